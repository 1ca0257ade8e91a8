"""Which columns of one forward pass an edit touches.

A pass sees a rectangle of columns: padding, prompt tokens and, while generating or under teacher
forcing, new tokens. Positions count real prompt tokens from each row's own last one, whatever the
padding side and whatever follows.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechtv.errors import InvalidInput
from mechtv.vectors.site import Site

ActsOn = Literal["prompt", "new", "both"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The columns of one pass.

    Args:
        prompt: the real prompt tokens.
        new: the real tokens after the prompt.
        whole_prompt: whether the pass holds the prompts from their first token on (a step with a
            KV cache does not; there a position that is missing is no error).
    """

    prompt: Bool[Tensor, "batch pos"]
    new: Bool[Tensor, "batch pos"]
    whole_prompt: bool = True

    def select(self, site: Site, acts_on: ActsOn) -> "Selection":
        """The columns that an edit at `site` touches, and which position each one is.

        On new tokens, the edit of position -1 (or `"all"`) acts at each of them; other positions
        name prompt tokens only.
        """
        slots = torch.full_like(self.prompt, -1, dtype=torch.long)
        if acts_on != "new":
            self._mark_prompt(slots, site)
        if acts_on != "prompt" and (site.positions == "all" or -1 in site.positions):
            last = 0 if site.positions == "all" else site.positions.index(-1)
            slots[self.new] = last
        row, column = torch.nonzero(slots >= 0, as_tuple=True)
        return Selection(row=row, column=column, slot=slots[row, column])

    def _mark_prompt(self, slots: Int[Tensor, "batch pos"], site: Site) -> None:
        if self.whole_prompt:
            self._check_long_enough(1 if site.positions == "all" else -min(site.positions))
        if site.positions == "all":
            slots[self.prompt] = 0
            return
        from_end = self.prompt.flip(1).cumsum(1).flip(1)
        for slot, position in enumerate(site.positions):
            slots[self.prompt & (from_end == -position)] = slot

    def _check_long_enough(self, wanted: int) -> None:
        _check_no_row_empty(self.prompt)
        lengths = self.prompt.sum(dim=1)
        shortest = int(lengths.min())
        if shortest < wanted:
            raise InvalidInput(
                f"Position {-wanted} does not exist in a prompt of {shortest} tokens; use "
                f'positions from -{shortest} to -1, "all", or a longer template.'
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Chosen activations of one pass: their rows, columns, and positions within the site."""

    row: Int[Tensor, " selected"]
    column: Int[Tensor, " selected"]
    slot: Int[Tensor, " selected"]


def last_real(mask: Bool[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
    """The column of each row's last real token: 4 for the mask 00111, 2 for 11100.

    Raises:
        InvalidInput: if a row has no real token.
    """
    _check_no_row_empty(mask)
    width = mask.shape[1]
    return width - 1 - mask.flip(1).long().argmax(dim=1)


def _check_no_row_empty(mask: Bool[Tensor, "batch pos"]) -> None:
    empty = torch.nonzero(~mask.any(dim=1))
    if len(empty):
        raise InvalidInput(
            f"Row {int(empty[0])} has no real token; every prompt needs at least one."
        )

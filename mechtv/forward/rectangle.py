"""What an edit can change: the blocks from its layer on, the columns from its position on.

`Rectangle` says where that part of a pass begins. `Suffix` lays the prompts out for it: every row
is shifted so that all rows begin their changeable part at one column, whatever the padding was.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechtv.tasks.prompts import Prompts
from mechtv.vectors.layout import ActsOn, Layout
from mechtv.vectors.site import Site


@dataclass(frozen=True, kw_only=True, eq=False)
class Rectangle:
    """Blocks from `layer` on; in each row the columns from `start` to `end`, both included."""

    layer: int
    start: Int[Tensor, " batch"]
    end: Int[Tensor, " batch"]

    @classmethod
    def around(
        cls,
        prompts: Prompts,
        layout: Layout,
        sites: Iterable[tuple[Site, ActsOn]],
        places: tuple[Int[Tensor, " place"], Int[Tensor, " place"]] | None = None,
    ) -> "Rectangle":
        """The smallest that holds the sites, the places (rows, columns) and each last prompt token.

        Raises:
            InvalidInput: if a row is too short for a site's positions.
        """
        start = end = prompts.last
        inside = [] if places is None else [places]
        layers = []
        for site, acts_on in sites:
            chosen = layout.select(site, acts_on)
            inside.append((chosen.row.cpu(), chosen.column.cpu()))
            layers.append(site.layer)
        for row, column in inside:
            start = start.scatter_reduce(0, row, column, "amin")
            end = end.scatter_reduce(0, row, column, "amax")
        return cls(layer=min(layers), start=start, end=end)

    def from_first_token(self, prompts: Prompts) -> "Rectangle":
        """The same blocks over whole rows, for models that cannot keep earlier columns."""
        return Rectangle(layer=self.layer, start=_first(prompts.mask), end=self.end)

    def share(self, prompts: Prompts, n_layers: int) -> float:
        """Which share of all blocks x real tokens it holds."""
        inside = (self.end - self.start + 1).sum() / prompts.mask.sum()
        return float(inside) * (n_layers - self.layer) / n_layers


@dataclass(frozen=True, kw_only=True, eq=False)
class Suffix:
    """The rows of a rectangle, aligned: `width` columns of prefix, then the suffix.

    Args:
        tokens, mask: each row's prefix ends at column `width` - 1 and its suffix begins at `width`;
            padding lies on both sides.
        start: the prompts' own column at which each row's suffix begins.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    start: Int[Tensor, " batch"]
    width: int

    @classmethod
    def of(cls, prompts: Prompts, rectangle: Rectangle) -> "Suffix":
        """The prompts, each row shifted and cut behind the rectangle's end."""
        before = rectangle.start - _first(prompts.mask)
        after = rectangle.end - rectangle.start + 1
        width, length = int(before.max()), int(after.max())
        offset = torch.arange(-width, length)
        mask = (offset >= -before[:, None]) & (offset < after[:, None])
        columns = (rectangle.start[:, None] + offset).clamp(0, prompts.tokens.shape[1] - 1)
        tokens = prompts.tokens.take_along_dim(columns, dim=1) * mask
        return cls(tokens=tokens, mask=mask, start=rectangle.start, width=width)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """How many columns the suffix has."""
        return self.tokens.shape[1] - self.width

    def lengths(self) -> Int[Tensor, "batch 2"]:
        """How many real tokens each row has before its suffix, and in it."""
        before = self.mask[:, : self.width].sum(dim=1)
        return torch.stack([before, self.mask.sum(dim=1) - before], dim=1)

    def kind(self) -> tuple[object, ...]:
        """In what rows may differ as a model sees them: sizes (to a factor of two) and padding."""
        width, length = self.width, self.length
        return width.bit_length(), length.bit_length(), bool(self.mask.all())

    def keys(self) -> list[bytes]:
        """What tells rows apart: real tokens, and where the suffix begins."""
        return [
            _digest(row[real].tolist(), begin)
            for row, real, begin in zip(
                self.tokens, self.mask, self.lengths()[:, 0].tolist(), strict=True
            )
        ]

    def layout(self, layout: Layout) -> Layout:
        """The prompts' layout as the suffix's columns see it."""
        columns = self.start[:, None] + torch.arange(self.length)
        inside = self.mask[:, self.width :]

        def cut(which: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch suffix"]:
            columns_there = columns.clamp(max=which.shape[1] - 1).to(which.device)
            return which.take_along_dim(columns_there, dim=1) & inside.to(which.device)

        return Layout(prompt=cut(layout.prompt), new=cut(layout.new), whole_prompt=False)

    def select(self, rows: Sequence[int]) -> "Suffix":
        """Some of the rows, without the columns that only others needed."""
        index = torch.tensor(rows)
        used = torch.nonzero(self.mask[index].any(dim=0)).flatten()
        first, end = int(used[0]), int(used[-1]) + 1
        return Suffix(
            tokens=self.tokens[index, first:end],
            mask=self.mask[index, first:end],
            start=self.start[index],
            width=self.width - first,
        )


def _first(mask: Bool[Tensor, "batch pos"]) -> Int[Tensor, " batch"]:
    return mask.long().argmax(dim=1)


def _digest(tokens: Sequence[int], begin: int) -> bytes:
    return hashlib.blake2b(repr((begin, tokens)).encode(), digest_size=16).digest()

"""Whether a model can be run in parts, and how: found out by trying, and compared with the whole.

Two things are compared, once for each kind of prompts: some rows under an edit, cut and in full;
and two variants side by side with each by itself. Where they differ by more than rounding, the
model is run in larger parts, one by one, or as a whole from then on.
"""

import logging
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.arguments import Unreplayable
from mechtv.forward.full import full_logits
from mechtv.forward.prefill import prefill, takes_a_cache
from mechtv.forward.prefix import Prefix, replay
from mechtv.forward.rectangle import Rectangle, Suffix
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.inject import hooked
from mechtv.vectors.site import Site

logger = logging.getLogger("mechtv.forward")

_RELATIVE_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest number
_ROUGH_ERROR = 0.05  # for the short types


class Fitness:
    """What is known of one model so far.

    Attributes:
        whole_rows: whether rows are recomputed from their first token on.
        unfit: why the model is run as a whole, if it is.
    """

    def __init__(self, model: TransformerBridge) -> None:
        self.whole_rows = False
        self.unfit: str | None = None
        self._compared: set[object] = set()
        self._apart: dict[object, bool] = {}
        self._said: set[str] = set()
        if not takes_a_cache(model):
            self._keep_whole_rows("it has no cache of keys and values")

    def prefix(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        suffix: Suffix,
        *,
        show: bool | None = False,
    ) -> Prefix | None:
        """A new prefix; None if the model turns out to be unfit for what was tried."""
        try:
            prefix = prefill(model, suffix, rectangle.layer, show=show)
            kind = (*suffix.kind(), rectangle.layer)
            if kind not in self._compared:
                _compare_with_the_whole(model, prompts, rectangle, suffix, prefix)
                self._compared.add(kind)
        except (InvalidInput, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model does when called in parts: the full pass runs
            if isinstance(error, RuntimeError) and "memory" in str(error):
                raise
            known = isinstance(error, Unreplayable)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            if self.whole_rows:
                self.unfit = f"this model cannot be run in parts ({reason})"
            else:
                self._keep_whole_rows(reason)
            return None
        return prefix

    def stands_side_by_side(
        self, model: TransformerBridge, prefix: Prefix, real: Bool[Tensor, "row suffix"]
    ) -> bool:
        """Whether variants of these rows' suffix do not see each other, at its real tokens."""
        kind = (prefix.layer, prefix.width > 0, prefix.length > 1)
        if kind not in self._apart:
            self._apart[kind] = _apart(model, prefix, real)
            if not self._apart[kind]:
                self.say("Vectors run one by one: this model's blocks would mix them.")
        return self._apart[kind]

    def say(self, line: str) -> None:
        """Write a line to the log, once."""
        if line not in self._said:
            self._said.add(line)
            logger.warning(line)

    def _keep_whole_rows(self, reason: str) -> None:
        self.whole_rows = True
        self.say(
            f"All positions are recomputed, earlier blocks alone are skipped: this model cannot go "
            f"on from earlier positions ({reason})."
        )


def _compare_with_the_whole(
    model: TransformerBridge,
    prompts: Prompts,
    rectangle: Rectangle,
    suffix: Suffix,
    prefix: Prefix,
) -> None:
    """Run the shortest and the longest row, as they were given and in parts, under one edit.

    The edit is at the rectangle's first block and column: what it changes outside the rectangle,
    as in a model that attends both ways, shows.

    Raises:
        Unreplayable: if the logits differ by more than rounding.
    """
    lengths = suffix.mask.sum(dim=1)
    index = torch.tensor([int(lengths.argmin()), int(lengths.argmax())]).unique()
    some = prompts.select(index.tolist())
    moved = some.last - prompts.last[index]
    start, end = rectangle.start[index], rectangle.end[index]
    own = prefix.rows(index, prefix.width, prefix.length)
    change = _change(own.entering[0][:, 0])

    def add(hidden: Float[Tensor, "batch pos d_model"], hook: HookPoint) -> Tensor:
        row = torch.arange(len(index), device=hidden.device)
        column = (start + moved).to(hidden.device)
        return hidden.index_put((row, column), change.to(hidden.device), accumulate=True)

    with torch.inference_mode(False), torch.no_grad():
        row = torch.arange(len(index)).repeat(2)
        with hooked(model, Site(layer=rectangle.layer), add):
            wanted = full_logits(model, some, row, torch.cat([start, end]) + moved.repeat(2))
        states = replay(model, _changed(own, change, 0))
        column = torch.cat([torch.zeros_like(start), end - start])
        there = states[row.to(states.device), column.to(states.device)][None]
        given = unembedded(model, there)[0]
        _check_equal(given, wanted)
        tokens = wanted.argmax(dim=-1).unique()
        _check_equal(unembedded(model, there, tokens)[0], wanted[:, tokens])


def _apart(model: TransformerBridge, prefix: Prefix, real: Bool[Tensor, "row suffix"]) -> bool:
    """Whether a quiet variant and a loud one side by side are what each is by itself."""
    if not prefix.arguments.can_part_variants:
        return False
    index = torch.tensor([0, len(prefix) - 1]).unique()
    own = prefix.rows(index, prefix.width, prefix.length)
    change = _change(own.entering[0][:, 0])
    with torch.inference_mode(False), torch.no_grad():
        alone = [replay(model, _changed(own, size * change, 0)) for size in (5.0, 0.1, -3.0)]
        three = own.side_by_side(3)
        for number, size in enumerate((5.0, 0.1, -3.0)):
            three = _changed(three, size * change, number * own.length)
        together = replay(model, three).split(own.length, dim=1)
    try:
        for given, wanted in zip(together, alone, strict=True):
            _check_equal(given[real[index]], wanted[real[index]])
    except Unreplayable:
        return False
    return True


def _change(states: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
    """Something of the states' own size, and unlike them."""
    return states.flip(-1)


def _changed(prefix: Prefix, change: Float[Tensor, "row d_model"], column: int) -> Prefix:
    """The prefix with something added to the residual stream at one column."""
    first = prefix.entering[0].clone()
    first[:, column] += change
    return replace(prefix, entering=(first, *prefix.entering[1:]))


def _check_equal(given: Float[Tensor, "*any"], wanted: Float[Tensor, "*any"]) -> None:
    error = float((given - wanted).abs().max() / wanted.abs().max())
    if not error <= _RELATIVE_ERROR.get(wanted.dtype, _ROUGH_ERROR):
        raise Unreplayable(f"its numbers differ by {error:.1e} of the largest")

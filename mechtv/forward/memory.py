"""Which prompts' prefixes are kept, how long, and when a pass may use them.

Every pass under a vector asks `Memory.cut` whether a smaller one does: the prefix is looked up, or
made and checked against a full pass. What is kept is bounded in bytes, goes with the model, and is
dropped when the weights change.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.arguments import Unreplayable
from mechtv.forward.full import full_logits
from mechtv.forward.obstacles import lasting_obstacle, passing_obstacle
from mechtv.forward.prefill import prefill, takes_a_cache
from mechtv.forward.prefix import Prefix, replay
from mechtv.forward.rectangle import Rectangle, Suffix
from mechtv.forward.unembed import unembedded
from mechtv.forward.weights import Stamp, stamp
from mechtv.tasks.prompts import Prompts

logger = logging.getLogger("mechtv.forward")

BUDGET: ContextVar[int] = ContextVar("the bytes that one model's prefixes may take", default=2**30)
_FULL: ContextVar[bool] = ContextVar("whether every pass is full", default=False)
# A rectangle that holds more of the pass than this is not worth the prompts' own pass: with
# gradients, or over prompts that are kept; and without both, where one pass may be all there is.
LARGEST_SHARE, LARGEST_ONCE = 0.5, 0.1
_RELATIVE_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest logit
_ROUGH_ERROR = 0.05  # for the short types


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A pass cut to its rectangle: the kept prefix, and the rows as they are laid out for it."""

    prefix: Prefix
    suffix: Suffix


class Memory:
    """The kept prefixes of one model."""

    def __init__(self) -> None:
        self.depth = 0
        self._obstacle: str | None = None
        self._weights: tuple[nn.Parameter, ...] = ()
        self._points: tuple[HookPoint, ...] = ()
        self._stamp: Stamp | None = None
        self._looked = False
        self._whole_rows = False
        self._unfit: str | None = None
        self._said: set[str] = set()
        self._kinds: set[tuple[object, ...]] = set()
        self._batches: OrderedDict[bytes, Prefix] = OrderedDict()
        self._sets: list[tuple[dict[bytes, int], Prefix]] = []

    def enter(self, model: TransformerBridge) -> None:
        """Begin a time in which the model stays as it is."""
        if not self.depth:
            self._obstacle = lasting_obstacle(model)
            self._weights = tuple(model.original_model.parameters())
            self._points = tuple({id(p): p for p in model.hook_dict.values()}.values())
            self._looked = False
        self.depth += 1

    def leave(self) -> None:
        """End it."""
        self.depth -= 1
        if not self.depth:
            self._weights, self._points = (), ()

    def cut(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        *,
        learning: bool,
    ) -> Cut | None:
        """The pass over `rectangle` alone, or None if the full pass has to run.

        Args:
            learning: whether gradients will be wanted.
        """
        fitting = self._fitting(model, prompts, rectangle)
        if fitting is None:
            return None
        suffix = Suffix.of(prompts, fitting)
        keys = suffix.keys()
        prefix = self._from_sets(keys, suffix, fitting.layer)
        if prefix is None:
            largest = LARGEST_SHARE if learning else LARGEST_ONCE
            if fitting.share(prompts, model.cfg.n_layers) > largest:
                return None
            prefix = self._from_batches(model, prompts, fitting, suffix, keys)
        if prefix is None:  # just found to be unfit
            return self.cut(model, prompts, rectangle, learning=learning)
        return Cut(prefix=prefix.from_layer(fitting.layer), suffix=suffix)

    @contextmanager
    def kept(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        *,
        largest: float = LARGEST_SHARE,
        show: bool | None,
    ) -> Iterator[None]:
        """Keep all of the prompts' prefixes inside the block, for passes over any of the rows.

        Args:
            largest: a rectangle that holds a larger share of the pass is not worth it.
        """
        fitting = self._fitting(model, prompts, rectangle)
        if fitting is None or fitting.share(prompts, model.cfg.n_layers) > largest:
            yield
            return
        suffix = Suffix.of(prompts, fitting)
        if _size(model, suffix, fitting.layer) > BUDGET.get():
            self._say(
                f"The prefixes of {len(prompts)} prompts take more than {BUDGET.get()} bytes; "
                "they are made anew for each batch. Raise it with forward.keep_at_most(...)."
            )
            yield
            return
        prefix = self._made(model, prompts, fitting, suffix, show)
        if prefix is None:
            with self.kept(model, prompts, rectangle, largest=largest, show=show):
                yield
            return
        entry = {key: row for row, key in enumerate(suffix.keys())}, prefix
        self._sets.append(entry)
        try:
            yield
        finally:
            self._sets = [other for other in self._sets if other is not entry]

    def forget(self) -> None:
        """Drop what is kept."""
        self._batches.clear()
        self._stamp = None

    @property
    def nbytes(self) -> int:
        """The size of what is kept."""
        kept = [*self._batches.values(), *(prefix for _, prefix in self._sets)]
        return sum(prefix.nbytes for prefix in kept)

    def _fitting(
        self, model: TransformerBridge, prompts: Prompts, rectangle: Rectangle
    ) -> Rectangle | None:
        if _FULL.get():
            return None
        self._look(model)
        reason = self._obstacle or self._unfit or passing_obstacle(self._points, self._weights)
        if reason is not None:
            self._say(f"The full pass runs: {reason}.")
            return None
        if self._whole_rows:
            rectangle = rectangle.from_first_token(prompts)
        return rectangle

    def _look(self, model: TransformerBridge) -> None:
        """Forget all about the model if its weights are others than they were."""
        if self._looked:
            return
        now = stamp(model)
        if now != self._stamp:
            self.forget()
            self._unfit, self._whole_rows = None, False
            self._kinds.clear()
            if not takes_a_cache(model):
                self._keep_whole_rows("it has no cache of keys and values")
        self._stamp, self._looked = now, True

    def _from_sets(self, keys: Sequence[bytes], suffix: Suffix, layer: int) -> Prefix | None:
        for rows, prefix in reversed(self._sets):
            if prefix.layer <= layer and all(key in rows for key in keys):
                index = torch.tensor([rows[key] for key in keys])
                return prefix.from_layer(layer).rows(index, suffix.width, suffix.length)
        return None

    def _from_batches(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        suffix: Suffix,
        keys: Sequence[bytes],
    ) -> Prefix | None:
        key = b"".join(keys)
        found = self._batches.get(key)
        if found is None or found.layer > rectangle.layer:
            found = self._made(model, prompts, rectangle, suffix, False)
            if found is None:
                return None
            self._batches[key] = found
        self._batches.move_to_end(key)
        while self._batches and self.nbytes > BUDGET.get():
            self._batches.popitem(last=False)
        return found

    def _made(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        suffix: Suffix,
        show: bool | None,
    ) -> Prefix | None:
        """A new prefix, checked; None if the model turns out to be unfit for what was tried."""
        try:
            prefix = prefill(model, suffix, rectangle.layer, show=show)
            kind = (*suffix.kind(), rectangle.layer)
            if kind not in self._kinds:
                _check(model, prompts, rectangle, suffix, prefix)
                self._kinds.add(kind)
        except (InvalidInput, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model does when called in parts: the full pass runs
            known = isinstance(error, Unreplayable)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            if self._whole_rows:
                self._unfit = f"this model cannot be run in parts ({reason})"
            else:
                self._keep_whole_rows(reason)
            return None
        return prefix

    def _keep_whole_rows(self, reason: str) -> None:
        self._whole_rows = True
        self._say(
            f"All positions are recomputed, earlier blocks alone are skipped: this model cannot go "
            f"on from earlier positions ({reason})."
        )

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.warning(line)


_MEMORIES: "weakref.WeakKeyDictionary[TransformerBridge, Memory]" = weakref.WeakKeyDictionary()


@contextmanager
def steady(model: TransformerBridge) -> Iterator[Memory]:
    """Inside the block the model's weights, hooks and mode stay as they are: look at them once.

    Every pass outside such a block looks anew, which costs about as much as a pass over one token.
    """
    memory = memory_of(model)
    memory.enter(model)
    try:
        yield memory
    finally:
        memory.leave()


def memory_of(model: TransformerBridge) -> Memory:
    """The model's memory; a new one if it has none."""
    return _MEMORIES.setdefault(model, Memory())


@contextmanager
def keep_at_most(n_bytes: int) -> Iterator[None]:
    """Let each model's prefixes take at most so many bytes inside the block (2**30 outside).

    Raises:
        InvalidInput: if `n_bytes` is negative.
    """
    if n_bytes < 0:
        raise InvalidInput(f"n_bytes={n_bytes} is negative; use 0 (keep nothing) or more.")
    token = BUDGET.set(n_bytes)
    try:
        yield
    finally:
        BUDGET.reset(token)


@contextmanager
def full_passes() -> Iterator[None]:
    """Inside the block every pass is a full one, to measure or to check against."""
    token = _FULL.set(True)
    try:
        yield
    finally:
        _FULL.reset(token)


def forget(model: TransformerBridge) -> None:
    """Drop all prefixes that are kept of a model's prompts."""
    memory_of(model).forget()


def _check(
    model: TransformerBridge,
    prompts: Prompts,
    rectangle: Rectangle,
    suffix: Suffix,
    prefix: Prefix,
) -> None:
    """Compare the shortest and the longest row, run in parts, with a full pass as they were given.

    Raises:
        Unreplayable: if the logits differ by more than rounding.
    """
    lengths = suffix.mask.sum(dim=1)
    index = torch.tensor([int(lengths.argmin()), int(lengths.argmax())]).unique()
    some = prompts.select(index.tolist())
    ends = torch.stack([rectangle.start, rectangle.end], dim=1)[index]
    with torch.inference_mode(False), torch.no_grad():
        row = torch.arange(len(index)).repeat_interleave(2)
        moved = (some.last - prompts.last[index])[row]
        wanted = full_logits(model, some, row, ends.flatten() + moved)
        states = replay(model, prefix.rows(index, prefix.width, suffix.length))
        column = ends.flatten() - rectangle.start[index][row]
        given = unembedded(model, states[row.to(states.device), column.to(states.device)][None])[0]
    error = float((given - wanted).abs().max() / wanted.abs().max())
    if not error <= _RELATIVE_ERROR.get(wanted.dtype, _ROUGH_ERROR):
        raise Unreplayable(f"its logits differ by {error:.1e} of the largest")


def _size(model: TransformerBridge, suffix: Suffix, layer: int) -> int:
    """About how many bytes the rows' prefix takes."""
    cfg = model.cfg
    n_kv_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    numbers = 2 * n_kv_heads * cfg.d_head * suffix.width + cfg.d_model * suffix.length
    return len(suffix) * numbers * (cfg.n_layers - layer) * cfg.dtype.itemsize

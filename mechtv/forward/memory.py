"""Which prompts' prefixes are kept, how long, and when a pass may use them.

Every pass under a vector asks `Memory.cut` whether a smaller one does: the prefix is looked up, or
made. What is kept is bounded in bytes, goes with the model, and is dropped when the model changes.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.forward.fitness import Fitness
from mechtv.forward.obstacles import lasting_obstacle, passing_obstacle
from mechtv.forward.prefix import Prefix
from mechtv.forward.rectangle import Rectangle, Suffix
from mechtv.forward.stamp import Stamp, stamp, versions
from mechtv.tasks.prompts import Prompts

BUDGET: ContextVar[int] = ContextVar("the bytes that one model's prefixes may take", default=2**30)
_FULL: ContextVar[bool] = ContextVar("whether every pass is full", default=False)
# A rectangle that holds more of the pass than this is not worth the prompts' own pass: with
# gradients, or over prompts that are kept; and without both, where one pass may be all there is.
LARGEST_SHARE, LARGEST_ONCE = 0.5, 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A pass cut to its rectangle: the kept prefix, and the rows as they are laid out for it."""

    prefix: Prefix
    suffix: Suffix


@dataclass(frozen=True, kw_only=True, eq=False)
class _Set:
    """Prompts' prefixes, each row's number by its key, and the key of all."""

    key: bytes
    rows: Mapping[bytes, int]
    prefix: Prefix


class Memory:
    """The kept prefixes of one model."""

    def __init__(self) -> None:
        self._depth = 0
        self._obstacle: str | None = None
        self._weights: tuple[nn.Parameter, ...] = ()
        self._points: tuple[HookPoint, ...] = ()
        self._versions = 0
        self._looked = False
        self._stamp: Stamp | None = None
        self._fitness: Fitness | None = None
        self._batches: OrderedDict[bytes, Prefix] = OrderedDict()
        self._sets: list[_Set] = []
        self._left: OrderedDict[bytes, _Set] = OrderedDict()  # of blocks that are over

    @contextmanager
    def steady(self, model: TransformerBridge) -> Iterator[None]:
        """A time in which the model stays as it is."""
        if not self._depth:
            self._obstacle = lasting_obstacle(model)
            self._weights = tuple(model.original_model.parameters())
            self._points = tuple({id(p): p for p in model.hook_dict.values()}.values())
            self._looked = False
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
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
        while (fitting := self._fitting(model, prompts, rectangle)) is not None:
            suffix = Suffix.of(prompts, fitting)
            keys = suffix.keys()
            prefix = self._from_sets(keys, suffix, fitting.layer)
            if prefix is None:
                largest = LARGEST_SHARE if learning else LARGEST_ONCE
                if fitting.share(prompts, model.cfg.n_layers) > largest:
                    return None
                prefix = self._from_batches(model, prompts, fitting, suffix, keys)
            if prefix is not None:
                return Cut(prefix=prefix.from_layer(fitting.layer), suffix=suffix)
        return None

    @contextmanager
    def kept(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        *,
        largest: float = LARGEST_SHARE,
        stays: bool = False,
        show: bool | None = False,
    ) -> Iterator[None]:
        """Keep all of the prompts' prefixes inside the block, for passes over any of the rows.

        Args:
            largest: a rectangle that holds a larger share of the pass is not worth it.
            stays: behind the block keep them as long as there is room, for another such block over
                exactly these rows.
        """
        entry = self._set(model, prompts, rectangle, largest, show)
        self._sets += [] if entry is None else [entry]
        try:
            yield
        finally:
            self._sets = [other for other in self._sets if other is not entry]
            if entry is not None and stays:
                self._left[entry.key] = entry
                self._make_room()

    def stands_side_by_side(self, model: TransformerBridge, cut: Cut) -> bool:
        """Whether variants of a cut pass can run at once."""
        real = cut.suffix.mask[:, cut.suffix.width :]
        return self._known(model).stands_side_by_side(model, cut.prefix, real)

    def forget(self) -> None:
        """Drop what is kept, and what is known of the model."""
        self._batches.clear()
        self._sets.clear()
        self._left.clear()
        self._stamp = self._fitness = None
        self._looked = False

    @property
    def nbytes(self) -> int:
        """The size of what is kept."""
        sets = [*self._sets, *self._left.values()]
        prefixes = [*self._batches.values(), *(one.prefix for one in sets)]
        return sum({id(prefix): prefix.nbytes for prefix in prefixes}.values())

    def _fitting(
        self, model: TransformerBridge, prompts: Prompts, rectangle: Rectangle
    ) -> Rectangle | None:
        """The rectangle as the model can be cut; None where it cannot."""
        if _FULL.get():
            return None
        fitness = self._known(model)
        reason = self._obstacle or fitness.unfit or passing_obstacle(self._points, self._weights)
        if reason is None and _has_holes(prompts):
            reason = "a prompt has padding between its tokens"
        if reason is not None:
            fitness.say(f"The full pass runs: {reason}.")
            return None
        return rectangle.from_first_token(prompts) if fitness.whole_rows else rectangle

    def _known(self, model: TransformerBridge) -> Fitness:
        """What is known of the model as it is now; all else is forgotten."""
        now = versions(self._weights)
        if not self._looked or self._versions != now:
            new = stamp(model)
            if new != self._stamp or self._versions != now:
                self.forget()
            self._stamp, self._versions, self._looked = new, now, True
        if self._fitness is None:
            self._fitness = Fitness(model)
        return self._fitness

    def _set(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        largest: float,
        show: bool | None,
    ) -> "_Set | None":
        """The rows with their prefixes; None if they are not to be kept."""
        while (fitting := self._fitting(model, prompts, rectangle)) is not None:
            if fitting.share(prompts, model.cfg.n_layers) > largest:
                return None
            suffix, known = Suffix.of(prompts, fitting), self._known(model)
            keys = suffix.keys()
            left = self._left.pop(b"".join(keys), None)
            if left is not None and left.prefix.layer <= fitting.layer:
                return left
            if _size(model, suffix, fitting.layer) + self._size_of_sets() > BUDGET.get():
                known.say(
                    f"The prefixes of {len(prompts)} prompts take more than {BUDGET.get()} bytes; "
                    "they are made anew for each batch. Raise it with forward.keep_at_most(...)."
                )
                return None
            prefix = known.prefix(model, prompts, fitting, suffix, show=show)
            if prefix is not None:
                return _Set(key=b"".join(keys), rows=dict(zip(keys, count())), prefix=prefix)
        return None

    def _size_of_sets(self) -> int:
        return sum(one.prefix.nbytes for one in self._sets)

    def _from_sets(self, keys: Sequence[bytes], suffix: Suffix, layer: int) -> Prefix | None:
        for one in reversed(self._sets):
            if one.prefix.layer <= layer and all(key in one.rows for key in keys):
                index = torch.tensor([one.rows[key] for key in keys])
                return one.prefix.from_layer(layer).rows(index, suffix.width, suffix.length)
        return None

    def _from_batches(
        self,
        model: TransformerBridge,
        prompts: Prompts,
        rectangle: Rectangle,
        suffix: Suffix,
        keys: Sequence[bytes],
    ) -> Prefix | None:
        """The prefix of exactly these rows, so that equal calls give equal bits."""
        key = b"".join(keys)
        found = self._batches.get(key)
        if found is None or found.layer > rectangle.layer:
            found = self._known(model).prefix(model, prompts, rectangle, suffix)
            if found is None:
                return None
            self._batches[key] = found
        self._batches.move_to_end(key)
        self._make_room()
        return found

    def _make_room(self) -> None:
        """Drop what no block holds, the oldest first, until the rest is within the budget."""
        for loose in (self._left, self._batches):
            while loose and self.nbytes > BUDGET.get():
                loose.popitem(last=False)


_MEMORIES: "weakref.WeakKeyDictionary[TransformerBridge, Memory]" = weakref.WeakKeyDictionary()


@contextmanager
def steady(model: TransformerBridge) -> Iterator[Memory]:
    """Inside the block the model's weights, hooks and mode stay as they are: look at them once.

    Every pass outside such a block looks anew, which costs about as much as a pass over one token.
    """
    memory = memory_of(model)
    with memory.steady(model):
        yield memory


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
    """Drop all prefixes that are kept of a model's prompts, and what is known of the model."""
    memory_of(model).forget()


def _has_holes(prompts: Prompts) -> bool:
    """Whether a row has padding between its first and its last real token."""
    changes = prompts.mask[:, 1:] != prompts.mask[:, :-1]
    edges = prompts.mask[:, 0].long() + prompts.mask[:, -1].long()
    return bool((changes.sum(dim=1) + edges > 2).any())


def _size(model: TransformerBridge, suffix: Suffix, layer: int) -> int:
    """About how many bytes the rows' prefix takes."""
    cfg = model.cfg
    n_kv_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    a_block = 2 * n_kv_heads * cfg.d_head * suffix.width + cfg.d_model * suffix.length
    mask = suffix.length * (suffix.width + suffix.length)
    numbers = (cfg.n_layers - layer) * a_block + 2 * mask + 2 * cfg.d_head * suffix.length
    return len(suffix) * numbers * cfg.dtype.itemsize

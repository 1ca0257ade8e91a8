"""What a block is called with beside the residual stream, cut to some rows and columns.

A model hands its blocks masks, positions and biases that it made for whole prompts. `Arguments`
keeps the part of each that the suffix needs, in one of three forms, and can fill a call again:
for other rows, or for several variants of the suffix side by side.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

Form = Literal["bias", "positions", "rows"]

_MASKS = ("attention_mask", "causal_mask", "causal_attention_mask")
_POSITIONS = ("position_embeddings", "position_ids")


class Unreplayable(Exception):
    """Why a pass cannot be cut; the full pass runs instead."""


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor argument.

    Its forms: `bias` is row x head x query x key, added to attention scores (or a mask of them; the
    axes of head and query may be 1); `positions` is row x query x ...; `rows` is row x anything.

    Args:
        for_all_queries: whether a bias has one query axis of size 1 for all queries (as in ALiBi).
        flat: whether the model wants its axes of row and head as one.
    """

    form: Form
    tensor: Tensor
    for_all_queries: bool = False
    flat: bool = False

    def filled(self) -> Tensor:
        """The tensor as the block wants it."""
        return rearrange(self.tensor, "b h q k -> (b h) q k") if self.flat else self.tensor

    def rows(
        self, index: Int[Tensor, " some"], n_queries: int, first_key: int, n_keys: int
    ) -> "Part":
        """Some rows, the first `n_queries` queries, and `n_keys` keys from `first_key` on."""
        x = self.tensor[index.to(self.tensor.device)]
        keys = slice(first_key, first_key + n_keys)
        if self.form == "bias":
            return replace(self, tensor=x[:, :, :n_queries, keys])
        return replace(self, tensor=x[:, keys] if self.form == "rows" else x[:, :n_queries])

    def side_by_side(self, n: int, width: int) -> "Part":
        """`n` copies of the suffix in a row, each blind to the others; the prefix once."""
        if n == 1:
            return self
        if self.form == "positions":
            return replace(self, tensor=repeat(self.tensor, "b q ... -> b (n q) ...", n=n))
        past, own = self.tensor[..., :width], self.tensor[..., width:]
        if self.for_all_queries:
            return replace(
                self, tensor=torch.cat([past, repeat(own, "b h q k -> b h q (n k)", n=n)], dim=-1)
            )
        same = torch.eye(n, dtype=torch.bool, device=own.device)[:, None, :, None]
        spread = torch.where(same, own[:, :, None, :, None, :], _unseen(own.dtype))
        own = rearrange(spread, "b h m q n k -> b h (m q) (n k)")
        past = repeat(past, "b h q k -> b h (n q) k", n=n)
        return replace(self, tensor=torch.cat([past, own], dim=-1))

    def room_for(self, n_rows: int, n_queries: int, n_keys: int) -> "Part":
        """Room for more rows, queries and keys, all of them unseen."""
        rest = self.tensor.shape[2:]
        if self.form == "rows":
            return replace(self, tensor=self.tensor.new_zeros(n_rows, n_keys))
        if self.form == "positions":
            return replace(self, tensor=self.tensor.new_zeros(n_rows, n_queries, *rest))
        heads = self.tensor.shape[1]
        shape = (n_rows, heads, 1 if self.for_all_queries else n_queries, n_keys)
        return replace(self, tensor=self.tensor.new_full(shape, _unseen(self.tensor.dtype)))

    def put(self, index: Int[Tensor, " some"], part: "Part", first_key: int) -> None:
        """Write another's rows into these, its keys from `first_key` on."""
        where = index.to(self.tensor.device)
        if self.form == "bias":
            queries, keys = part.tensor.shape[2:]
            self.tensor[where, :, :queries, first_key : first_key + keys] = part.tensor
        elif self.form == "rows":
            self.tensor[where, first_key : first_key + part.tensor.shape[1]] = part.tensor
        else:
            self.tensor[where, : part.tensor.shape[1]] = part.tensor


@dataclass(frozen=True, eq=False)
class _Part:
    index: int


_HIDDEN, _CACHE = object(), object()


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of several blocks; tensors that blocks share are kept once.

    Args:
        parts: the tensors.
        calls: for each block its positional and keyword arguments, with marks in place of the
            tensors, the residual stream and the cache.
    """

    parts: tuple[Part, ...]
    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]

    def fill(
        self, call: int, hidden: Tensor, cache: Cache | None
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for one block on this residual stream."""
        args, kwargs = self.calls[call]
        given = [self._value(mark, hidden, cache) for mark in args]
        return given, {name: self._value(mark, hidden, cache) for name, mark in kwargs.items()}

    def _value(self, mark: object, hidden: Tensor, cache: Cache | None) -> object:
        """What stands for a mark; not a function inside `fill`, which would hold itself and all."""
        if mark is _HIDDEN:
            return hidden
        if mark is _CACHE:
            return cache
        if isinstance(mark, tuple):
            return tuple(self._value(part, hidden, cache) for part in mark)
        return self.parts[mark.index].filled() if isinstance(mark, _Part) else mark

    def map(self, change: Callable[[Part], Part]) -> "Arguments":
        """The same calls with every tensor changed."""
        return replace(self, parts=tuple(map(change, self.parts)))

    def from_call(self, first: int) -> "Arguments":
        """The same without the first calls."""
        return replace(self, calls=self.calls[first:])

    def put(self, index: Int[Tensor, " some"], other: "Arguments", first_key: int) -> None:
        """Write another's rows into these, their keys from `first_key` on."""
        for own, part in zip(self.parts, other.parts, strict=True):
            own.put(index, part, first_key)

    @property
    def can_part_variants(self) -> bool:
        """Whether every block gets a mask of who sees whom, so that variants can be kept apart."""

        def has_mask(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> bool:
            marks = [mark for mark in (*call[0], *call[1].values()) if isinstance(mark, _Part)]
            parts = [self.parts[mark.index] for mark in marks]
            masks = [part for part in parts if part.form == "bias" and not part.for_all_queries]
            return bool(masks) and all(part.form != "rows" for part in parts)

        return all(map(has_mask, self.calls))

    @property
    def nbytes(self) -> int:
        """The size of the tensors."""
        return sum(part.tensor.nbytes for part in self.parts)


class Recorder:
    """Collects `Arguments` from the calls of one pass over `n_rows` rows and `n_columns` columns.

    Args:
        width: the columns of the prefix, which are cut off on the side of the queries.
    """

    def __init__(self, *, n_rows: int, n_columns: int, width: int) -> None:
        self._n_rows, self._n_columns, self._width = n_rows, n_columns, width
        self._parts: list[Part] = []
        self._known: dict[int, tuple[Tensor, _Part]] = {}  # holds the tensors, so ids stay theirs
        self._calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

    def add(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Take in one call of a block whose wrapped module has this `forward`.

        Raises:
            Unreplayable: for an argument that nobody knows how to cut.
        """
        names = list(inspect.signature(forward).parameters)
        marks = [self._mark(name, x) for name, x in zip(names, args, strict=False)]
        if len(args) > len(names):
            raise Unreplayable("its blocks take more arguments than they name")
        self._calls.append(
            (tuple(marks), {name: self._mark(name, x) for name, x in kwargs.items()})
        )

    def arguments(self) -> Arguments:
        """What was collected."""
        return Arguments(parts=tuple(self._parts), calls=tuple(self._calls))

    def _mark(self, name: str, value: object) -> object:
        if name == "hidden_states":
            return _HIDDEN
        if isinstance(value, Cache):
            return _CACHE
        if isinstance(value, Tensor):
            return self._part(name, value)
        if isinstance(value, tuple):
            return tuple(self._mark(name, item) for item in value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise Unreplayable(f"its blocks take {name}={type(value).__name__}, which cannot be cut")

    def _part(self, name: str, tensor: Tensor) -> _Part:
        if id(tensor) not in self._known:
            self._parts.append(self._cut(name, tensor))
            self._known[id(tensor)] = tensor, _Part(len(self._parts) - 1)
        return self._known[id(tensor)][1]

    def _cut(self, name: str, tensor: Tensor) -> Part:
        n, w = self._n_rows, self._n_columns
        shape = tuple(tensor.shape)
        if name in _MASKS and tensor.ndim == 4 and shape[2:] == (w, w):
            return Part("bias", tensor[:, :, self._width :].expand(n, -1, -1, -1))
        if name in _MASKS and shape == (n, w):
            return Part("rows", tensor)
        if name in _POSITIONS and tensor.ndim > 1 and shape[0] in (1, n) and shape[1] == w:
            return Part("positions", tensor[:, self._width :].expand(n, *[-1] * (tensor.ndim - 1)))
        if name == "alibi" and tensor.ndim == 3 and not shape[0] % n and shape[1:] == (1, w):
            return Part("bias", rearrange(tensor, "(b h) q k -> b h q k", b=n), True, flat=True)
        raise Unreplayable(f"its blocks take a {name} of shape {shape}, which cannot be cut")


def _unseen(dtype: torch.dtype) -> float | bool:
    """What a mask of this type holds where a query may not look."""
    return False if dtype == torch.bool else torch.finfo(dtype).min

"""Keys (or values) of a prefix and of a suffix, side by side without being joined.

Attention code concatenates cached and new keys, repeats them for grouped queries, and multiplies.
Done literally, each training step copies the whole prefix several times and sends gradients into
it that nobody reads. `Joined` stands for the concatenated tensor: the operations that attention
applies to it are done on the two parts; for any other it turns into the tensor it stands for.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

_GROUPING = (slice(None), slice(None), None, slice(None), slice(None))


class Joined:
    """The tensor batch x head x (past, new) x d_head; a head stands for `repeats` query heads."""

    def __init__(
        self,
        past: Float[Tensor, "batch kv_head past d_head"],
        new: Float[Tensor, "batch kv_head new d_head"],
        *,
        repeats: int = 1,
        transposed: bool = False,
    ) -> None:
        self._past, self._new = past, new
        self._repeats, self._transposed = repeats, transposed

    def whole(self) -> Tensor:
        """The tensor itself."""
        joined = torch.cat([self._past, self._new], dim=2).repeat_interleave(self._repeats, dim=1)
        return joined.transpose(2, 3) if self._transposed else joined

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        batch, head, new, width = self._new.shape
        keys = self._past.shape[2] + new
        last = (width, keys) if self._transposed else (keys, width)
        return torch.Size((batch, head * self._repeats, *last))

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's data type."""
        return self._new.dtype

    def transpose(self, first: int, second: int) -> "Joined | Tensor":
        """As a tensor's; the last two axes are exchanged without touching the numbers."""
        if {first % 4, second % 4} != {2, 3}:
            return self.whole().transpose(first, second)
        return self._with(transposed=not self._transposed)

    def repeat_interleave(self, repeats: int, dim: int) -> "Joined | Tensor":
        """As a tensor's; heads are repeated without being copied."""
        if dim % 4 != 1 or self._transposed:
            return self.whole().repeat_interleave(repeats, dim=dim)
        return self._with(repeats=self._repeats * repeats)

    def __getitem__(self, index: Any) -> "_Grouped | Tensor":
        """As a tensor's; an axis for groups behind the heads begins their repetition."""
        grouped = isinstance(index, tuple) and index == _GROUPING and not self._transposed
        return _Grouped(self) if grouped else self.whole()[index]

    def __getattr__(self, name: str) -> Any:
        """Anything else, asked of the tensor."""
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Products with a tensor from the left are taken part by part."""
        if func is torch.matmul and not kwargs and len(args) == 2 and type(args[0]) is Tensor:
            return args[1]._times(args[0])
        return func(*tree_map(_whole, args), **tree_map(_whole, dict(kwargs or {})))

    def _times(self, left: Float[Tensor, "batch head query inner"]) -> Tensor:
        heads = self._new.shape[1]
        grouped = rearrange(left, "b (h r) q x -> b h (r q) x", h=heads, r=self._repeats)
        if self._transposed:
            parts = [grouped @ part.transpose(2, 3) for part in (self._past, self._new)]
            product = torch.cat(parts, dim=-1)
        else:
            past, new = grouped.split([self._past.shape[2], self._new.shape[2]], dim=-1)
            product = past @ self._past + new @ self._new
        return rearrange(product, "b h (r q) x -> b (h r) q x", r=self._repeats)

    def _with(self, *, repeats: int | None = None, transposed: bool | None = None) -> "Joined":
        return Joined(
            self._past,
            self._new,
            repeats=self._repeats if repeats is None else repeats,
            transposed=self._transposed if transposed is None else transposed,
        )


class _Grouped:
    """A `Joined` between `[:, :, None]` and the `expand` and `reshape` that repeat its heads."""

    def __init__(self, joined: Joined, repeats: int = 1) -> None:
        self._joined, self._repeats = joined, repeats

    def expand(self, *shape: int) -> "_Grouped | Tensor":
        """Give the new axis its size."""
        batch, heads, keys, width = self._joined.shape
        if shape == (batch, heads, shape[2], keys, width):
            return _Grouped(self._joined, shape[2])
        return self._whole().expand(*shape)

    def reshape(self, *shape: int) -> "Joined | Tensor":
        """Make it an axis of heads again."""
        batch, heads, keys, width = self._joined.shape
        if shape == (batch, heads * self._repeats, keys, width):
            repeated = self._joined.repeat_interleave(self._repeats, 1)
            return repeated
        return self._whole().reshape(*shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole(), name)

    def _whole(self) -> Tensor:
        return self._joined.whole()[_GROUPING].repeat_interleave(self._repeats, dim=2)


def _whole(value: object) -> object:
    return value.whole() if isinstance(value, Joined) else value

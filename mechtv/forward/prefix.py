"""What edits cannot change: kept of one plain pass, for any of its rows."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers.cache_utils import DynamicCache

from mechtv.forward.arguments import Arguments
from mechtv.forward.joined import Joined
from mechtv.forward.linear import few_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefix:
    """What is constant in a rectangle, for blocks from `layer` on.

    Args:
        width: the columns before the suffix; 0 if the suffix is whole rows.
        entering: for each block the residual stream that enters it, at the suffix's columns.
        keys, values: for each block those of the columns before the suffix; none if `width` is 0.
        arguments: what the blocks were called with.
    """

    layer: int
    width: int
    entering: tuple[Float[Tensor, "row suffix d_model"], ...]
    keys: tuple[Float[Tensor, "row kv_head past d_head"], ...]
    values: tuple[Float[Tensor, "row kv_head past d_head"], ...]
    arguments: Arguments

    def __len__(self) -> int:
        return self.entering[0].shape[0]

    @property
    def nbytes(self) -> int:
        """The size of everything kept."""
        kept = (*self.entering, *self.keys, *self.values)
        return sum(tensor.nbytes for tensor in kept) + self.arguments.nbytes

    @property
    def length(self) -> int:
        """How many columns the suffix has."""
        return self.entering[0].shape[1]

    def rows(self, index: Int[Tensor, " some"], width: int, length: int) -> "Prefix":
        """Some rows, with the last `width` columns before the suffix and its first `length`."""
        everything = torch.equal(index, torch.arange(len(self)))
        if everything and (width, length) == (self.width, self.length):
            return self
        first = self.width - width

        def cut(past: Tensor) -> Tensor:
            return past[:, :, first:].index_select(0, index.to(past.device))

        return replace(
            self,
            width=width,
            entering=tuple(x[index.to(x.device), :length] for x in self.entering),
            keys=tuple(map(cut, self.keys)),
            values=tuple(map(cut, self.values)),
            arguments=self.arguments.map(
                lambda part: part.rows(index, length, first, width + length)
            ),
        )

    def from_layer(self, layer: int) -> "Prefix":
        """The same without the blocks before `layer`."""
        gone = layer - self.layer
        return replace(
            self,
            layer=layer,
            entering=self.entering[gone:],
            keys=self.keys[gone:],
            values=self.values[gone:],
            arguments=self.arguments.from_call(gone),
        )

    def side_by_side(self, n: int) -> "Prefix":
        """`n` copies of the suffix in each row, behind one prefix (see `can_part_variants`)."""
        if n == 1:
            return self
        return replace(
            self,
            entering=tuple(x.repeat(1, n, 1) for x in self.entering),
            arguments=self.arguments.map(lambda part: part.side_by_side(n, self.width)),
        )

    def room_for(self, n_rows: int, width: int, length: int) -> "Prefix":
        """A prefix of this form with room for more rows and columns, for `put`."""
        return replace(
            self,
            width=width,
            entering=tuple(x.new_zeros(n_rows, length, x.shape[2]) for x in self.entering),
            keys=tuple(_room(x, n_rows, width) for x in self.keys),
            values=tuple(_room(x, n_rows, width) for x in self.values),
            arguments=self.arguments.map(
                lambda part: part.room_for(n_rows, length, width + length)
            ),
        )

    def put(self, index: Int[Tensor, " some"], other: "Prefix") -> None:
        """Write another's rows into these."""
        first = self.width - other.width
        for own, rows in zip(self.entering, other.entering, strict=True):
            own[index.to(own.device), : other.length] = rows
        for own, rows in zip(self.keys + self.values, other.keys + other.values, strict=True):
            own[index.to(own.device), :, first:] = rows
        self.arguments.put(index, other.arguments, first)


def replay(
    model: TransformerBridge, prefix: Prefix, *, last_layer: int | None = None
) -> Float[Tensor, "row suffix d_model"]:
    """Run the prefix's blocks again on the suffix's columns, under whatever hooks they have.

    Returns:
        The residual stream behind block `last_layer`, the last one if None. Differentiable in what
        the hooks bring in.
    """
    n_blocks = (model.cfg.n_layers if last_layer is None else last_layer + 1) - prefix.layer
    cache = _Replayed(prefix) if prefix.width else None
    hidden = prefix.entering[0].clone()  # some families write into their input
    blocks = list(model.blocks)[prefix.layer :][:n_blocks]
    with few_rows(block.original_component for block in blocks):
        for index, block in enumerate(blocks):
            args, kwargs = prefix.arguments.fill(index, hidden, cache)
            output = block(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
    return hidden


class _Replayed(DynamicCache):
    """A cache that holds a prefix and takes nothing in."""

    def __init__(self, prefix: Prefix) -> None:
        super().__init__()
        self._prefix = prefix

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        """The prefix's keys and values, joined with these."""
        block = layer_idx - self._prefix.layer
        return (
            Joined(self._prefix.keys[block], key_states),
            Joined(self._prefix.values[block], value_states),
        )


def _room(past: Tensor, n_rows: int, width: int) -> Tensor:
    return past.new_zeros(n_rows, past.shape[1], width, past.shape[3])

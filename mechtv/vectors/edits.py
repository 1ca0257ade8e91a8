"""What an edit does: four operations that map an activation to an activation.

An `Edit` is one operation at one site. A value has the shape of one activation (`d_model`, or
`head d_head` at the heads), or one such value for each of the site's positions. Values may require
gradients: that is how vectors are learned.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechtv.errors import InvalidInput
from mechtv.vectors.site import Site


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """The common part of the four operations; see `Add`, `Replace`, `Affine` and `Linear`."""

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Map the selected activations; `slot` says which of the site's positions each is."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The operation's tensors by field name, the form in which they are stored."""
        return {
            f.name: value
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }

    def map(self, change: Callable[[Tensor], Tensor]) -> "Operation":
        """The same operation with `change` applied to each of its tensors."""
        return replace(self, **{name: change(value) for name, value in self.tensors().items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Add(Operation):
    """h <- h + value."""

    value: Float[Tensor, "*slot_feature"]

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Give h + value."""
        return activation + per_slot(self.value, activation, slot)


@dataclass(frozen=True, kw_only=True, eq=False)
class Replace(Operation):
    """h <- value."""

    value: Float[Tensor, "*slot_feature"]

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Give the value."""
        return per_slot(self.value, activation, slot).expand_as(activation)


@dataclass(frozen=True, kw_only=True, eq=False)
class Affine(Operation):
    """h <- scale * h + value (I2CL's beta and lambda * v)."""

    scale: Float[Tensor, ""]
    value: Float[Tensor, "*slot_feature"]

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Give scale * h + value."""
        value = per_slot(self.value, activation, slot)
        wide = activation.to(torch.promote_types(activation.dtype, value.dtype))
        return self.scale.to(activation.device) * wide + value


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear(Operation):
    """h <- h + W h (the closed-form linear task vector)."""

    matrix: Float[Tensor, "d_model d_model"]

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Give h + W h."""
        matrix = self.matrix.to(activation.device)
        wide = activation.to(torch.promote_types(activation.dtype, matrix.dtype))
        return wide + wide @ matrix.to(wide.dtype).T


OPERATIONS: dict[str, type[Operation]] = {
    "add": Add,
    "replace": Replace,
    "affine": Affine,
    "linear": Linear,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """One operation at one site.

    Raises:
        InvalidInput: if the operation's value does not fit the site's number of positions, or a
            `Linear` stands at the heads or has a matrix that is not square.
    """

    site: Site
    operation: Operation

    def __post_init__(self) -> None:
        if isinstance(self.operation, Linear):
            if self.site.component == "z":
                raise InvalidInput("A Linear edit acts on d_model vectors; it cannot stand at z.")
            shape = tuple(self.operation.matrix.shape)
            if len(set(shape)) != 1 or len(shape) != 2:
                raise InvalidInput(f"A Linear edit needs a square matrix; this one is {shape}.")
            return
        value: Any = getattr(self.operation, "value", None)
        features = 2 if self.site.component == "z" else 1
        slots = 0 if self.site.positions == "all" else len(self.site.positions)
        each = slots and value.ndim == features + 1 and value.shape[0] == slots
        if not (each or value.ndim == features):
            raise InvalidInput(
                f"A value of shape {tuple(value.shape)} does not fit {self.site}; give one value "
                f"of {features} dimension(s)"
                f"{f', or one for each of the {slots} positions' if slots else ''}."
            )
        heads = self.site.heads
        if heads is not None and value.shape[-2] != len(heads):
            raise InvalidInput(
                f"A value of shape {tuple(value.shape)} does not fit the {len(heads)} head(s) of "
                f"{self.site}; give one row for each."
            )

    @property
    def width(self) -> int:
        """The size of the activation's last axis that this edit needs."""
        tensors = self.operation.tensors()
        return int(tensors.get("value", tensors.get("matrix", torch.empty(0))).shape[-1])

    @property
    def operation_name(self) -> str:
        """The operation's name in `OPERATIONS`."""
        return type(self.operation).__name__.lower()


def per_slot(
    value: Tensor, activation: Tensor, slot: Int[Tensor, " selected"]
) -> Float[Tensor, "..."]:
    """The value for each selected activation: the shared one, or the one of its position."""
    value = value.to(activation.device)
    return value[slot] if value.ndim == activation.ndim else value

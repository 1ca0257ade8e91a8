"""What an edit does: five operations that map an activation to an activation.

An `Edit` is one operation at one site. A value has the shape of one activation (`d_model`, or
`head d_head` at the heads), or one such value for each of the site's positions. Values may require
gradients: that is how vectors are learned. `Linear` and `ResidualMLP` act alike at all positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import gelu

from mechtv.errors import InvalidInput
from mechtv.vectors.site import Site


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """The common part of the operations in `OPERATIONS`."""

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
    """h <- h + W h, or h + W h + b (the closed-form linear task vector)."""

    matrix: Float[Tensor, "d_model d_model"]
    bias: Float[Tensor, " d_model"] | None = None

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Give h + W h + b."""
        matrix = self.matrix.to(activation.device)
        wide = activation.to(torch.promote_types(activation.dtype, matrix.dtype))
        after = wide + wide @ matrix.to(wide.dtype).T
        return after if self.bias is None else after + self.bias.to(after)


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualMLP(Operation):
    """h <- h + gain f((h - centre) / scale), f an MLP of some layers, all as wide as h.

    Each layer but the last is x <- x + gelu(W x + b); the last is W x + b.
    """

    weights: Float[Tensor, "depth d_model d_model"]
    biases: Float[Tensor, "depth d_model"]
    centre: Float[Tensor, " d_model"]
    scale: Float[Tensor, ""]
    gain: Float[Tensor, ""]

    def __call__(
        self, activation: Float[Tensor, "selected *feature"], slot: Int[Tensor, " selected"]
    ) -> Float[Tensor, "selected *feature"]:
        """Give h + gain f((h - centre) / scale)."""
        wide = activation.to(torch.promote_types(activation.dtype, self.weights.dtype))
        return wide + self.change(wide)

    def change(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """What is added to h."""
        x = (h - self.centre.to(h)) / self.scale.to(h)
        weights, biases = self.weights.to(h), self.biases.to(h)
        for layer in range(len(weights) - 1):
            x = x + gelu(x @ weights[layer].T + biases[layer])
        return self.gain.to(h) * (x @ weights[-1].T + biases[-1])


MAPS = (Linear, ResidualMLP)
OPERATIONS: dict[str, type[Operation]] = {
    "add": Add,
    "replace": Replace,
    "affine": Affine,
    "linear": Linear,
    "residual_mlp": ResidualMLP,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """One operation at one site.

    Raises:
        InvalidInput: if the operation's value does not fit the site's number of positions, or a map
            stands at the heads or has tensors that do not fit each other.
    """

    site: Site
    operation: Operation

    def __post_init__(self) -> None:
        if isinstance(self.operation, MAPS):
            _check_map(self.operation, self.site)
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
        named = next(name for name in ("value", "matrix", "weights") if name in tensors)
        return int(tensors[named].shape[-1])

    @property
    def operation_name(self) -> str:
        """The operation's name in `OPERATIONS`."""
        return next(name for name, kind in OPERATIONS.items() if type(self.operation) is kind)


def per_slot(
    value: Tensor, activation: Tensor, slot: Int[Tensor, " selected"]
) -> Float[Tensor, "..."]:
    """The value for each selected activation: the shared one, or the one of its position."""
    value = value.to(activation.device)
    return value[slot] if value.ndim == activation.ndim else value


def _check_map(operation: Linear | ResidualMLP, site: Site) -> None:
    kind = type(operation).__name__
    if site.component == "z":
        raise InvalidInput(f"A {kind} edit acts on d_model vectors; it cannot stand at z.")
    if isinstance(operation, ResidualMLP):
        _check_layers(operation)
        return
    shape = tuple(operation.matrix.shape)
    if len(set(shape)) != 1 or len(shape) != 2:
        raise InvalidInput(f"A Linear edit needs a square matrix; this one is {shape}.")
    if operation.bias is not None and tuple(operation.bias.shape) != shape[:1]:
        raise InvalidInput(
            f"A Linear edit with a matrix of shape {shape} needs a bias of shape {shape[:1]}; this "
            f"one is {tuple(operation.bias.shape)}."
        )


def _check_layers(operation: ResidualMLP) -> None:
    shape = tuple(operation.weights.shape)
    if len(shape) != 3 or not shape[0] or shape[1] != shape[2]:
        raise InvalidInput(
            f"A ResidualMLP edit needs weights of shape (layers, width, width); these are {shape}."
        )
    wanted = {"biases": shape[:2], "centre": shape[2:], "scale": (), "gain": ()}
    for name, given in operation.tensors().items():
        if name != "weights" and tuple(given.shape) != wanted[name]:
            raise InvalidInput(
                f"A ResidualMLP edit with weights of shape {shape} needs {name} of shape "
                f"{wanted[name]}; this one is {tuple(given.shape)}."
            )

"""Linear layers of few rows, by the kernels that are fast for them.

A pass over one token multiplies each weight with a few dozen rows. On CPUs torch hands float32
products to a library that is made for many rows; with oneDNN few take as little as half the time.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn


@contextmanager
def few_rows(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block the linear layers in some modules take oneDNN, for float32 on a CPU.

    Gradients reach the layers' inputs alone; those that want gradients for their weights are left
    as they are.
    """
    layers = [x for module in modules for x in module.modules() if is_eligible(x)]
    for layer in layers:
        vars(layer)["forward"] = partial(product, weight=layer.weight, bias=layer.bias)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def product(
    x: Float[Tensor, "*batch inner"],
    weight: Float[Tensor, "outer inner"],
    bias: Float[Tensor, " outer"] | None = None,
) -> Float[Tensor, "*batch outer"]:
    """The product x @ weight.T + bias by oneDNN, for float32 on a CPU; differentiable in x."""
    found: Tensor = _FewRows.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return found


class _FewRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "*batch inner"],
        weight: Float[Tensor, "outer inner"],
        bias: Float[Tensor, " outer"] | None,
    ) -> Float[Tensor, "*batch outer"]:
        ctx.weight = weight
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return found

    @staticmethod
    def backward(
        ctx: Any, gradient: Float[Tensor, "*batch outer"]
    ) -> tuple[Float[Tensor, "*batch inner"], None, None]:
        return product(gradient, ctx.weight.T), None, None

    @staticmethod
    def jvp(ctx: Any, x: Float[Tensor, "*batch inner"], *_: Any) -> Float[Tensor, "*batch outer"]:
        return product(x, ctx.weight)


def is_eligible(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer may take oneDNN."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and torch.backends.mkldnn.is_available()
        and all(
            x.dtype == torch.float32
            and x.device.type == "cpu"
            and not (x.requires_grad and torch.is_grad_enabled())
            for x in module.parameters()
        )
    )

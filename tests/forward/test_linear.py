"""Linear layers of few rows give what `torch.nn.Linear` gives, and are left as they were."""

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing import assert_close

from mechtv.forward.linear import few_rows

ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


def layer(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(33, 20, bias=bias, dtype=dtype)
    return made.requires_grad_(False)


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    """In float64, from the formula."""
    product = x.double() @ linear.weight.double().T
    return product if linear.bias is None else product + linear.bias.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(33,), (1, 33), (0, 33), (4, 1, 33), (2, 3, 5, 33)])
def test_values_and_gradients(bias: bool, shape: tuple[int, ...]) -> None:
    linear = layer(bias)
    x = torch.randn(shape, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    with few_rows([nn.Sequential(linear)]):
        given = linear(x)
    assert "_FewRows" in type(given.grad_fn).__name__
    assert_close(given.double(), exact(linear, wide), **ROUNDING)
    given.square().sum().backward()
    exact(linear, wide).square().sum().backward()
    assert_close(x.grad.double(), wide.grad, **ROUNDING)


def test_inputs_that_do_not_lie_in_order() -> None:
    linear = layer(True)
    for x in (torch.randn(33, 6).T, torch.randn(6, 66)[:, ::2], torch.randn(33).expand(6, 33)):
        with few_rows([linear]):
            assert_close(linear(x).double(), exact(linear, x), **ROUNDING)


def test_derivatives_of_gradients() -> None:
    linear, x = layer(False), torch.randn(5, 33, requires_grad=True)
    wide = x.detach().double().requires_grad_()

    def second(y: Tensor, value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value.pow(3).sum(), y, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), y)[0]

    with few_rows([linear]):
        given = second(x, linear(x))
    assert_close(given.double(), second(wide, exact(linear, wide)), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_forward_mode() -> None:
    linear, x, tangent = layer(True), torch.randn(5, 33), torch.randn(5, 33)
    with forward_ad.dual_level(), few_rows([linear]):
        given = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, tangent)))
    assert_close(given.primal.double(), exact(linear, x), **ROUNDING)
    assert_close(given.tangent.double(), tangent.double() @ linear.weight.double().T, **ROUNDING)


def test_layers_are_themselves_again_after_an_error() -> None:
    linear = layer(True)
    with pytest.raises((RuntimeError, TypeCheckError)), few_rows([linear]):
        linear(torch.randn(2, 7))
    assert "forward" not in vars(linear)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    linear = layer(True, dtype)
    with few_rows([linear]):
        assert "forward" not in vars(linear)


def test_a_forward_of_the_users_own_is_left_alone() -> None:
    linear = layer(True)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    with few_rows([linear]):
        assert_close(linear(torch.ones(2, 33)), torch.ones(2, 33))
    assert "forward" in vars(linear)


def test_gradients_of_weights_are_not_lost() -> None:
    linear = layer(True).requires_grad_()
    with few_rows([linear]):
        linear(torch.ones(2, 33)).sum().backward()
    assert_close(linear.weight.grad, torch.full((20, 33), 2.0))

"""Two parts side by side behave as the tensor that they stand for."""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import repeat_kv
from vectors.naive import noise

from mechtv.forward.joined import Joined

EXACT = {"atol": 1e-12, "rtol": 1e-12}
PAST, NEW = noise(2, 3, 5, 4, seed=1), noise(2, 3, 2, 4, seed=2)
WHOLE = torch.cat([PAST, NEW], dim=2)

OPERATIONS = {
    "itself": lambda x: x,
    "repeated by transformers": lambda x: repeat_kv(x, 4),
    "repeated by torch": lambda x: x.repeat_interleave(4, dim=1),
    "repeated twice": lambda x: repeat_kv(x.repeat_interleave(2, dim=-3), 2),
    "transposed": lambda x: x.transpose(-2, -1),
    "transposed back": lambda x: x.transpose(2, 3).transpose(-1, -2),
    "repeated, transposed": lambda x: repeat_kv(x, 4).transpose(2, 3),
    "transposed, repeated": lambda x: x.transpose(2, 3).repeat_interleave(4, dim=1),
    "heads behind keys": lambda x: x.transpose(1, 2),
    "repeated along keys": lambda x: x.repeat_interleave(3, dim=2),
    "flat": lambda x: x.reshape(6, 7, 4),
    "permuted": lambda x: x.permute(0, 2, 1, 3),
    "indexed": lambda x: x[:, :, 3:6],
    "grouped": lambda x: x[:, :, None, :, :].expand(2, 3, 4, 7, 4).sum(2),
    "grouped otherwise": lambda x: x[:, :, None, :, :].expand(2, 3, 1, 7, 4).reshape(6, 7, 4),
    "times two": lambda x: torch.mul(x, 2),
    "of another type": lambda x: x.to(torch.float32).double(),
    "softmax": lambda x: torch.nn.functional.softmax(x, dim=-1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_it_gives_on_the_whole(name: str) -> None:
    found = OPERATIONS[name](Joined(PAST, NEW))
    wanted = OPERATIONS[name](WHOLE)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    whole = found.whole() if isinstance(found, Joined) else found
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if name == "of another type" else EXACT
    assert_close(whole, wanted, **tolerance)


@pytest.mark.parametrize("repeats", [1, 4])
def test_products_and_their_gradients_are_those_of_the_whole(repeats: int) -> None:
    queries = noise(2, 3 * repeats, 6, 4, seed=3).requires_grad_()
    new = [NEW.clone().requires_grad_() for _ in range(4)]
    results = []
    for keys, values in (
        (Joined(PAST, new[0]), Joined(PAST, new[1])),
        (torch.cat([PAST, new[2]], dim=2), torch.cat([PAST, new[3]], dim=2)),
    ):
        keys, values = repeat_kv(keys, repeats), repeat_kv(values, repeats)
        pattern = torch.matmul(queries, keys.transpose(2, 3)).softmax(dim=-1)
        results.append(torch.matmul(pattern, values))
    assert_close(*results, **EXACT)
    gradients = [
        torch.autograd.grad(result.square().sum(), [queries, *leaves])
        for result, leaves in zip(results, (new[:2], new[2:]), strict=True)
    ]
    assert_close(*gradients, **EXACT)


def test_products_copy_no_key() -> None:
    joined = Joined(PAST, NEW)
    joined.whole = lambda: pytest.fail("the parts were put together")  # type: ignore[method-assign]
    keys, values = repeat_kv(joined, 4), joined.repeat_interleave(4, dim=1)
    scores = torch.matmul(noise(2, 12, 6, 4), keys.transpose(2, 3))
    assert torch.matmul(scores, values).shape == (2, 12, 6, 4)


@pytest.mark.parametrize(
    "product",
    [torch.bmm, torch.matmul, lambda a, b: torch.einsum("bqd,bkd->bqk", a, b.transpose(1, 2))],
)
def test_other_products_take_the_whole(product) -> None:
    left = noise(6, 5, 4)
    joined = Joined(PAST, NEW).reshape(6, 7, 4).transpose(1, 2)
    assert_close(product(left, joined), product(left, WHOLE.reshape(6, 7, 4).transpose(1, 2)))


def test_a_product_from_the_right_takes_the_whole() -> None:
    right = noise(2, 3, 4, 6)
    assert_close(torch.matmul(Joined(PAST, NEW), right), WHOLE @ right, **EXACT)

"""Gradients reach every value of a vector, through any layer, position and family."""

from collections.abc import Callable

import pytest
import torch
from builders import D_MODEL
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close
from transformer_lens.model_bridge import TransformerBridge
from vectors.naive import IDS, SOME_FAMILIES, by_hand, feature, noise, tiny_shared, vector_of

from mechtv.forward import capture, last_logits, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Affine, Edit, Linear, Replace, Site

ANSWERS = ((7, 8, 9), (10, 11, 12), (13, 14, 15))
WEIGHTS = noise(384, 2, seed=7, scale=0.1)  # a few sums of logits, which is enough and quick


def loss_at(
    model: TransformerBridge, prompts: Prompts, *sites: Site, acts_on: str = "prompt"
) -> Callable[..., Tensor]:
    def loss(*values: Tensor) -> Tensor:
        edits = [
            Edit(site=site, operation=Add(value=value))
            for site, value in zip(sites, values, strict=True)
        ]
        return last_logits(model, prompts, vector_of(*edits, acts_on=acts_on)) @ WEIGHTS

    return loss


@pytest.mark.parametrize("component", ["resid_pre", "attn_out", "z"])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_the_gradient_of_a_value_is_that_of_finite_differences(family: str, component: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS)
    shape = feature(model, component)
    for layer, positions, slots in ((0, (-3, -1), (2,)), (1, "all", ()), (2, (-1,), ())):
        site = Site(layer=layer, component=component, positions=positions)
        value = noise(*slots, *shape, seed=layer).requires_grad_()
        assert gradcheck(loss_at(model, prompts, site), value, fast_mode=True)


def test_the_gradient_of_every_number_is_that_of_finite_differences() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    value = noise(D_MODEL).requires_grad_()
    assert gradcheck(loss_at(model, prompts, Site(layer=1)), value)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_reach_several_sites_at_once(family: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS, padding_side="right")
    sites = (
        Site(layer=0, component="mlp_out", positions=(-2, -1)),
        Site(layer=1, component="resid_post", positions="all"),
        Site(layer=2, component="resid_pre"),
    )
    values = [noise(2, 32, seed=1), noise(32, seed=2), noise(32, seed=3)]
    inputs = [value.requires_grad_() for value in values]
    assert gradcheck(loss_at(model, prompts, *sites), inputs, fast_mode=True)


@pytest.mark.parametrize("acts_on", ["new", "both"])
def test_gradients_reach_a_value_that_acts_on_answers(acts_on: str) -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS, answers=ANSWERS).with_answers()
    columns = prompts.last[:, None] + torch.arange(3)

    def loss(value: Tensor) -> Tensor:
        vector = vector_of(Edit(site=Site(layer=1), operation=Add(value=value)), acts_on=acts_on)
        return run(model, prompts, vector, columns=columns) @ WEIGHTS

    assert gradcheck(loss, noise(32).requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_gradients_reach_all_tensors_of_all_operations(family: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS)
    site = Site(layer=1, positions=(-3, -1))

    def loss(scale: Tensor, value: Tensor, other: Tensor, matrix: Tensor) -> Tensor:
        vector = vector_of(
            Edit(site=Site(layer=0), operation=Replace(value=other)),
            Edit(site=site, operation=Affine(scale=scale, value=value)),
            Edit(site=Site(layer=2), operation=Linear(matrix=matrix)),
        )
        return last_logits(model, prompts, vector) @ WEIGHTS

    tensors = (noise(), noise(2, 32, seed=1), noise(32, seed=2), noise(32, 32, seed=3, scale=0.3))
    inputs = [tensor.requires_grad_() for tensor in tensors]
    assert gradcheck(loss, inputs, fast_mode=True)


def test_the_gradient_in_a_batch_is_the_sum_of_those_of_the_rows_alone() -> None:
    model = tiny_shared("llama")
    value = noise(2, 32).requires_grad_()
    vector = vector_of(Edit(site=Site(layer=1, positions=(-3, -1)), operation=Add(value=value)))
    logits = last_logits(model, Prompts.from_ids(model, IDS), vector)
    (together,) = torch.autograd.grad((logits @ WEIGHTS).sum(), value)
    alone = [
        torch.autograd.grad((by_hand(model, ids, vector)[-1] @ WEIGHTS).sum(), value)[0]
        for ids in IDS
    ]
    assert together.abs().min() > 0
    assert_close(together, sum(alone), atol=1e-10, rtol=1e-10)


def test_gradients_reach_a_value_from_a_captured_activation() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    later = Site(layer=2, component="z", positions=(-2, -1))

    def states(value: Tensor) -> Tensor:
        vector = vector_of(Edit(site=Site(layer=0, positions=(-2,)), operation=Add(value=value)))
        return capture(model, prompts, [later], vector)[later].sum(dim=-1)

    assert gradcheck(states, noise(32).requires_grad_(), fast_mode=True)


def test_without_gradients_none_are_kept() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    value = noise(32).requires_grad_()
    vector = vector_of(Edit(site=Site(layer=1), operation=Add(value=value)))
    assert last_logits(model, prompts, vector).requires_grad
    with torch.no_grad():
        assert not last_logits(model, prompts, vector).requires_grad
    with torch.inference_mode():
        inside = last_logits(model, prompts, vector)
    assert_close(inside, last_logits(model, prompts, vector).detach(), atol=1e-12, rtol=1e-12)
    assert value.grad is None
    assert all(weight.grad is None for weight in model.parameters())

"""Log-probabilities of given tokens, and their gradients, are those of the whole distribution."""

import functools

import pytest
import torch
from builders import FAMILIES, N_LAYERS, RARE_FAMILIES, tiny
from forward.engine import all_cut, frozen_tiny
from torch.testing import assert_close
from vectors.naive import additive, noise, random_ids, vector_of

from mechtv.forward import full_passes, kept, logits_at
from mechtv.forward.likelihood import log_probabilities_at, token_log_probabilities
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
IDS = [random_ids(length, seed) for seed, length in enumerate((15, 11, 18))]
ROW, COLUMN, TOKENS = torch.tensor([0, 1, 1, 2]), torch.tensor([17, 16, 17, 17]), (5, 9, 300, 5)

shared = functools.cache(frozen_tiny)


def learnable(model):
    value = noise(model.cfg.d_model, seed=3).requires_grad_()
    return value, vector_of(
        Edit(site=Site(layer=N_LAYERS - 1, positions=(-2,)), operation=Add(value=value))
    )


@pytest.mark.parametrize("family", [*FAMILIES, *RARE_FAMILIES])
def test_values_and_gradients_are_those_of_log_softmax(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS)
    ids, weights = torch.tensor(TOKENS), torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    value, vector = learnable(model)
    with full_passes():
        logits = logits_at(model, prompts, ROW, COLUMN, vector)
        wanted = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
        (slope,) = torch.autograd.grad((weights * wanted).sum(), value)
    with kept(model, prompts, vector, places=(ROW, COLUMN)), all_cut(monkeypatch):
        found = log_probabilities_at(model, prompts, ROW, COLUMN, ids, vector)
        (gradient,) = torch.autograd.grad((weights * found).sum(), value)
    assert_close(found, wanted, **EXACT)
    assert_close(gradient, slope, **EXACT)


def test_the_gradient_agrees_with_finite_differences() -> None:
    model = shared("llama")
    states = noise(4, model.cfg.d_model, seed=1).requires_grad_()
    ids = torch.tensor(TOKENS)
    assert torch.autograd.gradcheck(lambda x: token_log_probabilities(model, x, ids), (states,))


def test_a_second_derivative_is_refused_and_never_silently_wrong() -> None:
    model = shared("llama")
    states = noise(4, model.cfg.d_model, seed=1).requires_grad_()
    total = token_log_probabilities(model, states, torch.tensor(TOKENS)).sum()
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.grad(total, states, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "phi", "native"])
def test_short_types_are_summed_in_float32(family: str, dtype: torch.dtype) -> None:
    model = tiny(family, dtype)
    model.requires_grad_(False)
    states = noise(4, model.cfg.d_model, seed=1).to(dtype).requires_grad_()
    ids = torch.tensor(TOKENS)
    found = token_log_probabilities(model, states, ids)
    logits = unembedded(model, states[None])[0].float()
    wanted = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
    assert found.dtype == torch.float32
    assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    one, other = (torch.autograd.grad(x.sum(), states)[0] for x in (found, wanted))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert_close(one, other, atol=tolerance * float(other.abs().max()), rtol=tolerance)


def test_without_a_vector_or_a_cut_it_is_the_full_pass() -> None:
    model = shared("gpt2")
    prompts = Prompts.from_ids(model, IDS)
    ids = torch.tensor(TOKENS)
    with torch.no_grad():
        for vector in (None, additive(model, layer=N_LAYERS - 1)):
            found = log_probabilities_at(model, prompts, ROW, COLUMN, ids, vector)
            logits = logits_at(model, prompts, ROW, COLUMN, vector)
            assert_close(found, logits.log_softmax(dim=-1)[torch.arange(4), ids], **EXACT)

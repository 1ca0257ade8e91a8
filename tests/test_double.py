"""A float64 model computes in float64 throughout, padded rows included."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders import tiny, tiny_hf
from vectors.naive import noise, vector_of

from mechtv.forward import full_passes, last_logits
from mechtv.models import open_model
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Site

SHORT, LONG = list(range(300, 304)), list(range(400, 409))


@pytest.fixture(scope="module")
def double():
    return open_model(dtype=torch.float64)


@torch.no_grad()
def test_padding_changes_nothing_on_the_default_model(double):
    together = last_logits(double, Prompts.from_ids(double, [SHORT, LONG]))
    for ids, padded in zip((SHORT, LONG), together, strict=True):
        alone = last_logits(double, Prompts.from_ids(double, [ids]))[0]
        torch.testing.assert_close(padded, alone, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_a_cut_pass_is_the_full_pass_on_the_default_model(double, caplog):
    prompts = Prompts.from_ids(double, [SHORT, LONG])
    value = noise(double.cfg.d_model, seed=0)
    vector = vector_of(Edit(site=Site(layer=15), operation=Add(value=value)))
    cut = last_logits(double, prompts, vector)
    assert not caplog.records
    with full_passes():
        torch.testing.assert_close(
            cut, last_logits(double, prompts, vector), atol=1e-10, rtol=1e-10
        )


@torch.no_grad()
def test_float32_is_as_near_as_float32_can_be(double, model):
    ids = torch.tensor([LONG])
    difference = (model(ids) - double(ids)).abs().max()
    assert 1e-6 < difference < 1e-3


@torch.no_grad()
def test_a_copy_has_its_own_weights():
    model = tiny_hf("llama")
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits
    copied = copy.deepcopy(model)
    for weight in copied.parameters():
        weight.zero_()
    assert torch.equal(model(ids).logits, before)
    assert not copied(ids).logits.any()


def test_threads_do_not_disturb_one_another():
    model = tiny("llama")
    prompts = Prompts.from_ids(model, [[5, 6, 7, 8], [9, 10]])

    def logits(_):
        with torch.no_grad(), full_passes():
            return last_logits(model, prompts)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(logits, range(40)))
    for one in found:
        torch.testing.assert_close(one, found[0], atol=1e-12, rtol=1e-12)

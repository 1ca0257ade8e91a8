"""Writing what is there changes nothing, and the residual stream is the sum of what is written."""

import pytest
import torch
from builders import FAMILIES, N_LAYERS
from torch.testing import assert_close
from vectors.naive import HOOK_NAMES, IDS, tiny_shared, vector_of

from mechtv.forward import capture, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Affine, Edit, Replace, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
OWN = IDS[1]
EVERY = torch.arange(len(OWN))[None]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("component", HOOK_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_replacing_a_site_by_its_own_value_changes_nothing(family: str, component: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, [OWN])
    plain = run(model, prompts, columns=EVERY)
    every = tuple(range(-len(OWN), 0))
    kinds = ((-1,), every) if family in ("llama", "native") else (every,)
    sites = [
        Site(layer=layer, component=component, positions=positions)
        for layer in range(N_LAYERS)
        for positions in kinds
    ]
    for site, values in capture(model, prompts, sites).items():
        vector = vector_of(Edit(site=site, operation=Replace(value=values[0])))
        assert_close(run(model, prompts, vector, columns=EVERY), plain, **EXACT)
    other = vector_of(Edit(site=site, operation=Replace(value=1.0 - values[0])))
    assert (run(model, prompts, other, columns=EVERY) - plain).abs().max() > 1e-3


def test_replacing_every_site_at_once_changes_nothing() -> None:
    model = tiny_shared("gemma2")
    prompts = Prompts.from_ids(model, [OWN])
    every = tuple(range(-len(OWN), 0))
    sites = [
        Site(layer=layer, component=component, positions=every)
        for layer in range(N_LAYERS)
        for component in HOOK_NAMES
    ]
    values = capture(model, prompts, sites)
    edits = [Edit(site=site, operation=Replace(value=values[site][0])) for site in sites]
    plain = run(model, prompts, columns=EVERY)
    assert_close(run(model, prompts, vector_of(*edits), columns=EVERY), plain, **EXACT)


def test_one_times_the_activation_plus_zero_changes_nothing() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    site = Site(layer=1, positions="all")
    vector = vector_of(Edit(site=site, operation=Affine(scale=one, value=zero)))
    assert torch.equal(run(model, prompts, vector), run(model, prompts))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_the_sum_of_what_the_sublayers_write(family: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS)
    for layer in range(N_LAYERS):
        pre, attention, mlp, post = sites = [
            Site(layer=layer, component=component, positions="all")
            for component in ("resid_pre", "attn_out", "mlp_out", "resid_post")
        ]
        values = {site: x[prompts.mask] for site, x in capture(model, prompts, sites).items()}
        assert_close(values[post], values[pre] + values[attention] + values[mlp], **EXACT)
        for written in (attention, mlp):
            assert values[written].norm(dim=-1).min() > 0.1
        if layer + 1 < N_LAYERS:
            below = Site(layer=layer + 1, component="resid_pre", positions="all")
            following = capture(model, prompts, [below])[below][prompts.mask]
            assert torch.equal(following, values[post])

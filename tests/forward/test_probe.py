"""Interventions at any hook point, over what they can change and over the whole pass."""

import functools

import pytest
import torch
from builders import FAMILIES, N_LAYERS, RARE_FAMILIES
from forward.engine import frozen_tiny
from torch import Tensor
from torch.testing import assert_close
from vectors.naive import additive, noise, random_ids

from mechtv.errors import InvalidInput
from mechtv.forward import full_passes, kept, scan
from mechtv.forward.probe import at_last, from_last, last_residual, observe
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts

EXACT = {"atol": 1e-10, "rtol": 1e-10}
IDS = [random_ids(length, seed) for seed, length in enumerate((9, 6, 12))]
FINAL = f"blocks.{N_LAYERS - 1}.hook_resid_post"

shared = functools.cache(frozen_tiny)


def by_hand(model, changes, vector=None) -> Tensor:
    """One prompt at a time, by TransformerLens's own hooks on the unpadded prompt."""
    rows = []
    for number, ids in enumerate(IDS):
        found = []

        def edit(activation, hook, change, number=number):
            activation = activation.clone()
            activation[0, -1] = change(activation[0, -1], number)
            return activation

        hooks = [(name, functools.partial(edit, change=changes[name])) for name in changes]
        hooks.append((FINAL, lambda x, hook, found=found: found.append(x[0, -1])))
        if vector is not None:
            added = vector.edits[0]
            hooks.insert(0, (added.site.hook_name, functools.partial(shifted, edit=added)))
        model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)
        rows.append(found[0])
    return torch.stack(rows)


def shifted(activation, hook, edit):
    """The edit made at the last token of an unpadded prompt."""
    last = activation[:, -1:] + edit.operation.value.reshape(-1)
    return torch.cat([activation[:, :-1], last], dim=1)


def shifts(model):
    """For two points a different shift for each row."""
    heads = noise(3, model.cfg.n_heads, model.cfg.d_head, seed=1)
    stream = noise(3, model.cfg.d_model, seed=2)
    return {"blocks.1.hook_resid_pre": stream, "blocks.2.attn.hook_z": heads}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_changes_at_the_last_tokens_are_those_made_by_hand(family: str, side: str) -> None:
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    vector, values = additive(model, layer=0, seed=3), shifts(model)
    changes = {name: functools.partial(torch.add, value) for name, value in values.items()}
    naive = {name: lambda x, n, value=value: x + value[n] for name, value in values.items()}
    with torch.no_grad():
        wanted = by_hand(model, naive, vector)
        with full_passes():
            assert_close(last_residual(model, prompts, vector, changes=changes), wanted, **EXACT)
        with kept(model, prompts, vector):
            assert_close(last_residual(model, prompts, vector, changes=changes), wanted, **EXACT)


@pytest.mark.parametrize("family", ["llama", "gpt2", "native"])
def test_without_changes_it_is_the_residual_stream_of_the_model(family: str) -> None:
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS)
    with torch.no_grad():
        assert_close(last_residual(model, prompts), by_hand(model, {}), **EXACT)
        states = scan(model, prompts, [additive(model, layer=1)], output="residual")[0]
        assert_close(states, last_residual(model, prompts, additive(model, layer=1)), **EXACT)
        logits = scan(model, prompts, [additive(model, layer=1)])[0]
        assert_close(unembedded(model, states[None])[0], logits, **EXACT)


@pytest.mark.parametrize("family", [*FAMILIES, *RARE_FAMILIES])
def test_the_last_residual_unembedded_is_what_the_model_gives(family: str) -> None:
    """Also where a family caps its logits, or multiplies them by a factor."""
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS)
    some = torch.tensor([7, 300])
    with torch.no_grad():
        wanted = model(prompts.tokens, attention_mask=prompts.mask.long())
        wanted = wanted[torch.arange(len(prompts)), prompts.last]
        states = last_residual(model, prompts)[None]
        assert_close(unembedded(model, states)[0], wanted, **EXACT)
        assert_close(unembedded(model, states, some)[0], wanted[:, some], **EXACT)


def test_gradients_reach_each_rows_own_change() -> None:
    model = shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    shift = torch.zeros(3, model.cfg.d_model, dtype=torch.float64, requires_grad=True)
    changes = {"blocks.1.hook_resid_pre": lambda x: x + shift}
    total = last_residual(model, prompts, changes=changes).square().sum()
    (gradient,) = torch.autograd.grad(total, shift)
    step = 1e-6 * noise(3, model.cfg.d_model, seed=5)
    with torch.no_grad():
        up, down = (
            last_residual(
                model, prompts, changes={"blocks.1.hook_resid_pre": lambda x, s=s: x + s * step}
            )
            .square()
            .sum()
            for s in (1, -1)
        )
    assert_close((gradient * step).sum(), (up - down) / 2, atol=1e-9, rtol=1e-6)


def test_observe_reads_patterns_and_states_behind_the_vector() -> None:
    model = shared("llama")
    vector = additive(model, layer=1, seed=3)
    reads = {"blocks.1.hook_resid_pre": at_last, "blocks.1.attn.hook_pattern": from_last}
    with torch.no_grad():
        for side in ("left", "right"):
            prompts = Prompts.from_ids(model, IDS, padding_side=side)
            plain, under = observe(model, prompts, reads), observe(model, prompts, reads, vector)
            change = under["blocks.1.hook_resid_pre"] - plain["blocks.1.hook_resid_pre"]
            value = vector.edits[0].operation.value.reshape(1, -1)
            assert_close(change, value.expand_as(change), **EXACT)
            pattern = under["blocks.1.attn.hook_pattern"]
            assert_close(pattern.sum(dim=-1), torch.ones_like(pattern[..., 0]), **EXACT)
            outside = ~prompts.mask[:, None, :].expand_as(pattern)
            assert float(pattern[outside].abs().max()) == 0


@pytest.mark.parametrize("name", ["blocks.9.hook_resid_pre", "blocks.1.nothing", "hook_embed"])
def test_a_hook_point_that_is_not_there_is_named(name: str) -> None:
    model = shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    with pytest.raises(InvalidInput, match=name):
        last_residual(model, prompts, changes={name: lambda x: None})
    with pytest.raises(InvalidInput, match=name):
        observe(model, prompts, {name: at_last})


def test_nothing_to_observe_is_refused_and_so_is_a_silent_point() -> None:
    model = shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    with pytest.raises(InvalidInput, match="no hook points"):
        observe(model, prompts, {})
    with torch.no_grad(), pytest.raises(InvalidInput, match="never fires"):
        observe(model, prompts, {"blocks.1.attn.hook_result": at_last})


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("point", ["hook_pattern", "hook_attn_scores"])
def test_patterns_have_no_last_token_to_change(family: str, point: str) -> None:
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS)
    with torch.no_grad(), pytest.raises(InvalidInput, match="has no activation at a token"):
        last_residual(model, prompts, changes={f"blocks.1.attn.{point}": torch.zeros_like})


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "full"])
def test_a_change_where_nothing_fires_is_refused(cut: bool) -> None:
    model = shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    changes = {"blocks.1.attn.hook_result": torch.zeros_like}
    whole = kept(model, prompts, additive(model, layer=1)) if cut else full_passes()
    with torch.no_grad(), whole, pytest.raises(InvalidInput, match="hook_result never fires"):
        last_residual(model, prompts, changes=changes)


def test_no_hooks_are_left_behind() -> None:
    model = shared("gpt2")
    prompts = Prompts.from_ids(model, IDS)

    def fails(_):
        raise RuntimeError("stop")

    before = [len(point.fwd_hooks) for point in model.hook_dict.values()]
    with pytest.raises(RuntimeError, match="stop"):
        last_residual(model, prompts, changes={"blocks.1.hook_resid_pre": fails})
    assert [len(point.fwd_hooks) for point in model.hook_dict.values()] == before

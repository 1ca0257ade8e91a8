"""Heads' OV maps against what attention really does when a head attends to one token alone."""

import functools

import numpy as np
import pytest
import torch
from builders import N_HEADS, N_LAYERS, RARE_FAMILIES
from evaluation.invented import LABELS, model_of, task_of
from methods.untouched import left_alone
from torch.testing import assert_close
from vectors.naive import additive, vector_of

import mechtv
from mechtv.analysis.answers import Answers, contrast, rivals
from mechtv.analysis.circuits import Circuits
from mechtv.analysis.head_maps import HeadMaps, head_maps, spectrum
from mechtv.analysis.lens import lens_logits
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.forward.run import last_logits
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
FAMILIES = ("llama", "gpt2", "qwen3", "qwen2", "gemma2", "gemma3", "neox", "phi", "bloom", "native")
"""OPT shows its pattern after use, so there attention cannot be steered by it."""


def attended(model, layer, head, x):
    """What a block's attention adds when one head reads `x` besides, at the last token alone."""
    name, outputs = f"blocks.{layer}", []
    behind = hasattr(model.blocks[layer], "ln1_post")
    output = f"{name}.ln1_post.hook_in" if behind else f"{name}.hook_attn_out"
    for added in (torch.zeros_like(x), x):

        def only(pattern, hook):
            alone = torch.zeros_like(pattern)
            alone[0, head, -1, -1] = 1
            return alone

        def more(read, hook, added=added):
            read = read.clone()
            read[0, -1] += added
            return read

        hooks = [(f"{name}.attn.hook_pattern", only), (f"{name}.attn.v.hook_in", more)]
        hooks.append((output, lambda out, hook: outputs.append(out[0, -1].detach().clone())))
        model.run_with_hooks(torch.tensor([[5, 310, 77, 8]]), fwd_hooks=hooks)
    return outputs[1] - outputs[0]


def shown(model, subject, prompts, names):
    """What hook points show at the last token of each prompt, alone, on the injected run."""
    rows = []
    for row in range(len(prompts)):
        found = {}

        def add(x, hook):
            x = x.clone()
            x[0, -1] += subject.theta
            return x

        def keep(x, hook, name, found=found):
            found[name] = x[0, :, -1, -1] if name.endswith("pattern") else x[0, -1]

        hooks = [(f"blocks.{subject.layer}.hook_resid_pre", add)]
        hooks += [(name, functools.partial(keep, name=name)) for name in names]
        ids = prompts.tokens[row][prompts.mask[row]][None]
        model.run_with_hooks(ids, fwd_hooks=hooks)
        rows.append(found)
    return {name: torch.stack([found[name].detach() for found in rows]) for name in names}


def mean_map(norm, scales, x):
    """The mean over queries of a norm's map at each query's scale."""
    weight = norm.original_component.weight.detach()
    gain = 1 + weight if "Gemma" in type(norm.original_component).__name__ else weight
    centred = x - x.mean() if isinstance(norm.original_component, torch.nn.LayerNorm) else x
    return torch.stack([centred * gain / scale for scale in scales]).mean(dim=0)


@pytest.mark.parametrize("family", [*FAMILIES, *RARE_FAMILIES])
def test_a_head_writes_what_attention_makes_of_theta(family):
    model, task = model_of(family), task_of(LABELS)
    subject = Subject.of(model, additive(model, layer=1, seed=3))
    maps = head_maps(model, task, subject.vector(), norm="none", n=3)
    assert maps.outputs.shape == (2, N_HEADS, model.cfg.d_model)
    for row, layer in enumerate((1, 2)):
        for head in range(N_HEADS):
            wanted = attended(model, layer, head, subject.theta)
            assert_close(maps.outputs[row, head], wanted, **EXACT)
            assert float(wanted.norm()) > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi", "granite", "olmo2"])
def test_behind_a_frozen_norm_it_reads_the_mean_of_the_norms_maps(family):
    model, task = model_of(family), task_of(LABELS)
    subject = Subject.of(model, additive(model, layer=1, seed=3))
    maps = head_maps(model, task, subject.vector(), n=4)
    prompts = Prompts.of(model, task, n=4)
    block = model.blocks[2]
    names = [f"blocks.2.{n}.hook_scale" for n in ("ln1", "ln1_post") if hasattr(block, n)]
    names.append("blocks.2.attn.hook_pattern")
    seen = shown(model, subject, prompts, names)
    assert float(seen[names[0]].std()) > 1e-3
    read = subject.theta
    if hasattr(block, "ln1"):
        read = mean_map(block.ln1, seen["blocks.2.ln1.hook_scale"], read)
    for head in range(N_HEADS):
        wanted = attended(model, 2, head, read)
        if hasattr(block, "ln1_post"):
            wanted = mean_map(block.ln1_post, seen["blocks.2.ln1_post.hook_scale"], wanted)
        assert_close(maps.outputs[1, head], wanted, **EXACT)
    np.testing.assert_allclose(maps.attention[1], seen[names[-1]].mean(dim=0), atol=1e-10)


def test_sharing_key_value_heads_in_another_order_would_be_seen():
    model = model_of("llama")
    assert (model.cfg.d_head, model.cfg.d_model // model.cfg.n_heads) == (16, 8)
    subject = Subject.of(model, additive(model, layer=1, seed=3))
    right = Circuits.of(model, 1)
    wrong = Circuits(layer=1, values=right.values[[0, 2, 1, 3]], outputs=right.outputs)
    assert float((wrong.ov(subject.theta) - right.ov(subject.theta)).abs().max()) > 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi"])
def test_the_contribution_is_what_the_final_norm_at_its_scale_reads(family):
    model, task = model_of(family), task_of(LABELS)
    vector = additive(model, layer=1, seed=3)
    subject, prompts = Subject.of(model, vector), Prompts.of(model, task)
    maps = head_maps(model, task, vector)
    final = f"blocks.{N_LAYERS - 1}.hook_resid_post"
    states = shown(model, subject, prompts, [final])[final]
    inner = model.ln_final.original_component
    eps = inner.eps if hasattr(inner, "eps") else inner.variance_epsilon
    centres = states.mean(dim=1, keepdim=True) if isinstance(inner, torch.nn.LayerNorm) else 0
    scales = ((states - centres).square().mean(dim=1) + eps).sqrt()
    with torch.no_grad():
        direction = contrast(model, prompts, rivals(last_logits(model, prompts), prompts))
    for row, head in ((0, 1), (1, 3)):
        output = maps.outputs[row, head]
        wanted = [
            mean_map(model.ln_final, scale[None], output) @ d
            for scale, d in zip(scales, direction, strict=True)
        ]
        np.testing.assert_allclose(maps.contributions[row, head], torch.stack(wanted), atol=1e-10)


def test_a_small_output_behind_the_last_block_moves_the_logits_as_its_contribution_says():
    """To first order, and but for what it changes of the norm's scale."""
    model, task = model_of("gpt2"), task_of(LABELS)
    vector, prompts = additive(model, layer=1, seed=3), Prompts.of(model, task)
    maps = head_maps(model, task, vector)
    output, step, differences = maps.outputs[1, 2], 1e-6, []
    states = shown(model, Subject.of(model, vector), prompts, ["blocks.2.hook_resid_post"])
    state = states["blocks.2.hook_resid_post"]
    centred = state - state.mean(dim=1, keepdim=True)
    output = output - output.mean()
    across = output - (centred @ output / centred.square().sum(dim=1))[:, None] * centred
    along = output - across
    for sign in (1, -1):
        logits = lens_logits(model, state + sign * step * across)
        differences.append(Answers.of(logits, prompts).logit_difference)
    slope = (differences[0] - differences[1]) / (2 * step)
    weight = model.ln_final.original_component.weight.detach()
    scale = (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
    with torch.no_grad():
        direction = contrast(model, prompts, rivals(last_logits(model, prompts), prompts))
    rest = (along * weight / scale * direction).sum(dim=1)
    np.testing.assert_allclose(maps.contributions[1, 2], slope + rest.numpy(), atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_the_spectrum_is_that_of_the_full_matrices(family):
    model = model_of(family)
    circuits = Circuits.of(model, 1)
    left, singular, right = spectrum(circuits)
    rank = model.cfg.d_head
    assert singular.shape == (N_HEADS, rank)
    full = circuits.matrices()
    assert_close(torch.linalg.svdvals(full)[:, :rank], singular, **EXACT)
    assert_close(torch.einsum("hor,hr,hir->hoi", left, singular, right), full, **EXACT)
    for vectors in (left, right):
        unit = torch.eye(rank, dtype=torch.float64).expand(N_HEADS, rank, rank)
        assert_close(torch.einsum("hdr,hds->hrs", vectors, vectors), unit, **EXACT)


def test_a_head_of_equal_singular_values_has_their_number_as_effective_rank():
    maps = head_maps(model_of(), task_of(), additive(model_of(), layer=2), n=2)
    values = np.zeros((1, N_HEADS, 16))
    values[0, 0, :16] = 3.0
    values[0, 1, :4] = 0.5
    values[0, 2, 0] = 1.0
    values[0, 3, :2] = 3.0, 1.0
    known = HeadMaps(**{**vars(maps), "singular_values": values})
    np.testing.assert_array_equal(known.ranks, [[16, 4, 1, 2]])
    p = np.array([0.75, 0.25])
    wanted = [[16, 4, 1, np.exp(-(p * np.log(p)).sum())]]
    np.testing.assert_allclose(known.effective_ranks, wanted, atol=1e-12)
    known = HeadMaps(**{**vars(maps), "singular_values": 0 * values})
    assert (known.ranks == 0).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_table_has_norm_direction_tokens_and_interval(family):
    model, task = model_of(family), task_of(LABELS)
    vector = additive(model, layer=1, seed=3)
    maps = head_maps(model, task, vector, layers=[2], seed=3)
    table, subject = maps.table(), Subject.of(model, vector)
    assert table["head"].tolist() == list(range(N_HEADS))
    assert (table["layer"] == 2).all()
    assert (table["seed"] == 3).all()
    for head, row in table.iterrows():
        output, theta = maps.outputs[0, head], subject.theta
        if family == "gpt2":
            output, theta = output - output.mean(), theta - theta.mean()
        assert row["output norm"] == pytest.approx(float(output.norm()), abs=1e-10)
        cosine = float(output @ theta / output.norm() / theta.norm())
        assert row["cosine"] == pytest.approx(cosine, abs=1e-10)
        estimate = mechtv.evaluation.intervals.mean(maps.contributions[0, head])
        assert (row["value"], row["low"], row["high"], row["n"]) == pytest.approx(
            (estimate.value, estimate.low, estimate.high, 8), abs=1e-12
        )
        best = int(lens_logits(model, maps.outputs[0, head : head + 1])[0].argmax())
        assert maps.tokens[0][head][0] == model.tokenizer.decode([best])
        assert row["tokens"].startswith(repr(maps.tokens[0][head][0]))
        assert row["rank"] == model.cfg.d_head
        assert 1 < row["effective rank"] <= row["rank"]


def test_chosen_layers_are_those_of_all_and_batches_change_nothing():
    model, vector = model_of("gemma2"), additive(model_of("gemma2"), layer=0, seed=3)
    whole = head_maps(model, task_of(), vector)
    some = head_maps(model, task_of(), vector, layers=(2, 1))
    assert (whole.layers, some.layers) == ((0, 1, 2), (1, 2))
    assert_close(some.outputs, whole.outputs[1:], **EXACT)
    np.testing.assert_allclose(some.contributions, whole.contributions[1:], atol=1e-10)
    np.testing.assert_allclose(some.attention, whole.attention[1:], atol=1e-10)


def test_the_model_is_left_alone():
    model = model_of("gemma2")
    with left_alone(model):
        head_maps(model, task_of(), additive(model, layer=1), n=2)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_one_sentence():
    model, task = model_of(), task_of()
    vector = additive(model, layer=1)
    with pytest.raises(InvalidInput, match="norm='mean' is unknown; use frozen or none"):
        head_maps(model, task, vector, norm="mean")
    for layers in ([0], [1, 1], [], [3], [-1]):
        with pytest.raises(InvalidInput, match=r"must be distinct blocks .* from 1 to 2"):
            head_maps(model, task, vector, layers=layers)
    value = torch.zeros(N_HEADS, 16, dtype=torch.float64)
    inside = vector_of(Edit(site=Site(layer=1, component="z"), operation=Add(value=value)))
    with pytest.raises(InvalidInput, match="a single Add at resid_pre"):
        head_maps(model, task, inside)


@pytest.mark.model
def test_on_the_real_model_every_query_head_has_its_map(model):
    theta = torch.randn(576, generator=torch.Generator().manual_seed(0))
    vector = Subject(layer=28, theta=20 * theta).vector()
    maps = head_maps(model, mechtv.get_task("present-past"), vector, n=4)
    table = maps.table()
    assert len(table) == 18
    assert (table["rank"] == 64).all()
    assert table["tokens"].str.len().gt(0).all()

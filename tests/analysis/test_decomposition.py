"""The exact decomposition: parts against formulas written out, and what they must add up to."""

import functools

import numpy as np
import pytest
import torch
from builders import FAMILIES, N_HEADS, N_LAYERS, RARE_FAMILIES, tiny
from evaluation.invented import LABELS, model_of, task_of
from methods.untouched import left_alone
from torch.testing import assert_close
from vectors.naive import additive, noise, vector_of

import mechtv
from mechtv.analysis import decomposition
from mechtv.analysis.answers import Answers, rivals
from mechtv.analysis.circuits import Circuits, output_bias
from mechtv.analysis.decomposition import Runs, decompose, decomposed, parts_of, scale_of
from mechtv.analysis.subject import Subject, random_like
from mechtv.errors import InvalidInput
from mechtv.forward.probe import at_last, observe
from mechtv.forward.run import last_logits
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Edit, Replace, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SIDES = ("left", "right")


def prompts_of(model, labels=None, side="left", n=None):
    """Test prompts of several lengths."""
    prompts = Prompts.of(model, task_of(labels), n=n, padding_side=side)
    assert not bool(prompts.mask.all()) or n == 1
    return prompts


def numbers(model, prompts, subject, against="zero-shot"):
    """The columns of a decomposition by name."""
    with torch.no_grad():
        columns = decomposed(model, prompts, subject, against)
    n = len(parts_of(model, subject.layer))
    return columns[:, :n], columns[:, n:-3], *columns[:, -3:].T


def cache_of(model, ids, subject=None):
    """All that one unpadded prompt shows, under TransformerLens's own hooks."""
    found = {}

    def keep(x, hook, name):
        found[name] = x[0].detach().clone()

    def add(x, hook):
        x = x.clone()
        x[0, -1] += subject.theta
        return x

    points = ("attn.hook_pattern", "attn.hook_v", "attn.hook_z", "hook_attn_out", "hook_mlp_out")
    points = (*points, "hook_resid_pre", "hook_resid_post")
    points += tuple(f"ln{i}_post.hook_in" for i in (1, 2) if hasattr(model.blocks[0], "ln1_post"))
    names = [f"blocks.{layer}.{point}" for layer in range(N_LAYERS) for point in points]
    hooks = [(f"blocks.{subject.layer}.hook_resid_pre", add)] if subject is not None else []
    hooks += [(name, functools.partial(keep, name=name)) for name in names]
    model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)
    return found


def written(model, layer, inner):
    """What the block's own output projection makes of one head's output, without its bias."""
    projection = model.blocks[layer].attn.o.original_component
    return projection(inner) - projection(torch.zeros_like(inner))


def naive_heads(model, layer, before, after):
    """Values, pattern and product of each head: z of mixed runs."""
    name, n_kv = f"blocks.{layer}.attn", before[f"blocks.{layer}.attn.hook_v"].shape[1]
    kinds = {"values": [], "pattern": [], "product": []}
    for head in range(N_HEADS):
        kv = head // (N_HEADS // n_kv)
        runs = {"old": before, "new": after}

        def z(pattern, values, head=head, kv=kv, runs=runs):
            c = runs[pattern][f"{name}.hook_pattern"][head, -1]
            v = runs[values][f"{name}.hook_v"][:, kv]
            total = torch.zeros(model.cfg.n_heads, model.cfg.d_head, dtype=torch.float64)
            total[head] = c @ v
            return total

        for pattern, run in runs.items():
            assert_close(z(pattern, pattern)[head], run[f"{name}.hook_z"][-1, head], **EXACT)
        both = z("new", "new") - z("new", "old") - z("old", "new") + z("old", "old")
        kinds["values"].append(z("old", "new") - z("old", "old"))
        kinds["pattern"].append(z("new", "old") - z("old", "old"))
        kinds["product"].append(both)
    inner = [x for kind in kinds.values() for x in kind]
    return torch.stack([written(model, layer, x.flatten()) for x in inner])


def naive_behind(norm, before, after, parts):
    """Gemma's norm behind a sublayer by hand: the parts, and what its scale changes."""
    eps, weight = norm.original_component.eps, 1 + norm.original_component.weight
    old, new = ((x.square().mean() + eps).sqrt() for x in (before, after))
    return torch.cat([parts * weight / new, (before * weight / new - before * weight / old)[None]])


def naive_parts(model, ids, subject):
    """All parts of one prompt's change, in the order of the stream."""
    before, after = cache_of(model, ids), cache_of(model, ids, subject)
    parts = [subject.theta[None]]
    for layer in range(subject.layer, N_LAYERS):
        block, name = model.blocks[layer], f"blocks.{layer}"
        heads = naive_heads(model, layer, before, after)
        if not hasattr(block, "ln1_post"):
            mlp = (run[f"{name}.hook_mlp_out"][-1] for run in (after, before))
            parts += [heads, (next(mlp) - next(mlp))[None]]
            continue
        attention = [run[f"{name}.ln1_post.hook_in"][-1] for run in (before, after)]
        mlp = [run[f"{name}.ln2_post.hook_in"][-1] for run in (before, after)]
        parts.append(naive_behind(block.ln1_post, *attention, heads))
        parts.append(naive_behind(block.ln2_post, *mlp, (mlp[1] - mlp[0])[None]))
    last = f"blocks.{N_LAYERS - 1}.hook_resid_post"
    return torch.cat(parts), after[last][-1] - before[last][-1]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_is_that_of_the_formula_written_out(family, side):
    model = model_of(family)
    subject = Subject.of(model, additive(model, layer=1, seed=3))
    prompts = prompts_of(model, side=side, n=2)
    with torch.no_grad():
        runs = Runs.of(model, prompts, subject)
        parts = torch.cat(list(runs.each()), dim=1)
        assert parts.shape[1] == len(parts_of(model, 1)) - 1
        for row in range(len(prompts)):
            ids = prompts.tokens[row][prompts.mask[row]].tolist()
            wanted, change = naive_parts(model, ids, subject)
            assert_close(parts[row], wanted, **EXACT)
            assert_close(parts[row].sum(dim=0), change, **EXACT)
            assert float(parts[row].norm(dim=-1).min()) > 1e-6


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("family", [*FAMILIES, *RARE_FAMILIES])
def test_the_parts_add_up_to_the_measured_changes(family, layer, side):
    model = model_of(family)
    vector = additive(model, layer=layer, seed=5)
    subject, prompts = Subject.of(model, vector), prompts_of(model, LABELS, side)
    contributions, norms, change, moved, errors = numbers(model, prompts, subject)
    assert_close(contributions.sum(dim=1), change, **EXACT)
    assert float(errors.max()) < 1e-10
    assert float(moved.min()) > 0.1
    assert bool(norms[:, -1].isnan().all())
    with torch.no_grad():
        plain, injected = last_logits(model, prompts), last_logits(model, prompts, vector)
    cap = getattr(model.cfg, "output_logits_soft_cap", 0) or 0
    if cap > 0:
        plain, injected = (cap * torch.atanh(x / cap) for x in (plain, injected))
    differences = [Answers.of(x, prompts).logit_difference for x in (injected, plain)]
    np.testing.assert_allclose(change, differences[0] - differences[1], atol=1e-9)
    assert np.abs(differences[0] - differences[1]).max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_outputs_through_their_maps_add_up_to_the_attention_output(family):
    model = model_of(family)
    prompts = prompts_of(model, side="right")
    for layer in range(N_LAYERS):
        block = f"blocks.{layer}"
        behind = hasattr(model.blocks[layer], "ln1_post")
        output = f"{block}.ln1_post.hook_in" if behind else f"{block}.hook_attn_out"
        with torch.no_grad():
            found = observe(
                model, prompts, dict.fromkeys((f"{block}.attn.hook_z", output), at_last)
            )
        outputs = Circuits.of(model, layer).outputs
        each = torch.einsum("bhw,hwd->bhd", found[f"{block}.attn.hook_z"], outputs)
        assert_close(each.sum(dim=1) + output_bias(model, layer), found[output], **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scale_of_a_norm_is_what_its_hook_shows(family):
    model, prompts = model_of(family), prompts_of(model_of(family))
    name = "blocks.1.ln1"
    reads = dict.fromkeys((f"{name}.hook_in", f"{name}.hook_scale"), at_last)
    with torch.no_grad():
        found = observe(model, prompts, reads)
        scale = scale_of(model.blocks[1].ln1, found[f"{name}.hook_in"])
    assert_close(scale, found[f"{name}.hook_scale"], **EXACT)


def test_open_answers_stand_against_the_best_wrong_token_of_the_run_that_is_named():
    model, vector = model_of(), additive(model_of(), layer=1, seed=5, scale=6.0)
    subject, prompts = Subject.of(model, vector), prompts_of(model)
    found = {}
    with torch.no_grad():
        logits = {
            "zero-shot": last_logits(model, prompts),
            "injected": last_logits(model, prompts, vector),
        }
    for against, seen in logits.items():
        chosen = rivals(seen, prompts)
        after, before = (
            Answers.of(logits[run], prompts, chosen).logit_difference
            for run in ("injected", "zero-shot")
        )
        contributions, _, change, _, _ = numbers(model, prompts, subject, against)
        np.testing.assert_allclose(change, after - before, atol=1e-10)
        assert_close(contributions.sum(dim=1), change, **EXACT)
        found[against] = change
    assert float((found["zero-shot"] - found["injected"]).abs().max()) > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
def test_every_sum_is_the_whole_and_every_row_its_share(family):
    model = model_of(family)
    found = decompose(model, task_of(LABELS), additive(model, layer=1, seed=2), n=6)
    whole = found.change.mean()
    for table in (found.table(), found.by_kind(), found.by_block(), found.summed("head", "kind")):
        assert table["value"].sum() == pytest.approx(whole, abs=1e-10)
        assert table["share"].sum() == pytest.approx(1, abs=1e-8)
        assert (table["n"] == 6).all()
        assert (table["error"] == found.error).all()
        assert (table["change"] == whole).all()
    table = found.table()
    assert len(table) == len(found.parts) == len(parts_of(model, 1))
    heads = found.by_head().set_index(["layer", "head"])["value"]
    assert len(heads) == 2 * N_HEADS
    mine = (table["layer"] == 2) & (table["head"] == 3)
    assert set(table[mine]["kind"]) == {"values", "pattern", "product"}
    assert heads[2, 3] == pytest.approx(table[mine]["value"].sum(), abs=1e-12)
    blocks = found.by_block().set_index("kind")["value"]
    assert len(blocks["block"]) == 2
    assert blocks["theta"] == table["value"].iloc[0]
    assert blocks["final norm scale"] == table["value"].iloc[-1]
    scales = {"attention scale", "MLP scale"} & set(found.by_kind()["kind"])
    assert len(scales) == (2 if family == "gemma2" else 0)


def test_a_row_has_its_interval_norm_and_provenance():
    model = model_of()
    subject = Subject.of(model, additive(model, layer=1, seed=2))
    found = decompose(model, task_of(LABELS), subject.vector(), seed=4)
    theta = found.table().iloc[0]
    estimate = mechtv.evaluation.intervals.mean(found.contributions[0])
    assert (theta["value"], theta["low"], theta["high"]) == pytest.approx(
        (estimate.value, estimate.low, estimate.high), abs=1e-12
    )
    assert theta["norm"] == pytest.approx(float(subject.theta.norm()), abs=1e-10)
    assert (theta["task"], theta["injection layer"], theta["seed"]) == ("invented", 1, 4)
    assert theta["weights"] == "raw"
    prompts = Prompts.of(model, task_of(LABELS), seed=4)
    assert found.queries == tuple(example.key for example in prompts.examples)
    contributions = numbers(model, prompts, subject)[0]
    np.testing.assert_allclose(found.contributions, contributions.T, atol=1e-10)


def test_norms_under_layer_norm_are_those_of_the_centred_parts():
    model = model_of("gpt2")
    subject = Subject.of(model, additive(model, layer=2, seed=2))
    shifted = Subject(layer=2, theta=subject.theta + 5.0)
    norms = [numbers(model, prompts_of(model), each)[1][:, :-1] for each in (subject, shifted)]
    assert_close(*norms, **EXACT)


def test_batches_and_intervals_in_parts_change_nothing(monkeypatch):
    model, vector = model_of("gemma3"), additive(model_of("gemma3"), layer=0, seed=1)
    whole = decompose(model, task_of(), vector)
    monkeypatch.setattr(decomposition, "BATCH", 3)
    monkeypatch.setattr(decomposition, "ROWS", 5)
    parts = decompose(model, task_of(), vector)
    for name in ("contributions", "norms", "change", "state_change"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=1e-10)
    for column in ("value", "low", "high"):
        np.testing.assert_allclose(parts.table()[column], whole.table()[column], atol=1e-10)


def test_the_same_place_by_its_other_name_gives_the_same():
    model = model_of()
    first = additive(model, layer=1, seed=1)
    second = additive(model, layer=0, component="resid_post", seed=1)
    found = [decompose(model, task_of(LABELS), vector, n=4) for vector in (first, second)]
    assert found[0].layer == found[1].layer == 1
    np.testing.assert_array_equal(found[0].contributions, found[1].contributions)


def test_parts_that_are_missing_are_told_of(monkeypatch):
    model, vector = model_of(), additive(model_of(), layer=1, seed=1)
    assert decompose(model, task_of(LABELS), vector).error < 1e-10
    original = Runs.heads
    monkeypatch.setattr(Runs, "heads", lambda self, layer: (0 * x for x in original(self, layer)))
    with pytest.raises(InvalidInput, match=r"\d+% of the vector's effect is in no part"):
        decompose(model, task_of(LABELS), vector)


def test_a_model_that_clips_what_its_heads_read_is_refused():
    model = tiny("olmo", clip_qkv=1.0)
    with pytest.raises(InvalidInput, match=r"\d+% of the vector's effect is in no part"):
        decompose(model, task_of(LABELS), additive(model, layer=1, seed=1))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_in_a_short_type_the_parts_add_up_as_well_as_it_rounds(family):
    model = tiny(family, torch.bfloat16)
    vector = additive(model, layer=1, seed=1).to(torch.bfloat16)
    assert decompose(model, task_of(LABELS), vector).error < 0.05


def test_the_model_is_left_alone():
    model = model_of("gemma2")
    with left_alone(model):
        decompose(model, task_of(), additive(model, layer=1), n=2)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_one_sentence():
    model, task = model_of(), task_of()
    vector = additive(model, layer=1)
    with pytest.raises(InvalidInput, match="against='both' is unknown; use zero-shot or injected"):
        decompose(model, task, vector, against="both")
    value = noise(model.cfg.d_model)
    replaces = vector_of(Edit(site=Site(layer=1), operation=Replace(value=value)))
    with pytest.raises(InvalidInput, match="a single Add at resid_pre"):
        decompose(model, task, replaces)
    with pytest.raises(InvalidInput, match="n=99 examples"):
        decompose(model, task, vector, n=99)
    found = decompose(model, task, vector, n=1)
    for by in ((), ("block",)):
        with pytest.raises(InvalidInput, match="give one or more of kind, layer, head"):
            found.summed(*by)


@pytest.mark.model
def test_on_the_real_model_the_parts_add_up_in_float32(model):
    task = mechtv.get_task("present-past")
    prompts = Prompts.of(model, task, n=4)
    reads = {"blocks.11.hook_resid_pre": at_last}
    with torch.no_grad():
        norm = observe(model, prompts, reads)["blocks.11.hook_resid_pre"].norm(dim=1).mean()
    drawn = random_like(torch.ones(576), 1, torch.Generator().manual_seed(0))[0]
    vector = Subject(layer=11, theta=drawn / drawn.norm() * norm).vector()
    found = decompose(model, task, vector, n=4)
    assert found.error <= 1e-4
    np.testing.assert_allclose(found.contributions.sum(axis=0), found.change, atol=1e-3)
    assert found.state_change.min() > 10

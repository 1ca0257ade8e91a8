"""The logit lens of runs, against passes whose last state is replaced by hand."""

import functools
import sys

import numpy as np
import pytest
import torch
from builders import FAMILIES, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import row_of
from methods.untouched import left_alone
from transformer_lens.tools.analysis import logit_lens as their_lens
from vectors.naive import additive, noise, vector_of

import mechtv
from mechtv.analysis.lens import lens_logits, lens_of, top_tokens
from mechtv.analysis.logit_lens import first_depth, logit_lens
from mechtv.errors import InvalidInput
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Linear, Site, TaskVector

N = 3
NAMES = [f"blocks.{layer}.hook_resid_pre" for layer in range(N_LAYERS)]
FINAL = f"blocks.{N_LAYERS - 1}.hook_resid_post"
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def streams(model, ids, vector=None):
    """The states at the last token of one row at every depth, by TransformerLens's own hooks."""
    found = []

    def shift(x, hook, edit):
        return torch.cat([x[:, :-1], x[:, -1:] + edit.operation.value.reshape(-1)], dim=1)

    hooks = []
    for edit in () if vector is None else vector.edits:
        hooks.append((edit.site.hook_name, functools.partial(shift, edit=edit)))
    hooks += [(name, lambda x, hook: found.append(x[0, -1].clone())) for name in (*NAMES, FINAL)]
    with torch.no_grad():
        model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)
    return found


def spoken(model, ids, state):
    """The model's own logits when the state stands behind its last block."""

    def put(x, hook):
        return torch.cat([x[:, :-1], state.expand_as(x[:, -1:])], dim=1)

    with torch.no_grad():
        return model.run_with_hooks(torch.tensor([ids]), fwd_hooks=[(FINAL, put)])[0, -1]


@functools.cache
def by_hand(family, labels, injected, layer=1):
    """Logits (query depth d_vocab) of every depth of one run, prompt by prompt."""
    model, prompts = model_of(family), prompts_of(family, labels)
    vector = additive(model, layer=layer, seed=3) if injected else None
    rows = []
    for number in range(N):
        ids = row_of(prompts, number)
        rows.append(torch.stack([spoken(model, ids, x) for x in streams(model, ids, vector)]))
    return torch.stack(rows)


def prompts_of(family, labels):
    return Prompts.of(model_of(family), task_of(labels), split="test", n=N)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_depth_is_what_the_model_says_of_that_state(family) -> None:
    model, task, prompts = model_of(family), task_of(LABELS), prompts_of(family, LABELS)
    lens = logit_lens(model, task, additive(model, layer=1, seed=3), n=N)
    label_ids = [ids[0] for ids in prompts.label_tokens]
    for readings, injected in ((lens.plain, False), (lens.injected, True)):
        logits = by_hand(family, LABELS, injected)
        for row, answer in enumerate(ids[0] for ids in prompts.answers):
            own = logits[row, :, answer]
            others = [logits[row, :, i] for i in label_ids if i != answer]
            rank = 1 + (logits[row] > own[:, None]).sum(dim=1)
            best_label = torch.tensor(label_ids)[logits[row][:, label_ids].argmax(dim=1)]
            log_p = own - logits[row].logsumexp(dim=1)
            np.testing.assert_allclose(readings.log_probability[:, row], log_p, **CLOSE)
            difference = own - torch.stack(others).mean(dim=0)
            np.testing.assert_allclose(readings.logit_difference[:, row], difference, **CLOSE)
            np.testing.assert_array_equal(readings.rank[:, row], rank)
            np.testing.assert_array_equal(readings.correct[:, row], rank == 1)
            np.testing.assert_array_equal(readings.correct_label[:, row], best_label == answer)
    assert lens.plain.rank.shape == (N_LAYERS + 1, N)
    assert np.abs(lens.injected.log_probability - lens.plain.log_probability)[1:].min() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_depth_is_the_models_own_output(family) -> None:
    model, task = model_of(family), task_of(LABELS)
    vector = additive(model, layer=1, seed=3)
    lens = logit_lens(model, task, vector, n=N)
    for readings, what in ((lens.plain, None), (lens.injected, vector)):
        own = mechtv.evaluate(model, task, what, n=N)
        first = mechtv.forward.run(model, prompts_of(family, LABELS), what)[:, 0]
        answers = prompts_of(family, LABELS).first_answer_tokens
        log_p = first.log_softmax(dim=1).gather(1, answers[:, None])[:, 0]
        np.testing.assert_allclose(readings.log_probability[-1], log_p.detach(), **CLOSE)
        np.testing.assert_array_equal(readings.correct[-1], own.correct)
        np.testing.assert_array_equal(readings.correct_label[-1], own.correct_label)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
def test_the_plain_run_is_that_of_transformer_lens(family) -> None:
    model, prompts = model_of(family), prompts_of(family, LABELS)
    lens = logit_lens(model, task_of(LABELS), n=N)
    for row, answer in enumerate(ids[0] for ids in prompts.answers):
        tokens = torch.tensor([row_of(prompts, row)])
        theirs = their_lens(model, tokens, targets=answer, return_type="log_probs")
        np.testing.assert_allclose(
            lens.plain.log_probability[:, row], theirs.values[:, 0, 0].detach(), atol=1e-5
        )
        ranks = 1 + theirs.rank_trajectory()[:, 0]
        np.testing.assert_array_equal(lens.plain.rank[:, row], ranks)
    assert lens.injected is None
    assert lens.layer is None


def test_the_rival_of_an_open_answer_is_one_token_at_every_depth_of_both_runs() -> None:
    model, prompts = model_of("llama"), prompts_of("llama", None)
    lens = logit_lens(model, task_of(), additive(model, layer=1, seed=3), n=N)
    under, plain = by_hand("llama", None, True), by_hand("llama", None, False)
    several = set()
    for row, answer in enumerate(ids[0] for ids in prompts.answers):
        wrong = under[row, -1].clone()
        wrong[answer] = -torch.inf
        rival = int(wrong.argmax())
        for readings, logits in ((lens.plain, plain), (lens.injected, under)):
            wanted = logits[row, :, answer] - logits[row, :, rival]
            np.testing.assert_allclose(readings.logit_difference[:, row], wanted, **CLOSE)
        several.add(int(plain[row, -1].argmax()) == rival)
    assert lens.plain.correct_label is None
    assert False in several  # else the plain run's rivals would have done as well


@pytest.mark.parametrize("layer", range(N_LAYERS))
def test_the_runs_part_at_the_depth_of_the_vector(layer) -> None:
    model = model_of("gpt2")
    lens = logit_lens(model, task_of(LABELS), additive(model, layer=layer, seed=3), n=N)
    change = np.abs(lens.injected.log_probability - lens.plain.log_probability)
    assert lens.layer == layer
    assert change[:layer].max(initial=0) == 0
    assert change[layer:].min() > 1e-6


def test_a_vector_of_any_form_is_read() -> None:
    model, task = model_of("llama"), task_of(LABELS)
    post = additive(model, layer=1, component="resid_post")
    pre = additive(model, layer=2)
    after = [logit_lens(model, task, v, n=N).injected.log_probability for v in (post, pre)]
    np.testing.assert_allclose(*after, **CLOSE)
    heads = additive(model, layer=1, component="z", scale=20.0)
    lens = logit_lens(model, task, heads, n=N)
    assert (first_depth(post), first_depth(pre), first_depth(heads)) == (2, 2, 2)
    assert set(lens.tokens["state"]) == {"plain", "injected"}
    changed = lens.injected.log_probability != lens.plain.log_probability
    assert not changed[:2].any()
    assert changed[2:].all()
    matrix = Edit(site=Site(layer=1), operation=Linear(matrix=noise(32, 32, scale=0.3)))
    assert logit_lens(model, task, vector_of(matrix), n=N).layer == 1


def test_top_tokens_are_those_of_mean_states_and_of_the_vector() -> None:
    model, task, prompts = model_of("llama"), task_of(LABELS), prompts_of("llama", LABELS)
    vector = additive(model, layer=1, seed=3)
    tokens = logit_lens(model, task, vector, n=N, k=3).tokens
    rows = [torch.stack(streams(model, row_of(prompts, r), vector)) for r in range(N)]
    logits = lens_logits(model, torch.stack(rows).mean(dim=0))
    for depth in range(N_LAYERS + 1):
        own = tokens.query("state == 'injected' and depth == @depth")
        best = logits[depth].topk(3)
        assert own["token"].tolist() == [model.tokenizer.decode([i]) for i in best.indices.tolist()]
        np.testing.assert_allclose(own["logit"], best.values, **CLOSE)
        assert own["rank"].tolist() == [1, 2, 3]
    theta = tokens.query("state == 'theta'")
    assert theta["depth"].unique().tolist() == [1]
    assert theta["token"].tolist() == top_tokens(model, vector, k=3)["token"].tolist()


def test_the_table_holds_every_depth_with_intervals_and_origin() -> None:
    model = model_of("llama")
    lens = logit_lens(model, task_of(LABELS), additive(model, layer=1, seed=3), n=N)
    table = lens.table()
    assert len(table) == 2 * 5 * (N_LAYERS + 1)
    row = table.query("run == 'injected' and score == 'log10 rank' and depth == 2").iloc[0]
    assert row["value"] == pytest.approx(np.log10(lens.injected.rank[2]).mean())
    assert row["low"] <= row["value"] <= row["high"]
    assert (row["n"], row["layer"], row["task"], row["weights"]) == (N, 1, "invented", "raw")
    plain = table.query("run == 'plain'")
    assert plain["layer"].isna().all()
    assert plain["setting"].unique().tolist() == ["zero-shot"]
    hits = table.query("run == 'injected' and score == 'accuracy, label-restricted' and depth == 3")
    expected = mechtv.evaluate(model, task_of(LABELS), additive(model, layer=1, seed=3), n=N)
    assert hits["value"].item() == expected.label_accuracy.value
    assert hits["low"].item() == expected.label_accuracy.low


def test_queries_are_read_in_batches_without_change(monkeypatch) -> None:
    model, task = model_of("gemma2"), task_of()
    whole = logit_lens(model, task, additive(model, layer=1, seed=3))
    for module in (sys.modules[f"mechtv.analysis.{name}"] for name in ("lens", "logit_lens")):
        monkeypatch.setattr(module, "ROWS", 3)
    parts = logit_lens(model, task, additive(model, layer=1, seed=3))
    assert len(whole.queries) == 8
    np.testing.assert_allclose(
        whole.injected.logit_difference, parts.injected.logit_difference, **CLOSE
    )
    np.testing.assert_array_equal(whole.plain.rank, parts.plain.rank)


def test_the_model_is_left_alone_and_the_vectors_seed_decides_the_queries() -> None:
    model = tiny("qwen3")
    vector = additive(model, layer=1)
    card = mechtv.Card(method="made", seed=5)
    seeded = TaskVector(edits=vector.edits, card=card)
    with left_alone(model):
        lens = logit_lens(model, task_of(LABELS), seeded, n=N)
    assert lens.queries == tuple(e.key for e in task_of(LABELS).split("test", n=N, seed=5))
    assert lens.queries != logit_lens(model, task_of(LABELS), seeded, n=N, seed=0).queries
    assert lens.provenance.seed == 5


def test_tokens_of_named_vectors() -> None:
    model = model_of("gpt2")
    vector = additive(model, layer=1, seed=3)
    theta = vector.value().reshape(-1)
    table = lens_of(model, {"theta": vector, "double": 2 * theta, "-theta": -theta}, k=4)
    tokens = {name: own["token"].tolist() for name, own in table.groupby("vector")}
    assert tokens["theta"] == tokens["double"] != tokens["-theta"]
    assert table["rank"].tolist() == [1, 2, 3, 4] * 3
    (logits,) = lens_logits(model, theta[None])
    np.testing.assert_allclose(table.query("vector == 'theta'")["logit"], logits.topk(4).values)


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_one_sentence() -> None:
    model = model_of("llama")
    with pytest.raises(InvalidInput, match="There are no vectors; give at least one by name"):
        lens_of(model, {})
    with pytest.raises(InvalidInput, match=r"'a' has the shape \(3,\); .* of shape \(32,\)"):
        lens_of(model, {"a": torch.ones(3)})
    with pytest.raises(InvalidInput, match="'a' holds numbers that are not finite"):
        lens_of(model, {"a": torch.full((32,), torch.nan)})
    with pytest.raises(InvalidInput, match="k=0 tokens cannot be shown; use 1 to 384"):
        lens_of(model, {"a": torch.ones(32)}, k=0)
    far = vector_of(Edit(site=Site(layer=7), operation=Add(value=torch.ones(32))))
    with pytest.raises(InvalidInput, match="layer=7 does not exist"):
        logit_lens(model, task_of(LABELS), far, n=N)
    with pytest.raises(InvalidInput, match="n=99 examples were asked"):
        logit_lens(model, task_of(LABELS), n=99)


@pytest.mark.model
def test_the_answer_rises_behind_a_vector_of_the_real_model(model) -> None:
    task = mechtv.get_task("singular-plural")
    state = mechtv.extract_hidden_state(model, task, 24, shots=5, n=8, operation="add")
    lens = logit_lens(model, task, state, n=4)
    ranks = np.log10(lens.injected.rank).mean(axis=1)
    assert ranks[30] < ranks[24] - 0.5
    assert lens.injected.log_probability[-1].mean() > lens.plain.log_probability[-1].mean() + 1
    own = mechtv.evaluate(model, task, state, n=4)
    np.testing.assert_array_equal(lens.injected.correct[-1], own.correct)


def test_a_vector_for_new_tokens_and_one_at_the_heads_are_refused() -> None:
    model, task = model_of("gpt2"), task_of()
    with pytest.raises(InvalidInput, match="new tokens only"):
        logit_lens(model, task, additive(model, layer=1).acting_on("new"))
    with pytest.raises(InvalidInput, match="one value in the residual stream"):
        lens_of(model, {"theta": additive(model, layer=1, component="z")})

"""The linearity battery against its formulas, prompt by prompt, and on models that are linear."""

import functools
import math

import numpy as np
import pytest
import torch
from analysis.test_integrated_jacobian import final_state, queries_of
from builders import tiny
from evaluation.invented import LABELS, model_of, task_of
from methods.untouched import left_alone
from vectors.naive import additive, noise, vector_of

import mechtv
from mechtv.analysis import linearity_battery
from mechtv.analysis.linearity import linearity
from mechtv.errors import InvalidInput
from mechtv.vectors import Add, Edit, Site

FAST = {"alphas": (0.0, 0.5), "nodes": 2, "n_null": 0, "n": 4}
ANSWERS = ("accuracy, full vocabulary", "accuracy, label-restricted", "log-probability")


@functools.cache
def result_of(family="llama", nodes=16):
    """One battery with everything in it, for tests that only read it."""
    model = model_of(family)
    alphas = (-0.5, 0.0, 0.5, 1.0)
    vector = additive(model, layer=1)
    return linearity(model, task_of(LABELS), vector, alphas=alphas, nodes=nodes, n_null=2, n=5)


def shifts_of(model, task, split, n, theta):
    """For each query its plain final state, and a function that gives the effect of a shift."""
    for ids in queries_of(model, task, split, n):
        function = final_state(model, ids, 1)
        plain = function(torch.zeros_like(theta)).detach()
        yield plain, lambda shift, f=function, p=plain: f(shift).detach() - p, function


def seen(model, x):
    """Under LayerNorm a state is what is left of it without its mean."""
    rms = bool(getattr(model.ln_final, "uses_rms_norm", False))
    return x if rms else x - x.mean(dim=-1, keepdim=True)


def fit(model, effects, predicted):
    """Norm ratio, cosine, R² and centred R² of some effects, query by query and then together."""
    effects, predicted = seen(model, torch.stack(effects)), seen(model, torch.stack(predicted))
    missed = (effects - predicted).pow(2).sum()
    pairs = list(zip(effects, predicted, strict=True))
    return {
        "norm ratio": np.mean([float(e.norm() / p.norm()) for e, p in pairs]),
        "cosine": np.mean([float(e @ p / e.norm() / p.norm()) for e, p in pairs]),
        "R²": float(1 - missed / effects.pow(2).sum()),
        "R² about the mean": float(1 - missed / (effects - effects.mean(dim=0)).pow(2).sum()),
    }


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_every_part_is_its_formula(family):
    model, task = model_of(family), task_of(LABELS)
    vector = additive(model, layer=1, positions=(-1,), seed=0)
    other = additive(model, layer=1, positions=(-1,), seed=8)
    theta, second = (v.edits[0].operation.value.reshape(-1) for v in (vector, other))
    found = linearity(
        model, task, vector, alphas=(0.5,), other=other, nodes=1, n_null=0, n=3, split="test"
    )
    parts = {name: ([], []) for name in ("half", "J(0) θ", "J(θ) θ", "path average", "sum")}
    for _, effect, function in shifts_of(model, task, "test", 3, theta):
        matrix = functools.partial(torch.autograd.functional.jacobian, function)
        whole = effect(theta)
        for name, pair in {
            "half": (effect(theta / 2), whole / 2),
            "J(0) θ": (whole, matrix(0 * theta) @ theta),
            "J(θ) θ": (whole, matrix(theta) @ theta),
            "path average": (whole, matrix(theta / 2) @ theta),
            "sum": (effect(theta + second), whole + effect(second)),
        }.items():
            for values, value in zip(parts[name], pair, strict=True):
                values.append(value)
    others = [effect(theta) for _, effect, _ in shifts_of(model, task, "train", 3, theta)]
    parts["mean shift"] = (parts["J(0) θ"][0], [sum(others) / 3] * 3)
    places = {
        "half": ("scaling", "alpha θ", 0.5),
        "sum": ("superposition", "sum of the effects", None),
    }
    for name, (effects, predicted) in parts.items():
        part, what, alpha = places.get(name, ("first order", name, None))
        for score, wanted in fit(model, effects, predicted).items():
            value = found.estimate(part, what, score, alpha=alpha).value
            assert value == pytest.approx(wanted, rel=1e-8, abs=1e-10), (name, score)


def test_answers_are_those_of_the_predicted_states():
    model, task = model_of(), task_of(LABELS)
    vector = additive(model, layer=1, positions=(-1,))
    theta = vector.edits[0].operation.value.reshape(-1)
    found = linearity(model, task, vector, alphas=(0.5,), nodes=1, n_null=0, n=5)
    scores = {"zero-shot": [], "J(0) θ": [], "measured": []}
    queries = task.split("test", n=5, seed=0)
    rows = shifts_of(model, task, "test", 5, theta)
    for query, (plain, effect, function) in zip(queries, rows, strict=True):
        jacobian = torch.autograd.functional.jacobian(function, 0 * theta)
        answer = int(model.tokenizer(f" {query.answer}")["input_ids"][0])
        for name, shift in {
            "zero-shot": 0 * plain, "J(0) θ": jacobian @ theta, "measured": effect(theta),
        }.items():  # fmt: skip
            with torch.no_grad():
                logits = model.unembed(model.ln_final((plain + shift)[None, None]))[0, 0]
            log_p = logits.log_softmax(dim=-1)[answer]
            scores[name].append((float(log_p), int(logits.argmax()) == answer))
    for name, pairs in scores.items():
        log_p, hits = np.mean(pairs, axis=0)
        assert found.estimate("first order", name, ANSWERS[2]).value == pytest.approx(log_p)
        assert found.estimate("first order", name, ANSWERS[0]).value == hits
    half = found.estimate("scaling", "alpha θ", ANSWERS[2], alpha=0.5).value
    assert half not in (np.mean(scores["zero-shot"], axis=0)[0], log_p)


@pytest.mark.parametrize("family", ["llama", "gpt2", "native"])
def test_enough_nodes_predict_every_query(family):
    found = result_of(family)
    for vector in ("theta", "random"):
        for score in ("R²", "R² about the mean", "cosine", "norm ratio"):
            value = found.estimate("first order", "path average", score, vector=vector).value
            assert value == pytest.approx(1, abs=1e-6)
        wrong = found.estimate("first order", "J(0) θ", "R²", vector=vector).value
        assert wrong < 0.99


def test_no_scale_is_no_effect_and_the_whole_is_itself():
    found = result_of()
    for vector in ("theta", "random"):
        ask = functools.partial(found.estimate, "scaling", "alpha θ", vector=vector)
        first_order = functools.partial(found.estimate, "first order", vector=vector)
        assert ask("relative norm", alpha=0.0).value == pytest.approx(0, abs=1e-12)
        assert ask("relative norm", alpha=1.0).value == 1
        assert ask("R²", alpha=1.0).value == 1
        for score in ANSWERS:
            assert ask(score, alpha=0.0).value == pytest.approx(
                first_order("zero-shot", score).value
            )
            assert ask(score, alpha=1.0).value == pytest.approx(
                first_order("measured", score).value
            )
        with pytest.raises(InvalidInput, match="no 'cosine' of 'alpha θ' in 'scaling'"):
            ask("cosine", alpha=0.0)
    assert found.estimate("scaling", "alpha θ", "cosine", alpha=-0.5).value > 0


def test_theta_is_the_sum_of_two_random_parts():
    found = result_of()
    for score in ANSWERS:
        whole = found.estimate("first order", "measured", score).value
        assert found.estimate("superposition", "effect of the sum", score).value == whole
    parts = [found.estimate("superposition", x, ANSWERS[2]).value for x in ("first", "second")]
    assert parts[0] != parts[1]


def test_a_model_without_attention_and_mlps_is_linear_in_every_part():
    model = tiny("llama")
    for block in model.original_model.model.layers:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    found = linearity(model, task_of(), additive(model, layer=0), n=4, n_null=2, nodes=1)
    table = found.table()
    perfect = table[table["score"].isin(["R²", "norm ratio", "cosine"])]
    assert len(perfect) == 2 * 3 * (6 + 4 + 1)
    np.testing.assert_allclose(perfect["value"], 1, atol=1e-10)
    norms = table[table["score"] == "relative norm"]
    np.testing.assert_allclose(norms["value"], norms["alpha"], atol=1e-10)
    assert "R² about the mean" not in set(table["score"])  # one effect for all: nothing to explain


def test_random_vectors_have_thetas_norm_and_are_none_if_none_are_wanted(monkeypatch):
    model, seen_norms = model_of(), []
    original = linearity_battery.directional_derivatives

    def spy(*args, **kwargs):
        seen_norms.append(args[4].norm(dim=1).unique())
        return original(*args, **kwargs)

    monkeypatch.setattr(linearity_battery, "directional_derivatives", spy)
    vector = additive(model, layer=1)
    found = linearity(model, task_of(), vector, **{**FAST, "n_null": 2})
    wanted = float(vector.edits[0].operation.value.norm())
    assert seen_norms[0].tolist() == pytest.approx([wanted] * len(seen_norms[0]))
    assert set(found.table()["vector"]) == {"theta", "random"}
    assert set(linearity(model, task_of(), vector, **FAST).table()["vector"]) == {"theta"}


def test_the_mean_shift_is_of_queries_that_are_not_scored():
    model, task, vector = model_of(), task_of(), additive(model_of(), layer=1)
    found = linearity(model, task, vector, **{**FAST, "n": 24}, split="train")
    assert (found.n, found.n_others) == (24, 8)
    assert found.estimate("first order", "mean shift", "R² about the mean").value < 0


def test_the_table_is_long_and_says_of_what():
    found = result_of()
    table = found.table()
    columns = ["task", "layer", "split", "part", "name", "alpha", "vector", "score"]
    assert list(table.columns[:8]) == columns
    assert not table.duplicated(columns).any()
    assert set(table["part"]) == {"scaling", "first order", "superposition"}
    assert (table["n"] == 5).all()
    assert (
        (table["low"] <= table["value"] + 1e-9) & (table["value"] <= table["high"] + 1e-9)
    ).all()
    assert table["alpha"].notna().equals(table["part"] == "scaling")
    assert set(ANSWERS) <= set(table["score"])
    open_answers = linearity(model_of(), task_of(), additive(model_of(), layer=1), **FAST)
    assert ANSWERS[1] not in set(open_answers.table()["score"])


def test_it_is_the_same_every_time():
    model, task, vector = model_of(), task_of(), additive(model_of(), layer=1)
    options = {**FAST, "n_null": 1}
    first, again, other = (
        linearity(model, task, vector, **options, seed=seed).table()["value"] for seed in (0, 0, 1)
    )
    assert first.equals(again)
    assert not first.equals(other)


def test_the_model_is_left_alone():
    model = tiny("llama")
    with left_alone(model):
        linearity(model, task_of(), additive(model, layer=1), **FAST)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alphas": ()}, "are no factors; give one or more finite numbers"),
        ({"alphas": (math.inf,)}, "are no factors"),
        ({"alphas": (1.0, 1.0)}, "name a factor twice"),
        ({"nodes": 0}, "nodes=0 is too few"),
        ({"n_null": -1}, "n_null=-1 is negative"),
        ({"n": 0}, "n=0 examples"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        linearity(model_of(), task_of(), additive(model_of(), layer=1), **{**FAST, **options})


def test_vectors_that_do_not_fit_are_refused():
    model, task = model_of(), task_of()
    vector = additive(model, layer=1)
    with pytest.raises(InvalidInput, match="added at block 2, the vector at block 1"):
        linearity(model, task, vector, other=additive(model, layer=2), **FAST)
    nothing = vector_of(Edit(site=Site(layer=1), operation=Add(value=0 * noise(model.cfg.d_model))))
    with pytest.raises(InvalidInput, match="there is no effect to explain"):
        linearity(model, task, nothing, **FAST)


@pytest.mark.model
def test_on_the_real_model_the_path_average_answers_as_the_vector_does(model):
    task = mechtv.get_task("present-past")
    vector = mechtv.extract_hidden_state(model, task, 26, shots=4, n=4, operation="add")
    found = linearity(model, task, vector, alphas=(0.5,), nodes=12, n_null=0, n=6)
    path, measured = (
        found.estimate("first order", name, "log-probability").value
        for name in ("path average", "measured")
    )
    assert path == pytest.approx(measured, abs=0.2)
    assert found.estimate("first order", "path average", "R²").value > 0.98


def test_what_a_layer_norm_does_not_see_changes_nothing() -> None:
    model, task = model_of("gpt2"), task_of()
    theta = noise(model.cfg.d_model, seed=3)
    options = {"n": 3, "nodes": 2, "n_null": 2, "alphas": (0.5,), "progress": False}
    tables = [
        linearity(
            model, task, vector_of(Edit(site=Site(layer=1), operation=Add(value=v))), **options
        )
        .table()
        .drop(columns="seed", errors="ignore")
        for v in (theta, theta + 7)
    ]
    first, second = (t["value"].to_numpy() for t in tables)
    np.testing.assert_allclose(first, second, atol=1e-8, rtol=1e-8)

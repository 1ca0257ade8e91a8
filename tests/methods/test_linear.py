"""Linear vectors against single full passes and the formula, and what the solver must do."""

import json
from dataclasses import replace

import pytest
import torch
from builders import D_MODEL, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits
from methods.untouched import left_alone
from torch.testing import assert_close

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import dntp, evaluate
from mechtv.forward import last_logits
from mechtv.methods.linear import explained, fit_linear, ridge_map
from mechtv.methods.states import paired_queries, paired_states
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Linear, Site, TaskVector

EXACT = {"atol": 1e-10, "rtol": 1e-10}
LAST = Site(layer=N_LAYERS - 1, component="resid_post")


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def naive_states(model, task, hook, shots, n, seed, split="train"):
    """Zero-shot and in-context states with one fixed set of demonstrations, one pass each."""
    shown = task.demonstrations(None, shots, seed=seed)
    examples = task.split(split, seed=seed)
    queries = [query for query in examples if query not in shown][:n]
    name = model.get_hook_point(hook).name
    both = []
    for lines in ([], [f"{e.fields['input']} -> {e.answer}" for e in shown]):
        rows = []
        for query in queries:
            ids = model.to_tokens("\n".join([*lines, f"{query.fields['input']} ->"]))[0].tolist()
            keep = {name: None}
            naive_logits(model, ids, len(ids), keep=keep)
            rows.append(keep[name][-1])
        both.append(torch.stack(rows))
    return both


def naive_map(h, y, ridge):
    """W = Y Hᵀ (H Hᵀ + λ I)⁻¹ by an explicit inverse; states are columns, as in the paper."""
    columns, changes = h.T, y.T
    inverse = torch.linalg.inv(columns @ columns.T + ridge * torch.eye(len(columns)))
    return changes @ columns.T @ inverse


# --- states ---


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize(
    ("family", "site", "hook"),
    [
        ("llama", LAST, "blocks.2.hook_resid_post"),
        ("gpt2", Site(layer=1, component="mlp_out"), "blocks.1.hook_mlp_out"),
        ("gemma2", Site(layer=1), "blocks.1.hook_resid_pre"),
    ],
)
def test_states_are_those_of_single_passes(family, site, hook, labels):
    model, task = model_of(family), task_of(labels)
    found = paired_states(model, task, site, shots=3, n=6, seed=2)
    wanted = naive_states(model, task, hook, 3, 6, 2)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == (6, D_MODEL)
        assert_close(mine, theirs, **EXACT)
    assert (found[1] - found[0]).abs().mean() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "neox", "opt", "native"])
def test_states_after_the_norm_are_what_the_final_norm_puts_out(family):
    model, task = model_of(family), task_of(LABELS)
    found = paired_states(model, task, LAST, shots=2, n=3, after_norm=True)
    assert_close(found, tuple(naive_states(model, task, "ln_final.hook_out", 2, 3, 0)), **EXACT)
    before = paired_states(model, task, LAST, shots=2, n=3)
    assert (found[0] - before[0]).abs().max() > 0.1


def test_queries_are_the_other_training_examples_and_their_answers_are_not_read():
    model, task = model_of(), task_of()
    shown = task.demonstrations(None, 3)
    queries, rows = paired_queries(task, shots=3, n=256)
    train = task.split("train")
    assert rows == [shown] * 21
    assert [q for q in train if q in queries] == list(queries)
    assert {q.key for q in queries} | {e.key for e in shown} == {e.key for e in train}
    other = replace(
        task, examples=tuple(e if e in shown else replace(e, answer="x") for e in task.examples)
    )
    for mine, theirs in zip(
        paired_states(model, task, LAST, shots=3, n=4),
        paired_states(model, other, LAST, shots=3, n=4),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_demonstrations_per_query_are_the_draw_of_the_task():
    task = task_of(LABELS)
    queries, rows = paired_queries(task, shots=3, n=5, split="test", demonstrations="per query")
    assert queries == task.split("test", n=5)
    assert rows == [task.demonstrations(query, 3) for query in queries]
    assert len(set(map(tuple, ([e.key for e in row] for row in rows)))) > 1


def test_states_of_held_out_queries_have_the_same_demonstrations():
    model, task = model_of(), task_of(LABELS)
    found = paired_states(model, task, LAST, shots=3, n=4, split="test")
    wanted = naive_states(model, task, "blocks.2.hook_resid_post", 3, 4, 0, split="test")
    assert_close(found, tuple(wanted), **EXACT)


def test_half_precision_states_are_read_as_single_precision():
    states = paired_states(tiny("llama", torch.bfloat16), task_of(), LAST, shots=2, n=3)
    assert {x.dtype for x in states} == {torch.float32}


# --- the fit ---


@pytest.mark.parametrize(
    ("family", "options", "hook"),
    [
        ("llama", {}, "blocks.2.hook_resid_post"),
        ("gpt2", {"layer": 1}, "blocks.1.hook_resid_post"),
        ("gemma2", {"layer": 1, "component": "resid_pre"}, "blocks.1.hook_resid_pre"),
        ("neox", {"layer": 0, "component": "attn_out"}, "blocks.0.hook_attn_out"),
        ("native", {"ridge": 0.5}, "blocks.2.hook_resid_post"),
        ("qwen3", {"solver": "primal"}, "blocks.2.hook_resid_post"),
    ],
)
@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
def test_the_matrix_is_the_formula_on_single_passes(family, options, hook, labels):
    model, task = model_of(family), task_of(labels)
    vector = fit_linear(model, task, shots=3, n=12, seed=1, **options)
    h, in_context = naive_states(model, task, hook, 3, 12, 1)
    (edit,) = vector.edits
    assert type(edit.operation) is Linear
    assert edit.operation.bias is None
    assert edit.site.positions == (-1,)
    assert model.get_hook_point(edit.site.hook_name) is model.get_hook_point(hook)
    wanted = naive_map(h, in_context - h, options.get("ridge", 5.0))
    assert_close(edit.operation.matrix, wanted, **EXACT)
    assert wanted.abs().max() > 1e-2
    assert not edit.operation.matrix.requires_grad


def test_the_fit_after_the_norm_is_the_formula_on_what_the_norm_puts_out():
    model, task = model_of(), task_of(LABELS)
    vector = fit_linear(model, task, shots=3, n=10, fit="after norm")
    h, in_context = naive_states(model, task, "ln_final.hook_out", 3, 10, 0)
    assert_close(vector.edits[0].operation.matrix, naive_map(h, in_context - h, 5.0), **EXACT)
    assert vector.sites == (LAST,), "applied before the norm"
    assert vector.card.settings["fit"] == "after norm"
    usual = fit_linear(model, task, shots=3, n=10)
    assert (usual.edits[0].operation.matrix - vector.edits[0].operation.matrix).abs().max() > 1e-2


def test_the_defaults_are_the_paper_s():
    model = tiny("llama", max_position_embeddings=1024)
    vector = fit_linear(model, task_of(LABELS, n=80))
    wanted = {
        "layer": 2, "component": "resid_post", "shots": 30, "n": 18, "ridge": 5.0,
        "solver": "auto", "intercept": False, "fit": "same site", "solved_by": "dual",
    }  # fmt: skip
    assert {k: v for k, v in vector.card.settings.items() if k in wanted} == wanted
    assert vector.n_parameters == D_MODEL**2


def test_without_a_penalty_the_map_carries_every_state_to_its_own():
    model, task = model_of(), task_of(LABELS)
    vector = fit_linear(model, task, shots=3, n=10, ridge=0.0)
    h, in_context = paired_states(model, task, LAST, shots=3, n=10)
    matrix = vector.edits[0].operation.matrix
    assert_close(h + h @ matrix.T, in_context, atol=1e-9, rtol=1e-9)
    queries, rows = paired_queries(task, shots=3, n=10)
    prompts = [
        Prompts.from_examples(model, task, queries, shown) for shown in ([()] * len(rows), rows)
    ]
    with torch.no_grad():
        given, wanted = last_logits(model, prompts[0], vector), last_logits(model, prompts[1])
    assert_close(given, wanted, atol=1e-8, rtol=1e-8)
    assert abs(vector.card.settings["r2"] - 1) < 1e-12


def test_a_boundless_penalty_is_the_zero_shot_run():
    model, task = model_of(), task_of(LABELS)
    prompts = Prompts.of(model, task)

    def change(ridge):
        vector = fit_linear(model, task, shots=3, n=10, ridge=ridge)
        with torch.no_grad():
            given, plain = last_logits(model, prompts, vector), last_logits(model, prompts)
        return float((given - plain).abs().max())

    assert 0 < change(1e12) < 1e-7
    assert 0.9e3 < change(1e7) / change(1e10) < 1.1e3
    assert change(1e13) < 1e-8


def test_an_intercept_is_the_fit_to_centred_states():
    model, task = model_of(), task_of(LABELS)
    vector = fit_linear(model, task, shots=3, n=12, intercept=True)
    h, in_context = naive_states(model, task, "blocks.2.hook_resid_post", 3, 12, 0)
    y = in_context - h
    matrix = naive_map(h - h.mean(dim=0), y - y.mean(dim=0), 5.0)
    operation = vector.edits[0].operation
    assert_close(operation.matrix, matrix, **EXACT)
    assert_close(operation.bias, y.mean(dim=0) - matrix @ h.mean(dim=0), **EXACT)
    assert vector.n_parameters == D_MODEL**2 + D_MODEL
    assert list(vector.table()["tensor"]) == ["matrix", "bias"]


# --- the solver ---


@pytest.mark.parametrize("n", [10, 32, 50])
@pytest.mark.parametrize("ridge", [0.01, 5.0, 1e4])
@pytest.mark.parametrize("intercept", [False, True])
def test_primal_and_dual_give_one_map(n, ridge, intercept):
    h, y = 7 * random(n, 32) + 1, random(n, 32, seed=1)
    options = {"ridge": ridge, "intercept": intercept}
    primal, dual, auto = (ridge_map(h, y, **options, solver=s) for s in ("primal", "dual", "auto"))
    assert_close(primal.matrix, dual.matrix, **EXACT)
    assert (primal.solved_by, dual.solved_by) == ("primal", "dual")
    assert auto.solved_by == ("dual" if n < 32 else "primal")
    if intercept:
        assert_close(primal.bias, dual.bias, **EXACT)


@pytest.mark.parametrize("n", [10, 50])
def test_an_intercept_is_a_component_that_is_not_penalised(n):
    """Against the normal equations of states with a constant component, penalised but for it."""
    h, y = random(n, 8) + 2, random(n, 8, seed=1) - 3
    found = ridge_map(h, y, ridge=2.0, intercept=True)
    extended = torch.cat([h, torch.ones(n, 1)], dim=1)
    penalty = 2.0 * torch.eye(9, dtype=torch.float64)
    penalty[-1, -1] = 0
    both = torch.linalg.inv(extended.T @ extended + penalty) @ extended.T @ y
    assert_close(found.matrix, both[:-1].T, **EXACT)
    assert_close(found.bias, both[-1], **EXACT)
    assert_close(found.predict(h), extended @ both, **EXACT)


def test_a_linear_map_is_recovered_from_more_states_than_its_width():
    h, wanted = random(20, 8), random(8, 8, seed=1)
    found = ridge_map(h, h @ wanted.T, ridge=0.0)
    assert found.solved_by == "least norm"
    assert_close(found.matrix, wanted, **EXACT)
    assert_close(ridge_map(h, h @ wanted.T, ridge=1e-9).matrix, wanted, atol=1e-8, rtol=0)


def test_an_affine_map_is_recovered_with_an_intercept_and_not_without():
    h, matrix, shift = random(20, 8), random(8, 8, seed=1), random(8, seed=2)
    y = h @ matrix.T + shift
    found = ridge_map(h, y, ridge=0.0, intercept=True)
    assert_close(found.matrix, matrix, **EXACT)
    assert_close(found.bias, shift, **EXACT)
    assert (ridge_map(h, y, ridge=0.0).matrix - matrix).abs().max() > 0.05


def test_without_a_penalty_the_map_is_the_limit_of_small_ones():
    """Of the many maps that fit few states, the one of least norm; also where states repeat."""
    h, y = random(5, 12), random(5, 12, seed=1)
    h[4], y[4] = h[3], y[3]
    found = ridge_map(h, y, ridge=0.0)
    assert_close(found.predict(h), y, **EXACT)
    assert_close(found.matrix, ridge_map(h, y, ridge=1e-7).matrix, atol=1e-5, rtol=0)
    assert_close(found.matrix, y.T @ torch.linalg.pinv(h).T, **EXACT)


def test_states_and_penalty_in_other_units_give_the_same_map():
    h, y = random(9, 16), random(9, 16, seed=1)
    wanted = ridge_map(h, y, ridge=5.0).matrix
    assert_close(ridge_map(300 * h, 300 * y, ridge=300**2 * 5.0).matrix, wanted, **EXACT)
    assert (ridge_map(300 * h, 300 * y, ridge=5.0).matrix - wanted).abs().max() > 0.01


def test_a_penalty_below_the_rounding_is_one_sentence():
    h = 1e4 * random(4, 16)
    with pytest.raises(InvalidInput, match="ridge=1e-15 is lost in the rounding"):
        ridge_map(h.repeat(3, 1), h.repeat(3, 1), ridge=1e-15, solver="dual")


def test_the_explained_share_is_one_minus_the_error_s():
    y = torch.tensor([[1.0, 2.0], [3.0, 2.0]]).double()
    assert explained(y, torch.zeros_like(y)) == {"r2": 1 - 18 / 2, "r2_about_zero": 0.0}
    assert explained(y, y.mean(dim=0).expand_as(y))["r2"] == 0.0
    assert explained(y, y) == {"r2": 1.0, "r2_about_zero": 1.0}
    same = torch.ones_like(y)
    assert explained(same, same) == {"r2": None, "r2_about_zero": 1.0}


# --- the vector ---


def test_the_card_says_how_good_the_fit_is_and_how_to_make_it_again():
    model, task = model_of(), task_of(LABELS)
    options = {"layer": 1, "shots": 3, "n": 12, "ridge": 2.0, "intercept": True}
    vector = fit_linear(model, task, seed=3, **options)
    card = vector.card
    assert (card.method, card.task, card.seed, card.dtype) == ("linear", "invented", 3, "float64")
    settings = json.loads(json.dumps(card.settings))
    measured = [settings.pop(name) for name in ("solved_by", "r2", "r2_about_zero")]
    assert settings.items() >= options.items()
    again = fit_linear(model, task, **settings, seed=3)
    assert torch.equal(vector.edits[0].operation.matrix, again.edits[0].operation.matrix)
    site = Site(layer=1, component="resid_post")
    h, in_context = paired_states(model, task, site, shots=3, n=12, seed=3)
    y, operation = in_context - h, vector.edits[0].operation
    left = (y - h @ operation.matrix.T - operation.bias).square().sum()
    wanted = [1 - left / (y - y.mean(dim=0)).square().sum(), 1 - left / y.square().sum()]
    assert measured[0] == "dual"
    assert_close(torch.tensor(measured[1:]).double(), torch.stack(wanted), atol=1e-6, rtol=0)
    assert 0 < measured[1] < 1


def test_as_many_queries_are_used_as_there_are():
    vector = fit_linear(model_of(), task_of(), shots=3)
    assert vector.card.settings["n"] == 21
    assert vector.card.settings["r2_about_zero"] > 0


def test_it_is_the_same_every_time_and_another_for_another_seed():
    first, again, other = (
        fit_linear(model_of(), task_of(), shots=2, n=4, seed=seed).edits[0].operation.matrix
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("intercept", [False, True])
def test_a_saved_vector_evaluates_as_before(intercept, tmp_path):
    model, task = model_of(), task_of(LABELS)
    vector = fit_linear(model, task, shots=2, n=8, intercept=intercept)
    loaded = TaskVector.load(vector.save(tmp_path / "linear.safetensors"))
    first, second, plain = (evaluate(model, task, v) for v in (vector, loaded, None))
    assert (first.log_probabilities == second.log_probabilities).all()
    assert (first.log_probabilities != plain.log_probabilities).all()
    assert loaded.card == vector.card


def test_weights_and_gradients_are_left_alone():
    model = tiny("llama")
    with left_alone(model):
        fit_linear(model, task_of(), shots=2, n=3, fit="after norm")


def test_a_half_precision_model_gets_a_single_precision_map():
    model, task = tiny("llama", torch.bfloat16), task_of(LABELS)
    vector = fit_linear(model, task, shots=2, n=6, intercept=True)
    assert {x.dtype for x in vector.edits[0].operation.tensors().values()} == {torch.float32}
    assert evaluate(model, task, vector, n=2).accuracy.n == 2


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shots": 0}, "shots=0 leaves nothing to fit; use 1 or more"),
        ({"n": 1}, "n=1 queries are too few to fit a map; use 2 or more"),
        ({"ridge": -1.0}, "ridge=-1.0 must be 0 or more and finite"),
        ({"ridge": float("nan")}, "ridge=nan must be 0 or more"),
        ({"solver": "svd"}, "solver='svd' is unknown; use one of auto, primal, dual"),
        ({"fit": "norm"}, "fit='norm' is unknown; use one of same site, after norm"),
        ({"layer": 3}, "layer=3 does not exist: this model has layers 0 to 2"),
        ({"layer": -1}, "layer=-1 is negative"),
        ({"component": "z"}, "acts on d_model vectors; it cannot stand at z"),
        ({"component": "resid_mid"}, "component='resid_mid' is unknown"),
        ({"fit": "after norm", "layer": 1}, "stands behind resid_post of layer 2.* of layer 1"),
        ({"fit": "after norm", "component": "resid_pre"}, "cannot be at resid_pre of layer 2"),
        ({"shots": 23}, "holds 24 examples; besides shots=23 .* 1 of them are left"),
        ({"shots": 25}, "shots=25 demonstrations .* holds 24 besides the query"),
        ({"shots": 20}, "the model's context holds 128; use fewer shots"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        fit_linear(model_of(), task_of(), **{"shots": 2, **options})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("site", "options", "sentence"),
    [
        (LAST, {"demonstrations": "none"}, "demonstrations='none' is unknown"),
        (Site(layer=0, positions="all"), {}, "A map is fitted at one position"),
        (Site(layer=0, positions=(-2, -1)), {}, "A map is fitted at one position"),
    ],
)
def test_states_that_cannot_be_paired_are_one_sentence(site, options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        paired_states(model_of(), task_of(), site, **{"shots": 2, "n": 4, **options})


def test_states_that_are_not_finite_are_one_sentence():
    model = tiny("llama")
    with torch.no_grad():
        model.original_model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(InvalidInput, match="not all finite; open the model in float32"):
        fit_linear(model, task_of(), shots=2, n=3)


@pytest.mark.model
def test_the_map_brings_the_real_model_nearer_to_its_in_context_run(model):
    task = mechtv.get_task("singular-plural")
    vector = fit_linear(model, task, shots=8, n=64)
    plain, mapped = (dntp(model, task, v, shots=8, n=16) for v in (None, vector))
    assert mapped.value < 0.85 * plain.value

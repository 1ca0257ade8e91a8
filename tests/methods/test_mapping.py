"""The mapping family: what each map is, that the MLP learns, and how they are compared."""

import json
from dataclasses import replace

import pytest
import torch
from builders import D_MODEL, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from methods.untouched import left_alone
from torch.testing import assert_close

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import dntp, evaluate
from mechtv.methods import extract_hidden_state
from mechtv.methods.frozen import frozen
from mechtv.methods.linear import fit_linear, ridge_map
from mechtv.methods.mapping import fit_mapping
from mechtv.methods.mapping_scores import compare_mappings
from mechtv.methods.residual_mlp import Plan, train_mlp
from mechtv.methods.states import paired_queries, paired_states
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Site, TaskVector
from mechtv.vectors.edits import ResidualMLP

EXACT = {"atol": 1e-10, "rtol": 1e-10}
LAST = Site(layer=N_LAYERS - 1, component="resid_post")
PLAN = Plan(depth=2, epochs=20, step_size=1e-3, weight_decay=0.01, batch_size=8)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(h, y, **changes):
    """An MLP trained on states that belong to no model."""
    with frozen(model_of()):
        return train_mlp(h, y, replace(PLAN, **changes), seed=0)


# --- constant and linear ---


@pytest.mark.parametrize(("family", "layer"), [("llama", None), ("gpt2", 1)])
def test_the_constant_map_is_the_mean_change(family, layer):
    model, task = model_of(family), task_of(LABELS)
    vector = fit_mapping(model, task, layer, mapping="constant", shots=3, n=7, seed=2)
    site = LAST if layer is None else Site(layer=layer, component="resid_post")
    queries, shown = paired_queries(task, shots=3, n=7, seed=2)
    total = torch.zeros(D_MODEL).double()
    for query, lines in zip(queries, shown, strict=True):
        for sign, rows in ((1, [lines]), (-1, [()])):
            prompts = Prompts.from_examples(model, task, [query], rows)
            _, cache = model.run_with_cache(prompts.tokens, names_filter=site.hook_name)
            total = total + sign * cache[model.get_hook_point(site.hook_name).name][0, -1].detach()
    assert vector.sites == (site,)
    assert type(vector.edits[0].operation) is Add
    assert_close(vector.value(), total / 7, **EXACT)


def test_the_constant_map_is_the_hidden_state_difference_where_prompts_are_the_same():
    """With the same demonstrations for all; here there are only two to draw."""
    model, task = model_of(), task_of(n=5)
    site = Site(layer=1, component="resid_post")
    states = paired_states(
        model, task, site, shots=2, n=3, demonstrations="per query", split="train"
    )
    wanted = extract_hidden_state(
        model, task, 1, shots=2, n=3, operation="add", component="resid_post"
    )
    assert_close((states[1] - states[0]).mean(dim=0), wanted.value(), **EXACT)


def test_the_linear_map_is_fit_linear():
    model, task = model_of(), task_of(LABELS)
    mine = fit_mapping(model, task, 1, mapping="linear", shots=3, n=8, ridge=2.0, seed=1)
    other = fit_linear(model, task, 1, shots=3, n=8, ridge=2.0, seed=1)
    assert torch.equal(mine.edits[0].operation.matrix, other.edits[0].operation.matrix)
    assert mine.card == other.card
    assert mine.sites == other.sites


# --- the MLP ---


def test_training_begins_as_the_constant_map_and_lowers_the_loss():
    h = 30 * random(40, 16) + 100
    y = 5 * (h / 100).square() + 20
    operation, curve = trained(h, y)
    losses = [point["train_loss"] for point in curve]
    variance = (y - y.mean(dim=0)).square().mean()
    assert losses[0] == pytest.approx(1.0, rel=1e-5), "in units of the changes' own spread"
    last = (operation.change(h) - y).square().mean() / variance
    assert losses[-1] == pytest.approx(float(last), rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    assert [(p["epoch"], p["step"]) for p in curve] == [(e, 5 * e) for e in range(21)]
    assert not operation.weights.requires_grad


def test_a_nonlinear_map_is_fitted_better_than_by_any_linear_one():
    h = 50 * random(256, 16)
    h[:, 3:] = 0  # three components vary
    y = 20 * (h.abs() / 50 - 0.8)  # even in every component, so no linear map does any good
    fit, held = slice(0, 192), slice(192, None)
    operation, _ = trained(h[fit], y[fit], depth=4, step_size=3e-3)
    linear = ridge_map(h[fit], y[fit], ridge=5.0, intercept=True)
    spread = (y[held] - y[fit].mean(dim=0)).square().mean()
    errors = [
        (predicted - y[held]).square().mean() / spread
        for predicted in (operation.change(h[held]), linear.predict(h[held].double()))
    ]
    assert errors[0] < 0.1
    assert errors[1] > 0.9


def test_states_in_other_units_train_alike():
    h, y = random(24, 8), random(24, 8, seed=1)
    curves = [trained(a * h + b, a * y)[1] for a, b in ((1.0, 0.0), (256.0, 0.0), (1.0, 3.0))]
    assert curves[0] == curves[1]
    for one, other in zip(curves[0], curves[2], strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-2)


def test_changes_that_are_all_the_same_are_the_constant_map():
    h = random(10, 8)
    operation, _ = trained(h, torch.full_like(h, 3.0), epochs=1, weight_decay=0.0)
    assert_close(operation.change(h), torch.full_like(h, 3.0), atol=0.02, rtol=0)


@pytest.mark.parametrize("depth", [1, 2, 16])
def test_the_vector_is_a_trained_mlp_with_its_curve(depth):
    model, task = model_of(), task_of(LABELS)
    options = {"depth": depth, "shots": 2, "n": 9, "epochs": 3, "batch_size": 4}
    with torch.no_grad():  # as a user may have it
        vector = fit_mapping(model, task, mapping="mlp", **options)
    (edit,) = vector.edits
    assert type(edit.operation) is ResidualMLP
    assert edit.site == LAST
    assert edit.operation.weights.shape == (depth, D_MODEL, D_MODEL)
    assert {x.dtype for x in edit.operation.tensors().values()} == {torch.float32}
    curve = vector.training_curve()
    assert list(curve["step"]) == [0, 3, 6, 9]
    assert curve["train_loss"].iloc[-1] < curve["train_loss"].iloc[0]
    settings = vector.card.settings
    assert vector.card.method == "mlp"
    assert {name: settings[name] for name in options} == options
    assert settings["r2"] == pytest.approx(1 - curve["train_loss"].iloc[-1], abs=1e-4)


def test_it_is_the_same_every_time_and_another_for_another_seed():
    options = {"mapping": "mlp", "shots": 2, "n": 6, "epochs": 2}
    state = torch.get_rng_state()
    first, again, other = (
        fit_mapping(model_of(), task_of(), **options, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in first.edits[0].operation.tensors().items():
        assert torch.equal(tensor, again.edits[0].operation.tensors()[name])
    weights = (vector.edits[0].operation.weights for vector in (first, other))
    assert not torch.allclose(*weights)


def test_the_card_makes_the_vector_again():
    model, task = model_of(), task_of()
    vector = fit_mapping(model, task, mapping="mlp", shots=2, n=6, epochs=2, seed=3)
    settings = json.loads(json.dumps(vector.card.settings))
    del settings["r2"], settings["r2_about_zero"]
    again = fit_mapping(model, task, **settings, seed=vector.card.seed)
    assert torch.equal(vector.edits[0].operation.weights, again.edits[0].operation.weights)
    assert settings["n"] == 6


@pytest.mark.parametrize("mapping", ["constant", "linear", "mlp"])
def test_a_saved_vector_evaluates_as_before(mapping, tmp_path):
    model, task = model_of(), task_of(LABELS)
    vector = fit_mapping(model, task, mapping=mapping, shots=2, n=6, epochs=1)
    loaded = TaskVector.load(vector.save(tmp_path / "mapping.safetensors"))
    first, second, plain = (evaluate(model, task, v) for v in (vector, loaded, None))
    assert (first.log_probabilities == second.log_probabilities).all()
    assert (first.log_probabilities != plain.log_probabilities).all()
    assert loaded.card == vector.card


def test_weights_modes_and_gradients_are_left_alone():
    model = tiny("gpt2")
    model.train()
    with left_alone(model):
        fit_mapping(model, task_of(), mapping="mlp", shots=2, n=4, epochs=1)


def test_it_trains_in_inference_mode():
    with torch.inference_mode():
        vector = fit_mapping(model_of(), task_of(), mapping="mlp", shots=2, n=4, epochs=1)
    curve = vector.training_curve()["train_loss"]
    assert curve.iloc[1] < curve.iloc[0]


# --- the comparison ---


@pytest.mark.parametrize("over", ["labels", "vocabulary"])
def test_the_comparison_has_the_scores_of_evaluate_and_dntp(over):
    model, task = model_of(), task_of(LABELS)
    options = {"shots": 2, "n": 8, "epochs": 2, "seed": 1}
    table = compare_mappings(model, task, depths=[2, 4], n_test=5, **options)
    names = ["zero-shot", "constant", "linear", "mlp-2", "mlp-4"]
    assert list(dict.fromkeys(table["mapping"])) == names
    value = table.set_index(["mapping", "score"])["value"]
    states = paired_states(model, task, LAST, shots=2, n=5, split="test", seed=1)
    vectors = {
        "zero-shot": None,
        "constant": fit_mapping(model, task, mapping="constant", **options),
        "linear": fit_mapping(model, task, mapping="linear", **options),
        "mlp-4": fit_mapping(model, task, mapping="mlp", depth=4, **options),
    }
    for name, vector in vectors.items():
        scores = evaluate(model, task, vector, n=5, seed=1)
        divergence = dntp(model, task, vector, shots=2, over=over, n=5, seed=1)
        wanted = {
            f"dNTP over {over}": divergence.value,
            "accuracy, full vocabulary": scores.accuracy.value,
            "accuracy, label-restricted": scores.label_accuracy.value,
            "log-probability": scores.log_probability.value,
        }
        for score, number in wanted.items():
            assert value[name, score] == pytest.approx(number, abs=1e-9), (name, score)
        mapped = states[0]
        if vector is not None:
            mapped = vector.edits[0].operation(mapped, torch.zeros(5, dtype=torch.long))
        error = float((mapped - states[1]).square().mean())
        assert value[name, "state MSE"] == pytest.approx(error, rel=1e-9)
    assert (table["n"] == 5).all()
    assert (table["low"] <= table["value"]).all()
    assert (table["value"] <= table["high"]).all()
    assert set(table["seed"]) == {1}
    assert len({value[name, "state MSE"] for name in names}) == 5


def test_the_comparison_reads_only_what_is_asked():
    task = task_of()
    table = compare_mappings(model_of(), task, 1, mappings=["linear"], shots=2, n=4, n_test=3)
    assert list(dict.fromkeys(table["mapping"])) == ["zero-shot", "linear"]
    assert "accuracy, label-restricted" not in set(table["score"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mapping": "cubic"}, "mapping='cubic' is unknown; use one of constant, linear, mlp"),
        ({"depth": 0}, "depth=0 is too small; use 1 or more"),
        ({"epochs": 0}, "epochs=0 is too small"),
        ({"batch_size": 0}, "batch_size=0 is too small"),
        ({"step_size": 0.0}, "step_size=0.0 must be above 0 and finite"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must be 0 or more"),
        ({"step_size": 1e30, "depth": 16}, "Training diverged: the loss became"),
        ({"mapping": "linear", "ridge": -1.0}, "ridge=-1.0 must be 0 or more"),
        ({"layer": 3}, "layer=3 does not exist"),
        ({"component": "z"}, "cannot stand at z"),
        ({"shots": 0}, "shots=0 leaves nothing to fit"),
        ({"n": 1}, "n=1 queries are too few"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        fit_mapping(
            model_of(), task_of(), **{"mapping": "mlp", "shots": 2, "n": 4, "epochs": 1, **options}
        )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mappings": []}, "There are no mappings to compare; give some of constant, linear, mlp"),
        ({"depths": [], "mappings": ["mlp"]}, "There are no mappings to compare"),
        ({"mappings": ["cubic"]}, "mapping='cubic' is unknown"),
        ({"n_test": 9}, "n=9 examples were asked of the test split"),
    ],
)
def test_a_comparison_that_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        compare_mappings(model_of(), task_of(), **{"shots": 2, "n": 4, **options})


@pytest.mark.model
def test_an_mlp_of_the_real_model_s_states_carries_its_task(model):
    task = mechtv.get_task("singular-plural")
    vector = fit_mapping(model, task, mapping="mlp", shots=5, n=32, epochs=10)
    plain, mapped = (dntp(model, task, v, shots=5, n=8) for v in (None, vector))
    assert mapped.value < 0.9 * plain.value

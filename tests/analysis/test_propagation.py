"""Fitted maps against normal equations and single passes, planted maps, and truly linear models."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from builders import D_MODEL, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import row_of
from methods.untouched import left_alone
from torch.testing import assert_close
from vectors.naive import noise

import mechtv
from mechtv.analysis.answers import Answers, rivals
from mechtv.analysis.perturbations import mean_effects, perturbed
from mechtv.analysis.propagation import fit_propagation
from mechtv.analysis.ridge import HeldOut, fit_ridge, generalised_scores
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.forward.run import last_logits
from mechtv.methods.linear import ridge_map
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Site, TaskVector

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SMALL = {"n": 3, "n_held_out": 6, "n_scored": 5, "progress": False}
OUTPUTS = ("o_proj", "down_proj")


def vector_at(layer, seed=0):
    edit = Edit(site=Site(layer=layer), operation=Add(value=noise(D_MODEL, seed=seed)))
    return TaskVector(edits=(edit,), card=Card(method="test", seed=3))


@functools.cache
def fitted(family="llama", layer=1, spread=0.3, labels=None, **options):
    model, task = model_of(family), task_of(labels)
    return fit_propagation(model, task, vector_at(layer), spread=spread, **SMALL, **options)


# --- the regression alone -----------------------------------------------------------------------


def planted(n=40, d_in=6, d_out=4, sigma=0.0):
    matrix = noise(d_out, d_in, seed=1)
    x = noise(n, d_in, seed=2) + 5
    return matrix, x, x @ matrix.T + sigma * noise(n, d_out, seed=3, scale=1.0)


def test_a_planted_map_is_recovered():
    matrix, x, y = planted()
    found = fit_ridge(x, y)
    assert_close(found.matrix, matrix, atol=1e-8, rtol=0)
    scores = HeldOut.of(y, found.predict(x))
    for estimate in scores.estimates().values():
        assert estimate.value == pytest.approx(1, abs=1e-10)
    assert (found.rank, found.bias) == (6, None)


def test_a_planted_map_with_a_shift_is_recovered_with_an_intercept_only():
    matrix, x, y = planted()
    shift = noise(4, seed=9)
    found = fit_ridge(x, y + shift, intercept=True)
    assert_close(found.matrix, matrix, atol=1e-8, rtol=0)
    assert_close(found.bias, shift, atol=1e-7, rtol=0)
    assert (fit_ridge(x, y + shift).matrix - matrix).abs().max() > 0.01


def test_known_noise_gives_the_expected_r2():
    sigma = 3.0
    matrix, x, y = planted(n=4000, sigma=sigma)
    rows = slice(2000, None)
    scores = HeldOut.of(y[rows], fit_ridge(x[:2000], y[:2000]).predict(x[rows]))
    left = 4 * sigma**2
    signal = x[rows] @ matrix.T
    for centred, centre in ((False, 0.0), (True, signal.mean(dim=0))):
        there = float((signal - centre).square().sum(dim=1).mean())
        r2 = scores.r2(centred=centred)
        assert r2.value == pytest.approx(1 - left / (there + left), abs=0.01)
        assert r2.low < r2.value < r2.high < r2.low + 0.05


def test_scores_are_those_of_the_formula():
    y, p = noise(9, 4, seed=1) + 3, noise(9, 4, seed=2) + 2
    scores = HeldOut.of(y, p)
    yc, pc = y - y.mean(dim=0), p - p.mean(dim=0)
    for centred, a, b in ((False, y, p), (True, yc, pc)):
        r2 = 1 - float(((a - b) ** 2).sum() / (a**2).sum())
        assert scores.r2(centred=centred).value == pytest.approx(r2, abs=1e-12)
        cosine = np.mean([float(u @ v / (u.norm() * v.norm())) for u, v in zip(a, b, strict=True)])
        assert scores.cosine(centred=centred).value == pytest.approx(cosine, abs=1e-12)
    shifted = HeldOut.of(y, p + noise(4, seed=3))
    assert shifted.r2().value != pytest.approx(scores.r2().value, abs=1e-3)
    assert shifted.r2(centred=True).value == pytest.approx(scores.r2(centred=True).value)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("n", [40, 4], ids=["more than dimensions", "fewer"])
def test_it_is_the_primal_and_the_dual_solution(n, intercept):
    _, x, y = planted(n=n, sigma=1.0)
    found = fit_ridge(x, y, ridge=2.5, intercept=intercept)
    for solver in ("primal", "dual"):
        other = ridge_map(x, y, ridge=2.5, solver=solver, intercept=intercept)
        assert_close(found.matrix, other.matrix, **EXACT)
        assert_close(found.predict(x), other.predict(x), **EXACT)
    none = fit_ridge(x, y, ridge=0.0, intercept=intercept)
    assert_close(none.matrix, ridge_map(x, y, ridge=0.0, intercept=intercept).matrix, **EXACT)
    assert none.rank == min(n - intercept, 6)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("n", [12, 4], ids=["more than dimensions", "fewer"])
def test_the_score_is_that_of_the_hat_matrix(n, intercept):
    _, x, y = planted(n=n, sigma=1.0)
    if intercept:
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    u, s = (u[:, : n - 1], s[: n - 1]) if intercept else (u, s)
    outside = float((y - u @ (u.T @ y)).square().sum())
    ridges = torch.tensor([1e-2, 1.0, 30.0], dtype=torch.float64)
    found = generalised_scores(ridges, s, u.T @ y, outside, n=n, free=int(intercept))
    for score, ridge in zip(found.tolist(), ridges.tolist(), strict=True):
        hat = x @ torch.linalg.inv(x.T @ x + ridge * torch.eye(6, dtype=x.dtype)) @ x.T
        left = (y - hat @ y).square().sum() / n
        degrees = 1 - (hat.trace() + intercept) / n
        assert score == pytest.approx(float(left / degrees**2), rel=1e-8)


def test_generalised_is_leave_one_out_where_all_samples_weigh_alike():
    _, _, y = planted(n=16, sigma=1.0)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    x = hadamard[:, :6]  # every sample has the same leverage
    for ridge in (0.5, 20.0):
        left_out = 0.0
        for i in range(16):
            rest = [j for j in range(16) if j != i]
            alone = ridge_map(x[rest], y[rest], ridge=ridge)
            left_out += float((y[i] - alone.predict(x[i : i + 1])[0]).square().sum()) / 16
        u, s, _ = torch.linalg.svd(x, full_matrices=False)
        outside = float((y - u @ (u.T @ y)).square().sum())
        found = generalised_scores(torch.tensor([ridge]).double(), s, u.T @ y, outside, n=16)
        assert float(found) == pytest.approx(left_out, rel=1e-10)


def test_the_chosen_ridge_has_the_least_score_and_helps_on_new_samples():
    matrix = noise(20, 30, seed=1, scale=0.2)
    x, new = noise(45, 30, seed=2), noise(200, 30, seed=4)
    y = x @ matrix.T + noise(45, 20, seed=3, scale=4.0)
    chosen = fit_ridge(x, y)
    error = {
        ridge: float((new @ matrix.T - fit_ridge(x, y, ridge=ridge).predict(new)).square().sum())
        for ridge in (0.0, chosen.ridge, 1e6)
    }
    assert error[chosen.ridge] < 0.7 * error[0.0]
    assert error[chosen.ridge] < 0.8 * error[1e6]


# --- perturbed vectors --------------------------------------------------------------------------


def test_perturbations_have_the_size_asked_for_in_turn():
    theta = noise(D_MODEL, seed=1)
    found = perturbed(theta, (0.01, 1.0), 7, torch_rng(0, "a test"))
    size = (found - theta).norm(dim=1) / theta.norm()
    assert_close(size, torch.tensor([0.01, 1.0] * 3 + [0.01]).double(), atol=1e-10, rtol=0)


def test_perturbations_point_everywhere_alike_or_stay_in_a_span():
    theta = noise(D_MODEL, seed=1)
    many = perturbed(theta, (1.0,), 20000, torch_rng(0, "a test")) - theta
    spread = many.T @ many / 20000 / theta.norm() ** 2 * D_MODEL
    assert_close(spread, torch.eye(D_MODEL).double(), atol=0.1, rtol=0)
    basis = torch.linalg.qr(noise(D_MODEL, 5, seed=2)).Q.T
    inside = perturbed(theta, (0.5,), 9, torch_rng(0, "a test"), basis) - theta
    assert_close(inside @ basis.T @ basis, inside, **EXACT)
    assert_close(inside.norm(dim=1), 0.5 * theta.norm().expand(9), **EXACT)


# --- the whole, one prompt at a time -------------------------------------------------------------


def naive_effects(model, prompts, layer, values):
    """Changes of the final state, averaged over prompts: one unpadded prompt at a time."""
    final = f"blocks.{N_LAYERS - 1}.hook_resid_post"

    def states(ids, added):
        kept = []

        def add(x, hook):
            x = x.clone()
            x[:, -1] += added
            return x

        hooks = [(f"blocks.{layer}.hook_resid_pre", add), (final, lambda x, hook: kept.append(x))]
        with torch.no_grad():
            model.run_with_hooks(torch.tensor([ids] * len(added)), fwd_hooks=hooks)
        return kept[0][:, -1]

    total = torch.zeros(len(values), D_MODEL, dtype=torch.float64)
    for row in range(len(prompts)):
        ids = row_of(prompts, row)
        total += states(ids, values) - states(ids, torch.zeros_like(values))
    return total / len(prompts)


@pytest.mark.parametrize(("family", "layer"), [("llama", 1), ("gpt2", 2), ("gemma2", 0)])
def test_the_whole_is_normal_equations_over_single_passes(family, layer):
    model, task = model_of(family), task_of()
    count, ridge, size, seed = D_MODEL + 4, 0.7, 0.3, 3
    result = fit_propagation(
        model,
        task,
        vector_at(layer),
        spread=size,
        n_perturbations=count,
        ridge=ridge,
        **SMALL,
    )
    theta = noise(D_MODEL, seed=0)
    seen = theta - theta.mean() if family == "gpt2" else theta
    step = size * float(seen.norm() / theta.norm())
    values = perturbed(theta, (step,), count, torch_rng(seed, "perturbed vectors"))
    others = perturbed(theta, (step,), 6, torch_rng(seed, "held-out perturbed vectors"))
    train = Prompts.of(model, task, split="train", n=3, seed=seed)
    test = Prompts.of(model, task, n=5, seed=seed)
    effects = naive_effects(model, train, layer, values)
    gram = values.T @ values + ridge * torch.eye(D_MODEL, dtype=torch.float64)
    matrix = torch.linalg.solve(gram, values.T @ effects).T
    assert_close(result.matrix, matrix, atol=1e-8, rtol=0)
    own = naive_effects(model, train, layer, theta[None])[0]
    assert_close(result.effect, own, **EXACT)
    assert own.abs().mean() > 0.1
    for scores, prompts in ((result.held_out, test.select(range(3))), (result.same_queries, train)):
        y, p = naive_effects(model, prompts, layer, others), others @ matrix.T
        if family == "gpt2":
            y, p = y - y.mean(dim=1, keepdim=True), p - p.mean(dim=1, keepdim=True)
        r2 = 1 - float((y - p).square().sum() / y.square().sum())
        assert scores.r2().value == pytest.approx(r2, abs=1e-8)
    assert result.centred == (family == "gpt2")


def test_answers_are_those_of_theta_and_of_what_is_added_at_the_end():
    model, task, result = model_of("llama"), task_of(LABELS), fitted(labels=LABELS)
    prompts = Prompts.of(model, task, n=5, seed=3)

    def behind(value):
        edit = Edit(
            site=Site(layer=N_LAYERS - 1, component="resid_post"), operation=Add(value=value)
        )
        return TaskVector(edits=(edit,), card=Card(method="test"))

    with torch.no_grad():
        against = rivals(last_logits(model, prompts), prompts)
        for name, vector in {
            "zero-shot": None,
            "theta at its layer": vector_at(1),
            "W theta at the end": behind(result.matrix @ noise(D_MODEL, seed=0)),
            "mean effect at the end": behind(result.effect),
        }.items():
            wanted = Answers.of(last_logits(model, prompts, vector), prompts, against)
            found = result.answers[name]
            for field in dataclasses.fields(Answers):
                np.testing.assert_allclose(
                    getattr(found, field.name), getattr(wanted, field.name), atol=1e-9
                )
    different = {a.log_probability.tobytes() for a in result.answers.values()}
    assert len(different) == 4


def test_effects_are_the_same_in_parts(monkeypatch):
    model, task = model_of("llama"), task_of()
    prompts = Prompts.of(model, task, n=3)
    subject = Subject.of(model, vector_at(1))
    values = perturbed(subject.theta, (0.5,), 7, torch_rng(0, "a test"))
    with torch.no_grad():
        whole = mean_effects(model, prompts, subject, values, False)
        monkeypatch.setattr("mechtv.analysis.perturbations.MOST_BYTES", 2 * 3 * D_MODEL * 8)
        assert_close(mean_effects(model, prompts, subject, values, False), whole, **EXACT)


# --- where everything is linear -----------------------------------------------------------------


@functools.cache
def transparent(family="llama"):
    """A model whose sublayers write nothing, so that states only ever add up."""
    model = tiny(family)
    for name, weight in model.original_model.named_parameters():
        if any(part in name for part in OUTPUTS):
            weight.data.zero_()
    return model


def test_of_a_model_that_only_adds_the_map_is_the_identity():
    result = fit_propagation(transparent(), task_of(), vector_at(1), spread=1.0, **SMALL)
    assert_close(result.matrix, torch.eye(D_MODEL).double(), atol=1e-7, rtol=0)
    for scores in (result.held_out, result.same_queries):
        for estimate in scores.estimates().values():
            assert estimate.value == pytest.approx(1, abs=1e-9)
    full, mapped = (result.answers[n] for n in ("theta at its layer", "W theta at the end"))
    np.testing.assert_allclose(mapped.log_probability, full.log_probability, atol=1e-6)


def test_a_small_spread_is_nearer_to_linear_than_a_large_one():
    near, far = fitted(spread=0.01, intercept=True), fitted(spread=1.0, intercept=True)
    assert near.same_queries.r2(centred=True).value > 0.95
    assert far.same_queries.r2(centred=True).value < near.same_queries.r2(centred=True).value - 0.1


# --- fewer perturbations than dimensions ---------------------------------------------------------


def test_too_few_perturbations_are_no_map():
    with pytest.raises(
        InvalidInput, match=r"do not determine a map with 32 numbers an output; use 64"
    ):
        fitted(n_perturbations=D_MODEL - 1)
    with pytest.raises(InvalidInput, match=r"33 numbers an output"):
        fitted(n_perturbations=D_MODEL, intercept=True)


def test_how_many_answers_are_scored_does_not_change_the_fit_or_its_scores():
    few, all_of_them = (
        fit_propagation(
            model_of(), task_of(), vector_at(1), spread=0.3, **(SMALL | {"n_scored": n_scored})
        )
        for n_scored in (1, None)
    )
    assert few.held_out.r2() == all_of_them.held_out.r2()
    assert few.n_held_out_queries == all_of_them.n_held_out_queries == SMALL["n"]


def test_in_their_span_they_are_scored_and_said_to_be_no_map():
    result = fit_propagation(
        transparent(),
        task_of(),
        vector_at(1),
        spread=1.0,
        n_perturbations=10,
        span=True,
        ridge=0.0,
        **SMALL,
    )
    assert (result.rank, result.is_map) == (10, False)
    assert_close(result.matrix @ result.matrix, result.matrix, atol=1e-9, rtol=0)  # a projection
    assert torch.linalg.matrix_rank(result.matrix) == 10
    # in the span the variation is mapped; the part of theta outside of it is not
    assert result.same_queries.r2(centred=True).value == pytest.approx(1, abs=1e-9)
    assert result.same_queries.r2().value < 0.999
    assert set(result.table()["is"]) == {"no map: known in 10 of 32 dimensions, 0 in the others"}


def test_enough_perturbations_are_a_map_and_span_changes_nothing():
    result, other = fitted(), fitted(span=True)
    assert (result.rank, result.is_map, result.n_perturbations) == (D_MODEL, True, 2 * D_MODEL)
    assert torch.equal(result.matrix, other.matrix)
    assert "all 32 dimensions" in result.describe()


# --- behaviour ----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers_and_none_is_the_vectors_own():
    first, again, other = fitted(), fitted(seed=3), fitted(seed=4)
    assert torch.equal(first.matrix, again.matrix)
    assert (first.matrix - other.matrix).abs().max() > 1e-3
    assert first.provenance.seed == 3


def test_the_table_has_intervals_and_says_what_was_done():
    result = fitted(spread=(0.1, 0.5), labels=LABELS)
    table = result.table()
    assert set(table["setting"]) == {"held-out perturbations", *result.answers}
    assert set(table["spread"]) == {"0.1 0.5"}
    assert set(table["queries"]) == {"test", "train"}
    assert set(table["seed"]) == {3}
    row = table[(table["score"] == "R², centred") & (table["queries"] == "test")].iloc[0]
    assert (row["value"], row["n"]) == (result.r2_centred.value, 6)
    assert row["low"] < row["value"] < row["high"]
    assert "accuracy, label-restricted" in set(table["score"])


def test_small_splits_are_taken_whole():
    result = fit_propagation(
        model_of("llama"),
        task_of(n=10),
        vector_at(2),
        n_perturbations=40,
        n_held_out=2,
        progress=False,
    )
    assert result.n == 6
    assert len(result.answers["zero-shot"].correct) == 2


def test_the_model_is_left_alone():
    model = tiny("gpt2", dtype=torch.float32)
    with left_alone(model):
        vector = vector_at(1).to(torch.float32)
        result = fit_propagation(model, task_of(), vector, **SMALL)
    assert result.matrix.dtype == torch.float64
    assert not result.matrix.requires_grad


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spread": 0.0}, "spread=0.0 is no share"),
        ({"spread": ()}, r"spread=\(\) is no share"),
        ({"spread": (0.1, -1.0)}, "no share"),
        ({"n_perturbations": 1, "span": True}, "n_perturbations=1 is too small; use 2"),
        ({"n_held_out": 1}, "n_held_out=1 is too small"),
        ({"n": 0}, "n=0 is too small; use 1"),
        ({"ridge": -1.0}, r"ridge=-1.0 is none; use 0 or more"),
        ({"ridge": float("nan")}, "ridge=nan is none"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    with pytest.raises(InvalidInput, match=said):
        fit_propagation(model_of("llama"), task_of(), vector_at(1), **{**SMALL, **options})


def test_a_vector_behind_the_last_block_is_refused():
    edit = Edit(
        site=Site(layer=N_LAYERS - 1, component="resid_post"), operation=Add(value=noise(D_MODEL))
    )
    vector = TaskVector(edits=(edit,), card=Card(method="test"))
    with pytest.raises(InvalidInput, match="behind the last block"):
        fit_propagation(model_of("llama"), task_of(), vector, **SMALL)


@pytest.mark.model
def test_on_the_real_model_the_last_block_is_nearly_linear(model):
    task = mechtv.get_task("present-past")
    last = model.cfg.n_layers - 1
    direction = torch.randn(model.cfg.d_model, generator=torch_rng(0, "a test"))
    edit = Edit(site=Site(layer=last), operation=Add(value=100 * direction / direction.norm()))
    vector = TaskVector(edits=(edit,), card=Card(method="test"))
    result = fit_propagation(
        model, task, vector, n=2, n_held_out=16, n_scored=4, n_perturbations=600, progress=False
    )
    assert result.is_map
    assert result.same_queries.r2().value > 0.8

"""The three objectives: their values against single passes, their gradients against differences."""

import math

import pytest
import torch
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits, row_of
from forward.engine import all_cut

from mechtv.evaluation import dntp, evaluate
from mechtv.forward import full_passes
from mechtv.methods import learned
from mechtv.tasks.prompts import Prompts

SITES = {
    "last token": {"layer": 1},
    "two layers, two positions": {"layer": (0, 2), "positions": (-2, -1)},
    "all positions": {"layer": (1,), "positions": "all"},
    "heads": {"layer": 1, "component": "z", "positions": (-3, -1)},
    "after the block": {"layer": 0, "component": "resid_post"},
}
OBJECTIVES = {
    "answer": {"objective": "answer"},
    "dntp": {"objective": "dntp", "icl_shots": 3},
    "dntp over labels": {"objective": "dntp", "icl_shots": 3, "over": "labels"},
    "state": {"objective": "state", "icl_shots": 3},
}
FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "neox")
POSITIONS = ("last token", "two layers, two positions", "all positions")
ROWS = torch.tensor([5, 0, 3])
SEED = 2


def inside_learn(monkeypatch, check, model, task, **options):
    """Call `check` with what `learn` gives its training loop, in the place of that loop."""
    seen = []

    def train(start, *, as_vector, training, validation, **_):
        check(start, as_vector, training, validation)
        seen.append(1)
        return [x.detach() for x in start], [{"epoch": 0.0, "validation_loss": 0.0}]

    monkeypatch.setattr(learned, "train", train)
    learned.learn(model, task, **{"seed": SEED, **options})
    assert seen


# --- gradients ---


def directions(tensors, positions):
    """One random direction for each position of each tensor, and one through all of them."""
    draw = torch.Generator().manual_seed(0)
    noise = [torch.randn(x.shape, generator=draw, dtype=x.dtype) for x in tensors]
    yield noise
    for i, own in enumerate(noise):
        for slot in range(1 if positions == "all" else own.shape[0]):
            only = [torch.zeros_like(x) for x in noise]
            chosen = ... if positions == "all" else slot
            only[i][chosen] = own[chosen]
            yield only


def difference(f, tensors, direction, step=1e-5):
    """The central difference of `f` along a direction."""
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            for x, d in zip(tensors, direction, strict=True):
                x += sign * step * d
            values.append(float(f()))
            for x, d in zip(tensors, direction, strict=True):
                x -= sign * step * d
    return (values[0] - values[1]) / (2 * step)


CASES = [
    (family, site, objective)
    for family in FAMILIES
    for site in SITES
    for objective in OBJECTIVES
    if family == "llama" or (site in POSITIONS and objective != "dntp over labels")
]


@pytest.mark.parametrize(("family", "site", "objective"), CASES)
def test_gradients_are_central_differences(family, site, objective, monkeypatch):
    """By turns on zero-shot and on two-shot prompts."""
    shots = 2 * ((list(SITES).index(site) + FAMILIES.index(family)) % 2)

    def check(start, as_vector, training, validation):
        def loss():
            return training.loss(as_vector(start), ROWS).sum()

        gradients = torch.autograd.grad(loss(), start)
        positions = as_vector(start).edits[0].site.positions
        for direction in directions(start, positions):
            measured = difference(loss, start, direction)
            pairs = zip(gradients, direction, strict=True)
            exact = sum(float((g * d).sum()) for g, d in pairs)
            assert abs(measured) > 1e-6
            assert exact == pytest.approx(measured, rel=1e-5, abs=1e-8)

    task = task_of(LABELS if "labels" in objective else None)
    few = {"shots": shots, "init": 0.5, "n_train": 6, "n_validation": 1}
    options = {**SITES[site], **OBJECTIVES[objective], **few}
    inside_learn(monkeypatch, check, model_of(family), task, **options)


def test_every_layer_and_position_has_a_theta_of_its_own_and_all_share_one(monkeypatch):
    shapes = {
        "last token": [(1, 32)],
        "two layers, two positions": [(2, 32), (2, 32)],
        "all positions": [(32,)],
        "heads": [(2, 4, 16)],
        "after the block": [(1, 32)],
    }
    for name, site in SITES.items():

        def check(start, as_vector, *_, wanted=shapes[name]):
            assert [tuple(x.shape) for x in start] == wanted
            edits = as_vector(start).edits
            values = torch.cat([edit.operation.value.detach().flatten() for edit in edits])
            assert values.abs().max() <= 0.1
            assert values.min() < -0.08
            assert values.max() > 0.08
            assert len(values.unique()) == len(values)
            assert all(x.dtype == torch.float64 and x.is_leaf for x in start)

        inside_learn(monkeypatch, check, model_of(), task_of(), **site, n_train=2, n_validation=1)


def test_the_start_depends_on_the_seed(monkeypatch):
    starts = []
    for seed in (0, 0, 1):
        inside_learn(
            monkeypatch,
            lambda start, *_: starts.append(start[0].sign().tolist()),
            model_of(), task_of(), seed=seed, n_train=2, n_validation=1,
        )  # fmt: skip
    assert starts[0] == starts[1] != starts[2]


# --- values ---


def naive_losses(model, task, vector, split, options, shots):
    """Each query's loss from single full passes and plain arithmetic."""
    plain = Prompts.of(model, task, split=split, shots=shots, seed=SEED)
    in_context = Prompts.of(model, task, split=split, shots=3, seed=SEED)
    losses = []
    for row in range(6 if split == "train" else 2):
        ids, context = row_of(plain, row), row_of(in_context, row)
        if options["objective"] == "answer":
            losses.append(answer_loss(model, ids, plain.answers[row], vector))
        elif options["objective"] == "state":
            losses.append(state_loss(model, ids, context, vector, options.get("state_layer", 2)))
        else:
            tokens = [r[0] for r in plain.label_tokens] if "over" in options else range(384)
            p = probabilities(model, context, None, tokens)
            q = probabilities(model, ids, vector, tokens)
            losses.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return losses


def probabilities(model, ids, vector, tokens):
    logits = naive_logits(model, ids, len(ids), vector)[-1].tolist()
    weights = [math.exp(logits[token]) for token in tokens]
    return [weight / sum(weights) for weight in weights]


def answer_loss(model, ids, answer, vector):
    total = 0.0
    for column, token in enumerate(answer):
        forced = [*ids, *answer[:column]]
        logits = naive_logits(model, forced, len(ids), vector)[-1].tolist()
        total += math.log(sum(math.exp(x) for x in logits)) - logits[token]
    return total / len(answer)


def state_loss(model, ids, context, vector, layer):
    name = model.get_hook_point(f"blocks.{layer}.hook_resid_post").name
    states = []
    for own, applied in ((ids, vector), (context, None)):
        keep = {name: None}
        naive_logits(model, own, len(own), applied, keep=keep)
        states.append(keep[name][-1])
    return float((states[0] - states[1]).square().mean())


@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "objective",
    [*OBJECTIVES.values(), {"objective": "state", "icl_shots": 3, "state_layer": 1}],
    ids=[*OBJECTIVES, "state after an earlier block"],
)
def test_losses_equal_single_passes_and_plain_arithmetic(objective, family, shots, monkeypatch):
    model, task = model_of(family), task_of(LABELS if "over" in objective else None)

    def check(start, as_vector, training, validation):
        vector = as_vector(start)
        wanted = naive_losses(model, task, vector, "train", objective, shots)
        losses = training.loss(vector, ROWS).tolist()
        assert losses == pytest.approx([wanted[row] for row in ROWS.tolist()], abs=1e-10)
        wanted = naive_losses(model, task, vector, "validation", objective, shots)
        score = validation.score(vector)
        assert score["validation_loss"] == pytest.approx(sum(wanted) / 2, abs=1e-10)
        assert ("validation_accuracy" in score) == (objective["objective"] == "answer")

    options = {"layer": (0, 1), "positions": (-2, -1), "init": 1.0, "shots": shots}
    few = {"n_train": 6, "n_validation": 2}
    inside_learn(monkeypatch, check, model, task, **options, **objective, **few)


def test_the_answer_score_is_what_evaluate_says(monkeypatch):
    model, task = model_of(), task_of(LABELS)

    def check(start, as_vector, training, validation):
        scores = evaluate(model, task, as_vector(start), split="validation", seed=SEED)
        assert validation.score(as_vector(start)) == {
            "validation_loss": pytest.approx(-scores.log_probability.value, abs=1e-12),
            "validation_accuracy": scores.exact_match.value,
        }

    inside_learn(monkeypatch, check, model, task, init=2.0)


def test_the_dntp_score_is_what_dntp_says(monkeypatch):
    model, task = model_of(), task_of(LABELS)

    def check(start, as_vector, training, validation):
        measured = dntp(
            model, task, as_vector(start), shots=3, over="labels", split="validation", seed=SEED
        )
        score = validation.score(as_vector(start))
        assert score["validation_loss"] == pytest.approx(measured.value, abs=1e-12)

    inside_learn(monkeypatch, check, model, task, init=2.0, **OBJECTIVES["dntp over labels"])


# --- prompts that ran once ---


@pytest.mark.parametrize("site", ["last token", "heads"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_prepared_prompts_do_not_run_again(objective, site, monkeypatch):
    def check(start, as_vector, training, validation):
        for one in (training, validation):
            vector = as_vector(start)
            with one.prepared(vector, False), all_cut(monkeypatch), monkeypatch.context() as patch:
                patch.setattr("mechtv.forward.fitness.prefill", lambda *_, **__: pytest.fail("ran"))
                found = one.loss(vector, ROWS)
                score = one.score(vector)
            with full_passes():
                torch.testing.assert_close(found, one.loss(vector, ROWS), atol=1e-10, rtol=1e-10)
                assert score == pytest.approx(one.score(vector), abs=1e-9)

    model, task = model_of("llama"), task_of()
    inside_learn(monkeypatch, check, model, task, **SITES[site], **OBJECTIVES[objective])

"""learn as a whole: what it leaves alone, what it repeats, what it records and what it refuses."""

import json
import math
import random
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from builders import D_MODEL, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits, row_of
from methods.untouched import check_untouched, traces
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import dntp, evaluate
from mechtv.methods import learn
from mechtv.methods.objectives import MatchState
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Site, TaskVector

SHORT = {"epochs": 2, "n_train": 6, "n_validation": 3, "batch_size": 4}
OBJECTIVES = {
    "answer": {"objective": "answer"},
    "dntp": {"objective": "dntp", "icl_shots": 3},
    "dntp over labels": {"objective": "dntp", "icl_shots": 3, "over": "labels"},
    "state": {"objective": "state", "icl_shots": 3},
}


def same_values(first, second):
    pairs = zip(first.edits, second.edits, strict=True)
    return all(torch.equal(a.operation.value, b.operation.value) for a, b in pairs)


# --- what stays as it was ---


def unusual(family, **settings):
    """A model of which every second weight needs gradients, some have them, and parts train."""
    model = tiny(family, **settings)
    with torch.no_grad():
        # in its first pass the bridge sets up hooks and attributes of its own
        model(torch.tensor([[2, 5]]), attention_mask=torch.tensor([[0, 1]]))
    model.train()
    for i, module in enumerate(model.original_model.modules()):
        if i % 3 == 0:
            module.training = False
    for i, weight in enumerate(model.original_model.parameters()):
        weight.requires_grad_(i % 2 == 0)
        if i % 4 == 0:
            weight.grad = torch.full_like(weight, i)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox", "native"])
@pytest.mark.parametrize("objective", ["answer", "state"])
def test_the_model_is_left_as_it_was(family, objective):
    model = unusual(family)
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    before = traces(model)
    assert len(set(before["flags"].values())) == len(set(before["modes"])) == 2
    learn(model, task_of(), **SHORT, **OBJECTIVES[objective])
    check_untouched(model, before)
    for name, weight in model.named_parameters():
        if name in gradients:
            assert torch.equal(weight.grad, gradients[name])
    assert gradients


def test_a_model_in_training_mode_is_trained_on_without_dropout():
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    calm, busy = tiny("gpt2", **dropout), tiny("gpt2", **dropout)
    busy.train()
    tokens = torch.tensor([[5, 6, 7]])
    assert not torch.allclose(busy(tokens), calm(tokens)), "the dropout is real"
    vectors = [learn(model, task_of(), **SHORT) for model in (calm, busy)]
    assert same_values(*vectors)
    assert busy.original_model.training
    assert not torch.allclose(busy(tokens), calm(tokens))


@contextmanager
def switched_off():
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


@cache
def learned_plainly(objective):
    return learn(model_of(), task_of(LABELS), **SHORT, **OBJECTIVES[objective])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, switched_off])
def test_training_works_where_gradients_are_off_and_leaves_them_off(context, objective):
    model = unusual("llama")
    options = {**SHORT, **OBJECTIVES[objective]}
    before = traces(model)
    with context():
        vector = learn(model, task_of(LABELS), **options)
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() == (context is torch.inference_mode)
    assert torch.is_grad_enabled()
    check_untouched(model, before)
    assert same_values(vector, learned_plainly(objective))
    assert not vector.value().requires_grad
    assert not vector.value().is_inference()


def flushes():
    smallest = torch.tensor(torch.finfo(torch.float32).tiny)
    return bool(smallest / 2 == 0)


@pytest.mark.parametrize("before", [True, False])
def test_denormal_numbers_are_flushed_while_training_and_as_before_afterwards(before, monkeypatch):
    meanwhile = []
    original = MatchState.loss
    monkeypatch.setattr(
        MatchState, "loss", lambda *a: (meanwhile.append(flushes()), original(*a))[1]
    )
    torch.set_flush_denormal(before)
    try:
        learn(model_of(), task_of(), **SHORT, **OBJECTIVES["state"])
        assert flushes() is before
        assert set(meanwhile) == {True}
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [2, 7])
def test_an_error_or_an_interrupt_inside_a_pass_leaves_nothing_behind(error, after):
    model = unusual("llama")
    passes = []

    def users_hook(activation, hook):
        passes.append(1)
        if len(passes) > after:
            raise error("stop")
        return activation

    model.add_hook("blocks.1.hook_mlp_out", users_hook)
    before = traces(model)
    assert sum(before["hooks"]) == 1
    with pytest.raises(error, match="stop"):
        learn(model, task_of(), (0, 1), positions=(-1, -2), **SHORT)
    assert len(passes) == after + 1
    check_untouched(model, before)
    assert not flushes()
    model.reset_hooks()
    assert same_values(learn(model, task_of(), **SHORT), learn(tiny("llama"), task_of(), **SHORT))


@pytest.mark.usefixtures("unchecked")
def test_global_random_states_are_neither_read_nor_changed():
    model = tiny("llama")

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    vectors = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = states()
        vectors.append(learn(model, task_of(), **SHORT, **OBJECTIVES["dntp"]))
        assert states() == before
    assert same_values(*vectors)


# --- what depends on the seed ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_seeds_give_equal_bits_and_other_seeds_others(dtype):
    options = {**SHORT, "layer": (0, 2), "positions": (-1, -2)}
    first = learn(tiny("llama", dtype), task_of(), **options)
    assert (first.training_curve().train_loss[1:].diff()[1:] != 0).all(), "it moves"
    again = learn(tiny("llama", dtype), task_of(), **options)
    other = learn(tiny("llama", dtype), task_of(), **options, seed=1)
    assert same_values(first, again)
    assert first.card.curve == again.card.curve
    for mine, others in zip(first.edits, other.edits, strict=True):
        assert not torch.isclose(mine.operation.value, others.operation.value).any()
        assert mine.operation.value.dtype == dtype


# --- that it trains ---


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_falls(family, objective):
    """All objectives, four sites; on queries of its own a distribution over labels may overfit."""
    sites = {
        "answer": {"layer": 1},
        "dntp": {"layer": (0, 2), "positions": (-1, -2)},
        "dntp over labels": {"layer": 2, "component": "attn_out"},
        "state": {"layer": 2, "positions": "all"},
    }
    options = {"epochs": 4, "patience": 4, "batch_size": 6, "step_size": 0.05}
    vector = learn(
        model_of(family), task_of(LABELS), **options, **sites[objective], **OBJECTIVES[objective]
    )
    curve = vector.training_curve()
    assert (curve.train_loss[1:].diff()[1:] < 0).all()
    if objective != "dntp over labels":
        assert curve.validation_loss.min() < curve.validation_loss[0]


def test_a_learned_vector_beats_the_plain_model_on_what_it_was_trained_for():
    model, task = model_of(), task_of(LABELS)
    options = {"epochs": 4, "batch_size": 6, "step_size": 0.1}
    vector = learn(model, task, **options)
    plain, better = (evaluate(model, task, v, split="train") for v in (None, vector))
    assert better.log_probability.value > plain.log_probability.value + 1
    vector = learn(model, task, **options, **OBJECTIVES["dntp"])
    far, near = (
        dntp(model, task, v, shots=3, over="vocabulary", split="train").value
        for v in (None, vector)
    )
    assert near < 0.7 * far


def test_the_vector_that_is_returned_is_that_of_the_best_epoch():
    """So long steps that the validation score gets worse after it was best."""
    model, task = model_of(), task_of(LABELS)
    options = {"epochs": 6, "patience": 6, "n_train": 8, "batch_size": 2}
    vector = learn(model, task, step_size=6.0, schedule="constant", **options)
    curve = vector.training_curve()
    ranks = list(zip(curve.validation_accuracy, -curve.validation_loss, strict=True))
    best = ranks.index(max(ranks))
    assert 0 < best < len(curve) - 1
    scores = evaluate(model, task, vector, split="validation")
    assert -scores.log_probability.value == pytest.approx(curve.validation_loss[best], abs=1e-12)
    assert scores.exact_match.value == curve.validation_accuracy[best]


def test_it_trains_on_prompts_with_demonstrations_too():
    vector = learn(model_of(), task_of(), shots=2, **SHORT)
    zero_shot = learn(model_of(), task_of(), **SHORT)
    assert vector.card.settings["shots"] == 2
    assert not torch.allclose(vector.value(), zero_shot.value())


def test_patience_ends_training_early():
    curve = learn(
        model_of(), task_of(), **{**SHORT, "epochs": 9}, patience=1, step_size=50.0
    ).training_curve()
    assert len(curve) < 9
    assert list(curve.epoch) == list(range(len(curve)))


# --- the step ---


def naive_norm(model, task, layer, position, centred, n=6):
    """The mean norm over rows of the block's input at one position, from single passes."""
    prompts = Prompts.of(model, task, split="train", n=n)
    name = model.get_hook_point(f"blocks.{layer}.hook_resid_pre").name
    norms = []
    for row in range(n):
        keep = {name: None}
        ids = row_of(prompts, row)
        naive_logits(model, ids, len(ids), keep=keep)
        h = keep[name][position].tolist()
        middle = sum(h) / len(h) if centred else 0.0
        norms.append(math.sqrt(sum((x - middle) ** 2 for x in h)))
    return sum(norms) / len(norms)


CENTRED = {"llama": False, "gemma2": False, "gpt2": True, "neox": True, "native": True}


@pytest.mark.parametrize(("family", "centred"), CENTRED.items())
@pytest.mark.parametrize("positions", [(-1,), (-3, -1), "all"])
def test_the_step_is_in_units_of_the_residual_norm_at_each_position(family, centred, positions):
    model, task = model_of(family), task_of()
    vector = learn(
        model, task, (0, 2), positions=positions, step_size=0.3, **{**SHORT, "epochs": 1}
    )
    settings = vector.card.settings
    for layer, norms, steps in zip(
        (0, 2), settings["residual_norms"], settings["steps"], strict=True
    ):
        places = (-1,) if positions == "all" else positions
        wanted = [naive_norm(model, task, layer, place, centred) for place in places]
        assert norms == pytest.approx(wanted, rel=1e-12)
        assert steps == pytest.approx([0.3 * x / math.sqrt(D_MODEL) for x in wanted], rel=1e-12)


def rescaled(factor):
    """A tiny Llama whose residual stream is `factor` times as large, computing the same."""
    model = tiny("llama", seed=3)
    with torch.no_grad():
        for name, weight in model.original_model.named_parameters():
            if any(part in name for part in ("embed", "o_proj", "down_proj")):
                weight.mul_(factor)
        for module in model.original_model.modules():
            if isinstance(module, LlamaRMSNorm):
                module.variance_epsilon *= factor**2
    return model


def test_training_does_not_depend_on_the_size_of_the_stream():
    """Step, weight decay and AdamW's epsilon are all in units of the stream."""
    options = {**SHORT, "init": 0.0, "weight_decay": 0.5}
    models = rescaled(1.0), rescaled(1e4)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(models[0](ids), models[1](ids), atol=1e-9, rtol=0)
    small, large = (learn(model, task_of(), 1, **options) for model in models)
    torch.testing.assert_close(1e4 * small.value(), large.value(), rtol=1e-6, atol=0)
    losses = [vector.training_curve().validation_loss.to_numpy() for vector in (small, large)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_training_that_diverges_says_so():
    huge = {**SHORT, "step_size": 1e300}
    with pytest.raises(InvalidInput, match=r"diverged: the loss became nan; use a smaller"):
        learn(model_of(), task_of(), 1, **{**huge, "epochs": 5, "patience": 5})


@pytest.mark.parametrize(("family", "seen"), [("gpt2", False), ("llama", True)])
def test_a_constant_on_all_components_is_invisible_to_layernorm_models_alone(family, seen):
    model, task = model_of(family), task_of()
    constant = torch.full((D_MODEL,), 20.0, dtype=torch.float64)
    shift = TaskVector(
        edits=(Edit(site=Site(layer=1, positions="all"), operation=Add(value=constant)),),
        card=Card(method="by hand"),
    )
    plain = learn(model, task, **SHORT).card.settings
    with shift.applied(model):
        moved = learn(model, task, **SHORT).card.settings
    same = moved["steps"][0] == pytest.approx(plain["steps"][0], rel=1e-9)
    assert same is not seen
    norms = (moved["residual_norms"][0], plain["residual_norms"][0])
    assert (norms[0] == pytest.approx(norms[1], rel=1e-9)) is same


def test_the_first_step_is_the_recorded_one():
    """AdamW's first step is the whole step against the sign of the gradient; theta was 0."""
    options = {"epochs": 1, "batch_size": 24, "init": 0.0, "step_size": 0.01}
    vector = learn(model_of(), task_of(LABELS), 1, **options)
    curve = vector.training_curve()
    assert curve.validation_loss[1] < curve.validation_loss[0], "the first epoch was kept"
    ((step,),) = vector.card.settings["steps"]
    moved = vector.value().abs()
    torch.testing.assert_close(moved, torch.full_like(moved, step), rtol=1e-4, atol=0)


def test_the_steps_of_the_heads_are_in_units_of_their_outputs():
    model = model_of()
    settings = learn(model, task_of(), 1, component="z", **SHORT).card.settings
    ((step,),), ((norm,),) = settings["steps"], settings["residual_norms"]
    assert step == pytest.approx(0.2 * norm / math.sqrt(4 * 16), rel=1e-12)


# --- what it records ---


def test_the_card_says_how_to_make_the_vector_again():
    model, task = model_of(), task_of()
    vector = learn(model, task, (2, 0), positions=[-1, -3], seed=5, **SHORT)
    card = vector.card
    described = mechtv.models.describe(model)
    assert (card.method, card.task, card.template, card.seed) == (
        "learned", "invented", "{input} -> {answer}", 5
    )  # fmt: skip
    assert (card.model, card.model_revision) == (described.name, described.revision)
    assert (card.dtype, card.weights) == ("float64", "raw")
    assert set(card.versions) >= {"mechtv", "torch", "transformers", "transformer-lens"}
    settings = json.loads(json.dumps(card.settings))
    assert settings == card.settings
    assert settings["layers"] == [0, 2]
    assert settings["positions"] == [-3, -1]
    assert (settings["n_train"], settings["n_validation"], settings["epochs"]) == (6, 3, 2)
    remade = {
        name: settings[name]
        for name in (
            *("positions", "component", "objective", "shots", "icl_shots", "over", "state_layer"),
            *("step_size", "weight_decay", "init", "epochs", "batch_size", "patience", "schedule"),
            *("n_train", "n_validation"),
        )
    }
    assert set(settings) == {*remade, "layers", "residual_norms", "steps"}
    again = learn(model, task, settings["layers"], seed=card.seed, **remade)
    assert same_values(vector, again)


def test_sites_are_those_that_were_asked():
    model, task = model_of(), task_of()
    vector = learn(model, task, [2, 0], positions=(-1, -3), component="mlp_out", **SHORT)
    assert vector.sites == tuple(
        Site(layer=layer, component="mlp_out", positions=(-3, -1)) for layer in (0, 2)
    )
    assert learn(model, task, **SHORT).sites == (Site(layer=1),)
    everywhere = learn(model, task, 0, positions="all", **SHORT)
    assert everywhere.sites == (Site(layer=0, positions="all"),)
    assert everywhere.value().shape == (D_MODEL,)
    assert vector.n_parameters == 2 * 2 * D_MODEL


def test_the_training_curve_has_one_row_an_epoch():
    vector = learn(model_of(), task_of(), **SHORT)
    curve = vector.training_curve()
    assert list(curve) == ["epoch", "step", "validation_loss", "validation_accuracy", "train_loss"]
    assert list(curve.epoch) == [0, 1, 2]
    assert list(curve.step) == [0, 2, 4]
    assert math.isnan(curve.train_loss[0])
    assert not curve.drop(columns="train_loss").isna().any(axis=None)
    state = learn(model_of(), task_of(), **SHORT, **OBJECTIVES["state"]).training_curve()
    assert "validation_accuracy" not in state


def test_a_saved_vector_evaluates_as_before(tmp_path):
    model, task = model_of(), task_of(LABELS)
    vector = learn(model, task, (0, 2), positions=(-1, -2), **SHORT)
    loaded = TaskVector.load(vector.save(tmp_path / "learned.safetensors"))
    assert same_values(vector, loaded)
    assert loaded.card == vector.card
    assert loaded.training_curve().equals(vector.training_curve())
    first, second = (evaluate(model, task, v) for v in (vector, loaded))
    assert (first.log_probabilities == second.log_probabilities).all()
    assert first.predictions == second.predictions


# --- what it refuses ---


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"objective": "answers"}, "objective='answers' is unknown; use one of answer, dntp,"),
        ({"schedule": "linear"}, "schedule='linear' is unknown; use one of cosine, constant"),
        ({"objective": "dntp", "over": "label"}, "over='label' is unknown; use one of labels, voc"),
        ({"component": "resid_mid"}, "component='resid_mid' is unknown; use one of resid_pre"),
        ({"layer": 3}, "layer=3 does not exist: this model has layers 0 to 2"),
        ({"layer": (0, 7)}, "layer=7 does not exist"),
        ({"layer": -1}, "layer=-1 is negative"),
        ({"layer": ()}, r"layer=\(\) must name one or more distinct layers"),
        ({"layer": (1, 1)}, r"layer=\(1, 1\) must name one or more distinct layers"),
        ({"positions": 0}, "positions=0 are not positions"),
        ({"positions": (-1, -1)}, r"positions=\(-1, -1\) are not positions"),
        ({"positions": ()}, r"positions=\(\) are not positions"),
        ({"positions": -40}, "Position -40 does not exist in"),
        ({"epochs": 0}, "epochs=0 is too small; use 1 or more"),
        ({"batch_size": 0}, "batch_size=0 is too small; use 1 or more"),
        ({"patience": 0}, "patience=0 is too small; use 1 or more"),
        ({"shots": -1}, "shots=-1 is too small; use 0 or more"),
        ({"step_size": 0.0}, "step_size=0.0 must be above 0"),
        ({"step_size": -0.1}, "step_size=-0.1 must be above 0"),
        ({"objective": "dntp", "icl_shots": 0}, "'dntp' matches an in-context run; icl_shots=0"),
        ({"objective": "state", "icl_shots": 0}, "'state' matches an in-context run; icl_shots=0"),
        ({"objective": "state", "layer": 2, "state_layer": 1}, "state_layer=1 comes before lay"),
        ({"objective": "state", "state_layer": 3}, "layer=3 does not exist"),
        ({"n_train": 25}, "n=25 examples .* train split .* holds 24; give n between 1 and 24"),
        ({"n_train": 0}, "n=0 examples"),
        ({"n_validation": 9}, "n=9 examples .* validation split .* holds 8"),
        ({"shots": 24}, "shots=24 demonstrations .* ask for at most 23"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(options, sentence):
    model = model_of()
    passes = []
    handle = model.original_model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(InvalidInput, match=sentence):
            learn(model, task_of(), **options)
    finally:
        handle.remove()
    assert len(passes) <= (options.get("positions") == -40), "refused before any pass"


def test_labels_that_share_a_token_are_refused_where_labels_are_compared():
    task = task_of(("jump", "hot", "jumped"))
    with pytest.raises(InvalidInput, match="The labels 'jump', 'jumped' share a first token"):
        learn(model_of(), task, **SHORT, **OBJECTIVES["dntp over labels"])
    learn(model_of(), task, **SHORT)


# --- the real model ---


@pytest.mark.model
def test_a_vector_is_learned_on_the_real_model(model):
    task = mechtv.get_task("present-past")
    flags = {name: weight.requires_grad for name, weight in model.named_parameters()}
    vector = learn(model, task, 12, n_train=48, n_validation=8, epochs=3, batch_size=16)
    curve = vector.training_curve()
    assert curve.validation_loss.min() < curve.validation_loss[0] - 1
    assert {name: weight.requires_grad for name, weight in model.named_parameters()} == flags
    assert all(weight.grad is None for weight in model.parameters())
    plain, injected = (evaluate(model, task, v, n=8) for v in (None, vector))
    assert injected.log_probability.value > plain.log_probability.value + 1
    assert 100 < vector.card.settings["residual_norms"][0][0] < 10_000

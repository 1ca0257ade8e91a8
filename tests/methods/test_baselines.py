"""Training a baseline: the loop, what it repeats, what it leaves alone, and what it refuses."""

import numpy as np
import pytest
import torch
from builders import tiny
from evaluation.invented import LABELS, task_of
from methods.plain import SHORT, model_of
from methods.untouched import check_untouched, traces

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.methods.baselines import train_baseline
from mechtv.tasks.prompts import Prompts

KINDS = ("prompt", "prefix", "lora")


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
def test_before_training_lora_is_the_plain_model(labels):
    model, task = model_of(), task_of(labels)
    found = train_baseline(model, task, "lora", **{**SHORT, "n": None}, step_size=1e-12)
    plain = evaluate(model, task)
    np.testing.assert_allclose(
        found.evaluation.log_probabilities, plain.log_probabilities, atol=1e-4, rtol=0
    )
    assert found.evaluation.accuracy == plain.accuracy
    assert found.evaluation.predictions == plain.predictions
    validation = evaluate(model, task, split="validation", n=3)
    assert found.curve[0]["validation_loss"] == pytest.approx(
        -validation.log_probability.value, abs=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_bridge_is_left_as_it_was(kind):
    model = tiny("llama", torch.float32)
    with torch.no_grad():
        # in its first pass the bridge sets up attributes of its own
        model(torch.tensor([[2, 5]]), attention_mask=torch.tensor([[0, 1]]))
    for i, weight in enumerate(model.original_model.parameters()):
        weight.requires_grad_(i % 2 == 0)
    before, state = traces(model), torch.get_rng_state()
    train_baseline(model, task_of(), kind, **SHORT)
    assert torch.equal(torch.get_rng_state(), state)
    check_untouched(model, before)


def test_it_works_without_gradients_around_it():
    model = model_of()
    wanted = train_baseline(model, task_of(), "prompt", **SHORT)
    with torch.no_grad():
        first = train_baseline(model, task_of(), "prompt", **SHORT)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        second = train_baseline(model, task_of(), "prompt", **SHORT)
    assert wanted.curve == first.curve == second.curve


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_every_time_and_another_for_another_seed(kind):
    torch.manual_seed(1)
    first = train_baseline(model_of(), task_of(), kind, **SHORT)
    torch.manual_seed(2)
    again, other = (train_baseline(model_of(), task_of(), kind, **SHORT, seed=s) for s in (0, 1))
    assert first.curve == again.curve
    assert (first.evaluation.log_probabilities == again.evaluation.log_probabilities).all()
    assert first.curve != other.curve


def test_options_reach_the_training_loop():
    model, task = model_of(), task_of()
    found = {}
    for name, options in {
        "plain": {},
        "decay": {"weight_decay": 0.9},
        "constant": {"schedule": "constant"},
        "batches": {"batch_size": 2},
        "fewer": {"n_train": 5},
        "step": {"step_size": 0.1},
    }.items():
        settings = {**SHORT, "epochs": 2, "split": "validation", **options}
        found[name] = train_baseline(model, task, "prompt", **settings)
    losses = {name: [row["validation_loss"] for row in x.curve] for name, x in found.items()}
    assert len({tuple(each[1:]) for each in losses.values()}) == len(found)
    assert len({each[0] for each in losses.values()}) == 1
    assert found["plain"].evaluation.split == "validation"
    assert (
        found["plain"].evaluation.queries == evaluate(model, task, split="validation", n=4).queries
    )
    assert found["batches"].curve[-1]["step"] == 2 * 3
    assert found["fewer"].settings["n_train"] == 5
    assert found["step"].settings["step_size"] == 0.1
    assert found["plain"].settings["step_size"] == 0.2
    tokens = Prompts.of(model, task, split="validation", n=4).lengths.double().mean()
    assert found["plain"].tokens_per_query == float(tokens) + 1
    assert found["plain"].seconds_training > 0


def test_patience_ends_training():
    options = {**SHORT, "epochs": 9, "patience": 2, "step_size": 1e-9}
    found = train_baseline(model_of(), task_of(), "lora", **options)
    assert 3 <= len(found.curve) < 10


def test_a_bar_shows_where_it_is_asked_for(capsys):
    train_baseline(model_of(), task_of(), "lora", **SHORT, progress=False)
    assert capsys.readouterr().err == ""
    train_baseline(model_of(), task_of(), "lora", **SHORT, progress=True)
    assert "lora for invented" in capsys.readouterr().err


# --- errors ---


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "adapter"}, "kind='adapter' is unknown; use one of prompt, prefix, lora"),
        ({"schedule": "linear"}, "schedule='linear' is unknown; use one of cosine, constant"),
        ({"epochs": 0}, "epochs=0 is too small; use 1 or more"),
        ({"batch_size": 0}, "batch_size=0 is too small"),
        ({"patience": 0}, "patience=0 is too small"),
        ({"step_size": 0.0}, "step_size=0.0 must be above 0 and finite"),
        ({"layer": 1}, "layer=1 is an option of kind='lora' only"),
        ({"target": "q_proj"}, "target='q_proj' is an option of kind='lora' only"),
        ({"step_size": float("nan")}, "step_size=nan must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be 0 or more and finite"),
        ({"kind": "lora", "layer": 3}, "layer=3 does not exist: this model has layers 0 to 2"),
        ({"n": 9}, "n=9 examples .* holds 8"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        train_baseline(model_of(), task_of(), **{**SHORT, **options})


@pytest.mark.model
def test_a_step_of_each_kind_on_the_real_model(model):
    task = mechtv.get_task("present-past")
    for kind in KINDS:
        found = train_baseline(
            model, task, kind, epochs=1, n_train=4, n_validation=2, n=2, batch_size=4
        )
        width = model.cfg.d_model
        kv = model.cfg.n_key_value_heads * model.cfg.d_head
        sizes = {"prompt": width, "prefix": 2 * model.cfg.n_layers * kv, "lora": 2 * width}
        assert found.n_parameters == sizes[kind]

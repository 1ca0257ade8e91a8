"""Hidden-state vectors against single full passes, and what they refuse."""

import json

import pytest
import torch
from builders import D_MODEL, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits
from methods.untouched import left_alone

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.methods import extract_hidden_state
from mechtv.vectors import Add, Replace, Site, TaskVector


def naive_state(model, task, hook, shots, n, seed):
    """The mean over training examples of the state at the last token, one pass each."""
    total = 0.0
    for query in task.split("train", n=n, seed=seed):
        shown = task.demonstrations(query, shots, seed=seed)
        assert query not in shown
        lines = [f"{e.fields['input']} -> {e.answer}" for e in shown]
        ids = model.to_tokens("\n".join([*lines, f"{query.fields['input']} ->"]))[0].tolist()
        name = model.get_hook_point(hook).name
        keep = {name: None}
        naive_logits(model, ids, len(ids), keep=keep)
        total = total + keep[name][-1]
    return total / n


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize("operation", ["replace", "add"])
@pytest.mark.parametrize(
    ("family", "component", "layer", "hook"),
    [
        ("llama", "resid_pre", 1, "blocks.1.hook_resid_pre"),
        ("gpt2", "resid_pre", 2, "blocks.2.hook_resid_pre"),
        ("gemma2", "attn_out", 0, "blocks.0.hook_attn_out"),
        ("llama", "resid_post", 2, "blocks.2.hook_resid_post"),
        ("qwen3", "z", 1, "blocks.1.attn.hook_z"),
    ],
)
def test_the_value_is_the_mean_of_single_passes(family, component, layer, hook, operation, labels):
    model, task = model_of(family), task_of(labels)
    vector = extract_hidden_state(
        model, task, layer, shots=3, operation=operation, component=component, n=5, seed=4
    )
    wanted = naive_state(model, task, hook, 3, 5, 4)
    if operation == "add":
        wanted = wanted - naive_state(model, task, hook, 0, 5, 4)
    (edit,) = vector.edits
    assert edit.site == Site(layer=layer, component=component)
    assert type(edit.operation) is {"replace": Replace, "add": Add}[operation]
    torch.testing.assert_close(vector.value(), wanted, atol=1e-10, rtol=0)
    assert wanted.abs().mean() > 1e-2
    assert not vector.value().requires_grad


@pytest.mark.parametrize("operation", ["replace", "add"])
def test_several_layers_and_positions_are_what_each_is_alone(operation):
    model, task = model_of("gpt2"), task_of()
    options = {"shots": 2, "n": 5, "operation": operation}
    several = extract_hidden_state(model, task, (2, 0), positions=(-1, -3), **options)
    assert several.sites == tuple(Site(layer=layer, positions=(-3, -1)) for layer in (0, 2))
    for edit in several.edits:
        for slot, position in enumerate((-3, -1)):
            alone = extract_hidden_state(
                model, task, edit.site.layer, positions=position, **options
            ).value()
            torch.testing.assert_close(edit.operation.value[slot], alone, atol=1e-12, rtol=0)


def test_the_defaults_are_the_middle_block_eight_shots_and_replacement():
    model, task = tiny("llama", max_position_embeddings=400), task_of(LABELS)
    vector = extract_hidden_state(model, task, n=2)
    wanted = naive_state(model, task, "blocks.1.hook_resid_pre", 8, 2, 0)
    torch.testing.assert_close(vector.value(), wanted, atol=1e-10, rtol=0)
    assert vector.value().shape == (D_MODEL,)
    assert isinstance(vector.edits[0].operation, Replace)
    assert vector.sites == (Site(layer=1),)


def test_as_many_prompts_are_averaged_as_the_training_split_holds():
    model, task = model_of(), task_of()
    whole = extract_hidden_state(model, task, shots=2, n=24)
    more = extract_hidden_state(model, task, shots=2, n=1000)
    assert torch.equal(whole.value(), more.value())
    assert more.card.settings["n"] == 24
    assert not torch.allclose(
        whole.value(), extract_hidden_state(model, task, shots=2, n=23).value()
    )


def test_it_is_the_same_every_time_and_another_for_another_seed():
    options = {"shots": 2, "n": 4}
    first, again, other = (
        extract_hidden_state(model_of(), task_of(), **options, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first.value(), again.value())
    assert not torch.allclose(first.value(), other.value())


def test_a_replaced_last_layer_makes_all_queries_answer_alike():
    model, task = model_of(), task_of(LABELS)
    vector = extract_hidden_state(model, task, 2, shots=2, n=4, component="resid_post")
    assert len(set(evaluate(model, task, vector).predictions)) == 1
    assert len(set(evaluate(model, task).predictions)) > 1


def test_half_precision_states_are_averaged_in_single_precision():
    vector = extract_hidden_state(tiny("llama", torch.bfloat16), task_of(), shots=2, n=7)
    assert vector.value().dtype == torch.float32
    assert (vector.value() != vector.value().bfloat16()).any()
    assert vector.card.dtype == "bfloat16"


def test_weights_and_gradients_are_left_alone():
    model = tiny("llama")
    with left_alone(model):
        extract_hidden_state(model, task_of(), shots=2, n=2, operation="add")


def test_the_card_says_how_to_make_the_vector_again():
    model, task = model_of(), task_of()
    vector = extract_hidden_state(model, task, 2, shots=2, n=3, operation="add", seed=7)
    card = vector.card
    assert (card.method, card.task, card.template, card.seed) == (
        "hidden_state", "invented", "{input} -> {answer}", 7
    )  # fmt: skip
    described = mechtv.models.describe(model)
    assert (card.model, card.model_revision) == (described.name, described.revision)
    assert card.dtype == "float64"
    settings = json.loads(json.dumps(card.settings))
    assert settings == {
        "layer": 2, "positions": [-1], "component": "resid_pre",
        "shots": 2, "operation": "add", "n": 3,
    }  # fmt: skip
    again = extract_hidden_state(model, task, **settings, seed=card.seed)
    assert torch.equal(vector.value(), again.value())
    with pytest.raises(InvalidInput, match="hidden_state vector was not trained; it has no curve"):
        vector.training_curve()


@pytest.mark.parametrize("operation", ["replace", "add"])
def test_a_saved_vector_evaluates_as_before(operation, tmp_path):
    model, task = model_of(), task_of(LABELS)
    vector = extract_hidden_state(model, task, shots=2, n=4, operation=operation)
    loaded = TaskVector.load(vector.save(tmp_path / "state.safetensors"))
    first, second, plain = (evaluate(model, task, v) for v in (vector, loaded, None))
    assert (first.log_probabilities == second.log_probabilities).all()
    assert (first.log_probabilities != plain.log_probabilities).all()
    assert loaded.card == vector.card


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"operation": "affine"}, "operation='affine' is unknown; use 'replace' or 'add'"),
        ({"shots": 0}, "shots=0 leaves nothing to extract; use 1 or more"),
        ({"shots": -1}, "shots=-1 leaves nothing to extract"),
        ({"layer": 3}, "layer=3 does not exist: this model has layers 0 to 2"),
        ({"layer": -1}, "layer=-1 is negative"),
        ({"component": "resid_mid"}, "component='resid_mid' is unknown"),
        ({"positions": "all"}, 'positions="all" names no single tokens'),
        ({"positions": (-1, -1)}, "are not positions; use distinct negative numbers"),
        ({"positions": -99}, "Position -99 does not exist in a prompt"),
        ({"layer": (1, 1)}, "must name one or more distinct layers"),
        ({"n": 0}, "n=0 examples"),
        ({"shots": 24}, "shots=24 demonstrations .* holds 23 besides the query"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        extract_hidden_state(model_of(), task_of(), **{"shots": 2, **options})


@pytest.mark.model
def test_the_state_of_the_real_model_carries_its_task(model):
    task = mechtv.get_task("singular-plural")
    vector = extract_hidden_state(model, task, 24, shots=5, n=8, operation="add")
    plain, injected = (evaluate(model, task, v, n=8) for v in (None, vector))
    assert injected.log_probability.value > plain.log_probability.value + 2
    assert vector.value().norm() > 100

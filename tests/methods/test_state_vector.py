"""State vectors against single full passes and formulas by hand, and what they refuse."""

import json

import pytest
import torch
from builders import N_HEADS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits
from methods.untouched import left_alone

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.forward import last_logits
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.state_vector import extract_state_vector, inner, momentum
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Replace, Site, TaskVector

WEIGHTS = (1.0, 2.0, 4.0, 8.0, 16.0, 0.0)
OPTIMISATIONS = ["inner", "momentum", "none"]


def naive_text(task, query, shots, seed):
    """The k-shot prompt as text."""
    shown = task.demonstrations(query, shots, seed=seed)
    assert query not in shown
    return "\n".join([*map(task.template.demonstration, shown), task.template.query(query)])


def naive_states(model, text, layer):
    """`z` at each arrow, from one full pass: arrows stand just before answers, and nowhere else."""
    ids = model.to_tokens(text)[0].tolist()
    arrow = model.to_tokens("jump ->")[0, -1].item()
    keep = {f"blocks.{layer}.attn.hook_z": None}
    keep = {model.get_hook_point(name).name: None for name in keep}
    naive_logits(model, ids, len(ids), keep=keep)
    (z,) = keep.values()
    states = [z[column] for column, token in enumerate(ids) if token == arrow]
    assert torch.equal(states[-1], z[-1])
    return states


def by_formula(states, optimisation, window, weights):
    """The vector of one layer from its states, written out."""
    if optimisation == "none":
        return states[-1]
    if optimisation == "inner":
        return sum(states[-window:]) / window
    base = sum(states[-len(weights) - 1 :]) / (len(weights) + 1)
    sequence = [*states[:-1], base]
    total = base
    for i, weight in enumerate(weights):
        before = len(sequence) - len(weights) + i - 1
        total = total + weight / sum(weights) * (sequence[before + 1] - sequence[before])
    return total


@pytest.mark.parametrize("optimisation", OPTIMISATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "neox"])
def test_each_layer_is_the_formula_over_single_passes(family, optimisation):
    model, task = model_of(family), task_of()
    options = {"shots": 4, "window": 3, "weights": (1.0, 2.0, 0.5)}
    vector = extract_state_vector(model, task, 1, optimisation=optimisation, n=3, seed=4, **options)
    assert vector.sites == (Site(component="z", layer=0), Site(component="z", layer=1))
    texts = [naive_text(task, q, 4, 4) for q in task.split("train", n=3, seed=4)]
    assert len({len(model.to_tokens(text)[0]) for text in texts}) > 1
    for layer, edit in enumerate(vector.edits):
        found = []
        for text in texts:
            states = naive_states(model, text, layer)
            assert len(states) == 5
            found.append(by_formula(states, optimisation, 3, options["weights"]))
        assert type(edit.operation) is Replace
        torch.testing.assert_close(edit.operation.value, sum(found) / 3, atol=1e-10, rtol=0)
        assert edit.operation.value.abs().mean() > 1e-2
        assert not edit.operation.value.requires_grad


def test_the_defaults_are_ten_shots_the_middle_block_and_the_mean_of_seven():
    model, task = tiny("llama", max_position_embeddings=400), task_of(LABELS)
    vector = extract_state_vector(model, task)
    (query,) = task.split("train", n=1)
    text = naive_text(task, query, 10, 0)
    assert [site.layer for site in vector.sites] == [0, 1]
    for layer, edit in enumerate(vector.edits):
        states = naive_states(model, text, layer)
        assert len(states) == 11
        wanted = by_formula(states, "inner", 7, None)
        torch.testing.assert_close(edit.operation.value, wanted, atol=1e-10, rtol=0)
    assert vector.card.settings == {
        "layers": 1, "shots": 10, "optimisation": "inner", "window": 7,
        "weights": list(WEIGHTS), "n": 1,
    }  # fmt: skip
    assert vector.n_parameters == 2 * N_HEADS * 16


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "native", "phi"])
def test_without_optimisation_it_writes_what_the_in_context_run_put_out(family, bos):
    model, task = tiny(family, bos=bos), task_of()
    vector = extract_state_vector(model, task, 1, shots=3, optimisation="none", seed=2)
    (query,) = task.split("train", n=1, seed=2)
    ids = model.to_tokens(naive_text(task, query, 3, 2))[0].tolist()
    names = [model.get_hook_point(f"blocks.{layer}.attn.hook_z").name for layer in (0, 1)]
    keep = dict.fromkeys(names)
    naive_logits(model, ids, len(ids), keep=keep)

    def written(x, hook):
        x = x.clone()
        x[0, -1] = keep[hook.name][-1]
        return x

    prompts = Prompts.of(model, task, n=3)
    found = last_logits(model, prompts, vector)
    for row, text in enumerate(prompts.texts):
        own = model.to_tokens(text)[0].tolist()
        wanted = naive_logits(model, own, len(own), extra=[(name, written) for name in names])[-1]
        torch.testing.assert_close(found[row], wanted, atol=1e-10, rtol=0)
        assert not torch.allclose(naive_logits(model, own, len(own))[-1], wanted, atol=1e-3)


def test_at_its_own_prompt_the_unoptimised_vector_changes_nothing():
    model, task = model_of(), task_of()
    vector = extract_state_vector(model, task, 2, shots=3, optimisation="none")
    own = Prompts.of(model, task, split="train", shots=3, n=1)
    torch.testing.assert_close(
        last_logits(model, own, vector), last_logits(model, own), atol=1e-10, rtol=0
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "neox", "bloom"])
def test_without_absolute_positions_one_prompt_unoptimised_is_its_hidden_state(family):
    """The last token is the same, and so are all that is added to it up to that layer."""
    model, task = model_of(family), task_of()
    state = extract_state_vector(model, task, 1, shots=3, optimisation="none", seed=3)
    hidden = extract_hidden_state(model, task, 1, shots=3, component="resid_post", n=1, seed=3)
    prompts = Prompts.of(model, task, n=4)
    found, wanted = (last_logits(model, prompts, vector) for vector in (state, hidden))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


def test_the_optimisations_by_hand_on_numbers():
    states = torch.tensor([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 100.0], dtype=torch.float64)
    assert inner(states, 1) == 100
    assert inner(states, 2) == 60.5
    assert inner(states, 8) == 19.5
    # the last seven: 156 / 7; changes 2, 3, 4, 5, 6 from the second state on, and B - 21
    base = 156 / 7
    wanted = base + (1 * 2 + 2 * 3 + 4 * 4 + 8 * 5 + 16 * 6) / 31
    assert float(momentum(states, WEIGHTS)) == pytest.approx(wanted, abs=1e-12)
    # of the last change too, where it has a weight
    base = (15 + 21 + 100) / 3
    wanted = base + (1 * 6 + 3 * (base - 21)) / 4
    assert float(momentum(states, (1.0, 3.0))) == pytest.approx(wanted, abs=1e-12)


def test_what_does_not_change_stays_and_what_grows_steadily_is_carried_on():
    constant = torch.full((8, 2, 3), 0.7, dtype=torch.float64)
    for found in (inner(constant, 7), momentum(constant, WEIGHTS)):
        torch.testing.assert_close(found, constant[0], atol=1e-14, rtol=0)
    line = torch.arange(8.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, -2.0]).double()
    torch.testing.assert_close(inner(line, 7), line[4], atol=1e-14, rtol=0)
    torch.testing.assert_close(momentum(line, WEIGHTS), line[5], atol=1e-14, rtol=0)


def test_a_window_of_one_is_no_optimisation():
    model, task = model_of(), task_of()
    one = extract_state_vector(model, task, 1, shots=3, window=1)
    none = extract_state_vector(model, task, 1, shots=3, optimisation="none")
    for a, b in zip(one.edits, none.edits, strict=True):
        assert torch.equal(a.operation.value, b.operation.value)


def test_as_many_prompts_are_averaged_as_the_training_split_holds():
    vector = extract_state_vector(model_of(), task_of(), 0, shots=1, window=2, n=1000)
    assert vector.card.settings["n"] == 24


def test_it_is_the_same_every_time_and_another_for_another_seed():
    first, again, other = (
        extract_state_vector(model_of(), task_of(), 0, shots=3, window=2, n=2, seed=seed).value()
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_half_precision_states_are_averaged_in_single_precision():
    vector = extract_state_vector(tiny("llama", torch.bfloat16), task_of(), 0, shots=4, window=3)
    assert vector.value().dtype == torch.float32
    assert (vector.value() != vector.value().bfloat16()).any()
    assert vector.card.dtype == "bfloat16"


def test_weights_gradients_and_hooks_are_left_alone():
    model = tiny("llama")
    with left_alone(model):
        extract_state_vector(model, task_of(), shots=2, optimisation="none", n=2)


def test_the_card_says_how_to_make_the_vector_again():
    model, task = model_of(), task_of()
    vector = extract_state_vector(
        model, task, 2, shots=4, optimisation="momentum", weights=(1.0, 0.5), n=2, seed=7
    )
    card = vector.card
    assert (card.method, card.task, card.template, card.seed) == (
        "state_vector", "invented", "{input} -> {answer}", 7
    )  # fmt: skip
    described = mechtv.models.describe(model)
    assert (card.model, card.model_revision) == (described.name, described.revision)
    settings = json.loads(json.dumps(card.settings))
    again = extract_state_vector(model, task, **settings, seed=card.seed)
    assert again.sites == vector.sites
    for a, b in zip(vector.edits, again.edits, strict=True):
        assert torch.equal(a.operation.value, b.operation.value)


def test_a_saved_vector_evaluates_as_before(tmp_path):
    model, task = model_of(), task_of(LABELS)
    vector = extract_state_vector(model, task, shots=4, window=3)
    loaded = TaskVector.load(vector.save(tmp_path / "state.safetensors"))
    first, second, plain = (evaluate(model, task, v) for v in (vector, loaded, None))
    assert (first.log_probabilities == second.log_probabilities).all()
    assert (first.log_probabilities != plain.log_probabilities).all()
    assert loaded.card == vector.card


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"optimisation": "outer"}, "'outer' is unknown; use one of inner, momentum, none"),
        ({"shots": 5}, "shots=5 are too few for .*'inner' with window=7; use 6 or more"),
        (
            {"shots": 5, "optimisation": "momentum"},
            "shots=5 are too few for .*'momentum' with 6 weights; use 6 or more",
        ),
        ({"shots": 0, "optimisation": "none"}, "shots=0 are too few .* use 1 or more"),
        ({"shots": 0, "window": 1}, "shots=0 are too few .* use 1 or more"),
        ({"window": 0}, "window=0 averages no states; use 1 or more"),
        ({"weights": ()}, r"weights=\(\) sum to 0"),
        ({"weights": (1, -1)}, r"weights=\(1.0, -1.0\) sum to 0"),
        ({"weights": (1, float("nan"))}, "sum to nan"),
        ({"layers": 3}, "layer=3 does not exist: this model has layers 0 to 2"),
        ({"layers": -1}, "layer=-1 is negative"),
        ({"n": 0}, "n=0 examples"),
        ({"shots": 24}, "shots=24 demonstrations .* holds 23 besides the query"),
        ({"shots": 20}, "context holds 128; use fewer shots"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        extract_state_vector(model_of(), task_of(), **{"shots": 6, **options})


def test_as_few_shots_as_the_sentence_says_are_enough():
    task = task_of(LABELS)
    for optimisation, shots in (("inner", 6), ("momentum", 6), ("none", 1)):
        vector = extract_state_vector(model_of(), task, shots=shots, optimisation=optimisation)
        assert vector.card.settings["shots"] == shots


@pytest.mark.model
@pytest.mark.parametrize("optimisation", OPTIMISATIONS)
def test_the_states_of_the_real_model_carry_its_task(model, optimisation):
    task = mechtv.get_task("singular-plural")
    vector = extract_state_vector(model, task, 18, optimisation=optimisation)
    plain, injected = (evaluate(model, task, v, n=8) for v in (None, vector))
    assert injected.log_probability.value > plain.log_probability.value + 2

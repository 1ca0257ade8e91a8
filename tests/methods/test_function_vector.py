"""Function vectors against sums of single passes and of whole layers, and what they refuse."""

import json
from dataclasses import replace

import pytest
import torch
from builders import D_MODEL, FAMILIES, N_HEADS, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import row_of
from methods.untouched import left_alone

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.evaluation.provenance import Provenance
from mechtv.methods import function_vector
from mechtv.methods.function_vector import extract_function_vector
from mechtv.methods.head_effects import mean_head_outputs, measure_head_effects
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Site, TaskVector

OPTIONS = {"shots": 2, "n": 4, "n_shuffled": 3}
HEADS = ((0, 1), (2, 3), (1, 0))


def projected(model, layer, task, shots, n):
    """The mean of what a layer's output projection gives at the last token, one pass each."""
    prompts = Prompts.of(model, task, split="train", shots=shots, n=n)
    taken = []
    projection = model.blocks[layer].attn.o.original_component
    handle = projection.register_forward_hook(lambda module, args, out: taken.append(out[0, -1]))
    with torch.no_grad():
        for row in range(n):
            model(torch.tensor([row_of(prompts, row)]))
    handle.remove()
    assert len(taken) == n
    return torch.stack(taken).mean(dim=0), projection.bias


@pytest.mark.parametrize("layer", range(N_LAYERS))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layers_heads_sum_to_its_attention_output_without_the_bias(family, layer):
    model, task = model_of(family), task_of()
    heads = [(layer, head) for head in range(N_HEADS)]
    vector = extract_function_vector(model, task, heads=heads, shots=2, n=3)
    wanted, bias = projected(model, layer, task, 2, 3)
    if family in ("gpt2", "neox", "phi", "bloom", "opt", "native"):
        assert bias.norm() > 0.1
        wanted = wanted - bias
    else:
        assert bias is None
    torch.testing.assert_close(vector.value(), wanted, atol=1e-10, rtol=0)
    assert wanted.norm() > 0.1


def test_heads_write_what_enters_the_stream_where_a_factor_stands_between():
    model, task = model_of("granite"), task_of()
    heads = [(1, head) for head in range(N_HEADS)]
    vector = extract_function_vector(model, task, heads=heads, shots=2, n=3)
    wanted, _ = projected(model, 1, task, 2, 3)
    torch.testing.assert_close(vector.value(), 0.5 * wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "neox", "bloom", "native"])
def test_one_head_writes_what_the_layer_loses_without_it(family):
    """Heads apart, not only in sum: the projection is linear in each head's own output."""
    model, task, (layer, head) = model_of(family), task_of(), (1, 2)
    vector = extract_function_vector(model, task, heads=[(layer, head)], shots=2, n=2)
    whole, _ = projected(model, layer, task, 2, 2)
    point = model.get_hook_point(f"blocks.{layer}.attn.hook_z")

    def silence(z, hook):
        z = z.clone()
        z[:, :, head] = 0
        return z

    with model.hooks(fwd_hooks=[(point.name, silence)]):
        rest, _ = projected(model, layer, task, 2, 2)
    torch.testing.assert_close(vector.value(), whole - rest, atol=1e-10, rtol=0)
    assert vector.value().norm() > 0.05


def test_processed_weights_give_their_own_heads():
    model, task = tiny("gpt2"), task_of()
    model.enable_compatibility_mode()
    vector = extract_function_vector(
        model, task, heads=[(1, head) for head in range(N_HEADS)], shots=2, n=3
    )
    wanted, bias = projected(model, 1, task, 2, 3)
    torch.testing.assert_close(vector.value(), wanted - bias, atol=1e-10, rtol=0)
    assert vector.card.weights == "processed"


@pytest.mark.parametrize(("heads", "count"), [(3, 3), (0.3, 4), (12, 12)])
def test_the_strongest_heads_are_taken_by_count_or_share(heads, count):
    model, task = model_of(), task_of()
    vector = extract_function_vector(model, task, heads=heads, **OPTIONS)
    effects = measure_head_effects(model, task, **OPTIONS)
    best = effects.top(count)
    named = extract_function_vector(model, task, heads=best, shots=2, n=4)
    assert torch.equal(vector.value(), named.value())
    assert vector.card.settings["heads"] == [list(head) for head in best]
    assert vector.card.settings["effects"] == [float(effects.mean[head]) for head in best]
    assert vector.card.settings["n_shuffled"] == 3


def test_the_defaults_are_ten_heads_and_shots_added_at_a_third_of_the_depth():
    model = tiny("llama", max_position_embeddings=400, num_hidden_layers=5)
    task = task_of(LABELS)
    vector = extract_function_vector(model, task, n=2, n_shuffled=2)
    (edit,) = vector.edits
    assert edit.site == Site(component="resid_pre", layer=2)  # 5 / 3 is nearest to 2
    assert isinstance(edit.operation, Add)
    assert vector.value().shape == (D_MODEL,)
    assert not vector.value().requires_grad
    assert vector.card.settings["shots"] == 10
    assert len(vector.card.settings["heads"]) == 10


@pytest.mark.parametrize("component", ["resid_post", "attn_out", "mlp_out"])
def test_the_vector_may_be_added_elsewhere(component):
    vector = extract_function_vector(
        model_of(), task_of(), 2, heads=HEADS, component=component, shots=2, n=2
    )
    assert vector.sites == (Site(component=component, layer=2),)


def test_given_heads_are_not_measured(monkeypatch):
    monkeypatch.setattr(function_vector, "measure_head_effects", None)
    vector = extract_function_vector(model_of(), task_of(), heads=HEADS, **OPTIONS)
    settings = vector.card.settings
    assert settings["heads"] == [list(head) for head in HEADS]
    assert (settings["effects"], settings["n_shuffled"], settings["ranked_on"]) == (None,) * 3


# --- effects that are at hand --------------------------------------------------------------------


def test_effects_of_the_same_task_are_used_whole(monkeypatch):
    model, task = model_of(), task_of()
    fresh = extract_function_vector(model, task, heads=3, **OPTIONS)
    effects = measure_head_effects(model, task, **OPTIONS)
    for name in ("measure_head_effects", "mean_head_outputs"):
        monkeypatch.setattr(function_vector, name, None)
    reused = extract_function_vector(model, task, heads=3, effects=effects, shots=2, n=4)
    assert torch.equal(fresh.value(), reused.value())
    assert fresh.card == reused.card


@pytest.mark.parametrize(
    "change",
    [
        {"task_checksum": "another"},
        {"shots": 5},
        {"n": 9},
        {"provenance": Provenance(model="another")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_of_other_effects_only_the_ranking_is_used(change):
    model, task = model_of(), task_of()
    effects = measure_head_effects(model, task, **OPTIONS)
    wrong = replace(effects, means=effects.means + 1, **change)
    vector = extract_function_vector(model, task, heads=3, effects=wrong, shots=2, n=4)
    named = extract_function_vector(model, task, heads=effects.top(3), shots=2, n=4)
    assert torch.equal(vector.value(), named.value())
    where = vector.card.settings["ranked_on"]
    assert where["task"] == change.get("task", "invented")
    assert where["shots"] == change.get("shots", 2)
    assert vector.card.settings["shots"] == 2


def test_another_seed_template_or_number_of_prompts_means_other_means():
    model, task = model_of(), task_of()
    effects = measure_head_effects(model, task, **OPTIONS)
    wrong = replace(effects, means=effects.means + 1)
    for other, options in (
        (task, {"seed": 1}),
        (task, {"n": 5}),
        (task.with_template("{input} = {answer}"), {}),
    ):
        options = {"shots": 2, "n": 4, "heads": HEADS, **options}
        with_effects = extract_function_vector(model, other, effects=wrong, **options)
        without = extract_function_vector(model, other, **options)
        assert torch.equal(with_effects.value(), without.value())


# --- what is left behind -------------------------------------------------------------------------


def test_it_is_the_same_every_time_and_another_for_another_seed():
    first, again, other = (
        extract_function_vector(model_of(), task_of(), heads=2, seed=seed, **OPTIONS)
        for seed in (0, 0, 1)
    )
    assert torch.equal(first.value(), again.value())
    assert not torch.allclose(first.value(), other.value())


def test_half_precision_models_give_single_precision_vectors():
    model = tiny("llama", torch.bfloat16)
    vector = extract_function_vector(model, task_of(), heads=HEADS, **OPTIONS)
    assert vector.value().dtype == torch.float32
    assert (vector.value() != vector.value().bfloat16()).any()
    means = mean_head_outputs(model, task_of(), shots=2, n=4)
    parts = [
        means[layer, head] @ model.blocks[layer].attn.W_O[head].float() for layer, head in HEADS
    ]
    torch.testing.assert_close(vector.value(), sum(parts))


def test_weights_and_gradients_are_left_alone():
    model = tiny("gpt2")
    with left_alone(model):
        extract_function_vector(model, task_of(), heads=2, **OPTIONS)


def test_the_card_says_how_to_make_the_vector_again():
    model, task = model_of(), task_of()
    vector = extract_function_vector(model, task, 2, heads=2, seed=7, **OPTIONS)
    card = vector.card
    assert (card.method, card.task, card.template, card.seed) == (
        "function_vector", "invented", "{input} -> {answer}", 7
    )  # fmt: skip
    settings = json.loads(json.dumps(card.settings))
    assert settings.pop("ranked_on")["seed"] == 7
    assert len(settings.pop("effects")) == 2
    heads = [tuple(head) for head in settings.pop("heads")]
    assert settings == {"layer": 2, "component": "resid_pre", "shots": 2, "n": 4, "n_shuffled": 3}
    again = extract_function_vector(model, task, heads=heads, **settings, seed=card.seed)
    assert torch.equal(vector.value(), again.value())


def test_as_many_prompts_are_averaged_as_the_training_split_holds():
    vector = extract_function_vector(model_of(), task_of(), heads=HEADS, shots=2, n=1000)
    assert vector.card.settings["n"] == 24


def test_a_saved_vector_evaluates_as_before(tmp_path):
    model, task = model_of(), task_of(LABELS)
    vector = extract_function_vector(model, task, heads=4, **OPTIONS)
    loaded = TaskVector.load(vector.save(tmp_path / "function.safetensors"))
    first, second, plain = (evaluate(model, task, v) for v in (vector, loaded, None))
    assert (first.log_probabilities == second.log_probabilities).all()
    assert (first.log_probabilities != plain.log_probabilities).all()
    assert loaded.card == vector.card


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads": 0}, "0 heads were asked for, of 12 that are ranked; give 1 to 12"),
        ({"heads": 13}, "13 heads were asked for, of 12 that are ranked"),
        ({"heads": 1.0}, r"1\.0 is no share of the heads"),
        ({"heads": []}, r"heads=\[\] must name one or more distinct"),
        ({"heads": [(0, 1), (0, 1)]}, "must name one or more distinct"),
        ({"heads": [(3, 0)]}, "Head 0 of layer 3 does not exist: .* layers 0 to 2 of heads 0 to 3"),
        ({"heads": [(0, 4)]}, "Head 4 of layer 0 does not exist"),
        ({"heads": [(-1, 0)]}, "Head 0 of layer -1 does not exist"),
        ({"shots": 1}, "shots=1 leaves no answers to shuffle; use 2 or more"),
        ({"shots": 0, "heads": HEADS}, "shots=0 leaves nothing to extract; use 1 or more"),
        ({"layer": 3}, "layer=3 does not exist: this model has layers 0 to 2"),
        ({"layer": -1}, "layer=-1 is negative"),
        ({"component": "z"}, "component='z' holds heads"),
        ({"component": "resid_mid"}, "component='resid_mid' is unknown"),
        ({"n": 0}, "n=0 is too small"),
        ({"n": 0, "heads": HEADS}, "n=0 examples were asked of the train split"),
        ({"n_shuffled": 0}, "n_shuffled=0 is too small"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        extract_function_vector(model_of(), task_of(), **{**OPTIONS, "heads": 2, **options})


def test_effects_of_a_model_of_another_shape_are_refused():
    effects = measure_head_effects(tiny("llama", num_hidden_layers=2), task_of(), **OPTIONS)
    sentence = "These effects are of 2 x 4 layers x heads, but the model has 3 x 4"
    with pytest.raises(InvalidInput, match=sentence):
        extract_function_vector(model_of(), task_of(), effects=effects, heads=2, shots=2)


@pytest.mark.model
def test_the_vector_of_the_real_model_carries_its_task(model):
    """Of the heads that `measure_head_effects` puts first on this task."""
    task = mechtv.get_task("singular-plural")
    vector = extract_function_vector(model, task, heads=[(20, 5), (14, 1), (17, 5)], n=8)
    assert vector.sites == (Site(layer=10),)
    plain, added = (evaluate(model, task, v, n=8) for v in (None, vector))
    assert added.log_probability.value > plain.log_probability.value

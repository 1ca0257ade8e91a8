"""Carried vectors: what they do in a rotated copy, how values, sizes and layers are mapped."""

import pytest
import torch
from builders import D_MODEL, tiny
from evaluation.invented import model_of, task_of
from methods.copies import a_vector, at, noise, original, pair, rotated

from mechtv.errors import InvalidInput
from mechtv.forward import last_logits
from mechtv.methods.carry import carry, carry_vector
from mechtv.methods.norms import residual_norms
from mechtv.methods.unembedding_map import unembedding_map
from mechtv.methods.vocabularies import token_texts
from mechtv.models import describe
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Affine, Linear, Replace, TaskVector
from mechtv.vectors.edits import ResidualMLP


def in_words(model, logits):
    """Logits by the shared tokens' texts."""
    texts, other = token_texts(original()), token_texts(rotated())
    own = texts if model is original() else other
    return logits[:, torch.tensor([own[text] for text in texts if text in other])]


OPERATIONS = {
    "add": Add(value=noise(D_MODEL)),
    "add at two positions": Add(value=noise(2, D_MODEL)),
    "replace": Replace(value=noise(D_MODEL)),
    "affine": Affine(scale=torch.tensor(0.5, dtype=torch.float64), value=noise(D_MODEL)),
    "linear": Linear(matrix=0.2 * noise(D_MODEL, D_MODEL)),
    "linear with a bias": Linear(matrix=noise(D_MODEL, D_MODEL), bias=noise(D_MODEL, seed=3)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("component", ["resid_pre", "resid_post", "attn_out", "mlp_out"])
def test_a_rotated_copy_does_under_the_carried_vector_what_the_original_does(name, component):
    positions = (-2, -1) if "two" in name else (-1,)
    edit = at(OPERATIONS[name], component=component, positions=positions)
    vector, task = a_vector(edit), task_of()
    carried = carry_vector(vector, original(), rotated(), task)
    logits = {}
    for model, own in ((original(), vector), (rotated(), carried)):
        prompts = Prompts.of(model, task)
        with torch.no_grad():
            logits[model] = in_words(model, last_logits(model, prompts, own))
            plain = in_words(model, last_logits(model, prompts))
        assert (logits[model] - plain).abs().max() > 0.1
    torch.testing.assert_close(logits[original()], logits[rotated()], atol=1e-8, rtol=0)


def test_a_carried_vector_comes_back():
    vector = a_vector(at(Add(value=noise(D_MODEL))))
    there = carry(vector, unembedding_map(original(), rotated()), layer=0)
    back = carry(there, unembedding_map(rotated(), original()), layer=1)
    torch.testing.assert_close(back.value(), vector.value(), atol=1e-8, rtol=0)
    assert back.sites == vector.sites


def test_values_matrices_and_biases_are_mapped_as_defined():
    large, small = pair()
    found = unembedding_map(large, small)
    m, width = found.matrix, large.cfg.d_model
    v, w = noise(width), noise(width, width, seed=1)
    vector = a_vector(at(Add(value=v)), at(Linear(matrix=w), component="mlp_out"))
    added, linear = carry(vector, found, factor=[2.0, 3.0]).edits
    torch.testing.assert_close(added.operation.value, 2 * m @ v)
    torch.testing.assert_close(linear.operation.matrix, m @ w @ torch.linalg.pinv(m))
    assert linear.operation.matrix.shape == (small.cfg.d_model,) * 2
    affine = Affine(scale=torch.tensor(0.3), value=v.float())
    (edit,) = carry(a_vector(at(affine)), found, factor=2.0).edits
    assert edit.operation.scale == affine.scale
    assert edit.operation.value.dtype == torch.float32
    torch.testing.assert_close(edit.operation.value, (2 * m @ v).float())


def test_a_bias_of_a_matrix_is_mapped_like_a_value():
    large, small = pair()
    found, width = unembedding_map(large, small), large.cfg.d_model
    biased = Linear(matrix=noise(width, width), bias=noise(width, seed=2))
    (edit,) = carry(a_vector(at(biased)), found, factor=2.0).edits
    torch.testing.assert_close(edit.operation.bias, 2 * found.matrix @ biased.bias)


def test_rescaling_takes_the_ratio_of_the_two_streams():
    (large, small), task = pair(), task_of()
    vector = a_vector(
        at(Add(value=noise(48)), positions=(-2, -1)), at(Replace(value=noise(48)), layer=2)
    )
    found = unembedding_map(large, small)
    plain = carry_vector(vector, large, small, task, rescale="none", mapping=found)
    scaled = carry_vector(vector, large, small, task, mapping=found, seed=2)
    factors = []
    for site in vector.sites:
        sizes = []
        for model in (large, small):
            prompts = Prompts.of(model, task, split="train", seed=2)
            (norms,) = residual_norms(model, prompts, [site])
            sizes.append(sum(norms) / len(norms) / model.cfg.d_model**0.5)
        factors.append(sizes[1] / sizes[0])
    assert scaled.card.settings["factors"] == pytest.approx(factors)
    assert plain.card.settings["factors"] == [1.0, 1.0]
    for before, after, factor in zip(plain.edits, scaled.edits, factors, strict=True):
        torch.testing.assert_close(after.operation.value, factor * before.operation.value)
        assert abs(factor - 1) > 0.02


# --- layers ---


def test_a_layer_goes_to_the_same_relative_depth():
    large = tiny("llama", num_hidden_layers=5)
    found = unembedding_map(large, model_of("llama"))
    vectors = [a_vector(at(Add(value=noise(D_MODEL)), layer=layer)) for layer in range(5)]
    assert [carry(v, found).sites[0].layer for v in vectors] == [0, 0, 1, 2, 2]
    assert [carry(v, found, layer=1).sites[0].layer for v in vectors] == [1] * 5
    one = unembedding_map(tiny("llama", num_hidden_layers=1), large)
    assert carry(vectors[0], one).sites[0].layer == 0


def test_added_values_that_meet_at_one_site_are_summed_and_others_are_refused():
    large, small = tiny("llama", num_hidden_layers=5), model_of("llama")
    found, task = unembedding_map(large, small), task_of()
    v, w = noise(D_MODEL), noise(D_MODEL, seed=1)
    both = carry(a_vector(at(Add(value=v), layer=0), at(Add(value=w), layer=1)), found)
    one = carry(a_vector(at(Add(value=v + w), layer=0)), found)
    prompts = Prompts.of(small, task, n=3)
    with torch.no_grad():
        torch.testing.assert_close(
            last_logits(small, prompts, both), last_logits(small, prompts, one)
        )
    replaced = a_vector(at(Add(value=v), layer=0), at(Replace(value=w), layer=1))
    with pytest.raises(InvalidInput, match=r"2 edits would meet at resid_pre.0. at -1, and 'rep"):
        carry(replaced, found)


def an_mlp():
    one = torch.tensor(1.0, dtype=torch.float64)
    layers = {"weights": noise(2, 48, 48), "biases": noise(2, 48)}
    return ResidualMLP(**layers, centre=noise(48), scale=one, gain=one)


def test_the_card_says_where_it_came_from_and_a_file_keeps_it(tmp_path):
    large, small = pair()
    vector = a_vector(at(Add(value=noise(48))), acts_on="both")
    carried = carry_vector(vector, large, small, task_of(), layer=2)
    card = carried.card
    about = describe(small)
    assert (card.method, card.task, card.seed) == ("carried", "invented", 3)
    assert (card.model, card.dtype, card.weights) == (about.name, about.dtype, about.weights)
    assert card.sources == (vector.card,)
    assert card.settings["layer"] == 2
    assert card.settings["map"]["large"]["d_model"] == 48
    assert card.settings["map"]["n_tokens"] > 200
    assert carried.acts_on == "both"
    loaded = TaskVector.load(carried.save(tmp_path / "carried.safetensors"))
    assert loaded.card == card
    assert torch.equal(loaded.value(), carried.value())


def test_models_and_gradients_are_left_alone():
    large, small = tiny("llama"), tiny("qwen3")
    before = [[x.clone() for x in model.parameters()] for model in (large, small)]
    value = noise(D_MODEL).requires_grad_()
    carried = carry_vector(a_vector(at(Add(value=value))), large, small, task_of())
    assert not carried.value().requires_grad
    for model, weights in zip((large, small), before, strict=True):
        for weight, old in zip(model.parameters(), weights, strict=True):
            assert torch.equal(weight, old)
            assert weight.requires_grad
            assert weight.grad is None


def test_a_vector_applied_to_another_width_as_it_is_is_refused():
    large, small = pair()
    vector = a_vector(at(Add(value=noise(48))))
    with pytest.raises(InvalidInput, match="width 48 but the model's d_model is 32"):
        last_logits(small, Prompts.of(small, task_of(), n=2), vector)
    with pytest.raises(InvalidInput, match="width 48 but the model's d_model is 32"):
        carry_vector(vector, small, large, task_of())
    with pytest.raises(InvalidInput, match=r"width 48 but the map takes vectors of .* width is 32"):
        carry(vector, unembedding_map(small, large))


def test_a_map_between_other_models_is_refused():
    large, small = pair()
    vector, back = a_vector(at(Add(value=noise(48)))), unembedding_map(small, large)
    with pytest.raises(InvalidInput, match=r"The map goes from .*, and not from .*leave it out"):
        carry_vector(vector, large, small, task_of(), mapping=back)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda v, m: carry(v, m, layer=3), "layer=3 does not exist: .* has layers 0 to 2"),
        (lambda v, m: carry(v, m, layer=-1), "layer=-1 is negative"),
        (
            lambda v, m: carry(v + a_vector(at(Add(value=noise(48)), layer=2)), m, layer=1),
            "layer=1 names one layer, but this vector acts at layers 1, 2",
        ),
        (lambda v, m: carry(v, m, factor=[1.0, 2.0]), "2 factors were given for 1 edits"),
        (
            lambda v, m: carry(a_vector(at(Add(value=noise(4, 16)), component="z")), m),
            "acts on heads .z., which another model has not",
        ),
        (
            lambda v, m: carry(a_vector(at(an_mlp())), m),
            "A ResidualMLP edit cannot be carried: .* only Add, Replace, Affine, Linear edits can",
        ),
        (
            lambda v, m: carry_vector(v, *pair(), task_of(), rescale="size"),
            "rescale='size' is unknown; use 'norm' or 'none'",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(call, sentence):
    vector = a_vector(at(Add(value=noise(48))))
    with pytest.raises(InvalidInput, match=sentence):
        call(vector, unembedding_map(*pair()))

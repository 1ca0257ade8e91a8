"""The map between two residual streams: its equations, its options, and what is refused."""

import pytest
import torch
from builders import D_MODEL, VOCABULARY, tiny, tiny_hf, tiny_tokenizer
from evaluation.invented import model_of
from methods.copies import MISSING, bridge_of, of_pieces, original, pair, rotated, rotation

from mechtv.errors import InvalidInput
from mechtv.methods.unembedding_map import _gain, unembedding_map
from mechtv.methods.vocabularies import shared_tokens, token_texts
from mechtv.models import describe


def test_the_map_to_a_rotated_copy_is_the_rotation():
    found = unembedding_map(original(), rotated())
    torch.testing.assert_close(found.matrix, rotation().T, atol=1e-8, rtol=0)
    assert found.relative_error < 1e-8
    assert VOCABULARY - 3 - len(MISSING) > found.n_tokens > 200
    back = unembedding_map(rotated(), original())
    torch.testing.assert_close(back.matrix, rotation(), atol=1e-8, rtol=0)


def rows_of(model):
    """The effective unembedding of an RMSNorm model by the definition, with texts as its keys."""
    gain = model.ln_final.original_component.weight.detach()
    texts = token_texts(model)
    return {text: model.W_U.detach()[:, i] * gain for text, i in texts.items()}


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize("ridge", [0.0, 3.0])
def test_the_map_solves_the_normal_equations(down, ridge):
    large, small = pair() if down else pair()[::-1]
    found = unembedding_map(large, small, ridge=ridge)
    of_large, of_small = rows_of(large), rows_of(small)
    shared = [text for text in of_large if text in of_small]
    a = torch.stack([of_small[text] for text in shared])
    b = torch.stack([of_large[text] for text in shared])
    assert found.matrix.shape == (small.cfg.d_model, large.cfg.d_model)
    residual = a @ found.matrix - b
    torch.testing.assert_close(a.T @ residual, -ridge * found.matrix, atol=1e-8, rtol=0)
    assert found.relative_error == pytest.approx(float(residual.norm() / b.norm()))
    assert 0.1 < found.relative_error < 1
    assert found.n_tokens == len(shared)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_folding_makes_the_map_the_same_wherever_the_gain_is_kept(family):
    """The gain in the unembedding and none in the norm: the same model, the same map."""
    other = rotated()  # which has no gains
    moved = tiny_hf(family, tie_word_embeddings=False)
    norm = moved.transformer.ln_f if family == "gpt2" else moved.model.norm
    offset = 1.0 if family == "gemma2" else 0.0
    moved.lm_head.weight.data *= norm.weight.data + offset
    norm.weight.data.fill_(1.0 - offset)
    plain, moved = tiny(family, tie_word_embeddings=False), bridge_of(moved, tiny_tokenizer())
    folded = [unembedding_map(model, other).matrix for model in (plain, moved)]
    torch.testing.assert_close(*folded, atol=1e-8, rtol=0)
    raw = [unembedding_map(m, other, fold_norm=False).matrix for m in (plain, moved)]
    assert not torch.allclose(*raw, atol=1e-2)
    if family != "gpt2":
        torch.testing.assert_close(raw[1], folded[0], atol=1e-8, rtol=0)


def test_a_map_of_layer_norm_models_neither_sees_nor_makes_a_constant():
    large, small = model_of("gpt2"), model_of("neox")
    matrix = unembedding_map(large, small).matrix
    assert matrix.sum(dim=0).abs().max() < 1e-8
    assert matrix.sum(dim=1).abs().max() < 1e-8
    assert matrix.norm() > 0.1


def test_some_of_the_tokens_are_enough_with_a_ridge():
    large, small = pair()
    words = [" new", " jump", " up"]
    few = unembedding_map(large, small, tokens=words, ridge=1e-9)
    assert few.n_tokens == 3
    assert few.relative_error < 1e-6
    of_large, of_small = rows_of(large), rows_of(small)
    for word in words:
        torch.testing.assert_close(of_small[word] @ few.matrix, of_large[word], atol=1e-4, rtol=0)


def test_another_tokenizer_gives_a_map_over_the_shared_tokens():
    found = unembedding_map(original(), of_pieces())
    assert found.n_tokens == len(shared_tokens(original(), of_pieces())[0]) > 50
    assert found.matrix.shape == (16, D_MODEL)


HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
ODD = {
    "llama": {"hidden_size": 33, **HEADS},
    "gemma2": {"hidden_size": 33, **HEADS},
    "gpt2": {"n_embd": 33, "n_head": 3},
}


@pytest.mark.parametrize("family", ODD)
@pytest.mark.parametrize("odd", [False, True])
def test_the_gain_is_read_off_the_norm_at_any_width(family, odd):
    model = tiny(family, **(ODD[family] if odd else {}))
    stored = model.ln_final.original_component.weight.detach()
    wanted = stored + 1 if family == "gemma2" else stored
    torch.testing.assert_close(_gain(model), wanted, atol=1e-9, rtol=0)


def test_the_table_names_both_models_and_the_fit():
    large, small = pair()
    found = unembedding_map(large, small, ridge=0.5)
    (row,) = found.table().to_dict("records")
    assert (row["d_large"], row["d_small"]) == (48, D_MODEL)
    assert row["tokens_shared"] == found.n_tokens
    assert row["relative_error"] == found.relative_error
    assert row["ridge"] == 0.5


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ridge": -1.0}, "ridge=-1.0 must be finite and 0 or more"),
        ({"ridge": float("inf")}, "ridge=inf must be finite"),
        ({"tokens": [" jump"]}, "1 shared tokens cannot fix a map to a model of width 32"),
        ({"tokens": [], "ridge": 1.0}, "0 shared tokens cannot"),
        ({"tokens": [" jump", "no such"]}, "The tokens .'no such'. are not shared"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        unembedding_map(*pair(), **options)


@pytest.mark.model
def test_the_real_model_is_carried_to_itself_unchanged(model):
    found = unembedding_map(model, model)
    identity = torch.eye(model.cfg.d_model, dtype=torch.float64)
    torch.testing.assert_close(found.matrix, identity, atol=1e-6, rtol=0)
    assert found.n_tokens > 40_000
    assert {" the", " Paris", "ing"} <= set(token_texts(model))
    assert describe(model) == found.small

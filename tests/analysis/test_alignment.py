"""Task alignment against least squares, and what its rows mean."""

import functools

import numpy as np
import pytest
import torch
from builders import D_MODEL, FAMILIES, tiny
from evaluation.invented import LABELS, model_of, task_of
from methods.untouched import left_alone
from vectors.naive import additive, noise

import mechtv
from mechtv.analysis.alignment import AnswerSpan, task_alignment
from mechtv.errors import InvalidInput
from mechtv.tasks.prompts import Prompts

LAYER_NORM = ("gpt2", "neox", "phi", "bloom", "opt", "native")
MANY = ("jump", "hot", "talked", "walk", "cold")


def is_centred(family):
    return family in LAYER_NORM


def gain_by_hand(family):
    weight = model_of(family).ln_final.original_component.weight.detach()
    return 1 + weight if family.startswith("gemma") else weight


def rows_by_hand(family, labels, gain):
    """The rows as columns (d_model x label), centred where the norm centres what it reads."""
    model = model_of(family)
    ids = [model.tokenizer(f" {label}")["input_ids"][0] for label in labels]
    rows = model.unembed.original_component.weight.detach()[ids].T
    rows = rows * gain_by_hand(family)[:, None] if gain else rows
    return rows - rows.mean(dim=0) if is_centred(family) else rows


def by_hand(x, rows, centred):
    """Norm of the least-squares fit of x by the rows, over the norm of x."""
    x = x - x.mean() if centred else x
    fit = torch.linalg.lstsq(rows, x[:, None]).solution
    return float((rows @ fit).norm() / x.norm())


@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_norm_of_the_least_squares_fit(family, gain) -> None:
    vectors = {"a": noise(D_MODEL, seed=1), "b": noise(D_MODEL, seed=2) + 3}
    found = task_alignment(model_of(family), task_of(MANY), vectors, gain=gain)
    rows = rows_by_hand(family, MANY, gain)
    wanted = [by_hand(x, rows, is_centred(family)) for x in vectors.values()]
    np.testing.assert_allclose(found.values, wanted, rtol=1e-10)
    other = task_alignment(model_of(family), task_of(MANY), vectors, gain=not gain)
    assert np.abs(found.values - other.values).min() > 1e-4
    assert (found.span.dim, found.span.n_tokens) == (5, 5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi"])
def test_the_part_outside_moves_no_labels_logit_and_the_part_inside_is_all_that_does(family):
    model = model_of(family)
    span = AnswerSpan.of(model, task_of(LABELS))
    x = span.seen(noise(D_MODEL, seed=1))
    inside = (x @ span.basis.T) @ span.basis
    read = gain_by_hand(family)[:, None] * rows_by_hand(family, LABELS, gain=False)
    if is_centred(family):
        read = rows_by_hand(family, LABELS, gain=True)
    torch.testing.assert_close((x - inside) @ read, torch.zeros(3, dtype=x.dtype))
    torch.testing.assert_close(inside @ read, x @ read)
    assert float((x @ read).abs().min()) > 1e-3
    aligned = span.alignment(torch.stack([inside, x - inside, -3 * inside]))
    torch.testing.assert_close(aligned, torch.tensor([1.0, 0.0, 1.0], dtype=x.dtype))
    both = span.alignment(x) ** 2 + (x - inside).norm() ** 2 / x.norm() ** 2
    torch.testing.assert_close(both, torch.ones_like(both))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_constant_added_to_all_components_shows_only_without_layer_norm(family) -> None:
    theta = noise(D_MODEL, seed=1)
    found = task_alignment(model_of(family), task_of(LABELS), {"a": theta, "b": theta + 7})
    same = abs(found["a"] - found["b"]) < 1e-10
    assert same == is_centred(family)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_random_vectors_are_aligned_as_said(family) -> None:
    span = AnswerSpan.of(model_of(family), task_of(MANY))
    drawn = span.alignment(noise(20_000, D_MODEL, seed=4))
    typical, low, high = span.of_random
    assert float(drawn.square().mean().sqrt()) == pytest.approx(typical, rel=0.01)
    np.testing.assert_allclose(np.quantile(drawn, [0.025, 0.975]), [low, high], atol=0.01)
    assert typical == pytest.approx((5 / (D_MODEL - is_centred(family))) ** 0.5)


def test_open_answers_span_the_first_tokens_of_the_training_answers() -> None:
    model, task = model_of("llama"), task_of()
    answers = Prompts.of(model, task, split="train", seed=2).answers
    tokens = sorted({ids[0] for ids in answers})
    span = AnswerSpan.of(model, task, seed=2)
    rows = (model.W_U[:, tokens].detach().T * gain_by_hand("llama")).T
    x = noise(D_MODEL, seed=1)
    assert span.n_tokens == len(tokens) > 3
    assert float(span.alignment(x)) == pytest.approx(by_hand(x, rows, False), rel=1e-10)


def test_fewer_dimensions_are_those_that_hold_most_of_the_rows() -> None:
    model, task = model_of("gpt2"), task_of(MANY)
    rows = rows_by_hand("gpt2", MANY, gain=True).T
    left_out = [
        float((rows - rows @ basis.T @ basis).square().sum())
        for basis in (AnswerSpan.of(model, task, dimensions=d).basis for d in range(1, 6))
    ]
    sizes = torch.linalg.svdvals(rows).square()
    wanted = [float(sizes[d:].sum()) for d in range(1, 6)]
    np.testing.assert_allclose(left_out, wanted, atol=1e-10)
    found = task_alignment(model, task, {"a": noise(D_MODEL)}, dimensions=2)
    assert found.table()["dimensions"].tolist() == [2]
    for wrong in (0, 6):
        with pytest.raises(InvalidInput, match=f"dimensions={wrong} cannot be: .* span 5; use 1"):
            task_alignment(model, task, {"a": noise(D_MODEL)}, dimensions=wrong)


def test_task_vectors_are_taken_and_the_table_says_what_random_vectors_have() -> None:
    model, vector = model_of("llama"), additive(model_of("llama"), layer=1)
    theta = vector.value().reshape(-1)
    found = task_alignment(model, task_of(LABELS), {"theta": vector, "Q theta": theta, "c": -theta})
    np.testing.assert_allclose(found.values, found["theta"], rtol=1e-12)
    table = found.table()
    assert table["vector"].tolist() == ["theta", "Q theta", "c"]
    assert (table["random_low"] < table["random"]).all()
    assert (table["random"] < table["random_high"]).all()
    row = table.iloc[0]
    assert (row["dimensions"], row["of"], row["tokens"], row["gain"]) == (3, D_MODEL, 3, True)
    assert (row["task"], row["weights"]) == ("invented", "raw")


@functools.cache
def narrow():
    """A model with fewer dimensions than the task has answers."""
    return tiny("llama", hidden_size=8)


def test_answers_that_span_everything_are_refused_unless_dimensions_are_few() -> None:
    task, vectors = task_of(), {"a": noise(8)}
    assert AnswerSpan.of(narrow(), task).of_random == (1.0, 1.0, 1.0)
    with pytest.raises(InvalidInput, match=r"answers span all 8 dimensions, .* give dimensions="):
        task_alignment(narrow(), task, vectors)
    assert task_alignment(narrow(), task, vectors, dimensions=3)["a"] < 1


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_one_sentence() -> None:
    model, task = model_of("llama"), task_of(LABELS)
    with pytest.raises(InvalidInput, match="'b' is zero, so it has no direction"):
        task_alignment(model, task, {"a": torch.ones(D_MODEL), "b": torch.zeros(D_MODEL)})
    with pytest.raises(InvalidInput, match=r"'a' has the shape \(5,\)"):
        task_alignment(model, task, {"a": torch.ones(5)})
    with pytest.raises(InvalidInput, match="There are no vectors"):
        task_alignment(model, task, {})


def test_the_model_is_left_alone() -> None:
    model = tiny("gemma3")
    with left_alone(model):
        task_alignment(model, task_of(LABELS), {"a": noise(D_MODEL)})


@pytest.mark.model
def test_an_unembedding_row_of_the_real_model_is_wholly_aligned(model) -> None:
    task = mechtv.get_task("singular-plural")
    token = Prompts.of(model, task, split="train").answers[0][0]
    row = model.W_U[:, token].detach() * model.ln_final.weight.detach()
    found = task_alignment(model, task, {"row": row, "random": noise(576)})
    assert found["row"] == pytest.approx(1, abs=1e-6)
    assert found["random"] < 0.95

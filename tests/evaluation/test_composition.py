"""Sums of vectors on a composed task against evaluate, and what is refused."""

import numpy as np
import pytest
import torch
from evaluation.invented import LABELS, model_of, task_of
from evaluation.made import a_vector, some

from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.evaluation.composition import evaluate_composition
from mechtv.vectors import Replace

SCORES = ("full vocabulary", "label-restricted", "exact match", "log-probability")


@pytest.mark.parametrize("weights", [None, {"b": 0.5, "a": -1.0}])
def test_the_parts_their_sum_and_the_plain_model_are_scored_on_the_same_queries(weights):
    model, task = model_of(), task_of(LABELS)
    parts = {"a": a_vector(0), "b": a_vector(1, 0)}
    found = evaluate_composition(model, task, parts, weights=weights)
    together = parts["a"] + parts["b"]
    if weights:
        together = (-1.0 * parts["a"]) + 0.5 * parts["b"]
    wanted = {**parts, "sum": together, "zero-shot": None}
    assert list(found.evaluations) == list(wanted)
    for name, vector in wanted.items():
        np.testing.assert_allclose(
            found.evaluations[name].log_probabilities,
            evaluate(model, task, vector).log_probabilities,
            atol=1e-10,
            rtol=0,
        )
    for mine, theirs in zip(found.vector.edits, together.edits, strict=True):
        assert torch.equal(mine.operation.value, theirs.operation.value)


def test_the_sum_is_compared_with_its_best_part():
    model, task = model_of(), task_of(LABELS)
    parts = {"a": a_vector(0), "b": a_vector(1, 0), "c": a_vector(2, 2)}
    found = evaluate_composition(model, task, parts)
    ranks = {
        name: (
            found.evaluations[name].accuracy.value,
            found.evaluations[name].log_probability.value,
        )
        for name in parts
    }
    best = max(ranks, key=ranks.get)
    assert found.best_part == best
    comparison = found.comparison()
    assert tuple(comparison["score"]) == SCORES
    assert set(comparison["best_part"]) == {best}
    for row in comparison.to_dict("records"):
        wanted = found.evaluations["sum"].compare(found.evaluations[best], row["score"])
        assert row["difference"] == wanted.difference.value
        assert (row["low"], row["high"]) == (wanted.difference.low, wanted.difference.high)
        assert row["p_value"] == wanted.p_value
        assert row["n"] == 8
    table = found.table()
    assert list(dict.fromkeys(table["part"])) == ["a", "b", "c", "sum", "zero-shot"]
    assert len(table) == 5 * 4


def test_open_answers_have_no_label_restricted_comparison():
    found = evaluate_composition(model_of(), task_of(), {"a": a_vector(0), "b": a_vector(1)}, n=3)
    assert "label-restricted" not in set(found.comparison()["score"])
    assert len(found.comparison()) == 3


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"n": 3}, {"n": 3}),
        ({"n": 99}, {}),
        ({"seed": 2}, {"seed": 2}),
        ({"split": "validation"}, {"split": "validation"}),
        ({"batch_size": 2}, {}),
    ],
)
def test_options_say_which_queries_are_scored(options, wanted):
    model, task = model_of(), task_of()
    found = evaluate_composition(model, task, {"a": a_vector(0), "b": a_vector(1)}, **options)
    plain = evaluate(model, task, **wanted)
    assert found.evaluations["zero-shot"].queries == plain.queries
    np.testing.assert_allclose(
        found.evaluations["zero-shot"].log_probabilities,
        plain.log_probabilities,
        atol=1e-10,
        rtol=0,
    )


def test_parts_of_several_seeds_need_one_given():
    parts = {"a": a_vector(0, made_with=1), "b": a_vector(1, made_with=2)}
    with pytest.raises(InvalidInput, match=r"seeds \[1, 2\], so one's test queries"):
        evaluate_composition(model_of(), task_of(), parts)
    found = evaluate_composition(model_of(), task_of(), parts, seed=1)
    assert found.evaluations["sum"].provenance.seed == 1


def test_a_bar_shows_where_it_is_asked_for(capsys):
    parts = {"a": a_vector(0), "b": a_vector(1)}
    evaluate_composition(model_of(), task_of(), parts, n=2, progress=False)
    assert capsys.readouterr().err == ""
    evaluate_composition(model_of(), task_of(), parts, n=2, progress=True)
    assert "vectors on invented" in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("parts", "options", "sentence"),
    [
        ({}, {}, "no vectors to score"),
        ({"a": a_vector()}, {}, "One part, 'a', is no composition; give two or more"),
        ({"a": a_vector(), "sum": a_vector()}, {}, "A vector is named 'sum'"),
        (some(), {"weights": {"early": 1.0}}, r"weights \['early'\] do not fit the parts"),
        ({"a": a_vector(), "b": a_vector(operation=Replace)}, {}, "Only additive .* 'replace'"),
        ({"a": a_vector(), "b": a_vector(acts_on="both")}, {}, "One vector acts on 'prompt'"),
    ],
)
def test_what_cannot_be_is_one_sentence(parts, options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        evaluate_composition(model_of(), task_of(), parts, **options)

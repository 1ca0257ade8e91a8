"""The best layer is the one that scores best on queries which are not the test's."""

from functools import partial

import pytest
from evaluation.invented import LABELS, model_of, task_of

from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation import evaluate
from mechtv.methods import choose_layer, extract_hidden_state

OPTIONS = {"shots": 2, "n": 4}


def hidden(labels=None):
    return partial(extract_hidden_state, model_of(), task_of(labels), **OPTIONS)


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
def test_each_layer_is_scored_as_evaluate_does_and_the_best_is_taken(labels):
    model, task = model_of(), task_of(labels)
    choice = choose_layer(model, task, hidden(labels))
    alone = [evaluate(model, task, hidden(labels)(layer), split="validation") for layer in range(3)]
    assert choice.by == ("label-restricted" if labels else "full vocabulary")
    scores = [e.label_accuracy if labels else e.accuracy for e in alone]
    ranks = [(s.value, e.log_probability.value) for s, e in zip(scores, alone, strict=True)]
    assert len(set(ranks)) == 3
    assert choice.layer == ranks.index(max(ranks))
    assert choice.vector.sites[0].layer == choice.layer
    table = choice.table()
    assert table["value"].tolist() == [s.value for s in scores]
    assert table["log_probability"].tolist() == [rank[1] for rank in ranks]
    assert set(table["n"]) == {8}
    assert set(table["split"]) == {"validation"}
    assert table["best"].tolist() == [layer == choice.layer for layer in range(3)]


def test_other_scores_other_splits_fewer_layers_and_queries():
    model, task = model_of(), task_of()
    choice = choose_layer(
        model, task, hidden(), (2, 0), by="log-probability", split="train", n=3, seed=1
    )
    assert choice.layers == (0, 2)
    for evaluation, vector in zip(choice.evaluations, choice.vectors, strict=True):
        alone = evaluate(model, task, vector, split="train", n=3, seed=1)
        assert alone.log_probability == evaluation.log_probability
    best = max(choice.evaluations, key=lambda e: e.log_probability.value)
    assert choice.layer == choice.layers[choice.evaluations.index(best)]


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_one_sentence():
    model, task = model_of(), task_of()
    with pytest.raises(InvalidInput, match="must name one or more distinct layers"):
        choose_layer(model, task, hidden(), [])
    with pytest.raises(InvalidInput, match='open answers; choose its layer by="full vocabulary"'):
        choose_layer(model, task, hidden(), by="label-restricted")
    with pytest.raises(UnknownName, match="fluency"):
        choose_layer(model, task, hidden(), [0], by="fluency")

"""Each place's score is that of the method's vector put there by hand."""

import sys
from functools import cache

import pytest
from builders import tiny
from evaluation.invented import LABELS, task_of

from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation import evaluate
from mechtv.methods import (
    extract_function_vector,
    extract_hidden_state,
    learn,
    measure_head_effects,
)
from mechtv.study import flexibility
from mechtv.study.flexibility import places
from mechtv.vectors import Edit, TaskVector

OPTIONS = {
    "hidden_state": {"n": 4},
    "function_vector": {"shots": 3, "n": 4, "n_shuffled": 3},
    "learned": {"epochs": 1},
}
LAST_FIVE = (-5, -4, -3, -2, -1)


@cache
def model():
    return tiny("llama", num_hidden_layers=8, max_position_embeddings=400)


def task():
    return task_of(LABELS).with_template("qa")


@pytest.fixture(scope="module")
def table():
    return flexibility(model(), task(), shots=2, options=OPTIONS)


def value(table, place, method, score="log-probability"):
    own = table[(table["place"] == place) & (table["method"] == method)]
    return own.set_index("score")["value"][score]


def test_every_method_stands_at_every_place_beside_the_plain_model(table):
    assert list(dict.fromkeys(table["place"])) == [
        "no vector",
        "last token",
        "position -4",
        "last 5 positions",
        "every 4th layer",
        "every 4th layer, last 5 positions",
        "last token of 2-shot prompts",
    ]
    assert (table.groupby(["place", "method"]).size() == 4).all()
    plain = evaluate(model(), task())
    in_context = evaluate(model(), task(), shots=2)
    assert value(table, "no vector", "zero-shot") == plain.log_probability.value
    assert value(table, "no vector", "in-context") == in_context.log_probability.value


@pytest.mark.parametrize(
    ("place", "layers", "positions", "shots"),
    [
        ("last token", (4,), (-1,), 0),
        ("position -4", (4,), (-4,), 0),
        ("last 5 positions", (4,), LAST_FIVE, 0),
        ("every 4th layer", (3, 7), (-1,), 0),
        ("every 4th layer, last 5 positions", (3, 7), LAST_FIVE, 0),
        ("last token of 2-shot prompts", (4,), (-1,), 2),
    ],
)
def test_the_scores_are_those_of_the_vectors_made_alone(table, place, layers, positions, shots):
    hidden = extract_hidden_state(
        model(), task(), layers, positions=positions, operation="add", shots=2, n=4
    )
    effects = measure_head_effects(model(), task(), **OPTIONS["function_vector"])
    one = extract_function_vector(
        model(), task(), effects=effects, **OPTIONS["function_vector"]
    ).edits[0]
    everywhere = tuple(
        Edit(
            site=type(one.site)(layer=layer, positions=(position,)),
            operation=one.operation,
        )
        for layer in layers
        for position in positions
    )
    function = TaskVector(edits=everywhere, card=hidden.card)
    learned = learn(model(), task(), layers, positions=positions, shots=shots, **OPTIONS["learned"])
    for method, vector in (
        ("hidden_state", hidden),
        ("function_vector", function),
        ("learned", learned),
    ):
        alone = evaluate(model(), task(), vector, shots=shots)
        own = table[(table["place"] == place) & (table["method"] == method)]
        assert set(own["layers"]) == {", ".join(map(str, layers))}
        assert set(own["positions"]) == {", ".join(map(str, positions))}
        assert set(own["template"]) == {task().template.text}
        plain = value(table, "no vector", "in-context" if shots else "zero-shot")
        assert abs(alone.log_probability.value - plain) > 1e-6
        assert value(table, place, method) == pytest.approx(alone.log_probability.value, abs=1e-9)


def test_in_a_shallow_model_every_fourth_layer_is_the_last():
    spread = [p.layers for p in places(3, layer=1, other_position=-4, shots=2) if "4th" in p.name]
    assert spread == [(2,), (2,)]


def test_finished_places_are_kept(tmp_path, monkeypatch):
    options = {"shots": 2, "options": {"hidden_state": {"n": 4}}, "folder": str(tmp_path)}
    first = flexibility(model(), task(), ["hidden_state"], **options)
    monkeypatch.setattr(sys.modules["mechtv.study.flexibility"], "evaluate", None)
    assert flexibility(model(), task(), ["hidden_state"], **options).equals(first)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"methods": ["linear"]}, UnknownName, "linear"),
        ({"options": {"lerned": {}}}, InvalidInput, "options are given for lerned, which is not"),
        ({"layer": 8}, InvalidInput, "layer=8 does not exist"),
        ({"options": {"hidden_state": {"shotz": 2}}}, UnknownName, "did you mean 'shots'"),
        ({"options": {"hidden_state": {"positions": -2}}}, UnknownName, "positions"),
        ({"options": {"hidden_state": {"seed": 1}}}, UnknownName, "seed"),
        ({"other_position": -50}, InvalidInput, "Position -50 does not exist in a prompt"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, error, sentence):
    given = {"methods": ["hidden_state"], "options": {"hidden_state": {"n": 2}}} | options
    with pytest.raises(error, match=sentence):
        flexibility(model(), task(), given.pop("methods"), shots=2, **given)

"""A comparison's rows are those of each method called by itself; finished cells are kept."""

import math
from dataclasses import replace
from functools import cache, partial

import pandas as pd
import pytest
from builders import tiny
from evaluation.invented import LABELS, task_of

from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation import dntp, evaluate
from mechtv.methods import extract_function_vector, extract_hidden_state
from mechtv.methods.linear import fit_linear
from mechtv.methods.registry import METHODS, Method
from mechtv.study import MethodComparison, compare_methods, scoring
from mechtv.vectors import TaskVector

OPTIONS = {
    "hidden_state": {"shots": 2, "n": 4},
    "function_vector": {"shots": 3, "n": 4, "n_shuffled": 3},
    "state_vector": {"shots": 6},
    "i2cl": {"shots": 3, "epochs": 1},
    "linear": {"shots": 2, "n": 8},
    "learned": {"epochs": 1},
    "learned-dntp": {"epochs": 1, "icl_shots": 2},
}
LAYERS = (0, 2)


@cache
def model():
    return tiny("llama", max_position_embeddings=400)


def compared(tasks=None, names=None, **options):
    names = list(names or METHODS)
    given = {name: OPTIONS[name] for name in names}
    return compare_methods(
        model(),
        tasks or [task_of(LABELS)],
        names,
        LAYERS,
        **{"shots": 2, "options": given, "progress": False} | options,
    )


@pytest.fixture(scope="module")
def everything():
    return compared([task_of(LABELS)])


def test_every_method_is_scored_at_every_layer_on_test_and_validation(everything):
    table = everything.table()
    cells = table[["method", "layer"]].drop_duplicates()
    with_layer = [name for name, method in METHODS.items() if method.has_layer]
    assert len(cells) == 2 + 1 + len(LAYERS) * len(with_layer)
    for (name, layer), own in table.groupby(["method", "layer"], dropna=False):
        test = own[own["split"] == "test"]
        assert len(test) == 6, name
        assert set(test["n"]) == {8}
        assert (own["split"] == "validation").any() == (not pd.isna(layer))
    vectors = table[~table["method"].isin(["zero-shot", "in-context"])]
    assert (vectors["seconds_to_fit"] > 0).all()
    assert (vectors["parameters"] > 0).all()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("hidden_state", extract_hidden_state),
        ("linear", fit_linear),
        ("function_vector", extract_function_vector),
    ],
)
def test_the_scores_are_those_of_the_method_called_alone(everything, name, make):
    task, table = task_of(LABELS), everything.table()
    for layer in LAYERS:
        vector = make(model(), task, layer, **OPTIONS[name])
        own = table[(table["method"] == name) & (table["layer"] == layer)]
        value = own.set_index(["split", "score"])["value"]
        for split in ("test", "validation"):
            alone = evaluate(model(), task, vector, split=split)
            assert value[split, "log-probability"] == pytest.approx(alone.log_probability.value)
            assert value[split, "accuracy, label-restricted"] == alone.label_accuracy.value
        for over in ("labels", "vocabulary"):
            alone = dntp(model(), task, vector, shots=2, over=over)
            assert value["test", f"dNTP over {over}"] == pytest.approx(alone.value, abs=1e-9)


def test_the_best_layer_is_chosen_on_validation(everything):
    table, best = everything.table(), everything.best()
    assert set(best["split"]) == {"test"}
    for name, own in best.groupby("method"):
        assert len(own) == 6
        layers = set(own["layer"].dropna())
        if name in OPTIONS and METHODS[name].has_layer:
            scores = table[(table["method"] == name) & (table["split"] == "validation")]
            by_layer = {
                layer: (
                    part.set_index("score")["value"]["accuracy, label-restricted"],
                    part.set_index("score")["value"]["log-probability"],
                )
                for layer, part in scores.groupby("layer")
            }
            assert layers == {max(by_layer, key=by_layer.get)}
        else:
            assert not layers


def test_the_wide_table_has_one_row_a_method(everything):
    wide = everything.wide()
    assert wide["method"].tolist() == ["zero-shot", "in-context", *METHODS]
    in_context = wide[wide["method"] == "in-context"].iloc[0]
    assert in_context["dNTP over labels"] == "0.00 [0.00, 0.00]"


def test_tasks_with_open_answers_have_no_label_scores():
    found = compared([task_of()], ["hidden_state"])
    assert "accuracy, label-restricted" not in set(found.table()["score"])
    assert len(found.best().query("method == 'hidden_state'")) == 5


def test_a_second_run_computes_nothing_and_an_interrupted_one_goes_on(tmp_path, monkeypatch):
    made = []

    def counting(model, task, layer, **options):
        made.append(layer)
        if len(made) == 2:
            raise KeyboardInterrupt
        return extract_hidden_state(model, task, layer, **options)

    monkeypatch.setitem(METHODS, "hidden_state", Method(make=counting))
    run = partial(compared, names=["hidden_state"], folder=str(tmp_path))
    told = []
    with pytest.raises(KeyboardInterrupt):
        run(on_finished=told.append)
    assert made == [0, 2]
    assert len(told) == 3  # zero-shot, in-context, and the first layer
    first = run(on_finished=told.append).table()
    assert made == [0, 2, 2]
    assert len(told) == 4
    monkeypatch.setattr(scoring, "Scorer", None)
    again = run(on_finished=told.append).table()
    assert made == [0, 2, 2]
    assert len(told) == 4
    assert first.equals(again)
    vectors = [TaskVector.load(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [vector.sites[0].layer for vector in vectors] == [0, 2]


def test_another_setting_is_computed_anew(tmp_path):
    run = partial(compared, names=["hidden_state"], folder=str(tmp_path))
    first = run().table()
    other = run(options={"hidden_state": {"shots": 3, "n": 4}}).table()
    mine = first["method"] == "hidden_state"
    assert not first[mine]["value"].equals(other[mine]["value"])
    assert first[~mine]["value"].equals(other[~mine]["value"])
    assert not run(seed=1).table()["value"].equals(first["value"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"methods": ["lerned"]}, UnknownName, "lerned.*learned"),
        ({"layers": ()}, InvalidInput, "must name one or more distinct layers"),
        ({"options": {"learned": {"epoch": 1}}}, UnknownName, "did you mean 'epochs'"),
        ({"options": {"learned": {"seed": 1}}}, UnknownName, "seed"),
        ({"options": {"learned": {"layer": 1}}}, UnknownName, "layer"),
        ({"options": {"linear": {}}}, InvalidInput, "options are given for linear, which is not"),
        ({"tasks": []}, InvalidInput, "one or more with distinct names; none was given"),
        ({"tasks": [task_of(), task_of()]}, InvalidInput, "invented stand twice"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, error, sentence):
    given = {"tasks": [task_of()], "methods": ["learned"], "layers": LAYERS} | options
    with pytest.raises(error, match=sentence):
        compare_methods(model(), given.pop("tasks"), shots=2, **given)


def test_what_a_method_fixes_is_no_option_of_it():
    with pytest.raises(UnknownName, match="objective"):
        compared(
            names=["learned-dntp"], options={"learned-dntp": {"epochs": 1, "objective": "answer"}}
        )


def test_given_heads_are_not_ranked(monkeypatch):
    monkeypatch.setattr("mechtv.methods.registry.measure_head_effects", None)
    options = {"function_vector": {"shots": 1, "n": 3, "heads": [[0, 1], [2, 3]]}}
    table = compared(names=["function_vector"], options=options).table()
    vector = extract_function_vector(
        model(), task_of(LABELS), 2, shots=1, n=3, heads=((0, 1), (2, 3))
    )
    own = table[(table["method"] == "function_vector") & (table["layer"] == 2)]
    value = own.set_index(["split", "score"])["value"]["test", "log-probability"]
    assert value == pytest.approx(evaluate(model(), task_of(LABELS), vector).log_probability.value)


def test_more_queries_than_there_are_are_all_of_them():
    whole = compared(names=["hidden_state"], n=999, n_validation=999).table()
    assert set(whole["n"]) == {8}
    assert compared(names=["hidden_state"]).table()["value"].equals(whole["value"])


def test_comparisons_are_joined_unless_they_hold_the_same_cell():
    first, second = (compared([task], ["hidden_state"]) for task in (task_of(LABELS), other_task()))
    both = MethodComparison.of(first, second)
    assert len(both.table()) == len(first.table()) + len(second.table())
    with pytest.raises(InvalidInput, match="stands in two of the comparisons"):
        MethodComparison.of(first, compared([task_of(LABELS)], ["hidden_state"], seed=1))


def other_task():
    return replace(task_of(), name="other")


def test_seconds_of_what_layers_share_count_for_each_layer(everything):
    table = everything.table()
    seconds = table[table["method"] == "function_vector"].groupby("layer")["seconds_to_fit"].first()
    assert len(seconds) == 2
    assert math.isclose(*seconds, rel_tol=0.9)

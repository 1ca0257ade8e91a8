"""The efficiency table: its rows against evaluate, and what cannot stand in one table."""

from dataclasses import replace

import pytest
import torch
from builders import D_MODEL
from evaluation.invented import LABELS, task_of
from methods.plain import SHORT, model_of

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.methods.baselines import train_baseline
from mechtv.methods.efficiency import efficiency
from mechtv.vectors import Add, Card, Edit, Linear, Site, TaskVector


def vectors():
    card = Card(method="by hand", settings={"layer": 1})
    add = Edit(site=Site(layer=1), operation=Add(value=torch.ones(D_MODEL)))
    linear = Edit(site=Site(layer=2), operation=Linear(matrix=torch.eye(D_MODEL)))
    return {
        "added": TaskVector(edits=(add,), card=card),
        "linear": TaskVector(edits=(linear,), card=card),
    }


def test_one_table_compares_all():
    model, task = model_of(), task_of(LABELS)
    trained = train_baseline(model, task, "lora", **SHORT)
    found = efficiency(model, task, vectors(), baselines=[trained], shots=3, n=4, batch_size=2)
    table = found.table().set_index("setting")
    assert list(table.index) == ["zero-shot", "in-context", "added", "linear", "lora"]
    assert table["parameters"].tolist() == [0, 0, D_MODEL, D_MODEL**2, 64 + D_MODEL]
    wanted = {
        "zero-shot": evaluate(model, task, n=4),
        "in-context": evaluate(model, task, shots=3, n=4),
        "added": evaluate(model, task, vectors()["added"], n=4),
        "lora": trained.evaluation,
    }
    for name, evaluation in wanted.items():
        assert table.loc[name, "accuracy"] == evaluation.accuracy.value
        assert table.loc[name, "low"] == evaluation.accuracy.low
        assert table.loc[name, "label_accuracy"] == evaluation.label_accuracy.value
        assert table.loc[name, "n"] == 4
        assert found[name].evaluation.queries == wanted["zero-shot"].queries
    assert (table["seconds_per_query"] > 0).all()
    assert table["batch_size"].tolist() == [2, 2, 2, 2, 4]
    assert table["seconds_training"].notna().tolist() == [False] * 4 + [True]
    lengths = table["tokens_per_query"]
    assert lengths["in-context"] > 2 * lengths["zero-shot"] == 2 * lengths["added"]
    assert (table["model"] == mechtv.models.describe(model).name).all()
    with pytest.raises(KeyError):
        found["prompt"]


def test_one_vector_goes_by_its_method():
    found = efficiency(model_of(), task_of(), vectors()["added"], shots=1, n=3)
    assert [row.name for row in found.rows] == ["zero-shot", "in-context", "by hand"]
    assert found.table()["label_accuracy"].isna().all()
    assert found["by hand"].settings == {"layer": 1}


def test_the_queries_are_those_of_the_vectors_seed():
    model, task = model_of(), task_of()
    added = vectors()["added"]
    of_seed = {s: replace(added, card=replace(added.card, seed=s)) for s in (3, 4)}
    found = efficiency(model, task, of_seed[3], shots=1, n=3)
    assert found["by hand"].evaluation.queries == evaluate(model, task, seed=3, n=3).queries
    assert found["zero-shot"].evaluation.provenance.seed == 3
    both = {"a": of_seed[3], "b": of_seed[4]}
    with pytest.raises(InvalidInput, match=r"splits of the seeds \[3, 4\]"):
        efficiency(model, task, both, shots=1, n=3)
    given = efficiency(model, task, both, shots=1, n=3, seed=1, split="validation")
    wanted = evaluate(model, task, seed=1, n=3, split="validation")
    assert {row.evaluation.queries for row in given.rows} == {wanted.queries}


def test_a_bar_shows_where_it_is_asked_for(capsys):
    efficiency(model_of(), task_of(), shots=1, n=2, progress=False)
    assert capsys.readouterr().err == ""
    efficiency(model_of(), task_of(), shots=1, n=2, progress=True)
    assert "in-context, invented" in capsys.readouterr().err


def test_the_table_refuses_what_cannot_be_compared():
    model, task = model_of(), task_of()
    trained = train_baseline(model, task, "prompt", **SHORT)
    added = vectors()["added"]
    for options, sentence in (
        ({"baselines": [trained]}, "baseline 'prompt' was scored on other queries"),
        ({"vectors": {"zero-shot": added}}, "Two rows would be named 'zero-shot'"),
        ({"baselines": [trained, trained], "n": 4}, "Two rows would be named 'prompt'"),
        ({"vectors": {"prompt": added}, "baselines": [trained]}, "be named 'prompt'; name the"),
        ({"batch_size": 0}, "batch_size=0 is too small"),
        ({"shots": 0}, "shots=0 is too small; use 1 or more"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            efficiency(model, task, **{"n": 3, "shots": 1} | options)
    other = replace(trained, name="another prompt")
    found = efficiency(model, task, baselines=[trained, other], shots=1, n=4)
    assert [row.name for row in found.rows[2:]] == ["prompt", "another prompt"]

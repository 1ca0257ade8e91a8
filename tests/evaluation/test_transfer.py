"""Each vector on each task against evaluate, and what is refused."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import D_MODEL, tiny
from evaluation.invented import model_of, task_of
from evaluation.made import a_vector, noise, some, two_tasks
from evaluation.naive import naive_logits, row_of

import mechtv
from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation import evaluate
from mechtv.evaluation.transfer import transfer_matrix
from mechtv.forward import full_passes, memory
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Affine, Edit, Site

SCORES = ("full vocabulary", "label-restricted", "exact match", "log-probability")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_entry_is_what_evaluate_gives(family):
    model, vectors, tasks = model_of(family), some(), two_tasks()
    found = transfer_matrix(model, vectors, tasks)
    for task in tasks:
        for name, vector in {**vectors, "zero-shot": None}.items():
            with full_passes():
                wanted = evaluate(model, task, vector)
            entry = found[name, task.name]
            np.testing.assert_allclose(
                entry.log_probabilities, wanted.log_probabilities, atol=1e-10, rtol=0
            )
            assert entry.queries == wanted.queries
            assert (entry.correct == wanted.correct).all()
            assert entry.accuracy == wanted.accuracy
            assert entry.label_accuracy == wanted.label_accuracy
            assert entry.provenance == wanted.provenance
    assert not np.allclose(
        found["early", "open"].log_probabilities, found["zero-shot", "open"].log_probabilities
    )


def test_an_entry_is_the_share_of_single_passes_that_are_right():
    model, vectors, tasks = model_of(), some(), two_tasks()
    found = transfer_matrix(model, vectors, tasks, n=4)
    for task in tasks:
        prompts = Prompts.of(model, task, n=4)
        for name, vector in vectors.items():
            hits = []
            for row in range(4):
                ids = row_of(prompts, row)
                logits = naive_logits(model, ids, len(ids), vector)[-1]
                hits.append(int(logits.argmax()) == prompts.answers[row][0])
            assert found[name, task.name].correct.tolist() == hits


def test_the_matrix_has_a_row_a_vector_and_one_for_the_plain_model():
    found = transfer_matrix(model_of(), some(), two_tasks(), n=5)
    for score in SCORES:
        matrix = found.matrix(score)
        assert list(matrix.index) == ["early", "late", "both", "zero-shot"]
        assert list(matrix.columns) == ["open", "closed"]
    assert found.matrix().loc["late", "closed"] == found["late", "closed"].accuracy.value
    labels = found.matrix("label-restricted")
    assert labels["open"].isna().all()
    assert labels.loc["both", "closed"] == found["both", "closed"].label_accuracy.value
    chances = found.matrix("log-probability")
    assert chances.loc["zero-shot", "open"] == found["zero-shot", "open"].log_probability.value
    assert chances["open"].nunique() == 4


def test_the_table_has_intervals_and_says_what_each_vector_was_made_for():
    table = transfer_matrix(model_of(), some(), two_tasks(), n=5).table()
    assert list(table.columns[:2]) == ["vector", "made_for"]
    assert len(table) == 4 * (3 + 4)
    made_for = dict(zip(table["vector"], table["made_for"], strict=True))
    assert made_for["late"] == "closed"
    assert made_for["early"] == "open"
    assert table["made_for"].isna().sum() == 3 + 4
    assert (table["low"] <= table["value"]).all()
    assert (table["value"] <= table["high"]).all()
    assert (table["n"] == 5).all()


def test_queries_follow_the_vectors_seed():
    model, tasks = model_of(), two_tasks()[:1]
    vectors = {"a": a_vector(0, made_with=4), "b": a_vector(1, made_with=4)}
    found = transfer_matrix(model, vectors, tasks)
    assert found["a", "open"].queries == evaluate(model, tasks[0], seed=4).queries
    summed = transfer_matrix(model, {"sum": vectors["a"] + vectors["b"]}, tasks)
    assert summed["sum", "open"].queries == found["a", "open"].queries
    given = transfer_matrix(model, vectors, tasks, seed=1)
    assert given["a", "open"].queries == evaluate(model, tasks[0], seed=1).queries
    mixed = {"a": vectors["a"], "b": a_vector(1, made_with=5)}
    with pytest.raises(InvalidInput, match=r"seeds \[4, 5\], so one's test queries are another's"):
        transfer_matrix(model, mixed, tasks)


def test_it_is_the_same_every_time_and_leaves_the_model_alone():
    model = tiny("llama")
    before = {name: x.clone() for name, x in model.named_parameters()}
    first, again = (transfer_matrix(model, some(), two_tasks(), n=4) for _ in range(2))
    assert first.table().equals(again.table())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None
    assert all(not point.fwd_hooks for point in model.hook_dict.values())


def test_where_a_split_is_smaller_all_of_it_is_taken():
    tasks = [replace(task_of(n=15), name="small"), replace(task_of(), name="large")]
    found = transfer_matrix(model_of(), some(), tasks, n=6)
    assert len(found["early", "small"].queries) == 3
    assert len(found["early", "large"].queries) == 6


def test_the_prompts_of_a_task_run_once(caplog):
    """Behind them, each vector's passes begin where the first vector acts."""
    caplog.set_level(logging.INFO, "mechtv")
    model = tiny("llama")
    rows, original = [], memory.Fitness.prefix
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            memory.Fitness, "prefix", lambda *a, **k: (rows.append(1), original(*a, **k))[1]
        )
        late = {name: a_vector(seed, 2) for seed, name in enumerate("abc")}
        transfer_matrix(model, late, two_tasks())
    assert len(rows) == 2
    assert "full pass" not in caplog.text


def test_the_split_that_is_asked_for_is_scored():
    model, task = model_of(), task_of()
    found = transfer_matrix(model, some(), [task], split="validation", batch_size=3)
    wanted = evaluate(model, task, split="validation")
    entry = found["zero-shot", "invented"]
    assert (entry.split, entry.queries) == ("validation", wanted.queries)
    np.testing.assert_allclose(
        entry.log_probabilities, wanted.log_probabilities, atol=1e-10, rtol=0
    )


def test_a_bar_shows_where_it_is_asked_for(capsys):
    transfer_matrix(model_of(), some(), [task_of()], n=2, progress=False)
    assert capsys.readouterr().err == ""
    transfer_matrix(model_of(), some(), [task_of()], n=2, progress=True)
    assert "vectors on invented" in capsys.readouterr().err


def wide_edit():
    return Edit(site=Site(layer=1), operation=Add(value=noise(48)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m, t: transfer_matrix(m, {}, [t]), "no vectors to score; give at least one"),
        (lambda m, t: transfer_matrix(m, some(), []), "no tasks to score on; give at least one"),
        (lambda m, t: transfer_matrix(m, some(), [t, t]), "must have distinct names"),
        (
            lambda m, t: transfer_matrix(m, {"zero-shot": a_vector()}, [t]),
            "named 'zero-shot', which names a row of its own",
        ),
        (lambda m, t: transfer_matrix(m, some(), [t], n=0), "n=0 examples .* holds 8"),
        (lambda m, t: transfer_matrix(m, some(), [t], batch_size=0), "batch_size=0 is too small"),
        (
            lambda m, t: transfer_matrix(
                m, {"wide": replace(a_vector(), edits=(wide_edit(),))}, [t]
            ),
            "width 48 but the model's d_model is 32",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(call, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        call(model_of(), task_of())


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_score_is_one_sentence():
    found = transfer_matrix(model_of(), some(), [task_of()], n=2)
    with pytest.raises(UnknownName, match="no score named 'exact'; did you mean 'exact match'"):
        found.matrix("exact")


def test_vectors_that_do_not_add_can_be_transferred():
    scale = torch.tensor(0.5, dtype=torch.float64)
    edit = Edit(site=Site(layer=1), operation=Affine(scale=scale, value=noise(D_MODEL)))
    vector = replace(a_vector(), edits=(edit,))
    found = transfer_matrix(model_of(), {"affine": vector}, [task_of()])
    wanted = evaluate(model_of(), task_of(), vector)
    np.testing.assert_allclose(
        found["affine", "invented"].log_probabilities, wanted.log_probabilities, atol=1e-10, rtol=0
    )


@pytest.mark.model
def test_a_state_of_the_real_model_serves_its_own_task_best(model):
    tasks = [mechtv.get_task("singular-plural"), mechtv.get_task("country-capital")]
    vectors = {
        task.name: mechtv.extract_hidden_state(model, task, 20, shots=4, n=6, operation="add")
        for task in tasks
    }
    chances = transfer_matrix(model, vectors, tasks, n=8).matrix("log-probability")
    for task in tasks:
        assert chances[task.name].idxmax() == task.name

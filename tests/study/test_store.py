"""Finished cells are there again, unfinished or others never."""

import json
from dataclasses import replace

import pytest
import torch
from builders import tiny
from evaluation.invented import LABELS, task_of

from mechtv.errors import InvalidInput
from mechtv.study.store import Store, key_of
from mechtv.tasks.template import TEMPLATES

KEY = {"task": "present/past", "method": "learned", "layer": 3, "labels": ("a", "b"), "n": None}
ROWS = [{"score": "accuracy", "value": 0.25, "low": float("nan")}]


def test_a_cell_is_there_again_in_another_store_on_the_same_folder(tmp_path):
    Store(tmp_path / "a" / "b").keep(KEY, ROWS)
    (row,) = Store(tmp_path / "a" / "b").rows(KEY)
    assert (row["score"], row["value"]) == ("accuracy", 0.25)
    assert row["low"] != row["low"]
    (file,) = (tmp_path / "a" / "b").iterdir()
    assert file.name.startswith("present_past-learned-3-")


@pytest.mark.parametrize("name", KEY)
def test_a_cell_with_another_key_is_another_cell(tmp_path, name):
    store = Store(tmp_path)
    store.keep(KEY, ROWS)
    assert store.rows(KEY | {name: "other"}) is None
    assert store.path(KEY, ".json") != store.path(KEY | {name: "other"}, ".json")


def test_without_a_folder_nothing_is_kept():
    store = Store(None)
    store.keep(KEY, ROWS)
    assert store.rows(KEY) is None
    assert store.path(KEY, ".json") is None


@pytest.mark.parametrize("content", ["", '{"key"', "[]", '{"rows": []}'])
def test_a_damaged_cell_is_one_sentence(tmp_path, content):
    store = Store(tmp_path)
    store.path(KEY, ".json").write_text(content)
    with pytest.raises(InvalidInput, match=r"is no finished cell .* delete it to compute it anew"):
        store.rows(KEY)


def test_a_digest_that_two_keys_share_is_no_cell_of_the_other(tmp_path):
    store = Store(tmp_path)
    store.path(KEY, ".json").write_text(json.dumps({"key": {"task": "else"}, "rows": ROWS}))
    assert store.rows(KEY) is None


TEMPLATE = TEMPLATES["arrow"]


def key(family="llama", task=None, seed=0, dtype=torch.float64, **settings):
    return key_of(tiny(family, dtype, seed=seed), task or task_of(), **settings)


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(seed=1),  # other weights of a model without a revision
        lambda: key(dtype=torch.float32),
        lambda: key("gpt2"),
        lambda: key(task=task_of(n=39)),
        lambda: key(task=task_of(LABELS)),
        lambda: key(task=task_of().with_template("qa")),
        lambda: key(task=task_of().with_template(replace(TEMPLATE, separator="; "))),
        lambda: key(task=task_of().as_chat()),
        lambda: key(task=bordered(task_of(), 30)),
        lambda: key(shots=3),
    ],
)
def test_whatever_changes_numbers_changes_the_key(other):
    assert other() != key()


def test_the_same_has_the_same_key():
    assert key(shots=3, options={"a": (1, 2)}) == key(shots=3, options={"a": (1, 2)})


def bordered(task, border):
    """The same examples, some of them as a test set of their own."""
    return replace(task, examples=task.examples[:border], test_examples=task.examples[border:])


def test_a_setting_that_cannot_be_written_down_is_one_sentence():
    with pytest.raises(InvalidInput, match=r"one of them is no plain value .* give numbers, texts"):
        key(options={"effects": object()})

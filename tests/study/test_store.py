"""Finished cells are there again, unfinished or others never."""

import json

import pytest
from evaluation.invented import task_of

from mechtv.errors import InvalidInput
from mechtv.study.store import Store, digest_of

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


def test_a_task_with_one_other_answer_has_another_digest():
    task = task_of()
    assert digest_of(task) == digest_of(task_of())
    assert digest_of(task) != digest_of(task_of(n=39))
    assert digest_of(task) != digest_of(task_of(("jump", "hot", "talked")))

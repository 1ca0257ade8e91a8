"""Finished cells are there again, unfinished or others never."""

import os
import time
from dataclasses import replace

import pytest
import torch
from builders import tiny
from evaluation.invented import LABELS, task_of

from mechtv.errors import InvalidInput
from mechtv.study.store import Store, digest_of, key_of
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


@pytest.mark.parametrize(
    "content", ["", '{"key"', "[]", "null", '"x"', '{"rows": []}', '{"checksum": 1}']
)
def test_a_damaged_cell_is_set_aside_with_a_sentence_in_the_log(tmp_path, content, caplog):
    store = Store(tmp_path)
    path = store.path(KEY, ".json")
    path.write_text(content)
    assert store.look(KEY).state == "damaged"
    assert path.is_file()  # looking changes nothing
    assert store.rows(KEY) is None
    assert "is no finished cell" in caplog.text
    assert path.with_name(path.name + ".damaged").read_text() == content
    assert store.keep(KEY, ROWS)
    assert store.look(KEY).state == "done"


def test_the_first_of_two_writers_wins(tmp_path):
    stores = [Store(tmp_path), Store(tmp_path)]
    assert stores[0].keep(KEY, [{"value": 1}])
    assert not stores[1].keep(KEY, [{"value": 2}])
    assert stores[1].rows(KEY) == [{"value": 1}]


def test_a_failure_stays_until_it_is_forgiven_or_the_cell_is_there(tmp_path):
    store = Store(tmp_path)
    assert store.look(KEY).state == "missing"
    store.fail(KEY, ValueError("no"))
    assert store.look(KEY).state == "failed"
    assert store.failure(KEY).error == "ValueError: no"
    store.forgive(KEY)
    assert store.look(KEY).state == "missing"
    store.fail(KEY, "died")
    store.keep(KEY, ROWS)
    assert store.look(KEY).state == "done"
    assert store.failure(KEY) is None


def test_a_damaged_failure_is_a_failure_still(tmp_path):
    store = Store(tmp_path)
    store.path(KEY, ".failed.json").write_text("{")
    assert store.look(KEY).state == "failed"
    assert "cannot be read" in store.failure(KEY).error


def test_cells_of_other_versions_are_older_and_the_newest_is_found(tmp_path):
    store = Store(tmp_path)
    keys = [KEY | {"versions": {"code": code}} for code in ("one", "two", "now")]
    for age, key in ((200, keys[0]), (100, keys[1])):
        store.keep(key, [{"value": age}])
        then = time.time() - age
        os.utime(store.path(key, ".json"), (then, then))
    found = store.look(keys[2])
    assert (found.state, found.rows) == ("older", ({"value": 100},))
    assert store.rows(keys[2]) is None
    assert store.look(keys[2] | {"n": 3}).state == "missing"
    store.path(keys[1], ".json").write_text("")
    assert Store(tmp_path).look(keys[2]).rows == ({"value": 200},)
    for key in keys[:2]:  # files that vanish are passed over
        store.path(key, ".json").unlink()
    assert store.look(keys[2]).state == "missing"


def test_cells_that_are_done_or_failed_are_counted_once(tmp_path):
    store = Store(tmp_path)
    assert (store.n_finished(), Store(None).n_finished()) == (0, 0)
    store.keep(KEY, ROWS)
    store.fail(KEY, "died afterwards")
    store.fail(KEY | {"n": 3}, "died")
    (tmp_path / ".a.json").touch()
    assert store.n_finished() == 2


def test_a_digest_is_of_keys_in_their_order():
    other = KEY | {"n": 3}
    assert digest_of([KEY, other]) == digest_of(iter([dict(KEY), other]))
    assert len({digest_of(some) for some in ([KEY], [other], [KEY, other], [other, KEY])}) == 4


def test_a_digest_that_two_keys_share_is_no_cell_of_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr("mechtv.study.store._settings", lambda key: "same")
    store = Store(tmp_path)
    store.keep(KEY, ROWS)
    assert store.rows(KEY | {"n": 3}) is None


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

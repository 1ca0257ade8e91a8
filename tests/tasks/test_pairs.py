"""Word pairs from files in the forms of Todd et al. and of Hendel et al."""

import json
import logging

import pytest

from mechtv.errors import InvalidInput
from mechtv.tasks.pairs import load_pairs
from mechtv.tasks.template import TEMPLATES

TODD = [
    {"input": "mop", "output": "pom"},
    {"input": "tar", "output": "rat"},
    {"input": "nib", "output": "bin"},
    {"input": "gum", "output": "mug"},
]


@pytest.fixture
def write(tmp_path):
    def write(plain, name="reversed.json"):
        path = tmp_path / name
        text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def pairs_of(task):
    return {example.fields["input"]: example.answer for example in task.examples}


@pytest.mark.parametrize("form", [TODD, {row["input"]: row["output"] for row in TODD}])
def test_both_forms_give_the_same_task(write, form):
    task = load_pairs(write(form))
    assert task.name == "reversed"
    assert task.template == TEMPLATES["arrow"]
    assert task.labels is None
    assert pairs_of(task) == {"mop": "pom", "tar": "rat", "nib": "bin", "gum": "mug"}


def test_the_path_may_be_a_text(write):
    assert len(load_pairs(str(write(TODD)))) == 4


@pytest.mark.parametrize(
    "form",
    [
        [{"input": "ein", "output": ["one", "a"]}, *TODD],
        {"ein": ["one", "a"], **{row["input"]: row["output"] for row in TODD}},
    ],
)
def test_the_first_of_several_answers_counts(write, form):
    assert pairs_of(load_pairs(write(form)))["ein"] == "one"


def test_texts_are_stripped_and_may_have_any_letters(write):
    task = load_pairs(write([{"input": " été ", "output": " летo\n"}, *TODD]))
    assert pairs_of(task)["été"] == "летo"


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    path = tmp_path / "marked.json"
    path.write_text(json.dumps(TODD), encoding="utf-8-sig")
    assert len(load_pairs(path)) == 4


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([*TODD, {"input": "mop ", "output": "other"}]),
        '{"mop": "pom", "tar": "rat", "nib": "bin", "mop": "other"}',
    ],
)
def test_of_a_repeated_input_the_first_is_kept_and_the_number_logged(write, caplog, text):
    with caplog.at_level(logging.INFO, logger="mechtv"):
        task = load_pairs(write(text))
    assert pairs_of(task)["mop"] == "pom"
    assert "reversed: 1 repeated inputs left out" in caplog.text


def test_labels_may_be_given(write):
    task = load_pairs(write(TODD), labels=["rat", "pom", "mug", "bin", "gin"])
    assert task.labels == ("rat", "pom", "mug", "bin", "gin")


def test_labels_may_be_inferred_in_order_of_appearance(write):
    rows = [{"input": str(number), "output": ["odd", "even"][number % 2]} for number in range(6)]
    assert load_pairs(write(rows), labels="infer").labels == ("odd", "even")


def test_labels_that_miss_an_answer_are_refused(write):
    with pytest.raises(InvalidInput, match="'bin'"):
        load_pairs(write(TODD), labels=["pom", "rat", "mug"])


def test_labels_are_no_single_text(write):
    with pytest.raises(InvalidInput, match="labels='pom' is one text"):
        load_pairs(write(TODD), labels="pom")


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ("[{", "is not JSON"),
        ([], "holds no pairs"),
        ({}, "holds no pairs"),
        ("3", "holds 3; expected"),
        (["mop"], 'pair 1: found "mop", expected'),
        ([*TODD, {"input": "cat"}], "pair 5: found"),
        ([*TODD, {"input": 7, "output": "seven"}], "pair 5: the input is 7"),
        ([*TODD, {"input": "cat", "output": None}], "pair 5: the output is null"),
        ([*TODD, {"input": "cat", "output": []}], r"pair 5: the output is \[\]"),
        ([*TODD, {"input": "cat", "output": " "}], "pair 5: the output is"),
        ({"mop": {"to": "pom"}}, "input 'mop': the output is"),
        (TODD[:2], "at least 3"),
    ],
)
def test_other_contents_are_named_with_what_is_expected(write, plain, message):
    with pytest.raises(InvalidInput, match=message):
        load_pairs(write(plain))


def test_a_missing_file_and_bytes_that_are_no_text_are_named(tmp_path):
    with pytest.raises(InvalidInput, match="There is no file"):
        load_pairs(tmp_path / "none.json")
    path = tmp_path / "bytes.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match=r"bytes\.json is not JSON"):
        load_pairs(path)


def test_a_long_value_is_shortened_in_the_message(write):
    with pytest.raises(InvalidInput) as caught:
        load_pairs(write(["x" * 1000]))
    assert len(str(caught.value)) < 400

"""The papers' data sets, from invented local files and from a hub that is made up."""

import csv
import json
import logging
import sys
from types import SimpleNamespace

import pytest

from mechtv.errors import InvalidInput, UnknownName
from mechtv.tasks import text as module
from mechtv.tasks.sources import TEXT_SOURCES, Source
from mechtv.tasks.template import TEMPLATES
from mechtv.tasks.text import load_text

WORDS = {
    "sst2": "negative positive",
    "sst5": "terrible negative neutral positive great",
    "mr": "negative positive",
    "subj": "objective subjective",
    "trec": "Abbreviation Entity Description Person Location Number",
    "hate-speech18": "neutral hate",
    "ag-news": "World Sports Business Technology",
    "dbpedia": "company school artist athlete politics transportation building nature village "
    "animal plant album film book",
    "rte": "true false",
    "snli": "true maybe false",
    "cb": "true false maybe",
}
"""The label words in the order of the hub's integers, written down a second time."""

QUERIES = {
    "sst2": "Review: A.\nSentiment:",
    "sst5": "Sentence: A.\nSentiment:",
    "mr": "Review: A.\nSentiment:",
    "subj": "Sentence: A.\nLabel:",
    "trec": "Question: A.\nAnswer Type:",
    "hate-speech18": "Text: A.\nLabel:",
    "ag-news": "News: A.\nType:",
    "dbpedia": "Input: A.\nLabel:",
    "rte": "The question is: A. ? The answer is: B.",
    "snli": "The question is: A. ? The answer is: B.",
    "cb": "The question is: A. ? The answer is: B.",
}
COLUMNS = {
    **dict.fromkeys(WORDS, ("text",)),
    "sst2": ("sentence",),
    "dbpedia": ("content",),
    "rte": ("sentence1", "sentence2"),
    "snli": ("premise", "hypothesis"),
    "cb": ("premise", "hypothesis"),
}
LABEL_COLUMN = {**dict.fromkeys(WORDS, "label"), "trec": "coarse_label"}
EVERY = pytest.mark.parametrize("name", sorted(WORDS))


def rows_of(name, start=0, copies=3):
    """Invented rows with the hub's columns: each label `copies` times, from text `start` on."""
    labels = [label for _ in range(copies) for label in range(len(WORDS[name].split()))]
    return [
        {
            **{column: f"{column} {start + number}" for column in COLUMNS[name]},
            LABEL_COLUMN[name]: label,
        }
        for number, label in enumerate(labels)
    ]


def write(path, rows):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def answers(examples):
    return [example.answer for example in examples]


def test_these_are_the_sources():
    assert set(TEXT_SOURCES) == set(WORDS)


@EVERY
def test_a_single_file_gives_examples_and_no_test_set(tmp_path, name):
    rows = rows_of(name)
    task = load_text(name, data=write(tmp_path / "some.jsonl", rows))
    words = WORDS[name].split()
    assert task.name == name
    assert task.labels == tuple(words)
    assert answers(task.examples) == [words[row[LABEL_COLUMN[name]]] for row in rows]
    assert task.test_examples == ()
    assert len(task.splits().test) >= 1


@EVERY
def test_the_prompt_is_the_papers(tmp_path, name):
    row = {**dict(zip(COLUMNS[name], ("A.", "B."), strict=False)), LABEL_COLUMN[name]: 0}
    task = load_text(name, data=write(tmp_path / "some.jsonl", [row, *rows_of(name)]))
    assert task.template.query(task.examples[0]) == QUERIES[name]


@EVERY
def test_label_words_and_the_names_of_the_hub_mean_the_same_as_integers(tmp_path, name):
    rows, label = rows_of(name), LABEL_COLUMN[name]
    words = WORDS[name].split()
    names = list(TEXT_SOURCES[name].labels)
    by_number = load_text(name, data=write(tmp_path / "a.jsonl", rows))
    for meaning in (words, names):
        spelled = [{**row, label: meaning[row[label]]} for row in rows]
        again = load_text(name, data=write(tmp_path / "b.json", spelled))
        assert answers(again.examples) == answers(by_number.examples)


@EVERY
def test_a_csv_file_is_read_too(tmp_path, name):
    rows = rows_of(name)
    from_csv = load_text(name, data=write_csv(tmp_path / "some.csv", rows))
    assert from_csv == load_text(name, data=write(tmp_path / "some.jsonl", rows))


@EVERY
@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_a_folder_of_several_sets_is_searched_by_name(tmp_path, name, held_out):
    for other in WORDS:
        stem = other.replace("-", "_")
        write(tmp_path / f"{stem}.train.jsonl", rows_of(other))
        write(tmp_path / f"{stem}.{held_out}.jsonl", rows_of(other, start=1000, copies=1))
    task = load_text(name, data=tmp_path)
    assert len(task.examples) == 3 * len(WORDS[name].split())
    assert len(task.test_examples) == len(WORDS[name].split())
    assert "1000" in task.test_examples[0].key[0]


@pytest.mark.parametrize("stem", ["", "ag-news.", "ag_news.", "my-copy."])
def test_the_names_a_file_in_a_folder_may_have(tmp_path, stem):
    write(tmp_path / f"{stem}train.jsonl", rows_of("ag-news"))
    write(tmp_path / f"{stem}test.jsonl", rows_of("ag-news", start=1000))
    task = load_text("ag-news", data=str(tmp_path))
    assert (len(task.examples), len(task.test_examples)) == (12, 12)


def test_a_folder_without_a_test_set_holds_one_out(tmp_path):
    write(tmp_path / "train.jsonl", rows_of("cb"))
    assert load_text("cb", data=tmp_path).test_examples == ()


def test_hidden_test_labels_are_not_asked_for_where_there_is_a_validation_set(tmp_path):
    write(tmp_path / "train.jsonl", rows_of("sst2"))
    write(tmp_path / "validation.jsonl", rows_of("sst2", start=1000))
    write(tmp_path / "test.jsonl", [{"sentence": "hidden", "label": -1}])
    assert "1000" in load_text("sst2", data=tmp_path).test_examples[0].key[0]


def test_a_validation_set_gives_examples_where_the_test_set_is_labelled(tmp_path):
    write(tmp_path / "train.jsonl", rows_of("mr"))
    write(tmp_path / "validation.jsonl", rows_of("mr", start=100))
    write(tmp_path / "test.jsonl", rows_of("mr", start=1000))
    task = load_text("mr", data=tmp_path)
    assert (len(task.examples), len(task.test_examples)) == (12, 6)


def test_the_file_of_another_set_is_not_taken(tmp_path):
    write(tmp_path / "sst5.train.jsonl", rows_of("sst5"))
    with pytest.raises(InvalidInput, match=r"no training file of 'mr'.*found sst5\.train\.jsonl"):
        load_text("mr", data=tmp_path)


def test_repeated_inputs_and_examples_in_the_test_set_are_left_out_and_counted(tmp_path, caplog):
    again = {"text": " text 0 ", "label": 1}
    write(tmp_path / "train.jsonl", [*rows_of("mr"), again, *rows_of("mr", start=1000, copies=1)])
    write(tmp_path / "test.jsonl", [*rows_of("mr", start=1000), rows_of("mr", start=1000)[0]])
    with caplog.at_level(logging.INFO, logger="mechtv"):
        task = load_text("mr", data=tmp_path)
    assert (len(task.examples), len(task.test_examples)) == (6, 6)
    assert task.examples[0].answer == "negative"
    assert "mr: 3 repeated inputs" in caplog.text
    assert "test set of mr: 1 repeated inputs" in caplog.text


def test_a_premise_may_recur_under_another_hypothesis(tmp_path):
    rows = [{"premise": "P.", "hypothesis": f"H{label}.", "label": label} for label in range(3)]
    assert len(load_text("snli", data=write(tmp_path / "some.jsonl", rows))) == 3


def test_texts_are_stripped_and_rows_without_text_or_label_left_out(tmp_path, caplog):
    rows = [
        {"premise": " P.\n", "hypothesis": "\tH. ", "label": 0},
        {"premise": "", "hypothesis": "H.", "label": 0},
        {"premise": "P.", "hypothesis": " ", "label": 0},
        {"premise": "unsure", "hypothesis": "H.", "label": -1},
        *rows_of("snli"),
    ]
    with caplog.at_level(logging.INFO, logger="mechtv"):
        task = load_text("snli", data=write(tmp_path / "some.jsonl", rows))
    assert task.examples[0].fields == {"premise": "P.", "hypothesis": "H."}
    assert len(task) == 10
    assert "3 rows without text or label left out" in caplog.text


def test_labels_of_no_use_are_left_out(tmp_path):
    rows = [*rows_of("hate-speech18"), {"text": "skip", "label": 2}, {"text": "by", "label": 3}]
    assert len(load_text("hate-speech18", data=write(tmp_path / "some.jsonl", rows))) == 6


def test_empty_lines_a_byte_order_mark_and_more_columns_are_no_matter(tmp_path):
    path = tmp_path / "some.jsonl"
    lines = [json.dumps({"idx": 7, **row}) for row in rows_of("cb")]
    path.write_text("\n\n".join(lines), encoding="utf-8-sig")
    assert len(load_text("cb", data=path)) == 9


def test_an_unknown_name_suggests_near_ones():
    with pytest.raises(UnknownName, match="sst2"):
        load_text("sst-2")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"sentence": "x", "label": 0},
            "line 7: nothing under text; found the columns sentence, label",
        ),
        (
            {"text": "x"},
            "line 7: nothing under label; found the columns text, expected text, label",
        ),
        ({"text": None, "label": 0}, "line 7: nothing under text"),
        ({"text": "x", "label": 2}, r"line 7: found the label '2'.*expected 0 \(negative\), 1"),
        ({"text": "x", "label": "good"}, "line 7: found the label 'good' under label"),
        ("[1, 2]", r"line 7: found '\[1, 2\]'; expected one JSON object a line"),
        ("{", "line 7: found no JSON"),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_what_is_expected(tmp_path, row, message):
    with pytest.raises(InvalidInput, match=message):
        load_text("mr", data=write(tmp_path / "some.jsonl", [*rows_of("mr"), row]))


def test_a_csv_row_that_does_not_fit_is_named_too(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text("text,label\nfine,0\nshort\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"some\.csv, line 3: nothing under label"):
        load_text("mr", data=path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InvalidInput, match="neither a file nor a folder"):
        load_text("mr", data=tmp_path / "none")
    with pytest.raises(
        InvalidInput, match=r"expected mr\.train\.jsonl or train\.jsonl.*found nothing"
    ):
        load_text("mr", data=tmp_path)
    with pytest.raises(InvalidInput, match=r"ends in '\.txt'; expected \.jsonl, \.json, \.csv"):
        load_text("mr", data=write(tmp_path / "some.txt", ["x"]))
    with pytest.raises(InvalidInput, match="no row with a text and a label out of 0"):
        load_text("mr", data=write(tmp_path / "empty.jsonl", [""]))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="cannot be read as UTF-8"):
        load_text("mr", data=tmp_path / "bytes.jsonl")


def test_a_source_has_the_fields_of_its_template():
    with pytest.raises(InvalidInput, match=r"\['premise'\].*reads \['text'\]"):
        Source(
            hub="some/where",
            description="",
            template="topic",
            labels={"a": "a"},
            fields={"premise": "premise"},
        )
    for source in TEXT_SOURCES.values():
        assert TEMPLATES[source.template].fields == set(source.fields)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the library `datasets`: it returns `splits` and remembers its calls."""
    made_up = SimpleNamespace(splits={}, calls=[])

    def load_dataset(*args, **kwargs):
        made_up.calls.append((args, kwargs))
        if isinstance(made_up.splits, Exception):
            raise made_up.splits
        return made_up.splits

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return made_up


@EVERY
def test_the_hub_gives_what_a_folder_gives(tmp_path, hub, name):
    source = TEXT_SOURCES[name]
    starts = {"train": 0, "validation": 100, "test": 1000}
    hub.splits = {split: rows_of(name, start) for split, start in starts.items()}
    for split in (*source.train, *([source.test] if source.test else [])):
        write(tmp_path / f"{split}.jsonl", hub.splits[split])
    assert load_text(name) == load_text(name, data=tmp_path)
    assert hub.calls == [((source.hub, source.config), {"revision": source.revision})]


def test_a_large_split_is_sampled_the_same_way_each_time(hub, monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_ROWS", 20)
    hub.splits = {"train": rows_of("mr", copies=50), "validation": [], "test": rows_of("mr", 1000)}
    hub.splits["validation"] = rows_of("mr", start=500)
    with caplog.at_level(logging.INFO, logger="mechtv"):
        task = load_text("mr")
    assert len(task.examples) == 26
    assert task == load_text("mr")
    assert "20 of 100 rows are read" in caplog.text


def test_a_row_of_the_hub_that_does_not_fit_is_named(hub):
    hub.splits = {"train": [{"text": "x", "label": 9}], "validation": [], "test": []}
    with pytest.raises(InvalidInput, match=r"SetFit/sst5 \(train\), row 0: found the label '9'"):
        load_text("sst5")


def test_a_missing_split_is_named(hub):
    hub.splits = {"train": rows_of("subj")}
    with pytest.raises(
        InvalidInput, match=r"has the splits \['train'\], but 'subj' needs \['test'\]"
    ):
        load_text("subj")


@pytest.mark.parametrize("error", [ConnectionError("no route"), RuntimeError("scripts")])
def test_a_hub_out_of_reach_points_to_local_files(hub, error):
    hub.splits = error
    with pytest.raises(
        InvalidInput, match=r"'nyu-mll/glue': .*data= .*\(sentence1, sentence2, label\)"
    ) as caught:
        load_text("rte")
    assert caught.value.__cause__ is error


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInput, match=r'pip install "mechtv\[data\]"') as caught:
        load_text("rte")
    assert isinstance(caught.value.__cause__, ImportError)


def test_local_files_need_no_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(load_text("rte", data=write(tmp_path / "some.jsonl", rows_of("rte")))) == 6

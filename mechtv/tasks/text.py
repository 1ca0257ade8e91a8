"""The text data sets of the papers, from the hub through `datasets` or from local files.

`TEXT_SOURCES` says for each where it is, what its columns and labels mean, and the label words and
template of the papers. None of their text ships with the package; the built-in tasks (`builtin`)
need no download, and word pairs have a reader of their own (`pairs`).
"""

import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mechtv.errors import InvalidInput, UnknownName
from mechtv.seeds import python_rng
from mechtv.tasks.example import Example
from mechtv.tasks.pairs import distinct
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES

logger = logging.getLogger(__name__)

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, for messages, and its columns."""

MAX_ROWS = 10_000
"""How many rows of a hub split are read: splits use 1400 examples at most, DBPedia has 560 000."""

UNLABELLED = "-1"
"""The hub's integer for rows without a label; they are left out."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set is and what its columns mean.

    Args:
        hub: the hub id; `config` and `revision` as in `datasets.load_dataset`.
        template: a name of `TEMPLATES`.
        fields: the template's field names, each with its column.
        labels: the hub's label names in the order of its integers, each with the papers' word, or
            None to leave rows of that label out.
        train: the splits that give the examples.
        test: the split that gives the test examples; None holds them out of the examples.

    Raises:
        InvalidInput: if `fields` are not the template's.
    """

    hub: str
    description: str
    template: str
    labels: Mapping[str, str | None]
    fields: Mapping[str, str]
    label_column: str = "label"
    config: str | None = None
    revision: str | None = None
    train: tuple[str, ...] = ("train",)
    test: str | None = "test"

    def __post_init__(self) -> None:
        expected = TEMPLATES[self.template].fields
        if expected != set(self.fields):
            raise InvalidInput(
                f"The source {self.hub!r} has the fields {sorted(self.fields)}, but its template "
                f"{self.template!r} reads {sorted(expected)}; name the same ones."
            )

    @property
    def words(self) -> tuple[str, ...]:
        """The papers' label words, in the order of the hub's integers."""
        return tuple(word for word in self.labels.values() if word is not None)

    @cached_property
    def meanings(self) -> dict[str, str | None]:
        """What the label column may hold (integer, the hub's name or the word), with its word."""
        numbered = {str(number): word for number, word in enumerate(self.labels.values())}
        return {UNLABELLED: None, **numbered, **self.labels, **{word: word for word in self.words}}


PARQUET = "refs/convert/parquet"
"""The hub's own copy of a repository whose main branch is a script, which `datasets` 4 refuses."""

NLI = {"premise": "premise", "hypothesis": "hypothesis"}

TEXT_SOURCES: dict[str, Source] = {
    "sst2": Source(
        hub="nyu-mll/glue",
        config="sst2",
        description="Sentences of film reviews: negative or positive (SST-2).",
        template="sentiment",
        fields={"text": "sentence"},
        labels={"negative": "negative", "positive": "positive"},
        test="validation",  # the labels of the test split are hidden
    ),
    "sst5": Source(
        hub="SetFit/sst5",
        description="Sentences of film reviews in five grades (SST-5).",
        template="sentence-sentiment",
        fields={"text": "text"},
        labels={
            "very negative": "terrible",
            "negative": "negative",
            "neutral": "neutral",
            "positive": "positive",
            "very positive": "great",
        },
        train=("train", "validation"),
    ),
    "mr": Source(
        hub="cornell-movie-review-data/rotten_tomatoes",
        description="Sentences of film reviews: negative or positive (MR).",
        template="sentiment",
        fields={"text": "text"},
        labels={"neg": "negative", "pos": "positive"},
        train=("train", "validation"),
    ),
    "subj": Source(
        hub="SetFit/subj",
        description="Sentences on films: objective (plot) or subjective (opinion) (SUBJ).",
        template="label",
        fields={"text": "text"},
        labels={"objective": "objective", "subjective": "subjective"},
    ),
    "trec": Source(
        hub="CogComp/trec",
        revision=PARQUET,
        description="Questions by the type of their answer (TREC, coarse).",
        template="question",
        fields={"text": "text"},
        label_column="coarse_label",
        labels={
            "ABBR": "Abbreviation",
            "ENTY": "Entity",
            "DESC": "Description",
            "HUM": "Person",
            "LOC": "Location",
            "NUM": "Number",
        },
    ),
    "hate-speech18": Source(
        hub="odegiber/hate_speech18",
        revision=PARQUET,
        description="Sentences of an extremist forum: neutral or hate (HateSpeech18).",
        template="text-label",
        fields={"text": "text"},
        labels={"noHate": "neutral", "hate": "hate", "idk/skip": None, "relation": None},
        test=None,
    ),
    "ag-news": Source(
        hub="fancyzhx/ag_news",
        description="News by topic (AG News).",
        template="topic",
        fields={"text": "text"},
        labels={
            "World": "World",
            "Sports": "Sports",
            "Business": "Business",
            "Sci/Tech": "Technology",
        },
    ),
    "dbpedia": Source(
        hub="fancyzhx/dbpedia_14",
        description="Starts of encyclopedia articles by the kind of their subject (DBPedia).",
        template="input-label",
        fields={"text": "content"},
        labels={
            "Company": "company",
            "EducationalInstitution": "school",
            "Artist": "artist",
            "Athlete": "athlete",
            "OfficeHolder": "politics",
            "MeanOfTransportation": "transportation",
            "Building": "building",
            "NaturalPlace": "nature",
            "Village": "village",
            "Animal": "animal",
            "Plant": "plant",
            "Album": "album",
            "Film": "film",
            "WrittenWork": "book",
        },
    ),
    "rte": Source(
        hub="nyu-mll/glue",
        config="rte",
        description="Whether a text entails a hypothesis (RTE).",
        template="entailment",
        fields={"premise": "sentence1", "hypothesis": "sentence2"},
        labels={"entailment": "true", "not_entailment": "false"},
        test="validation",
    ),
    "snli": Source(
        hub="stanfordnlp/snli",
        description="Whether a caption entails a hypothesis, contradicts it, or neither (SNLI).",
        template="entailment",
        fields=NLI,
        labels={"entailment": "true", "neutral": "maybe", "contradiction": "false"},
    ),
    "cb": Source(
        hub="aps/super_glue",
        config="cb",
        description="Whether a text commits its author to an embedded clause (CommitmentBank).",
        template="entailment",
        fields=NLI,
        labels={"entailment": "true", "contradiction": "false", "neutral": "maybe"},
        test="validation",
    ),
}
"""The data sets of the papers by name."""


def load_text(name: str, *, data: str | Path | None = None) -> Task:
    """A data set of the papers as a task with its label words.

    Texts are stripped. Rows without a text or label are left out, and so are repeated inputs (the
    first is kept) and examples that stand in the test set too; the numbers are logged at INFO. Of a
    hub split at most `MAX_ROWS` rows are read, the same ones each time.

    Args:
        name: a key of `TEXT_SOURCES`.
        data: local files to read instead of the hub: a JSON-lines (.jsonl, .json) or CSV file with
            the hub's columns, or a folder with `train.jsonl` and perhaps `validation.jsonl` or
            `test.jsonl`, also with the data set's name before (`ag_news.train.jsonl`). Labels are
            the hub's integers or names, or the label words. Of a single file, the test set is held
            out.

    Raises:
        UnknownName: if there is no such data set.
        InvalidInput: if the data cannot be fetched or read, lack a column, or hold another label.
    """
    if name not in TEXT_SOURCES:
        raise UnknownName("data set", name, TEXT_SOURCES)
    source = TEXT_SOURCES[name]
    if data is None:
        train, test = _from_hub(name, source)
    else:
        train, test = _from_files(name, source, Path(data))
    seen: set[tuple[str, ...]] = set()
    test_examples = distinct(test, name=f"test set of {name}", seen=seen)
    return Task(
        name=name,
        description=source.description,
        template=TEMPLATES[source.template],
        labels=source.words,
        examples=distinct(train, name=name, seen=seen),
        test_examples=test_examples,
    )


def _from_hub(name: str, source: Source) -> tuple[list[Example], list[Example]]:
    splits = _download(name, source)
    needed = (*source.train, *([] if source.test is None else [source.test]))
    if missing := set(needed) - set(splits):
        raise InvalidInput(
            f"{source.hub!r} on the hub has the splits {sorted(splits)}, but {name!r} needs "
            f"{sorted(missing)}; pass data= with a local file of the same columns instead."
        )
    by_split = {
        split: _examples(f"{source.hub} ({split})", source, _sampled(source, split, splits[split]))
        for split in needed
    }
    train = [example for split in source.train for example in by_split[split]]
    return train, [] if source.test is None else by_split[source.test]


def _download(name: str, source: Source) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InvalidInput(
            f"{name!r} is read from the hub with the library `datasets`, which is not installed; "
            'run `pip install "mechtv[data]"`, or pass data= with a local file.'
        ) from error
    try:
        return load_dataset(source.hub, source.config, revision=source.revision)
    except Exception as error:  # the hub's client has no common base for what can go wrong
        raise InvalidInput(
            f"{name!r} could not be read from the hub ({source.hub!r}: {type(error).__name__}); "
            f"check the connection, or pass data= with a local file of the same columns "
            f"({', '.join((*source.fields.values(), source.label_column))})."
        ) from error


def _sampled(source: Source, split: str, rows: Any) -> Iterator[Row]:
    """All rows of a hub split or, where there are more than `MAX_ROWS`, a fixed sample in order."""
    numbers: Iterable[int] = range(len(rows))
    if len(rows) > MAX_ROWS:
        logger.info("%s (%s): %d of %d rows are read", source.hub, split, MAX_ROWS, len(rows))
        rng = python_rng(0, f"rows of {source.hub} {source.config} {split}")
        numbers = sorted(rng.sample(range(len(rows)), MAX_ROWS))
    for number in numbers:
        yield f"{source.hub} ({split}), row {number}", rows[number]


def _from_files(name: str, source: Source, path: Path) -> tuple[list[Example], list[Example]]:
    train, test = _local_files(name, source, path)
    examples = [example for file in train for example in _examples(str(file), source, _read(file))]
    return examples, [] if test is None else _examples(str(test), source, _read(test))


def _local_files(name: str, source: Source, path: Path) -> tuple[list[Path], Path | None]:
    """The files that give the examples, and the one that gives the test examples."""
    if path.is_file():
        return [path], None
    if not path.is_dir():
        raise InvalidInput(
            f"data={str(path)!r} is neither a file nor a folder; give a .jsonl or .csv file, or a "
            "folder with train.jsonl and validation.jsonl or test.jsonl."
        )
    splits = {
        split: file
        for split in ("train", "validation", "test")
        if (file := _split_file(name, path, split)) is not None
    }
    if "train" not in splits:
        raise InvalidInput(
            f"The folder {str(path)!r} has no training file of {name!r}; expected "
            f"{_stem(name)}.train.jsonl or train.jsonl (or .json, .csv), found "
            f"{', '.join(sorted(file.name for file in path.iterdir())) or 'nothing'}."
        )
    test = next((s for s in (source.test, "test", "validation") if s in splits), None)
    train = [file for split, file in splits.items() if split in source.train and split != test]
    return train, None if test is None else splits[test]


def _split_file(name: str, folder: Path, split: str) -> Path | None:
    """A split's file: `{stem}.{split}`, else `{split}`, else the only one, if not another set's."""
    by_owner = {
        file.stem.removesuffix(split).removesuffix("."): file
        for file in sorted(folder.iterdir())
        if file.suffix in READERS and f".{file.stem}".endswith(f".{split}")
    }
    for owner in (_stem(name), name, ""):
        if owner in by_owner:
            return by_owner[owner]
    others = {form for other in TEXT_SOURCES for form in (other, _stem(other))}
    return (
        next(iter(by_owner.values())) if len(by_owner) == 1 and not others & set(by_owner) else None
    )


def _stem(name: str) -> str:
    return name.replace("-", "_")


def _read(path: Path) -> Iterator[Row]:
    if path.suffix not in READERS:
        raise InvalidInput(f"{path} ends in {path.suffix!r}; expected {', '.join(READERS)}.")
    try:
        yield from READERS[path.suffix](path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{path} cannot be read as UTF-8 text ({error}).") from error


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _json_object(where, line)


def _json_object(where: str, line: str) -> Mapping[str, Any]:
    try:
        plain = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{where}: found no JSON ({error.msg}); expected one JSON object a line."
        ) from error
    if not isinstance(plain, dict):
        raise InvalidInput(
            f"{where}: found {line.strip()[:40]!r}; expected one JSON object a line."
        )
    return plain


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            yield f"{path}, line {reader.line_num}", row


READERS = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows}


def _examples(origin: str, source: Source, rows: Iterable[Row]) -> list[Example]:
    read = [_example(source, where, row) for where, row in rows]
    examples = [example for example in read if example is not None]
    if not examples:
        raise InvalidInput(
            f"{origin} holds no row with a text and a label out of {len(read)}; the labels of "
            f"{source.hub!r} are {', '.join(source.words)}."
        )
    if len(examples) < len(read):
        logger.info("%s: %d rows without text or label left out", origin, len(read) - len(examples))
    return examples


def _example(source: Source, where: str, row: Mapping[str, Any]) -> Example | None:
    """The row as an example, or None for one that is left out."""
    columns = (*source.fields.values(), source.label_column)
    if missing := [column for column in columns if row.get(column) is None]:
        raise InvalidInput(
            f"{where}: nothing under {', '.join(missing)}; found the columns "
            f"{', '.join(map(str, row))}, expected {', '.join(columns)}."
        )
    label = str(row[source.label_column]).strip()
    if label not in source.meanings:
        words = (f"{number} ({word})" for number, word in enumerate(source.labels.values()) if word)
        raise InvalidInput(
            f"{where}: found the label {label!r} under {source.label_column}; expected "
            f"{', '.join(words)}, as number or word."
        )
    word = source.meanings[label]
    fields = {field: str(row[column]).strip() for field, column in source.fields.items()}
    return None if word is None or not all(fields.values()) else Example(fields=fields, answer=word)

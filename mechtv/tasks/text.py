"""The text data sets of the papers, from the hub through `datasets` or from local files.

`TEXT_SOURCES` (in `sources`) says what each one is. None of their text ships with the package; the
built-in tasks (`builtin`) need no download, and word pairs have a reader of their own (`pairs`).
"""

import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mechtv.errors import InvalidInput, UnknownName
from mechtv.seeds import python_rng
from mechtv.tasks.example import Example
from mechtv.tasks.pairs import distinct
from mechtv.tasks.sources import TEXT_SOURCES, Source
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES

logger = logging.getLogger(__name__)

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, for messages, and its columns."""

MAX_ROWS = 10_000
"""How many rows of a hub split are read: splits use 1400 examples at most, DBPedia has 560 000."""


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

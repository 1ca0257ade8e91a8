"""Finished cells of a study, one small file each, so that nothing is computed or lost twice.

A cell is known by its key, everything that decides its numbers; the versions of the code stand
apart from the rest, so that a cell of older code is found and named. A file is written once, whole,
under a temporary name first: an interrupted or killed run leaves only finished cells behind, and of
two runs in one folder neither harms the other.
"""

import hashlib
import json
import logging
import os
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import CannotWrite, InvalidInput
from mechtv.files import made_folder, remove, write_once, write_whole
from mechtv.forward.setting import device_of
from mechtv.forward.stamp import checksum
from mechtv.models import describe
from mechtv.models.card import UNKNOWN
from mechtv.study.code import code_version
from mechtv.study.scoring import Row
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector

logger = logging.getLogger(__name__)

Key = Mapping[str, Any]
State = Literal["done", "failed", "damaged", "older", "missing"]

CELL, FAILURE, VECTOR, DAMAGED = ".json", ".failed.json", ".safetensors", ".damaged"
VERSIONS = "versions"
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged file raises


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a cell has no rows: one sentence, and where in the code it happened."""

    error: str
    trace: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is of a cell.

    Args:
        rows: those of a cell that is done; of one that is older, what other code computed.
        failure: why a failed cell has none.
    """

    state: State
    rows: tuple[Row, ...] = ()
    failure: Failure | None = None


class Store:
    """Cells in a folder, or in memory alone if there is none.

    Raises:
        CannotWrite: if the folder cannot be made.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else made_folder(folder)

    def rows(self, key: Key) -> list[Row] | None:
        """A cell's rows; None if it is not there, or its file is damaged.

        A damaged file is set aside beside its place, and a line in the log says so.
        """
        path = self.path(key, CELL)
        if path is None:
            return None
        try:
            return _read(path, key)
        except _DAMAGE as error:
            _set_aside(path, error)
        return None

    def look(self, key: Key) -> Found:
        """What there is of a cell; nothing is touched.

        Of cells that other code computed, those are seen that were there at the first look.
        """
        path = self.path(key, CELL)
        if path is None:
            return Found(state="missing")
        try:
            rows = _read(path, key)
        except _DAMAGE:
            return Found(state="damaged")
        if rows is not None:
            return Found(state="done", rows=tuple(rows))
        failure = self.failure(key)
        if failure is not None:
            return Found(state="failed", failure=failure)
        older = self._older(key)
        return Found(state="older", rows=tuple(older)) if older else Found(state="missing")

    def n_finished(self) -> int:
        """How many cells are done or failed, by the names of the files."""
        names = _names(self._folder)
        failed = {name.removesuffix(FAILURE) for name in names if name.endswith(FAILURE)}
        return len({name.removesuffix(CELL) for name in names if _is_cell(name)} | failed)

    def keep(self, key: Key, rows: list[Row], vector: TaskVector | None = None) -> bool:
        """Write a cell, and its vector first; False if another run has written it already.

        Raises:
            CannotWrite: if the disk is full, or the folder cannot be written.
        """
        path = self.path(key, CELL)
        if path is None:
            return True
        if vector is not None:
            vector.save(self._with(key, VECTOR))
        content = {"key": _plain(key), "rows": _plain(rows)}
        content["checksum"] = _digest(content)
        written = write_once(path, json.dumps(content, indent=1).encode())
        self.forgive(key)
        return written

    def fail(self, key: Key, error: BaseException | str) -> None:
        """Write down why a cell could not be computed."""
        path = self.path(key, FAILURE)
        if path is None:
            return
        trace = "" if isinstance(error, str) else "".join(traceback.format_exception(error))
        sentence = error if isinstance(error, str) else _sentence(error)
        content = {"key": _plain(key), "error": sentence, "trace": trace}
        write_whole(path, json.dumps(content, indent=1).encode())

    def failure(self, key: Key) -> Failure | None:
        """Why a cell could not be computed; None if it was not tried or is there."""
        path = self.path(key, FAILURE)
        if path is None or self._with(key, CELL).is_file():
            return None
        try:
            found = json.loads(path.read_text())
            return Failure(error=found["error"], trace=found["trace"])
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            return Failure(error=f"{str(path)!r} cannot be read ({error!r}).")

    def forgive(self, key: Key) -> None:
        """Forget that a cell failed, so that it is tried again.

        Raises:
            CannotWrite: if the folder cannot be written.
        """
        path = self.path(key, FAILURE)
        if path is not None:
            remove(path)

    def path(self, key: Key, suffix: str) -> Path | None:
        """Where a file that belongs to a cell lies; None without a folder."""
        return None if self._folder is None else self._with(key, suffix)

    def _with(self, key: Key, suffix: str) -> Path:
        assert self._folder is not None
        versions = _digest(_plain(key).get(VERSIONS))[:8]
        return self._folder / f"{_stem(key)}-{versions}{suffix}"

    def _older(self, key: Key) -> list[Row] | None:
        """The rows of the newest cell of other code but otherwise this key; None without one.

        A damaged one is passed over.
        """
        for file in sorted(self._by_stem.get(_stem(key), ()), key=_age, reverse=True):
            try:
                rows = _read(file, key, any_version=True)
            except _DAMAGE:
                continue
            if rows is not None:
                return rows
        return None

    @cached_property
    def _by_stem(self) -> Mapping[str, list[Path]]:
        """The cells' files, by their names without the versions; listed once."""
        found: defaultdict[str, list[Path]] = defaultdict(list)
        for name in filter(_is_cell, _names(self._folder)):
            assert self._folder is not None
            found[name.rpartition("-")[0]].append(self._folder / name)
        return found


def digest_of(keys: Iterable[Key]) -> str:
    """Short, and the same only for the same keys in the same order."""
    return _digest([_plain(key) for key in keys])[:16]


def key_of(model: TransformerBridge, task: Task, **settings: Any) -> Key:
    """What decides a cell's numbers: model, device, task, versions, and the cell's own settings.

    Raises:
        InvalidInput: for a setting that cannot be written down.
    """
    about = describe(model)
    unknown = about.revision == UNKNOWN
    key = {
        "task": task.name,
        "task_checksum": task.checksum(),
        "model": asdict(about) | ({"weights_checksum": checksum(model)} if unknown else {}),
        "device": str(device_of(model)),
        VERSIONS: code_version(),
    } | settings
    check_plain(key)
    return key


def check_plain(key: Key) -> None:
    """Refuse a key with a setting that cannot be written down.

    Raises:
        InvalidInput: if there is one.
    """
    try:
        _plain(key)
    except TypeError as error:
        raise InvalidInput(
            f"A cell is kept by its settings, and one of them is no plain value ({error}); give "
            "numbers, texts and lists."
        ) from error


def _read(path: Path, key: Key, *, any_version: bool = False) -> list[Row] | None:
    """The rows of a cell's file; None if it is not there, or of another key of the same digest.

    Raises:
        Exception: one of `_DAMAGE`, if it is damaged.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    given = found.pop("checksum")
    if given != _digest(found):
        raise ValueError("its checksum is not that of its rows")
    wanted = _plain(key)
    if any_version:
        wanted[VERSIONS] = found["key"][VERSIONS]
    rows: list[Row] = found["rows"]
    return rows if found["key"] == wanted else None


def _set_aside(path: Path, why: Exception) -> None:
    aside = path.with_name(path.name + DAMAGED)
    try:
        os.replace(path, aside)
    except FileNotFoundError:
        return  # another run did it
    except OSError as error:
        raise CannotWrite(
            f"{str(path)!r} is damaged and cannot be set aside: {error.strerror}."
        ) from error
    logger.warning(
        "%s is no finished cell (%s): it is computed anew; what was there is kept as %s.",
        path,
        _sentence(why),
        aside.name,
    )


def _names(folder: Path | None) -> list[str]:
    return [] if folder is None else [entry.name for entry in os.scandir(folder)]


def _is_cell(name: str) -> bool:
    return name.endswith(CELL) and not name.endswith(FAILURE) and not name.startswith(".")


def _age(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _stem(key: Key) -> str:
    """What a cell's files are called, but for the versions."""
    return f"{_name(key)}-{_settings(key)}"


def _name(key: Key) -> str:
    named = (key.get(name) for name in ("task", "method", "layer"))
    words = "-".join(str(word) for word in named if word is not None)
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in words)


def _settings(key: Key) -> str:
    """The digest of all but the versions."""
    return _digest({name: value for name, value in _plain(key).items() if name != VERSIONS})[:12]


def _sentence(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text}"


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(dict(value) if isinstance(value, Mapping) else value))

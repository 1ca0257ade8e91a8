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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import CannotWrite, InvalidInput
from mechtv.files import made_folder, write_once, write_whole
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
        if path is None or not path.is_file():
            return None
        try:
            return _read(path, key)
        except _DAMAGE as error:
            _set_aside(path, error)
        return None

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
        self._with(key, FAILURE).unlink(missing_ok=True)
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
        if path is None or not path.is_file() or self._with(key, CELL).is_file():
            return None
        try:
            found = json.loads(path.read_text())
            return Failure(error=found["error"], trace=found["trace"])
        except _DAMAGE as error:
            return Failure(error=f"{str(path)!r} cannot be read ({error!r}).")

    def forgive(self, key: Key) -> None:
        """Forget that a cell failed, so that it is tried again."""
        path = self.path(key, FAILURE)
        if path is not None:
            path.unlink(missing_ok=True)

    def state(self, key: Key) -> State:
        """What there is of a cell, without touching it."""
        path = self.path(key, CELL)
        if path is None:
            return "missing"
        if path.is_file():
            try:
                return "missing" if _read(path, key) is None else "done"
            except _DAMAGE:
                return "damaged"
        if self.failure(key) is not None:
            return "failed"
        return "older" if self.older(key) is not None else "missing"

    def older(self, key: Key) -> list[Row] | None:
        """The rows of the newest cell of other code but otherwise this key; None if there is none.

        A damaged one is passed over.
        """
        if self._folder is None:
            return None
        files = self._folder.glob(f"{_name(key)}-{_settings(key)}-*{CELL}")
        cells = [file for file in files if not file.name.endswith(FAILURE)]
        for file in sorted(cells, key=lambda cell: cell.stat().st_mtime, reverse=True):
            try:
                rows = _read(file, key, any_version=True)
            except _DAMAGE:
                continue
            if rows is not None:
                return rows
        return None

    def path(self, key: Key, suffix: str) -> Path | None:
        """Where a file that belongs to a cell lies; None without a folder."""
        return None if self._folder is None else self._with(key, suffix)

    def _with(self, key: Key, suffix: str) -> Path:
        assert self._folder is not None
        versions = _digest(_plain(key).get(VERSIONS))[:8]
        return self._folder / f"{_name(key)}-{_settings(key)}-{versions}{suffix}"


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
    """The rows of a cell's file; None if another key's digest is the same.

    Raises:
        Exception: one of `_DAMAGE`, if it is damaged.
    """
    found = json.loads(path.read_text())
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

"""Finished cells of a study, one small file each, so that nothing is computed or lost twice.

A cell is known by its key, everything that decides its numbers. Files are written whole under a
temporary name, so an interrupted or killed run leaves only finished cells behind.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.files import write_whole
from mechtv.forward.setting import device_of
from mechtv.forward.stamp import checksum
from mechtv.models import describe
from mechtv.models.card import UNKNOWN
from mechtv.tasks.task import Task
from mechtv.vectors.card import library_versions

Key = Mapping[str, Any]
Row = dict[str, Any]


class Store:
    """Cells in a folder, or in memory alone if there is none."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def rows(self, key: Key) -> list[Row] | None:
        """A cell's rows; None if it is not there.

        Raises:
            InvalidInput: if its file is damaged.
        """
        path = self.path(key, ".json")
        if path is None or not path.is_file():
            return None
        try:
            found = json.loads(path.read_text())
            if found["key"] == _plain(key):
                rows: list[Row] = found["rows"]
                return rows
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f"{str(path)!r} is no finished cell ({error!r}); delete it to compute it anew."
            ) from error
        return None

    def keep(self, key: Key, rows: list[Row]) -> None:
        """Write a cell."""
        path = self.path(key, ".json")
        if path is not None:
            text = json.dumps({"key": _plain(key), "rows": rows}, indent=1)
            write_whole(path, text.encode())

    def path(self, key: Key, suffix: str) -> Path | None:
        """Where a file that belongs to a cell lies; None without a folder."""
        if self._folder is None:
            return None
        named = (key.get(name) for name in ("task", "method", "layer"))
        words = "-".join(str(word) for word in named if word is not None)
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in words)
        return self._folder / f"{safe}-{_digest(_plain(key))[:12]}{suffix}"


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
        "versions": library_versions(),
    } | settings
    try:
        _plain(key)
    except TypeError as error:
        raise InvalidInput(
            f"A cell is kept by its settings, and one of them is no plain value ({error}); give "
            "numbers, texts and lists."
        ) from error
    return key


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _plain(key: Key) -> Any:
    return json.loads(json.dumps(dict(key)))

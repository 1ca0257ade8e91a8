"""Cells that share a model, a task and a seed: they are computed one after another, in one place.

The model is opened once a process; prompts, the in-context run and a method's costly parts are made
once a group. Any number of processes may be at one folder: each takes cells that no other is at.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock, Timeout
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import CannotWrite, Interrupted
from mechtv.forward.chunks import lost_device
from mechtv.study.grid import Cell, Study
from mechtv.study.scoring import Bench, Maker, Row
from mechtv.study.specs import ModelSpec, Stamp
from mechtv.study.store import Key, Store
from mechtv.vectors.vector import TaskVector

logger = logging.getLogger(__name__)

CELLS, LOCK = "cells", ".lock"

_ONE_AT_A_TIME = Lock()  # threads of a worker share the open model and its hooks

OnFinished = Callable[[Cell], None]


class DeviceLost(Interrupted):
    """An error after which CUDA refuses all work of this process."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some cells of one model, task and seed, in the study's order."""

    cells: tuple[Cell, ...]

    def halves(self) -> "tuple[Group, Group]":
        """Two groups, the one with the earlier cells first."""
        middle = len(self.cells) // 2
        return Group(cells=self.cells[:middle]), Group(cells=self.cells[middle:])


def grouped(cells: Sequence[Cell], at_least: int = 1) -> list[Group]:
    """The cells in groups, the largest cut in halves until there are `at_least` so many."""
    groups = [Group(cells=tuple(own)) for _, own in groupby(cells, key=_shared)]
    while len(groups) < min(at_least, len(cells)):
        largest = max(range(len(groups)), key=lambda number: len(groups[number].cells))
        groups[largest : largest + 1] = groups[largest].halves()
    return groups


def compute(
    study: Study,
    group: Group,
    folder: str | Path,
    *,
    wait: bool = True,
    device: str | None = None,
    progress: bool | None = False,
    on_finished: OnFinished | None = None,
) -> list[Cell]:
    """Compute those cells of a group that the folder lacks, and keep each as soon as it is done.

    A cell that raises an error is written down as failed, and the next one is computed. What is
    failed already is not tried again.

    Args:
        wait: for cells that another process is at, when all others are there.

    Returns:
        The cells that were not waited for.

    Raises:
        CannotWrite: if the disk is full, or the folder cannot be written.
        DeviceLost: if an error of a cell left its GPU unusable; the cell is written down as failed.
    """
    worker = _Worker(study, Store(Path(folder) / CELLS), device, progress)
    busy = list(group.cells)
    with _ONE_AT_A_TIME:
        for waiting in (False, True)[: 1 + wait]:
            busy = [c for c in busy if not worker.do(c, wait=waiting, on_finished=on_finished)]
    return busy


class _Worker:
    """What the cells of a group share, made when the first missing one asks."""

    def __init__(
        self, study: Study, store: Store, device: str | None, progress: bool | None
    ) -> None:
        self._study, self._store = study, store
        self._device, self._progress = device, progress
        self._bench: Bench | None = None
        self._makers: dict[str, Maker | None] = {}

    def do(self, cell: Cell, *, wait: bool, on_finished: OnFinished | None) -> bool:
        """See to it that a cell is there, or failed; False if another process is at it."""
        key = self._study.key(cell)
        if not self._there(key):
            with _alone(self._store.path(key, LOCK), wait=wait) as is_alone:
                if not is_alone:
                    return False
                if not self._there(key):
                    self._compute(cell, key)
        if on_finished is not None:
            on_finished(cell)
        return True

    def _there(self, key: Key) -> bool:
        return self._store.rows(key) is not None or self._store.failure(key) is not None

    def _compute(self, cell: Cell, key: Key) -> None:
        try:
            rows, vector = self._made(cell)
            self._store.keep(key, rows, vector)
        except CannotWrite:
            raise
        except Exception as error:
            logger.warning("%s failed: %s: %s", cell, type(error).__name__, error)
            self._store.fail(key, error)
            if lost_device(error):
                raise DeviceLost(
                    f"The GPU is of no use to this process any more ({error}). Finished cells are "
                    "kept; run the study again to go on."
                ) from error

    def _made(self, cell: Cell) -> tuple[list[Row], TaskVector | None]:
        if self._bench is None:
            self._bench = Bench(
                opened(cell.model, self._device),
                cell.task.load(),
                shots=self._study.shots,
                n=self._study.n,
                n_validation=self._study.n_validation,
                seed=cell.seed,
                progress=self._progress,
            )
        alike = f"{cell.method.title} {cell.positions}"
        if alike not in self._makers:
            self._makers[alike] = self._bench.maker(cell.method.name, cell.options())
        rows, vector = self._bench.cell(cell.method.name, self._makers[alike], cell.layer)
        return [row | {"device": self._bench.device} for row in rows], vector


_OPEN: dict[tuple[ModelSpec, str | None, Stamp], TransformerBridge] = {}


def opened(model: ModelSpec, device: str | None) -> TransformerBridge:
    """The model, which stays open in this process until another one is asked for."""
    wanted = model, device, model.stamp()
    if wanted not in _OPEN:
        close()  # there may be no room for two
        _OPEN[wanted] = model.open(device)
    return _OPEN[wanted]


def close() -> None:
    """Let go of the open model."""
    _OPEN.clear()
    gc.collect()


@contextmanager
def _alone(path: Path | None, *, wait: bool) -> Iterator[bool]:
    """Hold a cell's lock, which the system frees if the process is killed.

    The file is removed while it is held. Who then gets the lock of the removed file finds the cell
    there.
    """
    assert path is not None
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    except OSError as error:
        raise CannotWrite(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    except NotImplementedError as error:
        raise CannotWrite(
            f"The file system of {str(path.parent)!r} has no locks, by which processes share a "
            "study; give a folder on another one."
        ) from error
    try:
        yield True
    finally:
        with suppress(OSError):  # some systems keep files that are open: then it stays, empty
            path.unlink()
        lock.release()


def _shared(cell: Cell) -> tuple[Any, ...]:
    return cell.model, cell.task, cell.seed

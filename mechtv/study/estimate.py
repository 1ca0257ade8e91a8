"""About what a study will take, before it runs: cells, seconds, memory.

Seconds come from the cells that are there, where there are some of the same model and method; else
from counts of operations over this machine's speed in one matrix product, which is good to a factor
of three or so.
"""

import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from math import fsum
from pathlib import Path
from statistics import fmean

import torch

from mechtv.forward.memory import BUDGET
from mechtv.study.grid import Cell, Study
from mechtv.study.groups import CELLS
from mechtv.study.scoring import Row, at_most
from mechtv.study.specs import DTYPES
from mechtv.study.store import Store

CHARACTERS = 4  # in one token of English text
EFFICIENCY = 0.3  # of a matrix product's speed that a model's pass reaches
PROMPTS = {  # passes over prompts: how many, and with how many demonstrations, by METHODS' defaults
    "hidden_state": (100, 8),
    "function_vector": (125, 10),
    "state_vector": (100, 8),
    "i2cl": (600, 1),
    "linear": (400, 8),
    "learned": (1000, 0),
    "learned-dntp": (1600, 4),
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is left of a study.

    Args:
        cells, missing: all cells, and those that are not there.
        seconds: one process's time for the missing ones.
        measured: the share of the missing cells whose seconds are measured ones.
        nbytes: of the largest model's weights and what is kept of prompts; None if the files of a
            model are not on this machine.
    """

    cells: int
    missing: int
    seconds: float
    measured: float
    nbytes: int | None

    def sentence(self) -> str:
        """All of it in words."""
        if not self.missing:
            return f"{self.cells} cells, all of them there."
        how = "measured" if self.measured > 0.99 else "counted, to a factor of three"
        if 0 < self.measured <= 0.99:
            how = f"{self.measured:.0%} measured, the rest counted"
        memory = "unknown" if self.nbytes is None else f"{self.nbytes / 2**30:.1f} GiB"
        return (
            f"{self.cells} cells, {self.missing} of them to be computed: about "
            f"{_duration(self.seconds)} in one process ({how}); memory about {memory} a process."
        )


def estimate(study: Study, folder: str | Path | None = None) -> Estimate:
    """What is left of a study.

    Args:
        folder: where finished cells are; all are missing if None, or if it does not exist.
    """
    store = Store(Path(folder) / CELLS if folder is not None and Path(folder).is_dir() else None)
    missing, seconds = [], defaultdict(list)
    for cell in study.cells:
        rows = store.rows(study.key(cell))
        if rows is None:
            missing.append(cell)
        else:
            seconds[_kind(cell)].append(_spent(rows))
    measured = [cell for cell in missing if _kind(cell) in seconds]
    counted = [cell for cell in missing if _kind(cell) not in seconds]
    times = [fmean(seconds[_kind(cell)]) for cell in measured]
    times += [_counted(study, cell) for cell in counted]
    return Estimate(
        cells=len(study.cells),
        missing=len(missing),
        seconds=fsum(times),
        measured=len(measured) / max(1, len(missing)),
        nbytes=_memory(study),
    )


def _kind(cell: Cell) -> tuple[str, str, str]:
    return cell.model.name, cell.task.name, cell.method.title


def _spent(rows: list[Row]) -> float:
    tested = max(int(row["n"]) for row in rows)
    return float(rows[0]["seconds_to_fit"]) + tested * float(rows[0]["seconds_per_query"])


def _counted(study: Study, cell: Cell) -> float:
    """Seconds by operation counts: two a parameter and token."""
    splits = cell.task.load().splits(cell.seed)
    tested = at_most(study.n, len(splits.test))
    held = at_most(study.n_validation, len(splits.validation)) if cell.layer is not None else 0
    a_query = _tokens_of_example(cell)
    tokens = float((tested + held) * a_query)
    if cell.method.name == "in-context":
        tokens *= 1 + study.shots
    passes, shots = PROMPTS.get(cell.method.name, (0, 0))
    tokens += passes * (1 + shots) * a_query
    width = DTYPES[cell.model.dtype].itemsize
    parameters = (cell.model.nbytes() or 0) / width
    return 2 * parameters * tokens / (EFFICIENCY * _operations_per_second())


def _tokens_of_example(cell: Cell) -> float:
    task = cell.task.load()
    some = task.examples[:100]
    return fmean(len(task.template.demonstration(one)) for one in some) / CHARACTERS


def _memory(study: Study) -> int | None:
    sizes = [model.nbytes() for model in study.models]
    known = [size for size in sizes if size is not None]
    return max(known) + BUDGET.get() if len(known) == len(sizes) else None


@cache
def _operations_per_second() -> float:
    size, times = 1024, 5
    x = torch.ones(size, size)
    _ = x @ x
    began = time.perf_counter()
    for _ in range(times):
        _ = x @ x
    return times * 2 * size**3 / (time.perf_counter() - began)


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

"""About what a study will take, before it runs: cells, seconds, memory.

Seconds come from the cells that are there, where there are some of the same model and method; else
from counts of operations over this machine's speed in one matrix product, which is good to a factor
of three or so.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum
from pathlib import Path
from statistics import fmean

import torch

from mechtv.forward.memory import BUDGET
from mechtv.study.grid import Cell, Study
from mechtv.study.results import StudyResults
from mechtv.study.scoring import Row, at_most

CHARACTERS = 4  # in one token of English text
EFFICIENCY = 0.3  # of a matrix product's speed that a model's pass reaches
PROMPTS = {  # passes over prompts: how many, and with how many demonstrations, by their defaults
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
        cells, missing: all cells, and those that are to be computed.
        failed: those that failed and are not tried again.
        seconds: one process's time for the missing ones.
        measured: the share of the missing cells whose seconds are measured ones.
        nbytes: of the largest model's weights and what is kept of prompts.
    """

    cells: int
    missing: int
    failed: int
    seconds: float
    measured: float
    nbytes: int

    def sentence(self) -> str:
        """All of it in words."""
        failed = f" {self.failed} failed before and are left out." if self.failed else ""
        if not self.missing:
            return f"{self.cells} cells, none of them to be computed.{failed}"
        how = "measured" if self.measured > 0.99 else "counted, to a factor of three"
        if 0 < self.measured <= 0.99:
            how = f"{self.measured:.0%} measured, the rest counted"
        return (
            f"{self.cells} cells, {self.missing} of them to be computed: about "
            f"{_duration(self.seconds)} in one process ({how}); memory about "
            f"{self.nbytes / 2**30:.1f} GiB a process.{failed}"
        )


def estimate(
    study: Study,
    folder: str | Path | None = None,
    *,
    retry_failed: bool = False,
    accept_older: bool = False,
) -> Estimate:
    """What is left of a study.

    Args:
        folder: where finished cells are; all are missing if None, or if it does not exist.
        retry_failed, accept_older: as in `run_study`.
    """
    results = StudyResults(study=study, folder=None if folder is None else Path(folder))
    seconds = defaultdict(list)
    for cell, _, found in results.states:
        if found.state == "done":
            seconds[_kind(cell)].append(_spent(found.rows))
    missing = results.todo(retry_failed=retry_failed, accept_older=accept_older)
    measured = [cell for cell in missing if _kind(cell) in seconds]
    counted = [cell for cell in missing if _kind(cell) not in seconds]
    times = [fmean(seconds[_kind(cell)]) for cell in measured]
    times += [_counted(study, cell) for cell in counted]
    return Estimate(
        cells=len(study.cells),
        missing=len(missing),
        failed=0 if retry_failed else results.counts().get("failed", 0),
        seconds=fsum(times),
        measured=len(measured) / max(1, len(missing)),
        nbytes=max(model.nbytes() for model in study.models) + BUDGET.get(),
    )


def _kind(cell: Cell) -> tuple[str, str, str]:
    return cell.model.name, cell.task.name, cell.method.title


def _spent(rows: Sequence[Row]) -> float:
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
    return 2 * cell.model.n_parameters() * tokens / (EFFICIENCY * _operations_per_second())


def _tokens_of_example(cell: Cell) -> float:
    task = cell.task.load()
    some = task.examples[:100]
    return fmean(len(task.template.demonstration(one)) for one in some) / CHARACTERS


@cache
def _operations_per_second() -> float:
    size, times = 1024, 5
    x = torch.ones(size, size, device="cuda" if torch.cuda.is_available() else "cpu")
    _ = (x @ x)[0, 0].item()
    began = time.perf_counter()
    for _ in range(times):
        product = x @ x
    _ = product[0, 0].item()  # waits for a GPU
    return times * 2 * size**3 / (time.perf_counter() - began)


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

"""What a study has found so far: one tidy table, the state of its cells, and what went wrong."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from mechtv.errors import InvalidInput
from mechtv.files import write_whole
from mechtv.study.compare import MethodComparison
from mechtv.study.grid import Cell, Study
from mechtv.study.groups import CELLS
from mechtv.study.scoring import Row
from mechtv.study.store import Found, Key, State, Store

DESCRIPTION = "study.json"
SECONDS = ("seconds_to_fit", "seconds_per_query")
"""The columns that differ between two runs."""

_SAYS: dict[State, str] = {
    "failed": "failed, the first of them with {error}: `errors` lists them, and retry_failed tries "
    "them again",
    "damaged": "in a damaged file: it will be set aside, and they are computed anew",
    "older": "computed by other code: their files stay, and they are computed anew unless "
    "accept_older is given",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StudyResults:
    """The finished cells of a study in a folder, as they are when first asked for.

    Args:
        folder: None for a study that was never run.
    """

    study: Study
    folder: Path | None

    @classmethod
    def load(cls, folder: str | Path) -> "StudyResults":
        """Those of a folder in which a study was run.

        Raises:
            InvalidInput: if it is none.
        """
        path = Path(folder) / DESCRIPTION
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"{str(folder)!r} is no folder of a study ({error}); run one into it first."
            ) from error
        return cls(study=Study.from_plain(found), folder=Path(folder))

    def table(self, *, accept_older: bool = False) -> pd.DataFrame:
        """One row a (cell, split, score): value, 95 % interval, n, and how it was made.

        Args:
            accept_older: take cells that other code computed where there are no newer ones.
        """
        rows = [row for cell, _, found in self.states for row in _rows(cell, found, accept_older)]
        table = pd.DataFrame(rows, columns=None if rows else ["task", "method", "layer"])
        return table.astype({"layer": "Int64"})

    def status(self) -> pd.DataFrame:
        """How many cells of each model, task and method are in which state."""
        counts = Counter(
            (cell.model.name, cell.task.name, cell.method.title, found.state)
            for cell, _, found in self.states
        )
        index = ["model", "task", "method"]
        rows = [
            {**dict(zip(index, key[:3], strict=True)), "state": key[3], "cells": count}
            for key, count in counts.items()
        ]
        wide = pd.DataFrame(rows).pivot_table(
            index=index, columns="state", values="cells", fill_value=0, sort=False
        )
        return wide.astype(int).reset_index().rename_axis(columns=None)

    def counts(self) -> dict[State, int]:
        """How many cells are in each state."""
        return dict(Counter(found.state for _, _, found in self.states))

    def todo(self, *, retry_failed: bool = False, accept_older: bool = False) -> list[Cell]:
        """The cells that a run computes, in the study's order."""
        left = {"failed": not retry_failed, "older": accept_older, "done": True}
        return [cell for cell, _, found in self.states if not left.get(found.state, False)]

    def errors(self) -> pd.DataFrame:
        """One row a failed cell: what it is, the error, and where it happened."""
        rows = [
            {"cell": str(cell), "error": found.failure.error, "trace": found.failure.trace}
            for cell, _, found in self.states
            if found.failure is not None
        ]
        return pd.DataFrame(rows, columns=["cell", "error", "trace"])

    def notices(self) -> tuple[str, ...]:
        """One sentence for each thing that is not as it should be."""
        found = self.counts()
        failed = self.errors()["error"]
        error = failed.iloc[0] if len(failed) else ""
        return tuple(
            f"{found[state]} of {len(self.study.cells)} cells are {text.format(error=error)}."
            for state, text in _SAYS.items()
            if state in found
        )

    def comparison(self, **where: object) -> MethodComparison:
        """The rows of one model and seed as a comparison of methods, for its tables and figures.

        Args:
            where: columns with the value wanted, such as `model="smollm2-135m"`, `seed=0`.

        Raises:
            InvalidInput: if a cell of it stands twice: of two models, seeds or positions.
        """
        table = self.table()
        unknown = [name for name in where if name not in table.columns]
        if unknown:
            raise InvalidInput(
                f"There is no column {unknown[0]!r}; use {', '.join(table.columns)}."
            )
        for name, value in where.items():
            table = table[table[name] == value]
        return MethodComparison.of(MethodComparison(rows=table.reset_index(drop=True)))

    def export(self, path: str | Path, *, accept_older: bool = False) -> Path:
        """Write the table as CSV or Parquet, by the name's ending; whole or not at all.

        Raises:
            InvalidInput: for another ending, or Parquet without pyarrow.
            CannotWrite: if it cannot be written.
        """
        path, table = Path(path), self.table(accept_older=accept_older)
        if path.suffix == ".csv":
            return write_whole(path, table.to_csv(index=False).encode())
        if path.suffix != ".parquet":
            raise InvalidInput(
                f"{path.name!r} ends in neither .csv nor .parquet; give one of them."
            )
        try:
            return write_whole(path, table.to_parquet(index=False))
        except ImportError as error:
            raise InvalidInput(
                "Parquet needs pyarrow (pip install pyarrow); install it, or give a name that ends "
                "in .csv."
            ) from error

    @cached_property
    def states(self) -> tuple[tuple[Cell, Key, Found], ...]:
        """Each cell, its key, and what there is of it."""
        cells = None if self.folder is None else self.folder / CELLS
        store = Store(cells if cells is not None and cells.is_dir() else None)
        keys = [(cell, self.study.key(cell)) for cell in self.study.cells]
        return tuple((cell, key, store.look(key)) for cell, key in keys)


def _rows(cell: Cell, found: Found, accept_older: bool) -> Iterator[Row]:
    """A cell's rows as the table has them."""
    where = "" if cell.positions is None else ", ".join(map(str, cell.positions))
    for row in found.rows if found.state == "done" or accept_older else ():
        yield {
            **row,
            "method": cell.method.title,
            "positions": where,
            "dtype": cell.model.dtype,
        }

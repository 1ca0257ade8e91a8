"""Run a study: here, on local Dask workers, or on a Dask cluster that is there already.

What is finished stays finished: a run that was interrupted or killed goes on where it was, with the
cells that were in flight computed again.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mechtv.errors import InvalidInput
from mechtv.files import made_folder, sweep, write_whole
from mechtv.progress import progress_bar
from mechtv.study.grid import Cell, Study
from mechtv.study.groups import CELLS, OnFinished, close, compute, grouped
from mechtv.study.results import DESCRIPTION, StudyResults
from mechtv.study.store import Store

logger = logging.getLogger(__name__)

PARTS = 4  # for each worker, so that none is idle for long at the end


def run_study(
    study: Study,
    folder: str | Path,
    *,
    workers: int = 0,
    scheduler: str | None = None,
    slurm: dict[str, Any] | None = None,
    retry_failed: bool = False,
    accept_older: bool = False,
    progress: bool | None = None,
    on_finished: OnFinished | None = None,
) -> StudyResults:
    """Compute the cells that the folder lacks, and return all.

    Args:
        folder: where finished cells are kept, one small file each; every worker must see it under
            this path.
        workers: how many local processes; 0 runs in this one. With `slurm`, how many jobs.
        scheduler: the address of a Dask scheduler, such as "tcp://10.0.0.1:8786".
        slurm: the options of `dask_jobqueue.SLURMCluster`, such as `{"queue": "gpu", "cores": 4,
            "memory": "32GB", "walltime": "04:00:00"}`.
        retry_failed: compute failed cells again.
        accept_older: leave out cells that other code computed.
        on_finished: called with each cell that is there, when run in this process.

    Raises:
        InvalidInput: if the study cannot run (see `Study.check`), or the options exclude each
            other.
        CannotWrite: if the disk is full or the folder cannot be written; finished cells are kept.
        Interrupted: if the cluster or a GPU is lost; finished cells are kept.
    """
    given = [name for name, value in (("scheduler", scheduler), ("slurm", slurm)) if value]
    if workers < 0 or len(given) > 1 or (scheduler and workers):
        raise InvalidInput(
            f"workers={workers}, scheduler={scheduler!r} and slurm={slurm!r} do not go together; "
            "give workers of 0 or more, or the address of a scheduler, or slurm with workers."
        )
    study.check()
    folder = Path(folder)
    results = _described(study, folder)
    for notice in results.notices():
        logger.warning(notice)
    todo = results.todo(retry_failed=retry_failed, accept_older=accept_older)
    _prepare(study, folder, todo)
    title = f"cells of {study.name}"
    with progress_bar(title=title, total=len(todo), show=progress) as bar:
        if workers or given:
            from mechtv.study import on_dask  # an extra that others do not need

            with on_dask.client(workers, scheduler, slurm) as client:
                groups = grouped(todo, at_least=PARTS * max(workers, on_dask.size(client)))
                on_dask.run(client, study, groups, folder, bar)
        else:

            def finished(cell: Cell) -> None:
                bar.update()
                if on_finished is not None:
                    on_finished(cell)

            _here(study, todo, folder, finished)
    return StudyResults(study=study, folder=folder)


def _here(study: Study, todo: Sequence[Cell], folder: Path, finished: OnFinished) -> None:
    """Compute cells in this process; those that another one is at, last."""
    busy = []
    try:
        for group in grouped(todo):
            busy += compute(study, group, folder, wait=False, on_finished=finished)
        for group in grouped(busy):
            compute(study, group, folder, on_finished=finished)
    finally:
        close()


def _described(study: Study, folder: Path) -> StudyResults:
    """The results so far, with the study's description in the folder."""
    made_folder(folder)
    text = json.dumps(study.to_plain(), indent=1)
    path = folder / DESCRIPTION
    if path.is_file() and path.read_text() != text:
        logger.info(
            "%s held another description; cells that both have are not computed again.", path
        )
    write_whole(path, text.encode())
    return StudyResults(study=study, folder=folder)


def _prepare(study: Study, folder: Path, todo: Sequence[Cell]) -> None:
    """Forget that a cell failed which is to be tried again, and remove what killed runs left."""
    store = Store(folder / CELLS)
    sweep(folder / CELLS)
    for cell in todo:
        store.forgive(study.key(cell))

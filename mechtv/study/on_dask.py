"""Groups of cells on Dask workers: Dask places, retries and reports, workers write the cells.

What is sent is a study's description and the numbers of some of its cells; what comes back is
nothing but word that they are there. A worker that dies costs the cell that it was at.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from mechtv.errors import Interrupted, InvalidInput, MechtvError
from mechtv.study.code import code_version
from mechtv.study.grid import Study
from mechtv.study.groups import CELLS, Group, compute
from mechtv.study.results import DESCRIPTION
from mechtv.study.store import CELL, FAILURE, Store

try:
    from distributed import Client, KilledWorker, LocalCluster, get_worker, wait
    from distributed.comm.core import CommClosedError
except ImportError as missing:
    raise InvalidInput(
        'Dask is not installed; install it with: pip install "mechtv[cluster]", or run without '
        "workers and scheduler."
    ) from missing

logger = logging.getLogger(__name__)

SECONDS = 1.0  # between two looks at what is finished
PATIENCE = 10  # seconds, for a scheduler's answer
LOST = (CommClosedError, CancelledError, TimeoutError, OSError)


@contextmanager
def client(
    workers: int, scheduler: str | None = None, slurm: dict[str, Any] | None = None
) -> Iterator[Client]:
    """A client of new local workers, of Slurm jobs, or of a scheduler that is there already.

    Raises:
        InvalidInput: if the scheduler does not answer, or the cluster cannot be made.
    """
    if scheduler is not None:
        with _at(scheduler) as found:
            yield found
        return
    cluster: Any = _local(workers) if slurm is None else slurm_cluster(slurm)
    with cluster, Client(cluster) as found:
        if slurm is not None:
            cluster.scale(jobs=max(1, workers))
        yield found


def slurm_cluster(options: dict[str, Any]) -> Any:
    """A cluster whose workers are Slurm jobs, through `dask_jobqueue`; none is started yet.

    Raises:
        InvalidInput: if it is not installed, or refuses the options.
    """
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError as error:
        raise InvalidInput(
            'dask-jobqueue is not installed; install it with: pip install "mechtv[cluster]".'
        ) from error
    try:
        return SLURMCluster(**options)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"SLURMCluster refuses the options {options!r}: {error}.") from error


def size(client: Client) -> int:
    """How many workers there are now."""
    return len(client.scheduler_info(n_workers=-1)["workers"])


def run(client: Client, study: Study, groups: Sequence[Group], folder: Path, bar: Any) -> None:
    """Compute the groups' cells on the client's workers.

    A group whose workers keep dying is cut into its cells; a cell that kills its workers by itself
    is written down as failed.

    Raises:
        InvalidInput, CannotWrite: what a worker cannot go on with.
        Interrupted: if the scheduler is lost.
    """
    number = {id(cell): place for place, cell in enumerate(study.cells)}
    store = Store(folder / CELLS)
    pending: dict[Any, Group] = {}

    def submit(some: Sequence[Group], attempt: str) -> None:
        for group in some:
            chosen = [number[id(cell)] for cell in group.cells]
            future = client.submit(
                remote,
                study.to_plain(),
                chosen,
                str(folder.resolve()),
                code_version(),
                key=f"{study.name}-{attempt}-{chosen[0]}-{os.urandom(4).hex()}",
                pure=False,
            )
            pending[future] = group

    def follow(future: Any, group: Group) -> None:
        error = future.exception() if future.status == "error" else None
        if future.status not in ("finished", "error"):
            raise CancelledError(future.status)
        if not isinstance(error, KilledWorker):
            if error is not None:
                raise error
        elif len(group.cells) > 1:
            submit([Group(cells=(cell,)) for cell in group.cells], "alone")
        else:
            key = study.key(group.cells[0])
            if store.rows(key) is None:
                store.fail(key, f"The workers that computed it died, {_how_often(error)}.")

    submit(groups, "group")
    done_before = _finished(folder)
    try:
        while pending:
            done = _done(list(pending))
            for future in done:
                follow(future, pending.pop(future))
            bar.update(min(_finished(folder) - done_before, bar.total) - bar.n)
    except MechtvError:
        client.cancel(list(pending))
        raise
    except LOST as error:
        raise Interrupted(
            f"The Dask cluster is lost ({type(error).__name__}). Finished cells are kept in "
            f"{str(folder)!r}; run the study again to go on."
        ) from error


def remote(plain: dict[str, Any], chosen: list[int], folder: str, versions: dict[str, str]) -> None:
    """What a worker does: compute some cells of a study.

    Raises:
        InvalidInput: if the worker runs other code than who sent this, or does not see the folder.
    """
    worker = get_worker()
    if code_version() != versions:
        differing = [name for name in versions if versions[name] != code_version().get(name)]
        raise InvalidInput(
            f"The worker {worker.address} runs another version of {', '.join(differing)} than the "
            "client; install the same on all."
        )
    if not (Path(folder) / DESCRIPTION).is_file():
        raise InvalidInput(
            f"The worker {worker.address} does not see the study in {folder!r}; put it where all "
            "workers see it under one path."
        )
    _share_threads(worker)
    study = Study.from_plain(plain)
    group = Group(cells=tuple(study.cells[number] for number in chosen))
    compute(study, group, folder, device=_device(worker))


def _at(scheduler: str) -> Client:
    try:
        return Client(scheduler, timeout=PATIENCE)
    except (*LOST, ValueError) as error:
        raise InvalidInput(
            f"No Dask scheduler answers at {scheduler!r} ({type(error).__name__}); start one with: "
            "dask scheduler, and workers with: dask worker ADDRESS."
        ) from error


def _local(workers: int) -> LocalCluster:
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,  # torch has threads of its own
        processes=True,
        dashboard_address=None,
        memory_limit=0,  # a worker that keeps its model open would be paused for good
        silence_logs=logging.ERROR,
        resources={LOCAL: workers},
    )


LOCAL = "local_workers"
"""A Dask resource by which a worker knows how many share its machine."""


def _share_threads(worker: Any) -> None:
    """Workers that one cluster started on one machine share its cores."""
    sharing = worker.state.total_resources.get(LOCAL)
    if sharing:
        torch.set_num_threads(max(1, n_cores() // int(sharing)))


def n_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device(worker: Any) -> str | None:
    """A GPU for each worker of a machine, by the worker's number; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    name = str(worker.name)
    return f"cuda:{int(name) % torch.cuda.device_count() if name.isdigit() else 0}"


def _done(futures: Sequence[Any]) -> list[Any]:
    with suppress(TimeoutError):  # which says only that none is done yet
        wait(list(futures), timeout=SECONDS, return_when="FIRST_COMPLETED")
    return [future for future in futures if future.done()]


def _finished(folder: Path) -> int:
    """How many cells' files there are, failures included."""
    names = [entry.name for entry in os.scandir(folder / CELLS)]
    failed = {name.removesuffix(FAILURE) for name in names if name.endswith(FAILURE)}
    done = {n.removesuffix(CELL) for n in names if n.endswith(CELL) and not n.endswith(FAILURE)}
    return len(done | failed)


def _how_often(error: KilledWorker) -> str:
    times = getattr(error, "allowed_failures", 0) + 1
    return f"{times} times (memory, or a crash in native code)"

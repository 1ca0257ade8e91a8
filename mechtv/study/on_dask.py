"""Groups of cells on Dask workers: Dask places, retries and reports, workers write the cells.

What is sent is a study's description and the numbers of some of its cells; what comes back is
nothing but word that they are there. A worker that dies costs the cell that it was at.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from mechtv.errors import Interrupted, InvalidInput, MechtvError
from mechtv.study.code import code_version
from mechtv.study.gpus import gpu
from mechtv.study.grid import Study
from mechtv.study.groups import CELLS, DeviceLost, Group, compute
from mechtv.study.results import DESCRIPTION
from mechtv.study.store import Store, digest_of

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

    A job is one worker unless the options say otherwise: torch has threads of its own.

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
        return SLURMCluster(**{"processes": 1} | options)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"SLURMCluster refuses the options {options!r}: {error}.") from error


def size(client: Client) -> int:
    """How many workers there are now.

    Raises:
        CommClosedError: if the client has no scheduler.
    """
    found = client.scheduler_info(n_workers=-1)
    if "workers" not in found:
        raise CommClosedError("no scheduler")
    return len(found["workers"])


def run(client: Client, study: Study, groups: Sequence[Group], folder: Path, bar: Any) -> None:
    """Compute the groups' cells on the client's workers.

    A group whose workers keep dying is cut into its cells. A cell whose workers keep dying is
    computed once more when nothing else is; if they die again it is written down as failed.

    Raises:
        InvalidInput, CannotWrite: what a worker cannot go on with.
        Interrupted: if the scheduler is lost, or a worker raises what nobody expects.
    """
    store, work = Store(folder / CELLS), _Work(client, study, folder, groups)
    before = store.n_finished()
    try:
        going = True
        while going:
            going = work.go_on()
            bar.update(min(store.n_finished() - before, bar.total) - bar.n)
    except (MechtvError, KeyboardInterrupt):
        work.cancel()
        raise
    except LOST as error:
        raise Interrupted(
            f"The Dask cluster is lost ({type(error).__name__}). Finished cells are kept in "
            f"{str(folder)!r}; run the study again to go on."
        ) from error


class _Work:
    """Groups that wait, those that workers are at, and single cells that are suspected.

    Each worker has one group at a time: one that waited on a worker would be blamed with the one
    before it when the worker dies.
    """

    def __init__(self, client: Client, study: Study, folder: Path, groups: Sequence[Group]) -> None:
        self._client, self._study, self._folder = client, study, folder
        self._store = Store(folder / CELLS)
        self._number = {id(cell): place for place, cell in enumerate(study.cells)}
        self._waiting, self._suspected = deque(groups), deque[Group]()
        self._running: dict[Any, Group] = {}
        self._alone: Group | None = None
        self._said = False

    def go_on(self) -> bool:
        """Hand out work, wait a moment, and see what came of it; False when nothing is left."""
        self._hand_out(size(self._client))
        for future in _done(list(self._running)):
            self._follow(future, self._running.pop(future))
        return bool(self._waiting or self._running or self._suspected)

    def cancel(self) -> None:
        """Let the workers leave what they are at."""
        if self._running:
            self._client.cancel(list(self._running))

    def _hand_out(self, n_workers: int) -> None:
        if not (n_workers or self._said):
            logger.warning("There is no worker yet; the study waits until one joins.")
            self._said = True
        while self._waiting and len(self._running) < n_workers:
            self._submit(self._waiting.popleft())
        if self._suspected and n_workers and not self._running:
            self._alone = self._suspected.popleft()
            self._submit(self._alone)

    def _submit(self, group: Group) -> None:
        chosen = [self._number[id(cell)] for cell in group.cells]
        future = self._client.submit(
            remote,
            self._study.to_plain(),
            chosen,
            str(self._folder.resolve()),
            code_version(),
            digest_of(map(self._study.key, group.cells)),
            key=f"{self._study.name}-{chosen[0]}-{os.urandom(4).hex()}",
            pure=False,
        )
        self._running[future] = group

    def _follow(self, future: Any, group: Group) -> None:
        if future.status not in ("finished", "error"):
            raise CancelledError(future.status)
        error = future.exception() if future.status == "error" else None
        if isinstance(error, KilledWorker):
            self._killed(group, error)
        elif isinstance(error, MechtvError):
            raise error
        elif error is not None:
            raise Interrupted(
                f"A worker stopped with {type(error).__name__}: {error}. Finished cells are kept "
                f"in {str(self._folder)!r}; run the study again to go on."
            ) from error

    def _killed(self, group: Group, error: KilledWorker) -> None:
        if len(group.cells) > 1:
            self._waiting += [Group(cells=(cell,)) for cell in group.cells]
        elif group is not self._alone:
            self._suspected.append(group)
        elif self._store.rows(key := self._study.key(group.cells[0])) is None:
            self._store.fail(key, f"The workers that computed it died, {_how_often(error)}.")


def remote(
    plain: dict[str, Any], chosen: list[int], folder: str, versions: dict[str, str], keys: str
) -> None:
    """What a worker does: compute some cells of a study.

    Args:
        keys: the digest of the cells' keys, as the client has them.

    Raises:
        InvalidInput: if the worker runs other code than who sent this, or sees another folder or
            other files of models and tasks.
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
    study = Study.from_plain(plain)
    cells = tuple(study.cells[number] for number in chosen)
    if digest_of(map(study.key, cells)) != keys:
        raise InvalidInput(
            f"The worker {worker.address} has other files of {cells[0].model.name!r} or "
            f"{cells[0].task.name!r} than the client; give all the same."
        )
    _share_threads(worker)
    try:
        compute(study, Group(cells=cells), folder, device=gpu())
    except DeviceLost:
        os._exit(1)  # Dask starts another worker, which finds the cell failed and goes on


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


def _done(futures: Sequence[Any]) -> list[Any]:
    if not futures:
        time.sleep(SECONDS)
        return []
    with suppress(TimeoutError):  # which says only that none is done yet
        wait(list(futures), timeout=SECONDS, return_when="FIRST_COMPLETED")
    return [future for future in futures if future.done()]


def _how_often(error: KilledWorker) -> str:
    times = getattr(error, "allowed_failures", 0) + 1
    return f"{times} time{'s' if times > 1 else ''} (memory, or a crash in native code)"

"""Dask places and retries; whatever dies, the table is that of one undisturbed process."""

import logging
import os
import signal
import sys
import threading
import time

import pytest
from study.small import small, without_seconds

from mechtv.errors import Interrupted, InvalidInput
from mechtv.study import StudyResults, on_dask, run_study
from mechtv.study.groups import grouped

distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of sockets that Dask leaves open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def whole(place):
    return run_study(small(place), place / "whole")


class Killer(threading.Thread):
    """Kills a worker process whenever a few more cells are there, so many times."""

    def __init__(self, client, folder, times):
        super().__init__(daemon=True)
        self.client, self.folder, self.times, self.killed = client, folder, times, 0

    def run(self):
        while self.killed < self.times:
            cells = self.folder / "cells"
            if cells.is_dir() and len(list(cells.glob("*.json"))) > self.killed:
                processes = list(self.client.run(os.getpid).values())
                os.kill(processes[self.killed % len(processes)], signal.SIGKILL)
                self.killed += 1
            time.sleep(0.2)


def test_workers_that_are_killed_cost_nothing_but_time(place, whole, tmp_path):
    study = small(place)
    prepared = run_study(small(place, seeds=[0]), tmp_path)
    assert prepared.counts() == {"done": 4}
    study_results = run_study(study, tmp_path / "undisturbed", workers=2)
    assert without_seconds(study_results).equals(without_seconds(whole))
    folder = tmp_path / "disturbed"
    with on_dask.client(2) as client:
        described(study, folder)
        killer = Killer(client, folder, times=2)
        killer.start()
        on_dask.run(client, study, grouped(study.cells, at_least=4), folder, Bar())
        killer.join(timeout=60)
    assert killer.killed == 2
    disturbed = StudyResults.load(folder)
    assert disturbed.counts() == {"done": 12}
    assert without_seconds(disturbed).equals(without_seconds(whole))


class Poison(distributed.WorkerPlugin):
    """Cells of one seed whose worker dies with them, in every worker; the others are slow."""

    def setup(self, worker):
        import os
        import time

        from mechtv.methods.hidden_state import extract_hidden_state
        from mechtv.methods.registry import METHODS, Method

        def make(model, task, layer, **options):
            if options["seed"] == 1:
                os._exit(1)
            time.sleep(0.5)
            return extract_hidden_state(model, task, layer, **options)

        METHODS["hidden_state"] = Method(make=make)


def test_cells_that_kill_their_workers_fail_and_no_other_is_blamed(place, whole, tmp_path):
    import cloudpickle
    import dask

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    study = small(place)
    described(study, tmp_path)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        on_dask.client(2) as client,
    ):
        client.register_plugin(Poison())
        on_dask.run(client, study, grouped(study.cells), tmp_path, Bar())
    results = StudyResults.load(tmp_path)
    assert results.counts() == {"done": 10, "failed": 2}
    for error in results.errors().itertuples():
        assert error.cell.endswith("seed 1")
        assert "The workers that computed it died, 1 time (" in error.error
    mended = run_study(study, tmp_path, retry_failed=True)
    assert without_seconds(mended).equals(without_seconds(whole))


def test_a_worker_of_other_code_or_files_or_without_the_folder_says_so(place, tmp_path):
    study = small(place)
    described(study, tmp_path / "here")
    plain, versions = study.to_plain(), on_dask.code_version()
    here, none = str(tmp_path / "here"), str(tmp_path / "elsewhere")
    with on_dask.client(1) as client:
        for folder, given, sentence in (
            (none, versions, "does not see the study in"),
            (none, {"code": "other"}, "runs another version of code than the client"),
            (here, versions, "has other files of .*model' or .*pairs.json' than the client"),
        ):
            sent = client.submit(on_dask.remote, plain, [0], folder, given, "other", pure=False)
            with pytest.raises(InvalidInput, match=sentence):
                sent.result()


def test_what_a_worker_does_not_expect_is_one_sentence(place, tmp_path, monkeypatch):
    study = small(place, seeds=[0])
    described(study, tmp_path)
    monkeypatch.setattr(on_dask, "remote", broken)
    sentence = r"A worker stopped with OSError: the cable\. Finished cells are kept"
    with on_dask.client(1) as client, pytest.raises(Interrupted, match=sentence):
        on_dask.run(client, study, grouped(study.cells), tmp_path, Bar())


def broken(*given):
    """What a worker does here."""
    raise OSError("the cable")


def test_a_scheduler_without_workers_is_waited_for_and_one_that_dies_is_one_sentence(
    place, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(on_dask, "SECONDS", 0.1)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    study = small(place, seeds=[0])
    described(study, tmp_path)
    cluster = distributed.LocalCluster(n_workers=0, processes=True, dashboard_address=None)
    client = distributed.Client(cluster, set_as_default=False)
    threading.Timer(2, cluster.close).start()
    with pytest.raises(Interrupted, match="The Dask cluster is lost"):
        on_dask.run(client, study, grouped(study.cells), tmp_path, Bar())
    assert "There is no worker yet; the study waits until one joins." in caplog.text
    client.close(timeout=1)


def test_a_scheduler_that_is_not_there_is_one_sentence(place, tmp_path, monkeypatch):
    monkeypatch.setattr(on_dask, "PATIENCE", 1)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with pytest.raises(InvalidInput, match=r"No Dask scheduler answers at 'tcp://127\.0\.0\.1:9'"):
        run_study(small(place), tmp_path, scheduler="tcp://127.0.0.1:9")


def test_slurm_jobs_are_asked_for_what_the_options_say():
    options = {"queue": "gpu", "cores": 4, "memory": "8GB", "walltime": "01:00:00"}
    with on_dask.slurm_cluster(options) as cluster:
        script = cluster.job_script()
    assert "#SBATCH -p gpu" in script
    assert "#SBATCH --cpus-per-task=4" in script
    assert "distributed.cli.dask_worker" in script
    with pytest.raises(InvalidInput, match="SLURMCluster refuses the options"):
        on_dask.slurm_cluster({"queue": "gpu"})


class Bar:
    """A bar that nobody sees."""

    n, total = 0, 12

    def update(self, more=1):
        self.n += more


def described(study, folder):
    """The folder as `run_study` prepares it."""
    from mechtv.study.running import _described

    _described(study, folder)

"""Whatever ends a run, finished cells stay, and going on gives what an undisturbed run gives."""

import errno
import json
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock
from study.small import save_model, small, without_seconds
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import CannotWrite, Interrupted, InvalidInput
from mechtv.evaluation import evaluate
from mechtv.forward import forget
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.registry import METHODS, Method
from mechtv.models import open_model
from mechtv.study import StudyResults, compare_methods, estimate, groups, run_study
from mechtv.study.groups import CELLS, LOCK, Group, compute, grouped
from mechtv.study.results import SECONDS
from mechtv.study.specs import ModelSpec
from mechtv.study.store import Store
from mechtv.tasks import get_task

KILLS = int(os.environ.get("MECHTV_KILLS", "3"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def whole(place):
    """The study, undisturbed."""
    return run_study(small(place), place / "whole")


def cell_files(folder):
    return sorted(p for p in (folder / CELLS).glob("*.json") if not p.name.startswith("."))


# --- what is computed ---


def test_the_table_is_what_the_functions_give(place, whole):
    study, table = small(place), whole.table()
    model, task = open_model(str(place / "model")), get_task(str(place / "pairs.json"))
    assert whole.counts() == {"done": 12}
    assert not whole.notices()
    for seed in study.seeds:
        own = table[table["seed"] == seed].drop(columns=[*SECONDS, "positions", "dtype", "device"])
        alone = compare_methods(
            model,
            [task],
            ["hidden_state"],
            [0, 2],
            shots=2,
            n=5,
            n_validation=5,
            options={"hidden_state": {"shots": 2, "n": 4}},
            seed=seed,
        ).table()
        assert own.reset_index(drop=True).equals(alone.drop(columns=list(SECONDS)))


def test_a_comparison_is_of_one_seed(whole):
    assert set(whole.comparison(seed=1).best()["method"]) == {
        "zero-shot",
        "in-context",
        "hidden_state",
    }
    with pytest.raises(InvalidInput, match="stands in two of the comparisons"):
        whole.comparison()
    with pytest.raises(InvalidInput, match="There is no column 'sed'"):
        whole.comparison(sed=1)


def test_a_second_run_computes_nothing(place, whole, monkeypatch):
    monkeypatch.setattr("mechtv.study.groups.Bench", None)
    told = []
    again = run_study(small(place), place / "whole", on_finished=told.append)
    assert not told
    assert again.table().equals(whole.table())


def test_another_description_in_the_folder_shares_its_cells(place, whole, tmp_path, caplog):
    few = run_study(small(place, seeds=[1]), tmp_path)
    assert few.counts() == {"done": 4}
    before = {path: path.stat().st_mtime_ns for path in cell_files(tmp_path)}
    caplog.set_level(logging.INFO)
    more = run_study(small(place), tmp_path)
    assert "held another description" in caplog.text
    assert without_seconds(more).equals(without_seconds(whole))
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())


def test_labels_and_positions_stand_in_the_table(place, tmp_path):
    named = {"name": "hidden_state", "label": "mine", "shots": 2, "n": 4}
    study = small(place, methods=[named], positions=[[-1], [-2, -1]], seeds=[0])
    table = run_study(study, tmp_path).table()
    assert set(table["method"]) == {"mine"}
    assert set(table["positions"]) == {"-1", "-2, -1"}


# --- how often the model runs ---


def passes(monkeypatch):
    """A counter of forward passes of the whole model, and of the tokens in them."""
    counted: Counter[str] = Counter()
    original = TransformerBridge.forward

    def forward(self, *args, **kwargs):
        counted["passes"] += 1
        counted["tokens"] += args[0].numel()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TransformerBridge, "forward", forward)
    return counted


def test_cells_of_a_group_share_their_prompts_passes(place, tmp_path, monkeypatch):
    learned = {"name": "learned", "epochs": 1, "batch_size": 8}
    study = small(place, methods=["zero-shot", "in-context", learned], layers="all", seeds=[0])
    counted = passes(monkeypatch)
    (group,) = grouped(study.cells)
    compute(study, group, tmp_path / "together")
    together = dict(counted)
    counted.clear()
    for cell in study.cells:
        forget(open_in_this_process(study))
        compute(study, Group(cells=(cell,)), tmp_path / "apart")
    assert together["passes"] < 0.7 * counted["passes"]
    assert together["tokens"] < 0.7 * counted["tokens"]
    tables = [StudyResults(study=study, folder=tmp_path / f) for f in ("together", "apart")]
    assert without_seconds(tables[0]).equals(without_seconds(tables[1]))


def open_in_this_process(study):
    from mechtv.study.groups import opened

    return opened(study.models[0], None)


def test_groups_are_halved_until_there_are_enough(place):
    cells = small(place).cells
    assert [len(group.cells) for group in grouped(cells)] == [4, 4, 4]
    assert [len(group.cells) for group in grouped(cells, at_least=5)] == [2, 2, 2, 2, 4]
    assert len(grouped(cells, at_least=100)) == 12
    assert grouped([], at_least=3) == []
    assert [c for group in grouped(cells, at_least=5) for c in group.cells] == list(cells)


# --- what goes wrong ---


def failing(monkeypatch, when):
    """Let the method raise an error for some of its calls."""

    def make(model, task, layer, **options):
        if when(layer, options["seed"]):
            raise ValueError("the moon is full")
        return extract_hidden_state(model, task, layer, **options)

    monkeypatch.setitem(METHODS, "hidden_state", Method(make=make))


@pytest.fixture
def tolerant(monkeypatch):
    """Options are not checked against a patched method's signature."""
    monkeypatch.setattr("mechtv.study.specs.check_options", lambda name, options: None)


@pytest.mark.usefixtures("tolerant")
def test_a_poison_cell_fails_alone_and_can_be_retried_alone(place, whole, tmp_path, monkeypatch):
    study = small(place)
    with monkeypatch.context() as patch:
        failing(patch, lambda layer, seed: (layer, seed) == (2, 1))
        results = run_study(study, tmp_path)
        assert results.counts() == {"done": 11, "failed": 1}
        (error,) = results.errors().itertuples()
        assert error.cell.endswith("hidden_state, layer 2, seed 1")
        assert error.error == "ValueError: the moon is full"
        assert "in make" in error.trace
        (notice,) = results.notices()
        assert "1 of 12 cells are failed" in notice
        assert "the moon is full" in notice
    assert run_study(study, tmp_path).counts() == {"done": 11, "failed": 1}
    told = []
    mended = run_study(study, tmp_path, retry_failed=True, on_finished=told.append)
    assert len(told) == 1
    assert mended.counts() == {"done": 12}
    assert without_seconds(mended).equals(without_seconds(whole))


@pytest.mark.usefixtures("tolerant")
def test_an_interrupted_run_keeps_what_it_finished(place, whole, tmp_path, monkeypatch):
    def make(model, task, layer, **options):
        if options["seed"] == 1:
            raise KeyboardInterrupt
        return extract_hidden_state(model, task, layer, **options)

    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "hidden_state", Method(make=make))
        with pytest.raises(KeyboardInterrupt):
            run_study(small(place), tmp_path)
    loaded = StudyResults.load(tmp_path)
    assert loaded.counts() == {"done": 6, "missing": 6}
    assert not list((tmp_path / CELLS).glob(f"*{LOCK}"))
    assert without_seconds(run_study(loaded.study, tmp_path)).equals(without_seconds(whole))


def test_a_full_disk_stops_the_run_and_loses_nothing(place, whole, tmp_path, monkeypatch):
    written = []

    def fsync(number):
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return
        written.append(number)
        if len(written) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CannotWrite, match="cannot be written: No space left on device"):
            run_study(small(place), tmp_path)
    loaded = StudyResults.load(tmp_path)
    assert loaded.counts() == {"done": 5, "missing": 7}
    assert not list(tmp_path.rglob(".*"))
    assert without_seconds(run_study(loaded.study, tmp_path)).equals(without_seconds(whole))


def test_looking_at_a_damaged_study_changes_nothing(place, tmp_path):
    run_study(small(place, seeds=[0]), tmp_path)
    victim = cell_files(tmp_path)[0]
    victim.write_text("{")
    results = StudyResults.load(tmp_path)
    assert len(results.table()[["method", "layer"]].drop_duplicates()) == 3
    results.export(tmp_path / "all.csv")
    estimate(results.study, tmp_path)
    assert victim.read_text() == "{"


def test_a_file_system_without_locks_is_one_sentence(place, tmp_path, monkeypatch):
    def acquire(self, **options):
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(CannotWrite, match="has no locks, by which processes share a study"):
        run_study(small(place), tmp_path)


@pytest.mark.usefixtures("tolerant")
def test_a_lost_gpu_stops_the_process_and_the_cell_is_failed(place, tmp_path, monkeypatch):
    monkeypatch.setattr("mechtv.study.groups.lost_device", lambda error: "moon" in str(error))
    failing(monkeypatch, lambda layer, seed: (layer, seed) == (2, 0))
    with pytest.raises(Interrupted, match="run the study again to go on"):
        run_study(small(place), tmp_path)
    assert StudyResults.load(tmp_path).counts() == {"done": 3, "failed": 1, "missing": 8}
    assert run_study(small(place), tmp_path).counts() == {"done": 11, "failed": 1}


def test_one_model_is_open_at_a_time_and_none_after_a_run(place, tmp_path, monkeypatch):
    open_now = []
    original = ModelSpec.open

    def opening(self, device=None):
        open_now.append(len(groups._OPEN))
        return original(self, device)

    monkeypatch.setattr(ModelSpec, "open", opening)
    other = str(save_model(tmp_path / "other", seed=1))
    study = small(place, models=[str(place / "model"), other], methods=["zero-shot"], seeds=[0])
    run_study(study, tmp_path / "study")
    assert open_now == [0, 0]
    assert not groups._OPEN


def test_a_folder_that_cannot_be_made_is_one_sentence(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="cannot be made: Not a directory"):
        run_study(small(place), tmp_path / "file" / "study")


def test_a_truncated_cell_is_set_aside_and_computed_again(place, whole, tmp_path, caplog):
    run_study(small(place), tmp_path)
    victim = cell_files(tmp_path)[3]
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) // 2])
    loaded = StudyResults.load(tmp_path)
    assert loaded.counts() == {"done": 11, "damaged": 1}
    assert "1 of 12 cells are in a damaged file" in loaded.notices()[0]
    mended = run_study(loaded.study, tmp_path)
    assert "is computed anew; what was there is kept as" in caplog.text
    assert mended.counts() == {"done": 12}
    assert without_seconds(mended).equals(without_seconds(whole))
    (aside,) = (tmp_path / CELLS).glob("*.damaged")
    assert aside.read_bytes() == content[: len(content) // 2]


def test_a_changed_number_in_a_cell_is_damage(place, tmp_path):
    run_study(small(place, seeds=[0]), tmp_path)
    victim = cell_files(tmp_path)[0]
    content = json.loads(victim.read_text())
    content["rows"][0]["value"] += 0.001
    victim.write_text(json.dumps(content))
    assert StudyResults.load(tmp_path).counts() == {"done": 3, "damaged": 1}


def test_cells_of_other_code_are_named_kept_and_taken_only_if_asked(
    place, whole, tmp_path, monkeypatch
):
    study = small(place)
    with monkeypatch.context() as patch:
        patch.setattr("mechtv.study.grid.code_version", lambda: {"mechtv": "0.0.1", "code": "old"})
        run_study(study, tmp_path)
    old = cell_files(tmp_path)
    loaded = StudyResults.load(tmp_path)
    assert loaded.counts() == {"older": 12}
    assert "12 of 12 cells are computed by other code: their files stay" in loaded.notices()[0]
    assert loaded.table().empty
    assert len(loaded.table(accept_older=True)) == len(whole.table())
    told = []
    run_study(study, tmp_path, accept_older=True, on_finished=told.append)
    assert not told
    assert run_study(study, tmp_path).counts() == {"done": 12}
    assert set(old) < set(cell_files(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"workers": -1},
        {"workers": 2, "scheduler": "tcp://127.0.0.1:1"},
        {"scheduler": "tcp://127.0.0.1:1", "slurm": {"queue": "gpu"}},
    ],
)
def test_ways_to_run_that_exclude_each_other_are_one_sentence(place, tmp_path, options):
    with pytest.raises(InvalidInput, match="do not go together"):
        run_study(small(place), tmp_path, **options)


def test_a_folder_without_a_study_is_one_sentence(tmp_path):
    with pytest.raises(InvalidInput, match="is no folder of a study"):
        StudyResults.load(tmp_path)


def test_the_table_is_exported_whole(place, whole, tmp_path):
    import pandas as pd

    read = pd.read_parquet(whole.export(tmp_path / "a.parquet"))
    assert read.equals(whole.table())
    assert len(pd.read_csv(whole.export(tmp_path / "a.csv"))) == len(read)
    with pytest.raises(InvalidInput, match=r"ends in neither \.csv nor \.parquet"):
        whole.export(tmp_path / "a.xlsx")


# --- several processes, and their death ---

RUN = """
import sys
sys.path[:0] = sys.argv[1:2]
import torch
torch.set_num_threads(1)
from pathlib import Path
from study.small import save_model, small, without_seconds
from mechtv.study import run_study
if __name__ == "__main__":
    run_study(small(Path(sys.argv[2]), seeds=range(int(sys.argv[4]))), sys.argv[3])
"""


def started(place, folder, seeds=3):
    words = [sys.executable, "-c", RUN, str(Path(__file__).parents[1])]
    return subprocess.Popen(
        [*words, str(place), str(folder), str(seeds)], stderr=subprocess.PIPE, text=True
    )


def finished(process):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


def test_two_processes_in_one_folder_lose_nothing_and_share_the_work(place, whole, tmp_path):
    both = [started(place, tmp_path) for _ in range(2)]
    for process in both:
        finished(process)
    results = StudyResults.load(tmp_path)
    assert results.counts() == {"done": 12}
    assert without_seconds(results).equals(without_seconds(whole))
    assert len(cell_files(tmp_path)) == 12
    assert not list((tmp_path / CELLS).glob(f"*{LOCK}"))


def test_a_cell_that_another_process_is_at_is_waited_for(place, whole, tmp_path):
    study = small(place)
    held = Store(tmp_path / CELLS).path(study.key(study.cells[0]), LOCK)
    lock = FileLock(held)
    with lock:
        process = started(place, tmp_path)
        until(lambda: len(cell_files(tmp_path)) == 11)
        assert process.poll() is None
    finished(process)
    assert StudyResults.load(tmp_path).counts() == {"done": 12}


def test_a_run_that_is_killed_again_and_again_gives_the_undisturbed_table(place, tmp_path):
    rng, seeds = random.Random(0), 4 * (KILLS + 2)
    kills = 0
    while kills < KILLS:
        process = started(place, tmp_path, seeds)
        there = len(cell_files(tmp_path)) if (tmp_path / CELLS).is_dir() else 0
        wanted = there + rng.randrange(1, 8)
        until(lambda p=process, w=wanted: p.poll() is not None or count(tmp_path) >= w)
        time.sleep(rng.random() * 0.1)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
    finished(started(place, tmp_path, seeds))
    study = small(place, seeds=range(seeds))
    disturbed = StudyResults(study=study, folder=tmp_path)
    undisturbed = run_study(study, tmp_path / "undisturbed")
    assert disturbed.counts() == {"done": 4 * seeds}
    assert without_seconds(disturbed).equals(without_seconds(undisturbed))


def count(folder):
    return len(cell_files(folder)) if (folder / CELLS).is_dir() else 0


def until(happens, seconds=120):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_evaluate_alone_gives_a_cells_score(place, whole):
    model, task = open_model(str(place / "model")), get_task(str(place / "pairs.json"))
    vector = extract_hidden_state(model, task, 2, shots=2, n=4, seed=1)
    alone = evaluate(model, task, vector, n=5, seed=1)
    table = whole.table()
    own = table[(table["seed"] == 1) & (table["layer"] == 2) & (table["split"] == "test")]
    found = own.set_index("score")["value"]["log-probability"]
    assert found == alone.log_probability.value

"""What two workers gain, what sharing gains, and that no kill changes a study's table.

Three studies of built-in tasks: one process against two Dask workers on the default and a tiny
model; forward passes with and without groups; and small cells of the tiny model under SIGKILL at
random moments, workers first, then whole runs. Run it on a quiet machine:

    python benchmarks/studies.py --out out/bench-studies [--kills 20] [--only passes]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import psutil
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import LlamaConfig, LlamaForCausalLM

import mechtv
from mechtv.files import write_whole
from mechtv.forward import forget
from mechtv.study import Study, StudyResults
from mechtv.study.groups import CELLS, Group, close, compute, grouped, opened
from mechtv.study.results import SECONDS

COMMAND = "from mechtv.cli import main; main()"
TASKS = ("present-past", "singular-plural", "country-capital", "antonym", "capitalize")
METHODS = (
    "zero-shot",
    "in-context",
    {"name": "hidden_state", "n": 20},
    {"name": "learned", "epochs": 1},
)


def main() -> None:
    options = _options()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    tiny = str(_tiny_model(out / "tiny"))
    found: dict[str, Any] = {"cores": os.cpu_count()}
    if options.only in (None, "workers"):
        found["workers"] = _workers(_study("both", ["smollm2-135m", tiny], [0, 1]), out)
    if options.only in (None, "passes"):
        found["passes"] = _passes(_study("passes", ["smollm2-135m"], [0], tasks=TASKS[:1]), out)
    if options.only in (None, "kills"):
        found["kills"] = _kills(_study("small", [tiny], range(options.seeds)), out, options.kills)
    print(json.dumps(found, indent=1))
    write_whole(out / "studies.json", json.dumps(found, indent=1).encode())


# --- one process, two workers ---


def _workers(study: Study, out: Path) -> dict[str, Any]:
    seconds, tables = {}, []
    for name, words in (("one process", ()), ("two workers", ("--workers", "2"))):
        folder = out / name.replace(" ", "-")
        began = time.monotonic()
        _finish(_started(study, folder, *words))
        seconds[name] = round(time.monotonic() - began, 1)
        tables.append(_table(folder))
        print(name, seconds[name], file=sys.stderr, flush=True)
    names, largest = _differences(*tables)
    return {
        "cells": len(study.cells),
        "seconds": seconds,
        "speed-up": round(seconds["one process"] / seconds["two workers"], 2),
        "columns that differ": names,
        "largest difference": largest,
    }


def _differences(one: pd.DataFrame, other: pd.DataFrame) -> tuple[list[str], float]:
    """Columns with other values, and the largest difference of a number."""
    names = [name for name in one if not one[name].equals(other[name])]
    numbers = [name for name in names if pd.api.types.is_numeric_dtype(one[name])]
    return names, max((float((one[n] - other[n]).abs().max()) for n in numbers), default=0.0)


# --- passes, with groups and without ---


def _passes(study: Study, out: Path) -> dict[str, Any]:
    counted: dict[str, dict[str, int]] = {}
    (group,) = grouped(study.cells)
    with _counter() as passes:
        compute(study, group, out / "together")
        counted["with groups"] = dict(passes)
        passes.clear()
        for cell in study.cells:
            forget(opened(cell.model, None))
            compute(study, Group(cells=(cell,)), out / "apart")
        counted["without"] = dict(passes)
    close()
    tables = [_table_of(study, out / name) for name in ("together", "apart")]
    return {"cells": len(study.cells), **counted, "same table": tables[0].equals(tables[1])}


@contextmanager
def _counter() -> Iterator[Counter[str]]:
    """Passes of the whole model, and the tokens in them."""
    counted: Counter[str] = Counter()
    original = TransformerBridge.forward

    def forward(self: TransformerBridge, *args: Any, **options: Any) -> Any:
        counted["passes"] += 1
        counted["tokens"] += args[0].numel()
        return original(self, *args, **options)

    with patch.object(TransformerBridge, "forward", forward):
        yield counted


# --- kills ---


def _kills(study: Study, out: Path, times: int) -> dict[str, Any]:
    rng, folder = random.Random(0), out / "killed"
    counted = {"workers": 0, "runs": 0, "runs begun": 0}
    while counted["runs"] < times:
        counted["runs begun"] += 1
        process = _started(study, folder, "--workers", "2")
        share = (times - counted["workers"]) // max(1, times - counted["runs"])
        for _ in range(max(1, share)):
            if _wait_for_more(process, folder, rng.randrange(1, 4)) and counted["workers"] < times:
                counted["workers"] += _kill_one(process, rng)
        if _wait_for_more(process, folder, rng.randrange(1, 3)):
            time.sleep(rng.random())
            _kill_all(process)
            counted["runs"] += 1
        process.wait()
        print(counted, _n_cells(folder), file=sys.stderr, flush=True)
        if _n_cells(folder) == len(study.cells):
            break
    _finish(_started(study, folder, "--retry-failed"))
    _finish(_started(study, out / "undisturbed"))
    tables = [_table(folder), _table(out / "undisturbed")]
    return {"cells": len(study.cells), **counted, "same table": tables[0].equals(tables[1])}


def _wait_for_more(process: subprocess.Popen[bytes], folder: Path, more: int) -> bool:
    """Wait for some more cells; False if the run ended instead."""
    wanted = _n_cells(folder) + more
    while process.poll() is None and _n_cells(folder) < wanted:
        time.sleep(0.02)
    return process.poll() is None


def _kill_one(process: subprocess.Popen[bytes], rng: random.Random) -> int:
    workers = _spawned(process)
    if not workers:
        return 0
    rng.choice(workers).kill()
    return 1


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    workers = _spawned(process)
    process.send_signal(signal.SIGKILL)
    for worker in workers:
        worker.kill()


def _spawned(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


# --- what they share ---


def _study(name: str, models: list[str], seeds: Any, tasks: tuple[str, ...] = TASKS) -> Study:
    return Study(
        name=name,
        models=models,
        tasks=tasks,
        methods=METHODS,
        seeds=seeds,
        n=50,
        n_validation=25,
    )


def _tiny_model(folder: Path) -> Path:
    """Random weights of two blocks, with the default model's tokenizer."""
    words = mechtv.open_model().tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = LlamaConfig(
        vocab_size=len(words), num_attention_heads=4, num_key_value_heads=2, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def _started(study: Study, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    file = folder.with_suffix(".toml")
    write_whole(file, _toml(study).encode())
    command = [sys.executable, "-c", COMMAND, "study", "run", str(file), "--out", str(folder)]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([*command, *words], stdout=log, stderr=log)


def _toml(study: Study) -> str:
    """A study as a file holds it: lists and tables in TOML are near enough to JSON."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name} = {text(one)}" for name, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(text, value)) + "]"
        return json.dumps(value)

    return "\n".join(f"{name} = {text(value)}" for name, value in study.to_plain().items())


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise SystemExit(f"{process.args} ended with {process.returncode}")


def _n_cells(folder: Path) -> int:
    return len(list((folder / CELLS).glob("[!.]*.json")))


def _table(folder: Path) -> pd.DataFrame:
    return _without_seconds(StudyResults.load(folder))


def _table_of(study: Study, folder: Path) -> pd.DataFrame:
    return _without_seconds(StudyResults(study=study, folder=folder))


def _without_seconds(results: StudyResults) -> pd.DataFrame:
    return results.table().drop(columns=list(SECONDS))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", default="out/bench-studies")
    parser.add_argument("--only", choices=("workers", "passes", "kills"))
    parser.add_argument("--kills", type=int, default=20, help="of workers, and of whole runs")
    parser.add_argument("--seeds", type=int, default=40, help="of the small cells")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""A study that takes a second: a tiny model in a folder, a file of pairs, two layers."""

import json
from pathlib import Path

import pandas as pd
import torch
from builders import tiny_hf, tiny_tokenizer

import mechtv
from mechtv.study.grid import Study
from mechtv.study.results import SECONDS, StudyResults

METHODS = ("zero-shot", "in-context", {"name": "hidden_state", "shots": 2, "n": 4})


def save_model(folder: Path, seed: int = 0) -> Path:
    """A tiny model with its tokenizer, as `save_pretrained` writes them."""
    tiny_hf("llama", torch.float32, seed).save_pretrained(folder)
    tiny_tokenizer(True).save_pretrained(folder)
    return folder


def save_pairs(path: Path, n: int = 40) -> Path:
    """A file of pairs."""
    examples = mechtv.get_task("capitalize").examples[:n]
    path.write_text(
        json.dumps([{"input": e.fields["input"], "output": e.answer} for e in examples])
    )
    return path


def small(place: Path, **changes: object) -> Study:
    """Twelve cells: 2 references and a method at 2 layers, with 3 seeds."""
    if not (place / "model").is_dir():
        save_model(place / "model")
        save_pairs(place / "pairs.json")
    given = {
        "name": "small",
        "models": [str(place / "model")],
        "tasks": [str(place / "pairs.json")],
        "methods": METHODS,
        "layers": [0, 2],
        "seeds": [0, 1, 2],
        "shots": 2,
        "n": 5,
        "n_validation": 5,
    }
    return Study(**given | changes)  # type: ignore[arg-type]


def without_seconds(results: StudyResults) -> pd.DataFrame:
    """The table but for the columns in which two runs differ."""
    return results.table().drop(columns=list(SECONDS))

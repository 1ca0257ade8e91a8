"""How well a model does the built-in tasks, zero-shot and in context, with intervals.

python figures/builtin_tasks.py [--model smollm2-135m] [--shots 8] [--out figures/results]

Writes `builtin_tasks.csv`, one row a (model, task, setting, score). What is done is kept: start it
again after an interruption and it goes on.
"""

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from tqdm import tqdm

import mechtv
from mechtv.files import write_whole
from mechtv.tasks.builtin import builtin_names


def main(
    model: str = "smollm2-135m",
    shots: int = 8,
    seed: int = 0,
    out: Annotated[Path, typer.Option()] = Path("figures/results"),
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "builtin_tasks.csv"
    key = {"model": model, "in_context_shots": shots, "seed": seed}
    parts = [pd.read_csv(path)] if path.exists() else []
    known = {tuple(row) for part in parts for row in part[["task", *key]].to_numpy()}
    missing = [name for name in builtin_names() if (name, *key.values()) not in known]
    opened = mechtv.open_model(model)
    for name in tqdm(missing):
        task = mechtv.get_task(name)
        scores = [
            mechtv.evaluate(opened, task, shots=k, seed=seed, batch_size=16)
            .table()
            .assign(in_context_shots=shots)
            for k in (0, shots)
        ]
        parts.append(pd.concat(scores, ignore_index=True))
        whole = pd.concat(parts, ignore_index=True)
        write_whole(path, whole.to_csv(index=False, float_format="%.6f").encode())


if __name__ == "__main__":
    typer.run(main)

"""How well a model does the built-in tasks, zero-shot and in context, with intervals.

python figures/builtin_tasks.py [--model smollm2-135m] [--shots 8] [--out figures/results]

Writes `builtin_tasks.csv`, one row a (task, setting, score). Tasks that are done are kept: start it
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
    done = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["task"])
    opened = mechtv.open_model(model)
    for name in tqdm([name for name in builtin_names() if name not in set(done["task"])]):
        task = mechtv.get_task(name)
        scores = [
            mechtv.evaluate(opened, task, shots=k, seed=seed, batch_size=16).table()
            for k in (0, shots)
        ]
        done = pd.concat([done, *scores], ignore_index=True)
        write_whole(path, done.to_csv(index=False, float_format="%.6f").encode())


if __name__ == "__main__":
    typer.run(main)

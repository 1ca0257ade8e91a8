"""What each way to do a task costs: vectors beside soft prompts, prefixes and LoRA.

    pip install "mechtv[peft]"
    python figures/efficiency_table.py

The efficiency table of *Task Vectors, Learned Not Extracted*: all are trained on the same examples
with the same objective, and timed on prompts that are run in full. Run it on a machine that does
nothing else. Writes figures/results/efficiency.csv.
"""

from pathlib import Path

import pandas as pd
import typer

import mechtv
from mechtv.files import write_whole

LAYERS = {"learned": 8, "learned, three layers": (4, 8, 12)}
TRAINING = {"epochs": 10, "batch_size": 32}


def main(
    tasks: str = "present-past,sentiment,country-capital",
    shots: int = 8,
    n: int = 100,
    seed: int = 0,
    results: Path = Path(__file__).parent / "results",
) -> None:
    model, tables = mechtv.open_model(), []
    for name in tasks.split(","):
        task = mechtv.get_task(name)
        size = min(n, len(task.splits(seed).test))
        vectors = {
            label: mechtv.learn(model, task, layer=layer, seed=seed, **TRAINING)
            for label, layer in LAYERS.items()
        }
        baselines = [
            mechtv.train_baseline(model, task, kind, n=size, seed=seed, **TRAINING)
            for kind in ("prompt", "prefix", "lora")
        ]
        found = mechtv.efficiency(
            model, task, vectors, baselines=baselines, shots=shots, n=size, seed=seed
        )
        tables.append(found.table())
        whole = pd.concat(tables, ignore_index=True)
        write_whole(results / "efficiency.csv", whole.to_csv(index=False).encode())


if __name__ == "__main__":
    typer.run(main)

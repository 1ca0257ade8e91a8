"""One place or many: hidden-state, function and learned vectors at six places.

    python figures/flexibility_table.py [--task present-past]

The flexibility table of *Task Vectors, Learned Not Extracted*. Finished cells are kept in
out/flexibility/. Writes figures/results/flexibility.csv, and the figure beside the cells.
"""

from pathlib import Path

import pandas as pd
import typer

import mechtv
from mechtv.files import write_whole

OPTIONS = {"learned": {"batch_size": 32, "n_train": 300, "n_validation": 100}}


def main(
    tasks: str = "present-past,singular-plural",
    n: int = 100,
    seed: int = 0,
    out: Path = Path("out/flexibility"),
    results: Path = Path(__file__).parent / "results",
) -> None:
    model, tables = mechtv.open_model(), []
    for name in tasks.split(","):
        task = mechtv.get_task(name).with_template("qa")
        splits = task.splits(seed)
        most = {"n_train": len(splits.train), "n_validation": len(splits.validation)}
        sizes = {size: min(OPTIONS["learned"][size], n) for size, n in most.items()}
        table = mechtv.flexibility(
            model,
            task,
            n=min(n, len(splits.test)),
            options={"learned": OPTIONS["learned"] | sizes},
            folder=str(out),
            seed=seed,
        )
        figure = mechtv.plots.flexibility_bars(table)
        write_whole(out / f"{name}.html", figure.to_html(include_plotlyjs=True).encode())
        tables.append(table)
        whole = pd.concat(tables, ignore_index=True)
        write_whole(results / "flexibility.csv", whole.to_csv(index=False).encode())


if __name__ == "__main__":
    typer.run(main)

"""How near learned vectors come to eight demonstrations, on every built-in task.

python figures/learned_tuned.py [--tasks present-past,topic] [--out figures/results]

For each task every setting (layers @ step size) is trained once; the one with the best validation
accuracy is scored on the test split, beside the plain and the in-context model. Writes
`learned_cells.csv`, one row a trained vector, and `learned_tuned.csv`, one row a task. What is
done is kept: start it again after an interruption and it goes on.
"""

import time
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from tqdm import tqdm

import mechtv
from mechtv.files import write_whole
from mechtv.tasks.builtin import builtin_names

SETTINGS = "8@0.2 12@0.2 4,8,12@0.1"


def main(
    model: str = "smollm2-135m",
    tasks: str = ",".join(builtin_names()),
    settings: Annotated[str, typer.Option(help="Layers @ step size, parted by spaces.")] = SETTINGS,
    shots: int = 8,
    epochs: int = 20,
    batch_size: int = 32,
    seed: int = 0,
    out: Path = Path("figures/results"),
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    opened = mechtv.open_model(model)
    common = {"model": model, "epochs": epochs, "batch_size": batch_size, "seed": seed}
    cells, tuned = _read(out / "learned_cells.csv"), _read(out / "learned_tuned.csv")
    tries = [
        dict(zip(("layers", "step_size"), one.split("@"), strict=True)) for one in settings.split()
    ]
    for name in tqdm(tasks.split(",")):
        keys = [common | {"task": name} | one for one in tries]
        for key in keys:
            if not _has(cells, key):
                cells = pd.concat(
                    [cells, pd.DataFrame([key | _cell(opened, key)])], ignore_index=True
                )
                _write(out / "learned_cells.csv", cells)
        done = cells[[any(_same(row, key) for key in keys) for _, row in cells.iterrows()]]
        others = tuned[tuned["task"] != name] if len(tuned) else tuned
        tuned = pd.concat(
            [others, pd.DataFrame([_best(opened, name, done, shots, seed)])], ignore_index=True
        )
        _write(out / "learned_tuned.csv", tuned)


def _cell(model, key: dict[str, object]) -> dict[str, object]:
    """Train one vector; its scores on the validation and on the test split."""
    task, began = mechtv.get_task(key["task"]), time.perf_counter()
    vector = mechtv.learn(
        model,
        task,
        [int(layer) for layer in str(key["layers"]).split(",")],
        step_size=float(key["step_size"]),
        epochs=key["epochs"],
        batch_size=key["batch_size"],
        patience=key["epochs"],
        seed=key["seed"],
    )
    seconds = time.perf_counter() - began
    curve = vector.training_curve()
    best = curve.loc[curve["validation_accuracy"].idxmax()]
    test = mechtv.evaluate(model, task, vector)
    return {
        "validation_accuracy": best["validation_accuracy"],
        "best_epoch": int(best["epoch"]),
        "last_train_loss": curve["train_loss"].iloc[-1],
        "n_train": vector.card.settings["n_train"],
        "test_accuracy": test.accuracy.value,
        "test_low": test.accuracy.low,
        "test_high": test.accuracy.high,
        "test_exact": test.exact_match.value,
        "n_test": test.accuracy.n,
        "seconds": seconds,
    }


def _best(model, name: str, cells: pd.DataFrame, shots: int, seed: int) -> dict[str, object]:
    """The setting with the best validation accuracy, beside eight shots on the same queries."""
    task = mechtv.get_task(name)
    best = cells.loc[cells["validation_accuracy"].idxmax()]
    in_context = mechtv.evaluate(model, task, shots=shots, seed=seed, batch_size=16).accuracy
    zero_shot = mechtv.evaluate(model, task, seed=seed).accuracy
    return best.to_dict() | {
        "zero_shot": zero_shot.value,
        "in_context": in_context.value,
        "in_context_low": in_context.low,
        "in_context_high": in_context.high,
        "shots": shots,
        "share_of_in_context": best["test_accuracy"] / in_context.value
        if in_context.value
        else None,
    }


def _has(table: pd.DataFrame, key: dict[str, object]) -> bool:
    return any(_same(row, key) for _, row in table.iterrows())


def _same(row: pd.Series, key: dict[str, object]) -> bool:
    return all(str(row[name]) == str(value) for name, value in key.items())


def _read(path: Path) -> pd.DataFrame:
    return (
        pd.read_csv(path, dtype={"layers": str, "step_size": str})
        if path.exists()
        else pd.DataFrame()
    )


def _write(path: Path, table: pd.DataFrame) -> None:
    write_whole(path, table.to_csv(index=False, float_format="%.6f").encode())


if __name__ == "__main__":
    typer.run(main)

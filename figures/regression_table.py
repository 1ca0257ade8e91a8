"""In-context regression as text: errors of the plain model, in context, and under vectors.

    python figures/regression_table.py

Two functions of six numbers, w·x and a sum of a hundred ReLUs, twelve demonstrations (protocol D5
of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context Learning*). The
ridge of the linear map is the best of several on validation queries. Writes
figures/results/regression.csv.
"""

from functools import partial
from pathlib import Path

import pandas as pd
import typer
from ridges import linear_maps

import mechtv
from mechtv.files import write_whole

SHOTS = 12


def main(
    n: int = 60,
    n_fit: int = 64,
    seed: int = 0,
    results: Path = Path(__file__).parent / "results",
) -> None:
    model, tables = mechtv.open_model(), []
    middle = model.cfg.n_layers // 2
    for kind in ("linear", "relu"):
        task = mechtv.regression_task(kind)
        evaluate = partial(mechtv.evaluate_regression, model, task, seed=seed)
        maps = linear_maps(model, task, shots=SHOTS, n=n_fit, seed=seed).values()
        # A vector goes on acting, since the number is written over many tokens.
        vectors = {
            f"hidden_state, layer {middle}": mechtv.extract_hidden_state(
                model, task, layer=middle, shots=SHOTS, n=n_fit, seed=seed
            ),
            f"learned, layer {middle}": mechtv.learn(
                model, task, layer=middle, batch_size=32, epochs=5, seed=seed
            ),
            "linear": min(
                maps,
                key=lambda vector: (
                    evaluate(vector.acting_on("both"), split="validation", n=n // 2).mse.value
                ),
            ),
        }
        found = {"zero-shot": evaluate(shots=0, n=n), "in-context": evaluate(n=n)}
        for name, vector in vectors.items():
            found[name] = evaluate(vector.acting_on("both"), n=n)
        tables += [scores.table().assign(run=name) for name, scores in found.items()]
        whole = pd.concat(tables, ignore_index=True)
        write_whole(results / "regression.csv", whole.to_csv(index=False).encode())


if __name__ == "__main__":
    typer.run(main)

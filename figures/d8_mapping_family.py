"""D8: constant, linear and deeper maps of the zero-shot state to the in-context one.

    python figures/d8_mapping_family.py [--quick]

A figure of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*.
"""

import pandas as pd
from cells import WHICH, accuracy
from common import Cell, Figure, Setup, main, pooled

import mechtv

VOCABULARY = "dNTP over vocabulary"
SHOTS = 8
WHAT = {
    VOCABULARY: "dNTP, vocabulary (nats)",
    "state MSE": "State error (mean square)",
    "accuracy": "Accuracy",
}


def mapped(setup: Setup, task, seed: int):
    most = len(task.splits(seed).train) - SHOTS
    few = {"n": 32, "epochs": 3, "depths": (1, 2)} if setup.quick else {"n": min(256, most)}
    table = mechtv.compare_mappings(
        setup.model,
        task,
        setup.model.cfg.n_layers - 1,
        shots=SHOTS,
        n_test=setup.size(task, seed),
        ridge=1e4,
        seed=seed,
        **few,
    )
    return table


def compute(setup: Setup):
    return setup.table(
        [
            Cell(compute=mapped, task=setup.task(name), settings={"seed": seed})
            for name in setup.tasks
            for seed in setup.seeds
        ]
    )


def draw(table):
    plain = table[table["score"].isin((VOCABULARY, "state MSE"))]
    own = pooled(
        pd.concat([plain, accuracy(table).assign(score="accuracy")]), ["score", "task", "mapping"]
    )
    labels = mechtv.plots.Labels(
        title="Maps of the zero-shot state to the in-context one",
        lines=(WHICH, "Fitted at the last layer. Bars: 95 % intervals"),
        names=WHAT | {f"mlp-{depth}": f"Residual MLP, depth {depth}" for depth in range(1, 17)},
    )
    return mechtv.plots.tidy_bars(
        own, labels, x="task", by="mapping", panel="score", own_y=True, columns=2
    )


def said(table):
    for score in (VOCABULARY, None):
        own = accuracy(table) if score is None else table[table["score"] == score]
        mean = own.groupby("mapping", sort=False)["value"].mean()
        words = ", ".join(f"{name} {value:.3g}" for name, value in mean.items())
        yield f"{score or 'Accuracy'}, mean over tasks: {words}."


FIGURE = Figure(
    name="d8_mapping_family",
    claim="A linear map is as good as deeper ones, and better than a constant.",
    tasks=("present-past", "country-capital", "sentiment", "topic"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

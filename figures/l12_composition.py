"""L12: English to French plus masculine to feminine, on masculine to feminine in French.

    python figures/l12_composition.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

import pandas as pd
from cells import FULL, cells
from common import Figure, Setup, averaged, main, pooled

import mechtv

PARTS = ("english-french", "masculine-feminine")


def composed(setup: Setup, task, layer: int, seed: int):
    parts = {name: setup.learned(setup.task(name), layer, seed) for name in PARTS}
    own = {task.name: setup.learned(task, layer, seed)}
    options = {"n": setup.size(task, seed), "seed": seed, "progress": False}
    together = mechtv.evaluate_composition(setup.model, task, parts, **options).table()
    alone = mechtv.transfer_matrix(setup.model, own, [task], **options).table()
    alone = alone[alone["vector"] == task.name].rename(columns={"vector": "part"})
    return pd.concat([together, alone], ignore_index=True)


def compute(setup: Setup):
    return setup.table(cells(setup, composed, setup.depths, beside=PARTS))


def draw(table):
    own = pooled(table[table["score"].isin((FULL, "log-probability"))], ["layer", "part", "score"])
    labels = mechtv.plots.Labels(
        title="Two vectors added, on the composed task",
        x="Layer",
        y="Score",
        lines=("masculine-feminine-french: from an English word to the French feminine one",),
        names={"log-probability": "Log-probability (nats)", FULL: "Accuracy (full vocabulary)"},
    )
    return mechtv.plots.tidy_bars(own, labels, x="layer", by="part", panel="score", own_y=True)


def said(table):
    for score, name in ((FULL, "Accuracy"), ("log-probability", "Log-probability (nats)")):
        own = averaged(table[table["score"] == score], ["part"])
        words = ", ".join(f"{row['part']} {row['value']:.2f}" for row in own.to_dict("records"))
        yield f"{name}, mean over layers: {words}."


FIGURE = Figure(
    name="l12_composition",
    claim="The sum of two vectors does what both do, one after the other.",
    tasks=("masculine-feminine-french",),
    quick_tasks=("masculine-feminine-french",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

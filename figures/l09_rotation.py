"""L9: how the layers turn the learned vector, whether toward the task's tokens, and its tokens.

    python figures/l09_rotation.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*; with the maps of L8.
"""

import pandas as pd
from cells import TASKS, cells, of_kind, propagated
from common import Figure, Setup, main, pooled

import mechtv

COSINE = "cos(θ, Qθ)"


def compute(setup: Setup):
    table = setup.table(cells(setup, propagated, setup.depths))
    return of_kind(table, "rotation", "alignment", "tokens")


def draw(table):
    turned = table[(table["kind"] == "rotation") & (table["score"] == COSINE)]
    random = turned.assign(
        value=turned["null_mean"],
        low=turned["null_low"],
        high=turned["null_high"],
        series=f"{COSINE}, random vectors",
    )
    aligned = table[table["kind"] == "alignment"]
    chance = aligned[aligned["vector"] == "θ"]
    parts = [
        turned.assign(series=COSINE, low=None, high=None),
        random,
        aligned.assign(series="alignment of " + aligned["vector"]),
        chance.assign(
            value=chance["random"],
            low=chance["random_low"],
            high=chance["random_high"],
            series="alignment of random vectors",
        ),
    ]
    columns = ["task", "layer", "series"]
    own = pooled(
        pd.concat(parts)[[*columns, "value", "low", "high"]].astype(
            {"value": float, "low": float, "high": float}
        ),
        columns,
    )
    labels = mechtv.plots.Labels(
        title="How the layers turn the vector, and toward what",
        x="Layer at whose input θ is added",
        y="Cosine, and share of the norm",
        lines=(
            "Alignment: the share of a vector's norm in the span of the answers' tokens",
            "Bars of random vectors: the range of 95 % of them",
        ),
    )
    return mechtv.plots.tidy_lines(own, labels, x="layer", by="series", panel="task")


def said(table):
    turned = table[(table["kind"] == "rotation") & (table["score"] == COSINE)]
    above = int((turned["value"] > turned["null_high"]).sum())
    below = int((turned["value"] < turned["null_low"]).sum())
    yield (
        f"{COSINE} is {turned['value'].min():.2f} to {turned['value'].max():.2f}: above the range "
        f"of random vectors in {above} of {len(turned)} maps, below it in {below}."
    )
    tokens = table[table["kind"] == "tokens"].groupby("task", sort=False).tail(3)
    for row in tokens.to_dict("records"):
        yield f"{row['task']}, layer {row['layer']}, {row['vector']}: {row['tokens']}"


FIGURE = Figure(
    name="l09_rotation",
    claim="Early vectors are turned toward the task's tokens, late ones are stretched as they are.",
    tasks=TASKS,
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
    quick_n=16,
)

if __name__ == "__main__":
    main(FIGURE)

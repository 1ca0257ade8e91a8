"""L1: accuracy against the layer of injection, for learned and extracted vectors.

    python figures/l01_accuracy_by_layer.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*; what its options are: `--help`.
"""

from common import Figure, Setup, comparison_of, main
from grid import grid, of_l1

import mechtv

METHODS = ("zero-shot", "in-context", "hidden_state", "function_vector", "learned")


def compute(setup: Setup):
    return grid(setup, METHODS, of_l1(setup))


def draw(table):
    return mechtv.plots.accuracy_of_methods(comparison_of(table))


def said(table):
    scores = comparison_of(table).table()
    own = scores[(scores["score"] == "accuracy, full vocabulary") & (scores["split"] == "test")]
    by_place = own.dropna(subset="layer").pivot_table(
        index=["task", "layer"], columns="method", values="value", sort=False
    )
    extracted = by_place.drop(columns="learned").max(axis=1)
    above = int((by_place["learned"] > extracted).sum())
    yield f"Learned is above both extracted vectors at {above} of {len(by_place)} (task, layer)."


FIGURE = Figure(
    name="l01_accuracy_by_layer",
    claim="Learned vectors are above extracted ones at every layer, also at late ones.",
    tasks=("present-past", "singular-plural", "country-capital", "antonym", "sentiment", "topic"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

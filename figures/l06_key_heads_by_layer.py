"""L6: in which blocks the key heads of learned vectors lie.

    python figures/l06_key_heads_by_layer.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

from cells import TASKS, cells, key_heads, of_kind
from common import Figure, Setup, main

import mechtv


def compute(setup: Setup):
    return of_kind(setup.table(cells(setup, key_heads, setup.depths)), "histogram")


def draw(table):
    own = table.groupby(["task", "layer", "block"], sort=False, as_index=False).agg(
        key_heads=("key_heads", "sum"), n_heads=("n_heads", "sum")
    )
    own["value"] = own["key_heads"] / own["n_heads"]
    own["layer"] = "θ at layer " + own["layer"].astype(str)
    labels = mechtv.plots.Labels(
        title="Where the key heads lie",
        x="Block",
        y="Share of the block's heads",
        lines=("Key heads: a tenth of the heads behind θ, by saliency on validation queries",),
    )
    return mechtv.plots.tidy_lines(own, labels, x="block", by="layer", panel="task")


def said(table):
    last = table["block"].max()
    for layer, own in table.groupby("layer", sort=False):
        early = own[own["block"] < (layer + last + 1) / 2]["key_heads"].sum()
        share = early / own["key_heads"].sum()
        yield f"θ at layer {layer}: {share:.0%} of its key heads lie in the nearer half behind it."


FIGURE = Figure(
    name="l06_key_heads_by_layer",
    claim="Key heads lie in the blocks right behind the vector.",
    tasks=TASKS,
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

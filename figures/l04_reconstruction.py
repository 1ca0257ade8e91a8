"""L4: what the OV circuits, or the MLPs, do in the learned vector's place, by layer.

    python figures/l04_reconstruction.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

from cells import TASKS, cells, reconstructed
from common import Figure, Setup, main, pooled

import mechtv

SHARE = "share of the gain recovered"
NULL = "random, norm and cosine of OV"


def compute(setup: Setup):
    return setup.table(cells(setup, reconstructed, setup.layers(2, 5)))


def draw(table):
    own = table[(table["score"] == SHARE) & (table["part"] != "theta")].copy()
    is_null = own["null"].fillna("") == "norm and cosine"
    own.loc[is_null, "part"] = NULL
    own = pooled(own[is_null | (own["null"].fillna("") == "")], ["task", "layer", "part"])
    labels = mechtv.plots.Labels(
        title="What OV circuits and MLPs do in the vector's place",
        x="Layer at whose input θ is added",
        y="Share of θ's gain in log-probability",
        lines=("Zero-shot is 0, the whole vector 1. Bars: 95 % intervals",),
    )
    own = own[own["part"] != "zero-shot"]
    return mechtv.plots.tidy_lines(own, labels, x="layer", by="part", panel="task")


def said(table):
    own = table[(table["score"] == SHARE) & (table["null"].fillna("") == "")]
    wide = own.pivot_table(index=["task", "layer", "seed"], columns="part", values="value")
    more = int((wide["MLP"] > wide["OV"]).sum())
    yield f"OV circuits alone recover {wide['OV'].min():.2f} to {wide['OV'].max():.2f} of the gain."
    yield f"MLPs alone recover more in {more} of {len(wide)} cells."


FIGURE = Figure(
    name="l04_reconstruction",
    claim="The OV circuits' outputs for θ, put in its place, bring back most of its accuracy.",
    tasks=TASKS,
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

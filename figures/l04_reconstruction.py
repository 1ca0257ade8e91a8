"""L4: what the OV circuits, or the MLPs, do in the learned vector's place, by layer.

    python figures/l04_reconstruction.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

import pandas as pd
from cells import TASKS, WHICH, accuracy, cells, reconstructed
from common import Figure, Setup, averaged, main, pooled

import mechtv

SHARE = "share of the gain recovered"
NULL = "random, norm and cosine of OV"
WHAT = {"accuracy": "Accuracy", SHARE: "Share of θ's gain"}


def compute(setup: Setup):
    return setup.table(cells(setup, reconstructed, setup.depths))


def draw(table):
    null = table["null"].fillna("")
    is_null = (null == "norm and cosine") & (table["part"] == "OV")
    own = table.assign(part=table["part"].mask(is_null, NULL))[is_null | (null == "")]
    shares = own[(own["score"] == SHARE) & ~own["part"].isin(("theta", "zero-shot"))]
    accuracies = accuracy(own).assign(score="accuracy")
    order = {task: place for place, task in enumerate(table["task"].unique())}
    both = pd.concat([accuracies, shares])
    both = both.sort_values("task", key=lambda task: task.map(order), kind="stable")
    several = both["task"].nunique() > 1
    both["panel"] = (both["task"] + "\n" if several else "") + both["score"].map(WHAT)
    labels = mechtv.plots.Labels(
        title="What OV circuits and MLPs do in the vector's place",
        x="Layer at whose input θ is added",
        lines=(
            WHICH,
            "Gain in log-probability: zero-shot 0, θ 1. Bars: 95 % intervals",
        ),
        names={"theta": "θ itself"},
    )
    own = pooled(both, ["panel", "layer", "part"])
    return mechtv.plots.tidy_lines(
        own, labels, x="layer", by="part", panel="panel", columns=2, own_y=True
    )


def said(table):
    own = table[(table["score"] == SHARE) & (table["null"].fillna("") == "")]
    wide = own.pivot_table(index=["task", "layer", "seed"], columns="part", values="value")
    more = int((wide["MLP"] > wide["OV"]).sum())
    yield f"OV circuits alone recover {wide['OV'].min():.2f} to {wide['OV'].max():.2f} of the gain."
    yield f"MLPs alone recover more in {more} of {len(wide)} cells."
    found = averaged(accuracy(table[table["null"].fillna("") == ""]), ["part"])
    words = ", ".join(f"{row['part']} {row['value']:.2f}" for row in found.to_dict("records"))
    yield f"Accuracy, mean over tasks and layers: {words}."


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

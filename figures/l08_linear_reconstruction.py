"""L8: the learned vector's effect as a linear map: accuracy of W theta at the end, by layer.

    python figures/l08_linear_reconstruction.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*. A quick run fits W in the span of 96
perturbations alone.
"""

from cells import TASKS, WHICH, accuracy, cells, of_kind, propagated
from common import Figure, Setup, main, pooled

import mechtv

NAMES = {
    "zero-shot": "Zero-shot",
    "theta at its layer": "θ at its layer",
    "W theta at the end": "Wθ at the end",
    "mean effect at the end": "Mean effect at the end",
}


def compute(setup: Setup):
    return of_kind(setup.table(cells(setup, propagated, setup.depths)), "propagation")


def draw(table):
    own = pooled(accuracy(table[table["setting"].isin(NAMES)]), ["task", "layer", "setting"])
    labels = mechtv.plots.Labels(
        title="The vector's effect as one linear map",
        x="Layer at whose input θ is added",
        y="Accuracy",
        lines=(
            WHICH,
            "Wθ and the mean effect are added behind the last block. Bars: 95 % intervals",
        ),
        names=NAMES,
    )
    return mechtv.plots.tidy_lines(own, labels, x="layer", by="setting", panel="task", share=True)


def said(table):
    held = table[(table["setting"] == "held-out perturbations") & (table["queries"] == "test")]
    fit, centred = (held[held["score"] == score]["value"] for score in ("R²", "R², centred"))
    yield (
        f"R² on held-out perturbations and queries is {fit.min():.3f} to {fit.max():.3f}; with the "
        f"mean effect left out {centred.min():.3f} to {centred.max():.3f}."
    )
    wide = accuracy(table[table["setting"].isin(NAMES)]).pivot_table(
        index=["task", "layer", "seed"], columns="setting", values="value"
    )
    gap = (wide["theta at its layer"] - wide["W theta at the end"]).mean()
    yield f"Wθ at the end is {gap:.2f} below θ at its layer on average."


FIGURE = Figure(
    name="l08_linear_reconstruction",
    claim="The path from θ to the last layer is linear: Wθ at the end has θ's accuracy.",
    tasks=TASKS,
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
    quick_n=16,
)

if __name__ == "__main__":
    main(FIGURE)

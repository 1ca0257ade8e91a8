"""L2: one place or many: hidden-state, function and learned vectors at six places.

    python figures/l02_flexibility.py [--quick]

The flexibility table of *Task Vectors, Learned Not Extracted*.
"""

from cells import WHICH, accuracy
from common import Cell, Figure, Setup, averaged, fitting, main, pooled

import mechtv

QUICK = {
    "hidden_state": {"n": 8},
    "function_vector": {"n": 6, "n_shuffled": 3, "shots": 3},
    "learned": {"epochs": 2, "batch_size": 32, "n_train": 48, "n_validation": 16},
}
FULL = {"learned": {"batch_size": 32, "n_train": 300, "n_validation": 80}}


def placed(setup: Setup, task, seed: int):
    options = QUICK if setup.quick else FULL
    options = options | {"learned": fitting(task, options["learned"])}
    return mechtv.flexibility(
        setup.model,
        task,
        shots=3 if setup.quick else 8,
        n=setup.size(task, seed),
        options=options,
        folder=str(setup.out / "cells"),
        seed=seed,
    )


def longer(task):
    """Word pairs as questions, so that there are five positions; other tasks as they are."""
    return task.with_template("qa") if "{input}" in task.template.text else task


def compute(setup: Setup):
    return setup.table(
        [
            Cell(compute=placed, task=task, settings={"seed": seed})
            for task in (longer(setup.task(name)) for name in setup.tasks)
            for seed in setup.seeds
        ]
    )


def draw(table):
    own = accuracy(table).copy()
    own.loc[own["method"].isin(("zero-shot", "in-context")), "place"] = "no vector"
    own = pooled(own, ["task", "place", "method"])
    labels = mechtv.plots.Labels(
        title="Accuracy by the place of the vector",
        y="Accuracy",
        lines=(
            WHICH,
            "Bars: 95 % intervals. In the k-shot prompt the vector acts behind demonstrations",
        ),
    )
    return mechtv.plots.tidy_bars(own, labels, x="place", by="method", panel="task", share=True)


def said(table):
    own = accuracy(table)
    own = averaged(own[~own["method"].isin(("zero-shot", "in-context"))], ["place", "method"])
    for place, rows in own.groupby("place", sort=False):
        words = (f"{row['method']} {row['value']:.2f}" for row in rows.to_dict("records"))
        yield f"{place}, mean over tasks: {', '.join(words)}."


FIGURE = Figure(
    name="l02_flexibility",
    claim="Learned vectors work at other positions, at several places and in k-shot prompts, where "
    "extracted ones do not.",
    tasks=("present-past", "singular-plural"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
    quick_n=16,
)

if __name__ == "__main__":
    main(FIGURE)

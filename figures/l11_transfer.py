"""L11: each task's learned vector on every task.

    python figures/l11_transfer.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

from cells import WHICH, accuracy, cells
from common import Figure, Setup, main, pooled

import mechtv

WORDS = ("present-past", "present-gerund", "singular-plural", "capitalize", "country-capital")
QUICK = ("present-past", "singular-plural", "capitalize")


def carried(setup: Setup, task, layer: int, seed: int):
    """The vectors of all tasks on one task."""
    vectors = {name: setup.learned(setup.task(name), layer, seed) for name in setup.tasks}
    return mechtv.transfer_matrix(
        setup.model, vectors, [task], n=setup.size(task, seed), seed=seed, progress=False
    ).table()


def compute(setup: Setup):
    return setup.table(cells(setup, carried, [setup.model.cfg.n_layers // 2], beside=setup.tasks))


def draw(table):
    own = pooled(accuracy(table), ["vector", "task"])
    labels = mechtv.plots.Labels(
        title="Learned vectors on other tasks",
        x="Scored on",
        y="Accuracy",
        lines=(WHICH, "Rows: the task that the vector was learned for. The middle layer"),
        names={"zero-shot": "no vector"},
    )
    return mechtv.plots.tidy_heat(own, labels, x="task", y="vector")


def said(table):
    wide = pooled(accuracy(table), ["vector", "task"]).pivot(
        index="vector", columns="task", values="value"
    )
    own = [wide.loc[task, task] for task in wide.columns if task in wide.index]
    others = [
        wide.loc[row, task]
        for task in wide.columns
        for row in wide.index
        if row not in (task, "zero-shot")
    ]
    without = wide.loc["zero-shot"].mean()
    yield f"On their own task {sum(own) / len(own):.2f}, without a vector {without:.2f}."
    if others:
        yield f"On other tasks {sum(others) / len(others):.2f}, at most {max(others):.2f}."


FIGURE = Figure(
    name="l11_transfer",
    claim="Vectors work on the task that they were learned for, and carry over to related ones.",
    tasks=(*WORDS, "antonym", "english-french"),
    quick_tasks=QUICK,
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

"""D3: accuracy of every method, at its best layer, by task.

    python figures/d3_accuracy_by_method.py [--quick] [--data FOLDER]

A table of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*, from the cells of D1.
"""

from cells import accuracy
from common import Figure, main
from grid import QUICK_TASKS, TASKS, TEXTS, everything

import mechtv
from mechtv.study.averages import best_layers


def draw(table):
    own = accuracy(best_layers(table))
    labels = mechtv.plots.Labels(
        title="Accuracy at the best layer of each method",
        y="Accuracy",
        lines=(
            "Label-restricted where a task has labels, else full vocabulary",
            "Layers are chosen on the validation split; bars: 95 % intervals",
        ),
    )
    return mechtv.plots.tidy_bars(own, labels, x="task", by="method", share=True)


def said(table):
    own = accuracy(best_layers(table))
    wide = own.pivot(index="task", columns="method", values="value")
    vectors = wide.drop(columns=["zero-shot", "in-context"])
    wins = vectors.eq(vectors.max(axis=1), axis=0).sum().sort_values(ascending=False, kind="stable")
    words = ", ".join(f"{name} {n}" for name, n in wins.items() if n)
    yield f"Best, or as good as the best, of {len(wide)} tasks: {words}."
    means = ", ".join(f"{name} {value:.2f}" for name, value in wide.mean().items())
    yield f"Means over tasks, label-restricted where there are labels: {means}."


FIGURE = Figure(
    name="d3_accuracy_by_method",
    claim="The linear map has the highest accuracy of the vectors, near that in context.",
    tasks=TASKS,
    quick_tasks=QUICK_TASKS,
    texts=TEXTS,
    compute=everything,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

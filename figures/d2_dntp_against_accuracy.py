"""D2: dNTP against accuracy, over all methods, layers and tasks.

    python figures/d2_dntp_against_accuracy.py [--quick] [--data FOLDER]

A figure of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*, from the cells of D1.
"""

from common import Figure, comparison_of, main
from grid import QUICK_TASKS, TASKS, TEXTS, everything

import mechtv


def draw(table):
    return mechtv.plots.dntp_against_accuracy(comparison_of(table), "vocabulary")


def said(table):
    found = mechtv.dntp_accuracy_correlation(comparison_of(table), "vocabulary")
    for row in found.to_dict("records"):
        yield (
            f"{row['task']}: {row['correlation']} {row['value']:.2f} "
            f"[{row['low']:.2f}, {row['high']:.2f}], n = {row['n']}."
        )


FIGURE = Figure(
    name="d2_dntp_against_accuracy",
    claim="The lower a vector's dNTP, the higher its accuracy.",
    tasks=TASKS,
    quick_tasks=QUICK_TASKS,
    texts=TEXTS,
    compute=everything,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

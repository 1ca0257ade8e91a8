"""D1: dNTP of every method, at its best layer, by task.

    python figures/d1_dntp_by_method.py [--quick] [--data FOLDER]

A figure of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*. With `--data`, SST-2, TREC and AG News are read from that folder too.
"""

from common import Figure, comparison_of, main
from grid import QUICK_TASKS, TASKS, TEXTS, everything

import mechtv
from mechtv.study.averages import best_layers

VOCABULARY = "dNTP over vocabulary"


def draw(table):
    return mechtv.plots.methods_table_bars(comparison_of(table), VOCABULARY)


def said(table):
    best = best_layers(table)
    own = best[(best["score"] == VOCABULARY) & ~best["method"].isin(("in-context", "zero-shot"))]
    for task, rows in own.groupby("task", sort=False):
        row = rows.loc[rows["value"].idxmin()]
        yield f"{task}: lowest dNTP {row['value']:.3g} by {row['method']}."


FIGURE = Figure(
    name="d1_dntp_by_method",
    claim="The linear map has the lowest dNTP of all methods on every data set.",
    tasks=TASKS,
    quick_tasks=QUICK_TASKS,
    texts=TEXTS,
    compute=everything,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

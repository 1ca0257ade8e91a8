"""L7: what key heads and random heads attend to from the last token.

    python figures/l07_attention.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

from cells import TASKS, cells, key_heads, of_kind
from common import Figure, Setup, averaged, main

import mechtv


def compute(setup: Setup):
    return of_kind(setup.table(cells(setup, key_heads, setup.depths)), "attention")


def draw(table):
    own = averaged(table, ["task", "group", "part"])
    labels = mechtv.plots.Labels(
        title="What key heads attend to",
        y="Share of the last token's attention",
        lines=("Means over early, middle and late vectors, seeds and heads",),
        names={"key": "Key heads", "random": "Random heads"},
    )
    return mechtv.plots.tidy_bars(own, labels, x="part", by="group", panel="task", share=True)


def said(table):
    first = table[table["part"] == "first token"].groupby("group")["value"].mean()
    yield (
        f"Key heads give {first['key']:.2f} of their attention to the first token, random heads "
        f"{first['random']:.2f}."
    )


FIGURE = Figure(
    name="l07_attention",
    claim="Key heads attend to the first token less, and to the final tokens more, than others.",
    tasks=TASKS,
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

"""L5: accuracy when the key heads of a learned vector are ablated, beside random heads.

    python figures/l05_key_head_ablation.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

from cells import TASKS, WHICH, accuracy, cells, key_heads, of_kind
from common import Figure, Setup, main, pooled

import mechtv


def compute(setup: Setup):
    return of_kind(setup.table(cells(setup, key_heads, setup.depths)), "ablation")


def draw(table):
    own = pooled(accuracy(table), ["task", "layer", "condition"])
    labels = mechtv.plots.Labels(
        title="Accuracy without the key heads",
        x="Layer at whose input θ is added",
        y="Accuracy",
        lines=(
            WHICH,
            "Key heads: a tenth of the heads behind θ, by saliency, replaced by their means",
            "Bars: 95 % intervals; for random heads over the sets",
        ),
        names={"intact": "No head ablated", "given heads": "Key heads", "random heads": "Random"},
    )
    return mechtv.plots.tidy_bars(own, labels, x="layer", by="condition", panel="task", share=True)


def said(table):
    own = accuracy(table)
    p = own.dropna(subset="p_value")["p_value"]
    least = 1 / (1 + own["n_sets"].max())
    n_least = int((p < 1.5 * least).sum())
    yield f"Key heads matter more than every random set in {n_least} of {len(p)}."
    mean = own.groupby("condition")["value"].mean()
    yield ", ".join(f"{name} {value:.2f}" for name, value in mean.items()) + " on average."


FIGURE = Figure(
    name="l05_key_head_ablation",
    claim="Without its key heads a learned vector loses two fifths of its accuracy; without random "
    "heads it loses little.",
    tasks=TASKS,
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

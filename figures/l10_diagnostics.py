"""L10: what the residual stream says of the answer, block by block, under several vectors.

    python figures/l10_diagnostics.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*.
"""

from common import Cell, Figure, Setup, main, pooled

import mechtv

SCORES = {
    "log-probability": "Log-probability (nats)",
    "logit difference": "Logit difference",
    "alignment of the change": "Alignment of the change",
}


def diagnosed(setup: Setup, task, seed: int):
    vectors = [setup.learned(task, layer, seed) for layer in setup.depths]
    return mechtv.diagnostics(
        setup.model, task, vectors, n=setup.size(task, seed), progress=False
    ).table()


def compute(setup: Setup):
    return setup.table(
        [
            Cell(compute=diagnosed, task=setup.task(name), settings={"seed": seed})
            for name in setup.tasks
            for seed in setup.seeds
        ]
    )


def draw(table):
    chosen = [score for score in SCORES if score in set(table["score"])]
    own = table[table["score"].isin(chosen) & (table["depth"] > 0)].copy()
    own["run"] = own["layer"].map(
        lambda layer: "zero-shot" if layer != layer else f"θ at layer {layer:.0f}"
    )
    several = own["task"].nunique() > 1
    own["panel"] = (own["task"] + "\n" if several else "") + own["score"].map(SCORES)
    own = pooled(own, ["panel", "depth", "run"])
    labels = mechtv.plots.Labels(
        title="The answer in the residual stream, block by block",
        x="Blocks passed",
        y="Logit lens at the last token",
        lines=("From the first block on. Bars: 95 % intervals",),
        names={"zero-shot": "No vector"},
    )
    return mechtv.plots.tidy_lines(own, labels, x="depth", by="run", panel="panel", own_y=True)


def said(table):
    own = pooled(table[table["score"] == "log-probability"], ["task", "layer", "depth"])
    for task, rows in own.groupby("task", sort=False):
        plain = rows[rows["layer"].isna()].set_index("depth")["value"]
        for layer, run in rows.groupby("layer"):
            gain = run.set_index("depth")["value"] - plain
            if gain.iloc[-1] <= 0:
                yield f"{task}, θ at layer {layer:.0f}: no gain ({gain.iloc[-1]:.1f} nats)."
                continue
            half = gain.index[gain >= gain.iloc[-1] / 2].min()
            yield (
                f"{task}, θ at layer {layer:.0f}: {gain.iloc[-1]:+.1f} nats at the end, half of it "
                f"or more first after {half} blocks."
            )


FIGURE = Figure(
    name="l10_diagnostics",
    claim="Under a vector the answer rises in the blocks right behind it, wherever it is added.",
    tasks=("present-past", "sentiment"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

"""L3: what each way costs: vectors beside soft prompts, prefixes and LoRA, and demonstrations.

    pip install "mechtv[peft]"
    python figures/l03_efficiency.py [--quick]

The efficiency table of *Task Vectors, Learned Not Extracted*: all are trained on the same examples
with the same objective, and timed on prompts that are run in full. Run it on a machine that does
nothing else; its seconds differ from run to run.
"""

import pandas as pd
from common import Cell, Figure, Setup, fitting, main, pooled

import mechtv

COLUMNS = {
    "accuracy": "Accuracy (full vocabulary)",
    "relative_seconds": "Seconds per query, plain = 1",
    "parameters": "Parameters",
    "peak_mb": "Peak memory (MB)",
}
NAMES = {
    "learned": "Learned vector, one layer",
    "learned at three layers": "Three layers",
    "prompt": "Soft prompt",
    "prefix": "Prefix tuning",
    "lora": "LoRA",
}


def costs(setup: Setup, task, seed: int):
    size = setup.size(task, seed)
    middle, (early, _, late) = setup.model.cfg.n_layers // 2, setup.depths
    vectors = {
        "learned": setup.learned(task, middle, seed),
        "learned at three layers": setup.learned(task, [early, middle, late], seed),
    }
    training = fitting(task, setup.training)
    baselines = [
        mechtv.train_baseline(setup.model, task, kind, n=size, seed=seed, **training)
        for kind in ("prompt", "prefix", "lora")
    ]
    return mechtv.efficiency(
        setup.model, task, vectors, baselines=baselines, shots=8, n=size, seed=seed
    ).table()


def compute(setup: Setup):
    return setup.table(
        [
            Cell(compute=costs, task=setup.task(name), settings={"seed": seed})
            for name in setup.tasks
            for seed in setup.seeds
        ]
    )


def draw(table):
    labels = mechtv.plots.Labels(
        title="Accuracy, time and size of each way to do a task",
        lines=("Bars: 95 % intervals of accuracies",),
        names=COLUMNS | NAMES,
    )
    return mechtv.plots.tidy_bars(
        long(table), labels, x="task", by="setting", panel="what", own_y=True
    )


def long(table):
    """A row for each of the four columns, the mean over seeds; only accuracies have intervals."""
    parts = [
        table.assign(
            what=column,
            value=table[column],
            low=table["low"] if column == "accuracy" else float("nan"),
            high=table["high"] if column == "accuracy" else float("nan"),
        )
        for column in COLUMNS
    ]
    return pooled(pd.concat(parts), ["task", "setting", "what"])


def said(table):
    wide = long(table).pivot(index=["task", "setting"], columns="what", values="value")
    for task in table["task"].unique():
        words = (
            f"{name} {wide.loc[(task, name), 'accuracy']:.2f} "
            f"({wide.loc[(task, name), 'relative_seconds']:.1f}x)"
            for name in table["setting"].unique()
        )
        yield f"{task}, accuracy (seconds per query, plain = 1): {', '.join(words)}."


FIGURE = Figure(
    name="l03_efficiency",
    claim="A learned vector reaches the accuracy of prefix tuning and LoRA of as many parameters, "
    "at the cost of a zero-shot query.",
    tasks=("present-past", "sentiment", "country-capital"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

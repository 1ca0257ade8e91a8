"""L13: reward now or later: the share of immediate choices without a vector, in context, learned.

    python figures/l13_delayed_reward.py [--quick]

A figure of *Task Vectors, Learned Not Extracted*. Every query is asked in both orders of its
options, since models prefer an option for where it stands. The vector's layer is chosen on the
validation split.
"""

from functools import partial

import pandas as pd
from common import Cell, Figure, Setup, fitting, main, pooled

import mechtv

NAMES = {
    "immediate reward": "Takes the immediate reward",
    "first option": "Takes the first option",
    "same choice in both orders": "Same choice in both orders",
}


def chosen(setup: Setup, task, seed: int):
    options = fitting(task, setup.training)
    train = partial(mechtv.learn, setup.model, task, seed=seed, progress=False, **options)
    choice = mechtv.choose_layer(setup.model, task, train, setup.depths)
    score = partial(
        mechtv.evaluate_choice,
        setup.model,
        task,
        both_orders=True,
        n=setup.size(task, seed),
        seed=seed,
    )
    shots = 4 if setup.quick else 8
    return pd.concat(
        [found.table() for found in (score(), score(shots=shots), score(choice.vector))]
    )


def compute(setup: Setup):
    return setup.table(
        [
            Cell(compute=chosen, task=setup.task(name), settings={"seed": seed})
            for name in setup.tasks
            for seed in setup.seeds
        ]
    )


def draw(table):
    own = pooled(table, ["task", "setting", "score"])
    labels = mechtv.plots.Labels(
        title="Reward now, or more of it later",
        y="Share of the choices",
        lines=("Each query in both orders of its options. Bars: 95 % intervals",),
        names=NAMES,
    )
    return mechtv.plots.tidy_bars(own, labels, x="score", by="setting", panel="task", share=True)


def said(table):
    now = pooled(table[table["score"] == "immediate reward"], ["task", "setting"])
    for row in now.to_dict("records"):
        yield (
            f"{row['task']}, {row['setting']}: immediate in {row['value']:.2f} "
            f"[{row['low']:.2f}, {row['high']:.2f}]."
        )


FIGURE = Figure(
    name="l13_delayed_reward",
    claim="A learned vector makes the model prefer what it was trained on, here the immediate "
    "reward, more than demonstrations do.",
    tasks=("delayed-reward", "delayed-reward-open"),
    quick_tasks=("delayed-reward",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

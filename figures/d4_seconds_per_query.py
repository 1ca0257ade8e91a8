"""D4: seconds per query under each vector, against demonstrations in the prompt.

    python figures/d4_seconds_per_query.py [--quick]

A figure of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*. Prompts are run in full. Run it on a machine that does nothing else; its seconds differ
from run to run.
"""

from common import Cell, Figure, Setup, main, pooled

import mechtv


def timed(setup: Setup, task, seed: int):
    middle, last = setup.model.cfg.n_layers // 2, setup.model.cfg.n_layers - 1
    few = {"n": 16} if setup.quick else {}
    common = {"seed": seed, "progress": False}
    vectors = {
        "learned": setup.learned(task, middle, seed),
        "hidden_state": mechtv.extract_hidden_state(setup.model, task, middle, **few, **common),
        "state_vector": mechtv.extract_state_vector(setup.model, task, middle, **few, **common),
        "linear": mechtv.fit_linear(setup.model, task, last, shots=8, n=64, **common),
    }
    return mechtv.efficiency(
        setup.model, task, vectors, shots=8, n=setup.size(task, seed), seed=seed
    ).table()


def compute(setup: Setup):
    return setup.table(
        [
            Cell(compute=timed, task=setup.task(name), settings={"seed": seed})
            for name in setup.tasks
            for seed in setup.seeds
        ]
    )


def draw(table):
    own = table.drop(columns=["low", "high"])  # of accuracies
    own = pooled(own.assign(value=own["seconds_per_query"] * 1000), ["task", "setting"])
    labels = mechtv.plots.Labels(
        title="Time of a query",
        y="Milliseconds per query",
        lines=("Prompts are run in full, in batches of 16",),
        unit="ms",
    )
    return mechtv.plots.tidy_bars(own, labels, x="task", by="setting")


def said(table):
    mean = table.groupby("setting", sort=False)["relative_seconds"].mean()
    yield "Plain = 1: " + ", ".join(f"{name} {value:.2f}" for name, value in mean.items()) + "."


FIGURE = Figure(
    name="d4_seconds_per_query",
    claim="A query under a vector takes about as long as a zero-shot one.",
    tasks=("present-past", "sentiment", "topic"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

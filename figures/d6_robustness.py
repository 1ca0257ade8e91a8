"""D6: the linear map when it is fitted to fewer queries, another ridge, or other shots.

    python figures/d6_robustness.py [--quick]

A figure of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*: N, lambda and k, each alone, the others at their middle value.
"""

import pandas as pd
from cells import accuracy
from common import Figure, Setup, main, pooled

import mechtv

VALUES = {
    "n": (16, 32, 64, 128, 256),
    "ridge": (5.0, 1e2, 1e3, 1e4, 1e5),
    "shots": (1, 2, 4, 8, 16),
}
QUICK = {"n": (16, 48), "ridge": (5.0, 1e4), "shots": (2, 4)}
MIDDLE = {"n": 64, "ridge": 1e4, "shots": 8}
QUICK_MIDDLE = {"n": 48, "ridge": 1e4, "shots": 4}
WHAT = {"n": "Queries N", "ridge": "Ridge λ", "shots": "Shots k"}
VOCABULARY = "dNTP over vocabulary"


def compute(setup: Setup):
    return pd.concat([of_task(setup, name) for name in setup.tasks], ignore_index=True)


def of_task(setup: Setup, name: str):
    """All maps of a task, with no more queries than it has beside the demonstrations."""
    values, middle = (QUICK, QUICK_MIDDLE) if setup.quick else (VALUES, MIDDLE)
    there = len(setup.task(name).splits(0).train)
    methods = {
        f"{option} = {value:g}": {"name": "linear", **middle, option: value}
        for option, some in values.items()
        for value in some
        if option != "n" or value <= there - middle["shots"]
    }
    distinct = {str(method): (label, method) for label, method in methods.items()}
    table = setup.study(
        tasks=[name],
        methods=["zero-shot", *({"label": label, **m} for label, m in distinct.values())],
        layers=[1.0],
        shots=8,
    )
    same = {label: distinct[str(method)][0] for label, method in methods.items()}
    return spread(table, same)


def spread(table, same: dict[str, str]):
    """A row for each varied option, where one map stands for several."""
    parts = [table[table["method"] == "zero-shot"].assign(varied=name) for name in WHAT]
    for label, made in same.items():
        name, _, value = label.partition(" = ")
        parts.append(
            table[table["method"] == made].assign(varied=name, at=float(value), method="linear")
        )
    return pd.concat(parts, ignore_index=True)


def draw(table):
    own = table[(table["split"] == "test") & (table["score"] == VOCABULARY)].copy()
    own = own[own["method"] == "linear"].sort_values("at", kind="stable")
    own["at"] = own["at"].map("{:g}".format)
    own["varied"] = own["varied"].map(WHAT)
    own = pooled(own, ["varied", "at", "task"])
    labels = mechtv.plots.Labels(
        title="The linear map under other settings",
        x="Value of the option",
        y="dNTP over the vocabulary (nats)",
        lines=(
            "Each option alone, the others at their middle value. Bars: 95 % intervals",
            "From the run with 8 demonstrations, whatever k is",
        ),
        unit="nats",
    )
    figure = mechtv.plots.tidy_lines(own, labels, x="at", by="task", panel="varied")
    return figure.update_xaxes(matches=None, showticklabels=True)


def said(table):
    own = accuracy(table[(table["split"] == "test") & (table["method"] == "linear")])
    tasks = own["task"].nunique()
    for name, rows in own.groupby("varied", sort=False):
        means = rows.groupby("at").agg(value=("value", "mean"), of=("task", "nunique"))
        words = ", ".join(
            f"{at:g}: {row.value:.2f}" + ("" if row.of == tasks else f" ({row.of:g} of the tasks)")
            for at, row in means.iterrows()
        )
        yield f"{WHAT[name]}, mean accuracy (label-restricted where there are labels): {words}."


FIGURE = Figure(
    name="d6_robustness",
    claim="The linear map hardly depends on N, lambda and k.",
    tasks=("present-past", "country-capital", "sentiment", "topic"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
)

if __name__ == "__main__":
    main(FIGURE)

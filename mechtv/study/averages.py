"""Several seeds of one model as one table: each score's mean over seeds.

Each seed has splits, demonstrations and training of its own. Layers and methods are therefore
chosen within a seed, on its own validation split: a test query of one seed may be a validation
query of another.
"""

from collections.abc import Callable
from typing import Any

import pandas as pd

from mechtv.study.compare import MethodComparison, rank

SCORED = ["task", "method", "layer", "split", "score"]


def over_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Each score as its mean over the seeds that have it.

    The ends of the interval are the means of the seeds' own ends. It is for the drawing of test
    queries, and right or too wide, since seeds share queries only in part; how vectors of several
    seeds differ is seen from `least` and `most`.

    Returns:
        The rows with `seeds` (how many), `least` and `most` (of a seed's values) in the place of
        `seed`; n is that of one seed, the smallest.

    Raises:
        InvalidInput: if a cell of one seed stands twice.
    """
    for own in _seeds(rows):
        MethodComparison.of(MethodComparison(rows=own))
    same = [name for name in ("model", "revision", "shots") if name in rows]
    means = ["low", "high", *(name for name in map(str, rows) if name.startswith("seconds"))]
    how: dict[str, Any] = {
        "seeds": ("value", "size"),
        "least": ("value", "min"),
        "most": ("value", "max"),
        "value": ("value", "mean"),
        "n": ("n", "min"),
        **{name: (name, "mean") for name in means},
        **{name: (name, "first") for name in same},
    }
    found: pd.DataFrame = rows.groupby(SCORED, dropna=False, sort=False).agg(**how)
    return found.reset_index()


def best_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """The mean test scores of each method, in each seed at the layer of `MethodComparison.best`.

    Returns:
        As `over_seeds`; `layer` is missing where seeds differ in it, `layers` names them all.
    """
    best = _of_each_seed(rows, lambda own: MethodComparison(rows=own).best())
    layers = {key: _distinct(own["layer"]) for key, own in best.groupby(["task", "method"])}
    means = over_seeds(without_layer(best))
    own = [layers[key] for key in zip(means["task"], means["method"], strict=True)]
    single = [int(one[0]) if len(one) == 1 else pd.NA for one in own]
    return means.assign(
        layer=pd.array(single, dtype="Int64"), layers=[", ".join(map(str, one)) for one in own]
    )


def best_vectors(rows: pd.DataFrame) -> pd.DataFrame:
    """The mean test scores of each task's best vector, chosen on each seed's validation split.

    Methods and layers compete by what `MethodComparison.best` goes by. A method that is for all
    layers at once has no validation rows and is never chosen; a task without any is left out.

    Returns:
        As `over_seeds`, without method and layer; `vectors` is a list of the (method, layer) that
        were chosen, one a seed.
    """
    best = _of_each_seed(rows, _best)
    firsts = best.drop_duplicates(["task", *(["seed"] if "seed" in best else [])])
    vectors = {
        task: list(zip(own["method"], own["layer"].astype(int), strict=True))
        for task, own in firsts.groupby("task")
    }
    means = over_seeds(without_layer(best.assign(method=""))).drop(columns=["method", "layer"])
    of_task = [vectors[task] for task in means["task"]]
    return means.assign(vectors=pd.Series(of_task, index=means.index, dtype=object))


def without_layer(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows as those of something that has no layer."""
    return rows.assign(layer=pd.array([pd.NA] * len(rows), dtype="Int64"))


def _best(rows: pd.DataFrame) -> pd.DataFrame:
    """The test rows of each task's best vector of one seed."""
    validated = rows[rows["split"] == "validation"].dropna(subset="layer")
    chosen = [rows.iloc[:0]]
    for task, own in validated.groupby("task", sort=False):
        sites = own[["method", "layer"]].drop_duplicates().itertuples(index=False)
        method, layer = max(sites, key=lambda site: rank(own[own["method"] == site[0]], site[1]))
        is_chosen = (rows["method"] == method) & (rows["layer"] == layer)
        chosen.append(rows[is_chosen & (rows["task"] == task) & (rows["split"] == "test")])
    return pd.concat(chosen)


def _distinct(layers: "pd.Series[int]") -> list[int]:
    return sorted(int(layer) for layer in layers.dropna().unique())


def _of_each_seed(
    rows: pd.DataFrame, choose: Callable[[pd.DataFrame], pd.DataFrame]
) -> pd.DataFrame:
    return pd.concat([choose(own) for own in _seeds(rows)], ignore_index=True)


def _seeds(rows: pd.DataFrame) -> list[pd.DataFrame]:
    if "seed" not in rows:
        return [rows]
    return [own.reset_index(drop=True) for _, own in rows.groupby("seed", sort=False)]

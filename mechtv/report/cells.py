"""The scores of a study for its page: those of each model, under names that say what is what."""

from dataclasses import dataclass

import pandas as pd

from mechtv.report.markup import visible
from mechtv.study.results import StudyResults
from mechtv.study.scoring import REFERENCES

MODEL = ["model", "revision", "dtype"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelScores:
    """The scores of one model.

    Args:
        kinds: for each method's name in the rows, which of the registry it is.
    """

    name: str
    rows: pd.DataFrame
    kinds: dict[str, str]

    @property
    def seeds(self) -> list[int]:
        """The seeds that have scores."""
        return sorted(int(seed) for seed in self.rows["seed"].unique())


def scores_of(results: StudyResults, *, accept_older: bool = False) -> list[ModelScores]:
    """The scores of each model that has some, in the study's order.

    A name that would stand for several things says which: a method at several positions, a task
    under several templates, a model in several versions or data types.
    """
    table = results.table(accept_older=accept_older)
    if table.empty:
        return []
    registry = {method.title: method.name for method in results.study.methods}
    kind = table["method"].map(registry)
    name = _told_apart(table, "method", "positions", "at [{}]").where(
        ~kind.isin(REFERENCES), kind
    )  # figures and correlations know these by their names, whatever their label
    task = _told_apart(table, "task", "template", "({})")
    kinds = dict(zip(name, kind, strict=True))
    table = table.assign(method=name, task=task)
    names = table["model"]
    for column, words in (("dtype", "({})"), ("revision", "({})")):
        names = _told_apart(table.assign(model=names), "model", column, words)
    groups = table.assign(shown=names).groupby(MODEL, sort=False, dropna=False)
    return [
        ModelScores(name=own["shown"].iloc[0], rows=own.drop(columns="shown"), kinds=kinds)
        for _, own in groups
    ]


def _told_apart(table: pd.DataFrame, name: str, by: str, words: str) -> "pd.Series[str]":
    """The names, each with its value of `by` where it has several."""
    several = table.groupby(name)[by].transform("nunique") > 1
    values = table[by].map(lambda value: words.format(visible(str(value), spaces=False)))
    return table[name].where(~several, table[name] + " " + values)

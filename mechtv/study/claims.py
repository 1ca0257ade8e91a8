"""What the papers claim of learned and linear vectors, tested on the cells of a grid.

*Task Vectors, Learned Not Extracted* (arXiv 2509.24169): learned vectors are more accurate than
extracted ones at every layer, and work at late layers, where those fail. *Distributional Alignment
as a Criterion for Designing Task Vectors in In-Context Learning* (arXiv 2605.20730): the linear
map has the lowest dNTP, and vectors of lower dNTP are more accurate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from mechtv.errors import InvalidInput
from mechtv.evaluation.dntp import Over
from mechtv.evaluation.intervals import LEVEL
from mechtv.study.averages import best_layers, over_seeds
from mechtv.study.compare import MethodComparison
from mechtv.study.correlation import ALL_TASKS, choosing, dntp_accuracy_correlation
from mechtv.study.scoring import REFERENCES

EXTRACTED = ("hidden_state", "function_vector", "state_vector")
HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"


def claims(
    comparison: MethodComparison, over: Over = "labels", kinds: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Whether the papers' claims hold in a comparison of one model.

    The first four say of differences, one a (task, layer), task, or (task, method), that all of
    them are positive. Cells do not keep the answers to single queries, so no difference is paired:
    its interval is made of those of its two scores (square-and-add, Newcombe 1998), as if they were
    of other queries, and is too wide where both get the same queries right. The intervals of one
    claim hold together at 95 % (Bonferroni; those of the scores are widened in proportion). A claim
    holds if all lie above 0, and does not hold if one lies below.

    The last one is about Spearman's correlation of dNTP and accuracy, with the interval of
    `dntp_accuracy_correlation`.

    Accuracy is label-restricted for tasks with a closed label set, else full-vocabulary. Scores of
    several seeds are averaged, as in `mechtv.study.averages`.

    Args:
        over: the tokens that dNTP compares.
        kinds: for labels of methods, which of the registry they are.

    Returns:
        One row a claim: claim; verdict (holds, does not hold, cannot be told); the value that
        decides (of the differences the one that says most against the claim) with its interval; n,
        how many differences or vectors there are; and all of it as a sentence.

    Raises:
        InvalidInput: if a cell of one seed stands twice.
    """
    rows = comparison.table()
    if rows.empty:
        says = [*(claim.says for claim in CLAIMS), CORRELATION]
        return pd.DataFrame([_row(claim, sentence="There are no scores.") for claim in says])
    best, averages = best_layers(rows), over_seeds(rows)
    grid = _Grid(
        accuracy=_with_kind(choosing(averages), kinds),
        best_accuracy=_with_kind(choosing(best), kinds),
        best_dntp=_with_kind(best[best["score"] == f"dNTP over {over}"], kinds),
    )
    found = [_tested(claim, claim.differences(grid)) for claim in CLAIMS]
    return pd.DataFrame([*found, _correlated(MethodComparison(rows=averages), over)])


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Mean test scores, with the `kind` of each method: at all layers, and at its best."""

    accuracy: pd.DataFrame
    best_accuracy: pd.DataFrame
    best_dntp: pd.DataFrame


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """That all of some differences are positive.

    Args:
        units: what there is a difference for; the `by` columns tell them apart.
        lacking: why there is no difference.
    """

    says: str
    differences: Callable[[_Grid], pd.DataFrame]
    units: str
    by: tuple[str, ...]
    lacking: str
    unit: str = ""


def _learned_above_extracted(grid: _Grid) -> pd.DataFrame:
    extracted = grid.accuracy[grid.accuracy["kind"].isin(EXTRACTED)]
    return _minus(_learned(grid), _first(extracted, ["task", "layer"], last=True), "task", "layer")


def _learned_at_the_latest(grid: _Grid) -> pd.DataFrame:
    plain = grid.accuracy[grid.accuracy["kind"] == "zero-shot"]
    return _minus(_at_the_latest(_learned(grid)), plain, "task")


def _extracted_fall(grid: _Grid) -> pd.DataFrame:
    best, rows = grid.best_accuracy, grid.accuracy
    latest = _at_the_latest(rows[rows["kind"].isin(EXTRACTED)])
    found = _minus(best, latest, "task", "method")
    return found.assign(layer=found["layer_2"])


def _linear_lowest(grid: _Grid) -> pd.DataFrame:
    kind = grid.best_dntp["kind"]
    others = grid.best_dntp[~kind.isin([*REFERENCES, "linear", "learned-dntp"])]
    return _minus(_first(others, ["task"]), grid.best_dntp[kind == "linear"], "task")


CLAIMS = (
    _Claim(
        says="Learned vectors are more accurate than extracted ones at every layer",
        differences=_learned_above_extracted,
        units="(task, layer)",
        by=("task", "layer"),
        lacking="There is no layer with both a learned and an extracted vector.",
    ),
    _Claim(
        says="Learned vectors work at the latest layer: they are more accurate than zero-shot",
        differences=_learned_at_the_latest,
        units="tasks",
        by=("task", "layer"),
        lacking="There are no learned vectors at two layers or more, or no zero-shot run.",
    ),
    _Claim(
        says="Extracted vectors are less accurate at the latest layer than at their best",
        differences=_extracted_fall,
        units="(task, method)",
        by=("task", "method", "layer"),
        lacking="There are no extracted vectors at two layers or more.",
    ),
    _Claim(
        says="The linear map has the lowest dNTP of all vectors not trained on dNTP",
        differences=_linear_lowest,
        units="tasks",
        by=("task", "method"),
        lacking="There is no linear map with another vector on the same task.",
        unit=" nats",
    ),
)
CORRELATION = "Over all tasks, vectors of lower dNTP are more accurate"


def _learned(grid: _Grid) -> pd.DataFrame:
    return grid.accuracy[grid.accuracy["kind"] == "learned"]


def _with_kind(rows: pd.DataFrame, kinds: Mapping[str, str] | None) -> pd.DataFrame:
    kind = [(kinds or {}).get(name, name) for name in rows["method"]]
    return rows.assign(kind=kind).reset_index(drop=True)


def _first(rows: pd.DataFrame, by: list[str], *, last: bool = False) -> pd.DataFrame:
    """Of each group the row of the lowest value; or of the highest, the last."""
    return rows.sort_values("value", ascending=not last).drop_duplicates(by)


def _at_the_latest(rows: pd.DataFrame) -> pd.DataFrame:
    """Those at the latest layer of each (task, method) that has several."""
    layers = rows.groupby(["task", "method"])["layer"]
    return rows[(rows["layer"] == layers.transform("max")) & (layers.transform("nunique") > 1)]


def _minus(first: pd.DataFrame, second: pd.DataFrame, *on: str) -> pd.DataFrame:
    """The differences of values that have the same `on`, with intervals that hold together."""
    both = first.merge(second, on=list(on), suffixes=("", "_2"))
    value = both["value"] - both["value_2"]
    down = np.hypot(both["value"] - both["low"], both["high_2"] - both["value_2"])
    up = np.hypot(both["high"] - both["value"], both["value_2"] - both["low_2"])
    tails = (1 - LEVEL) / max(len(both), 1), 1 - LEVEL
    wider = np.divide(*stats.norm.isf(np.divide(tails, 2)))
    return both.assign(value=value, low=value - wider * down, high=value + wider * up)


def _tested(claim: _Claim, differences: pd.DataFrame) -> dict[str, Any]:
    if differences.empty:
        return _row(claim.says, sentence=claim.lacking)
    n, above = len(differences), differences["value"] > 0
    clear, against = differences["low"] > 0, differences["high"] < 0
    ends = differences["high"] if against.any() else differences["low"].fillna(-np.inf)
    row = differences.iloc[int(np.nanargmin(ends))]
    place = ", ".join(f"layer {row[name]}" if name == "layer" else row[name] for name in claim.by)
    sentence = (
        f"The difference is positive for {above.sum()} of {n} {claim.units}, clearly for "
        f"{clear.sum() or 'none'}, and clearly negative for {against.sum() or 'none'}. What says "
        f"most against the claim: {place}, "
        f"{_text(row['value'], row['low'], row['high'])}{claim.unit}."
    )
    return _row(claim.says, row["value"], row["low"], row["high"], n=n, sentence=sentence)


def _correlated(comparison: MethodComparison, over: Over) -> dict[str, Any]:
    try:
        table = dntp_accuracy_correlation(comparison, over)
    except InvalidInput as error:
        return _row(CORRELATION, sentence=str(error))
    spearman = table[table["correlation"] == "Spearman"]
    tasks = spearman[spearman["task"] != ALL_TASKS]["value"].dropna()
    row = spearman.iloc[0]
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    sentence = (
        f"Spearman’s correlation of dNTP and accuracy is {_text(value, low, high)} over {row['n']} "
        f"vectors, and negative within {(tasks < 0).sum()} of {len(tasks)} tasks."
    )
    if np.isnan(value):
        sentence = "The correlation is not defined: all vectors have the same dNTP or accuracy."
    verdict = _verdict(-high, -low)
    return _row(CORRELATION, value, low, high, n=int(row["n"]), sentence=sentence, verdict=verdict)


def _row(
    claim: str,
    value: float = np.nan,
    low: float = np.nan,
    high: float = np.nan,
    *,
    sentence: str,
    n: int = 0,
    verdict: str | None = None,
) -> dict[str, Any]:
    verdict = verdict or _verdict(low, high)
    numbers = {"value": value, "low": low, "high": high, "n": n}
    return {"claim": claim, "verdict": verdict, **numbers, "sentence": sentence}


def _verdict(low: float, high: float) -> str:
    if low > 0:
        return HOLDS
    return FAILS if high < 0 else OPEN


def _text(value: float, low: float, high: float) -> str:
    interval = "" if np.isnan(low) else f" [{low:+z.2f}, {high:+z.2f}]"
    return f"{value:+z.2f}{interval}".replace("-", "−")

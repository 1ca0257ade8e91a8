"""Does dNTP tell how accurate a vector is? Both scores of every vector, and their correlation.

*Distributional Alignment as a Criterion for Designing Task Vectors in In-Context Learning* (arXiv
2605.20730), section 3: the nearer a vector's next-token distribution is to the in-context one, the
more accurate it should be, so the correlation should be negative.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from mechtv.errors import InvalidInput
from mechtv.evaluation.dntp import Over
from mechtv.evaluation.intervals import LEVEL, RESAMPLES, Estimate
from mechtv.study.compare import CHOOSES, MethodComparison
from mechtv.study.scoring import REFERENCES

ALL_TASKS = "all tasks"
FEWEST = 3
CELL = ["task", "method", "layer"]

Values = Float[np.ndarray, "*resample point"]
Correlation = Callable[..., Float[np.ndarray, "*resample"]]


def dntp_accuracy_correlation(
    comparison: MethodComparison, over: Over = "labels", score: str | None = None
) -> pd.DataFrame:
    """How a vector's accuracy goes with its dNTP: over all tasks, and within each.

    A point is a (task, method, layer) on the test split; zero-shot and in-context are left out, and
    so is a dNTP of 0, which has no logarithm. The intervals are from resampled points (2,000 times,
    fixed seed). Points of one task share its queries, so they are narrower than for points that are
    independent.

    Args:
        over: the tokens that dNTP compares: the `labels` or the whole `vocabulary`.
        score: the accuracy. If None, the one that `MethodComparison.best` goes by:
            label-restricted for tasks with a closed label set, full vocabulary for open answers.

    Returns:
        One row a (task, correlation): value, 95 % interval, n points. Missing where it is not
        defined: fewer than three points, or the same value at all of them.

    Raises:
        InvalidInput: if there are fewer than three points in all, or no task has such scores.
    """
    points = dntp_and_accuracy(comparison, over, score)
    vectors = points[~points["method"].isin(REFERENCES) & (points["dntp"] > 0)]
    if len(vectors) < FEWEST:
        raise InvalidInput(
            f"A correlation needs {FEWEST} vectors or more that have both scores, and there are "
            f"{len(vectors)}; compare more methods, layers or tasks."
        )
    groups = [(ALL_TASKS, vectors), *vectors.groupby("task", sort=False)]
    return pd.DataFrame([row for task, group in groups for row in _rows(str(task), group)])


def dntp_and_accuracy(
    comparison: MethodComparison, over: Over = "labels", score: str | None = None
) -> pd.DataFrame:
    """The points: dNTP and accuracy of every (task, method, layer) on the test split.

    Args:
        over, score: as in `dntp_accuracy_correlation`.

    Returns:
        One row a point: task, method, layer, dntp (nats) and accuracy with their 95 % intervals,
        the accuracy's score and n.

    Raises:
        InvalidInput: if `over` is unknown, or no task has such scores.
    """
    if over not in get_args(Over):
        raise InvalidInput(f"over={over!r} is unknown; use 'labels' or 'vocabulary'.")
    table = comparison.table()
    distance = rows_with(table, f"dNTP over {over}").rename(columns={"value": "dntp"})
    accuracy = choosing(table) if score is None else rows_with(table, score)
    accuracy = accuracy.rename(columns={"value": "accuracy"})
    columns = ["low", "high"]
    return distance[[*CELL, "dntp", *columns]].merge(
        accuracy[[*CELL, "accuracy", *columns, "score", "n"]],
        on=CELL,
        suffixes=("_dntp", "_accuracy"),
    )


def rows_with(table: pd.DataFrame, score: str) -> pd.DataFrame:
    """The test rows of one score.

    Raises:
        InvalidInput: if no task has it, or a cell has it more than once.
    """
    rows = table[(table["split"] == "test") & (table["score"] == score)]
    if rows.empty:
        known = ", ".join(map(repr, table["score"].drop_duplicates()))
        raise InvalidInput(f"No task has the score {score!r}; there are {known or 'none'}.")
    twice = rows[rows.duplicated(CELL)]
    if len(twice):
        cell = ", ".join(str(part) for part in twice.iloc[0][CELL] if not pd.isna(part))
        raise InvalidInput(
            f"There is more than one {score!r} of ({cell}); keep the rows of one model, one seed "
            "and one setting."
        )
    return rows


def choosing(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the accuracy that decides for each task which layer is best."""
    tasks = [own for _, own in table.groupby("task", sort=False)]
    chosen = [rows_with(own, CHOOSES[CHOOSES[True] in set(own["score"])]) for own in tasks]
    return pd.concat([table.iloc[:0], *chosen])


def _rows(task: str, points: pd.DataFrame) -> list[dict[str, Any]]:
    dntp, accuracy = points["dntp"].to_numpy(float), points["accuracy"].to_numpy(float)
    found = {
        "Spearman": _estimate(_spearman, dntp, accuracy),
        "Pearson, log dNTP": _estimate(_pearson, np.log(dntp), accuracy),
    }
    return [{"task": task, "correlation": name, **asdict(e)} for name, e in found.items()]


def _estimate(correlation: Correlation, x: Values, y: Values) -> Estimate:
    """The correlation with its percentile interval over resampled points.

    Resamples that have one value only, at which no correlation is defined, are left out.
    """
    value = float(correlation(x, y)) if len(x) >= FEWEST else np.nan
    if np.isnan(value):
        return Estimate(value=value, low=value, high=value, n=len(x))
    chosen = np.random.default_rng(0).integers(0, len(x), (RESAMPLES, len(x)))
    drawn = correlation(x[chosen], y[chosen])
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value=value, low=float(low), high=float(high), n=len(x))


def _spearman(x: Values, y: Values, axis: int = -1) -> Float[np.ndarray, "*resample"]:
    return _pearson(stats.rankdata(x, axis=axis), stats.rankdata(y, axis=axis), axis)


def _pearson(x: Values, y: Values, axis: int = -1) -> Float[np.ndarray, "*resample"]:
    """NaN where x or y has one value only; `scipy.stats.pearsonr` would warn at each."""
    defined = (np.ptp(x, axis=axis) > 0) & (np.ptp(y, axis=axis) > 0)
    x, y = (values - values.mean(axis=axis, keepdims=True) for values in (x, y))
    scale = np.sqrt((x**2).sum(axis=axis) * (y**2).sum(axis=axis))
    return np.where(defined, (x * y).sum(axis=axis) / np.where(defined, scale, 1), np.nan)

"""Uncertainty: intervals for shares and means, and tests for two results on the same queries."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from mechtv.errors import InvalidInput

LEVEL = 0.95
RESAMPLES = 2000
BATCH = 100  # resamples at a time, where there are many means: all at once take gigabytes


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % interval and the number of queries behind it."""

    value: float
    low: float
    high: float
    n: int

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference of two results on the same queries (first minus second)."""

    difference: Estimate
    p_value: float
    test: str


def share(hits: Bool[np.ndarray, " query"]) -> Estimate:
    """The share of hits, with the Wilson interval.

    Raises:
        InvalidInput: if there are no queries.
    """
    _check_some(hits)
    interval = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(LEVEL, method="wilson")
    return Estimate(
        value=float(hits.mean()), low=float(interval.low), high=float(interval.high), n=len(hits)
    )


def mean_share(hits: Bool[np.ndarray, "query trial"]) -> Estimate:
    """The mean over queries and their trials, with the Wilson interval of as many as queries.

    Several trials of a query are not independent. Their mean varies no more than one hit or miss
    with the same expectation, so the interval is right or too wide, never too narrow.
    """
    if hits.shape[1] == 1:
        return share(hits[:, 0])
    _check_some(hits)
    n, p = len(hits), float(hits.mean())
    z = float(stats.norm.ppf((1 + LEVEL) / 2))
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return Estimate(value=p, low=max(centre - half, 0.0), high=min(centre + half, 1.0), n=n)


def mean(values: Float[np.ndarray, " query"]) -> Estimate:
    """The mean, with the percentile bootstrap interval (2,000 resamples, fixed seed).

    With one query the interval is unknown (NaN).

    Raises:
        InvalidInput: if there are no queries.
    """
    _check_some(values)
    low, high = _bootstrap(values.astype(float))
    return Estimate(value=float(values.mean()), low=low, high=high, n=len(values))


def intervals_of_means(
    values: Float[np.ndarray, "*many query"],
) -> tuple[Float[np.ndarray, "*many"], Float[np.ndarray, "*many"]]:
    """The lower and upper ends of what `mean` gives for each of many, from one resampling."""
    if values.shape[-1] < 2:
        unknown = np.full(values.shape[:-1], np.nan)
        return unknown, unknown
    found = stats.bootstrap(
        (values,),
        np.mean,
        axis=-1,
        batch=BATCH,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return np.asarray(found.low), np.asarray(found.high)


def ratio(part: Float[np.ndarray, " query"], whole: Float[np.ndarray, " query"]) -> Estimate:
    """The mean of a part over that of the whole, paired, with the interval by bootstrap.

    It is NaN where the mean of the whole is 0; for its interval see `intervals_of_ratios`.

    Raises:
        InvalidInput: if there are no queries.
    """
    _check_some(whole)
    total = float(whole.mean())
    low, high = intervals_of_ratios(part, whole)
    value = float(part.mean()) / total if total else math.nan
    return Estimate(value=value, low=float(low), high=float(high), n=len(whole))


def intervals_of_ratios(
    parts: Float[np.ndarray, "*many query"], whole: Float[np.ndarray, " query"]
) -> tuple[Float[np.ndarray, "*many"], Float[np.ndarray, "*many"]]:
    """The percentile bootstrap of each part's mean over the mean of the whole, on the same queries.

    All parts and the whole share their resamples (2,000, fixed seed). Where the whole's own
    interval contains 0, that of a ratio says nothing: NaN.
    """
    unknown = np.full(parts.shape[:-1], np.nan)
    least, most = intervals_of_means(whole)
    if not (least > 0 or most < 0):
        return unknown, unknown
    n = len(whole)
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
    with np.errstate(divide="ignore", invalid="ignore"):  # in a few the whole may be 0
        ratios = (parts @ weights.T) / (weights @ whole)
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.nanquantile(ratios, ends, axis=-1, method="nearest")
    return np.asarray(low), np.asarray(high)


def compare_shares(
    first: Bool[np.ndarray, " query"], second: Bool[np.ndarray, " query"]
) -> Comparison:
    """Paired shares: the exact McNemar test, and a paired bootstrap interval for the difference."""
    _check_paired(first, second)
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    differing = only_first + only_second
    p_value = stats.binomtest(only_first, differing).pvalue if differing else 1.0
    difference = mean(first.astype(float) - second.astype(float))
    return Comparison(difference=difference, p_value=float(p_value), test="McNemar, exact")


def compare_means(
    first: Float[np.ndarray, " query"], second: Float[np.ndarray, " query"]
) -> Comparison:
    """Paired means: the Wilcoxon signed-rank test, and a paired bootstrap interval."""
    _check_paired(first, second)
    difference = first.astype(float) - second.astype(float)
    p_value = stats.wilcoxon(difference).pvalue if difference.any() else 1.0
    return Comparison(
        difference=mean(difference), p_value=float(p_value), test="Wilcoxon signed-rank"
    )


def _bootstrap(values: Float[np.ndarray, " query"]) -> tuple[float, float]:
    if len(values) < 2:
        return float("nan"), float("nan")
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    result = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _check_some(values: np.ndarray) -> None:
    if not len(values):
        raise InvalidInput("There are no queries to average over; give at least one.")


def _check_paired(first: np.ndarray, second: np.ndarray) -> None:
    if len(first) != len(second):
        raise InvalidInput(
            f"A paired comparison needs the same queries; one result has {len(first)}, "
            f"the other {len(second)}."
        )

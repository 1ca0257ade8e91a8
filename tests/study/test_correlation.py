"""dNTP against accuracy: correlations as scipy's, intervals from the same resamples."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mechtv.errors import InvalidInput
from mechtv.study import MethodComparison
from mechtv.study.correlation import (
    ALL_TASKS,
    dntp_accuracy_correlation,
    dntp_and_accuracy,
    rows_with,
)

FULL, LABELS = "accuracy, full vocabulary", "accuracy, label-restricted"
MEASURES = ["Spearman", "Pearson, log dNTP"]


def row(task, method, layer, score, value, split="test"):
    about = {"task": task, "method": method, "layer": layer, "split": split}
    return about | {"score": score, "value": value, "low": value / 2, "high": value * 2, "n": 50}


def compared(points, labelled=(), references=True) -> MethodComparison:
    """A comparison with these (task, method, layer, dNTP, accuracy), and what else there would be.

    The validation rows, the other scores, zero-shot and in-context have values that would be seen.
    """
    cells = [*points]
    if references:
        for task in dict.fromkeys(task for task, *_ in points):
            cells += [(task, "zero-shot", None, 9.0, 0.9), (task, "in-context", None, 0.0, 0.1)]
    rows = []
    for task, method, layer, dntp, accuracy in cells:
        where = (task, method, layer)
        rows.append(row(*where, "dNTP over labels", dntp))
        rows.append(row(*where, "dNTP over vocabulary", (accuracy + 0.1) * 3))
        rows.append(row(*where, FULL, 0.5 * accuracy))
        rows.append(row(*where, FULL, 7.0, split="validation"))
        if task in labelled:
            rows.append(row(*where, LABELS, accuracy))
    return MethodComparison(rows=pd.DataFrame(rows).astype({"layer": "Int64"}))


def many(n=14, task="sst2", seed=0):
    """Points with a tie, and one method without a layer."""
    rng = np.random.default_rng(seed)
    accuracy = rng.uniform(0, 1, n).round(1)
    dntp = np.exp(-3 * accuracy + rng.normal(size=n))
    layers = [None, *range(1, n)]
    return [
        (task, "linear" if layer else "i2cl", layer, float(d), float(a))
        for layer, d, a in zip(layers, dntp, accuracy, strict=True)
    ]


def columns(points):
    return np.array([p[3] for p in points]), np.array([p[4] for p in points])


def test_correlations_and_intervals_are_scipys():
    points = many()
    x, y = columns(points)
    assert len(np.unique(y)) < len(y)
    found = dntp_accuracy_correlation(compared(points, ["sst2"])).set_index(["task", "correlation"])
    for name, given, correlation in zip(
        MEASURES, (x, np.log(x)), (stats.spearmanr, stats.pearsonr), strict=True
    ):
        by_scipy = stats.bootstrap(
            (given, y),
            lambda a, b, by=correlation: by(a, b).statistic,
            paired=True,
            vectorized=False,
            n_resamples=2000,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
        for task in (ALL_TASKS, "sst2"):
            mine = found.loc[(task, name)]
            assert mine["value"] == pytest.approx(correlation(given, y).statistic, abs=1e-12)
            assert mine["low"] == pytest.approx(by_scipy.low, abs=1e-12)
            assert mine["high"] == pytest.approx(by_scipy.high, abs=1e-12)
            assert mine["low"] < mine["value"] < mine["high"]
            assert mine["n"] == len(points)


def test_tasks_are_seen_together_and_each_alone():
    """Within each task the relation is perfect; over both it is 0."""
    points = [("a", "linear", i, 2.0**-i, 0.1 * i) for i in range(5)]
    points += [("b", "linear", i, 2.0**i, 0.1 * i) for i in range(5)]
    found = dntp_accuracy_correlation(compared(points))
    assert found["task"].tolist() == [ALL_TASKS, ALL_TASKS, "a", "a", "b", "b"]
    assert found["correlation"].tolist() == MEASURES * 3
    assert found["n"].tolist() == [10, 10, 5, 5, 5, 5]
    assert found["value"].tolist() == pytest.approx([0, 0, -1, -1, 1, 1], abs=1e-12)
    assert found["low"].tolist()[2:] == pytest.approx([-1, -1, 1, 1])
    assert found["high"].tolist()[2:] == pytest.approx([-1, -1, 1, 1])


def test_only_the_order_counts_for_spearman_and_only_the_ratio_for_pearson():
    points = many()
    first = dntp_accuracy_correlation(compared(points))
    squared = [(*p[:3], p[3] ** 2, p[4]) for p in points]
    shifted = [(*p[:3], p[3] + 1, p[4]) for p in points]
    numbers = ["value", "low", "high"]
    for other, same in ((squared, [True, True]), (shifted, [True, False])):
        second = dntp_accuracy_correlation(compared(other))
        close = np.isclose(first[numbers], second[numbers]).all(axis=1)
        assert close[:2].tolist() == same


def test_zero_shot_in_context_and_a_dntp_of_0_do_not_count():
    points = many()
    with_more = [*points, ("sst2", "mlp", 3, 0.0, 0.0)]
    found = [
        dntp_accuracy_correlation(compared(given, ["sst2"], references))
        for given, references in ((points, False), (points, True), (with_more, True))
    ]
    assert found[0].equals(found[1])
    assert found[0].equals(found[2])


def test_points_hold_both_scores_of_the_test_split():
    points = dntp_and_accuracy(compared(many(), ["sst2"]), score=LABELS)
    x, y = columns(many())
    assert len(points) == len(x) + 2
    assert points["dntp"].tolist()[:-2] == x.tolist()
    assert points["accuracy"].tolist()[:-2] == y.tolist()
    assert pd.isna(points["layer"].iloc[0])
    assert points["layer"].tolist()[1:-2] == list(range(1, len(x)))
    assert points["low_dntp"].tolist()[:-2] == (x / 2).tolist()
    assert points["high_accuracy"].tolist()[:-2] == (y * 2).tolist()


def test_without_a_score_each_task_has_the_one_that_chooses_its_layers():
    comparison = compared([*many(), *many(task="capitals")], ["sst2"])
    points = dntp_and_accuracy(comparison)
    assert points.groupby("task")["score"].unique().map(list).to_dict() == {
        "capitals": [FULL],
        "sst2": [LABELS],
    }
    only = dntp_and_accuracy(comparison, score=LABELS)
    assert set(only["task"]) == {"sst2"}


def test_over_chooses_the_dntp():
    comparison = compared(many(), ["sst2"])
    found = dntp_accuracy_correlation(comparison, "vocabulary")
    assert found["value"].iloc[0] == pytest.approx(1)


def test_same_input_same_bits():
    comparison = compared(many(), ["sst2"])
    assert dntp_accuracy_correlation(comparison).equals(dntp_accuracy_correlation(comparison))


def test_what_is_not_defined_is_missing_and_no_warning():
    few = [("a", "linear", i, 2.0**-i, 0.1 * i) for i in range(4)]
    few += [("b", "linear", i, 1.0 + i, 0.5) for i in range(4)]
    few += [("c", "linear", i, 1.0 + i, 0.1 * i) for i in range(2)]
    found = dntp_accuracy_correlation(compared(few)).set_index("task")
    assert found.loc[["b", "c"], ["value", "low", "high"]].isna().all(axis=None)
    assert found.loc["c", "n"].tolist() == [2, 2]
    assert found.loc[[ALL_TASKS, "a"], ["value", "low", "high"]].notna().all(axis=None)


@pytest.mark.parametrize("n", [0, 2])
def test_fewer_than_three_vectors_are_refused(n):
    points = many()[:n] or [("sst2", "mlp", 1, 0.0, 0.5)]
    with pytest.raises(InvalidInput, match=f"needs 3 vectors or more .* there are {n}; compare"):
        dntp_accuracy_correlation(compared(points))
    assert len(dntp_accuracy_correlation(compared(many()[:3]))) == 4


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_one_sentence():
    comparison = compared(many())
    with pytest.raises(InvalidInput, match="over='words' is unknown; use 'labels' or"):
        dntp_accuracy_correlation(comparison, over="words")
    with pytest.raises(InvalidInput, match="No task has the score 'exact'; there are 'dNTP over"):
        dntp_accuracy_correlation(comparison, score="exact")
    twice = pd.concat([comparison.table(), comparison.table().query("layer == 3")])
    with pytest.raises(InvalidInput, match=r"more than one .* of \(sst2, linear, 3\); keep"):
        rows_with(twice, FULL)

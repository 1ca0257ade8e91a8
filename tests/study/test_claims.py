"""The papers' claims: what holds, what does not, and what a grid cannot tell."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mechtv.study import MethodComparison, claims
from mechtv.study.claims import CLAIMS, CORRELATION, FAILS, HOLDS, OPEN

FULL = "accuracy, full vocabulary"
LEARNED, LATEST, FALL, LINEAR = (claim.says for claim in CLAIMS)


def cell(task, method, layer, hits, dntp=None, n=100, seed=0):
    """The rows of a cell: so many hits of n, and a dNTP with an interval of ±10 %."""
    about = {"task": task, "method": method, "layer": layer, "n": n, "seed": seed}
    ends = stats.binomtest(hits, n).proportion_ci(method="wilson")
    right = about | {"score": FULL, "value": hits / n, "low": ends.low, "high": ends.high}
    rows = [right | {"split": "test"}]
    if layer is not None:
        other = about | {"split": "validation", "low": math.nan, "high": math.nan}
        rows.append(other | {"score": FULL, "value": hits / n})
        rows.append(other | {"score": "log-probability", "value": 0.0})
    if dntp is not None:
        ends = {"value": dntp, "low": 0.9 * dntp, "high": 1.1 * dntp}
        rows.append(about | ends | {"split": "test", "score": "dNTP over labels"})
    return rows


def compared(*cells):
    rows = [row for own in cells for row in own]
    return MethodComparison(rows=pd.DataFrame(rows).astype({"layer": "Int64"}))


def found(comparison, claim, **options):
    (row,) = claims(comparison, **options).query("claim == @claim").to_dict("records")
    return row


def grid(learned, extracted, tasks=("a", "b")):
    """Hits of the two methods at layers 2 and 5, the same on every task."""
    return compared(
        *(cell(task, "learned", layer, learned[layer]) for task in tasks for layer in (2, 5)),
        *(
            cell(task, "hidden_state", layer, extracted[layer])
            for task in tasks
            for layer in (2, 5)
        ),
        *(cell(task, "zero-shot", None, 0) for task in tasks),
    )


def test_learned_above_extracted_holds_where_every_difference_is_clear():
    row = found(grid({2: 90, 5: 80}, {2: 40, 5: 10}), LEARNED)
    assert (row["verdict"], row["n"]) == (HOLDS, 4)
    assert row["value"] == pytest.approx(0.5)
    assert (
        "positive for 4 of 4 (task, layer), clearly for 4, and clearly negative for none"
        in (row["sentence"])
    )
    assert "a, layer 2, +0.50 [" in row["sentence"]


def test_learned_above_extracted_does_not_hold_if_one_layer_is_clearly_below():
    row = found(grid({2: 90, 5: 5}, {2: 40, 5: 60}), LEARNED)
    assert (row["verdict"], row["value"]) == (FAILS, pytest.approx(-0.55))
    assert "clearly negative for 2" in row["sentence"]


def test_a_small_difference_cannot_be_told():
    row = found(grid({2: 90, 5: 45}, {2: 40, 5: 40}), LEARNED)
    assert (row["verdict"], row["value"]) == (OPEN, pytest.approx(0.05))


def test_the_best_extracted_vector_is_what_counts():
    weak = grid({2: 90, 5: 90}, {2: 10, 5: 10}, tasks=("a",)).rows
    strong = compared(cell("a", "function_vector", 5, 100)).rows
    both = MethodComparison(rows=pd.concat([weak, strong], ignore_index=True))
    assert found(both, LEARNED)["value"] == pytest.approx(-0.1)


def test_the_interval_of_a_difference_is_newcombes():
    """His example: 56 of 70 against 48 of 80 (1998, Table II, method 10)."""
    row = found(
        compared(cell("a", "learned", 3, 56, n=70), cell("a", "hidden_state", 3, 48, n=80)),
        LEARNED,
    )
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_intervals_of_several_differences_are_wider_by_bonferroni():
    def one(*tasks):
        return found(grid({2: 56, 5: 56}, {2: 48, 5: 48}, tasks=tasks), LEARNED)

    narrow, wide = one("a"), one("a", "b")
    ratio = stats.norm.isf(0.025 / 4) / stats.norm.isf(0.025 / 2)
    assert (wide["value"] - wide["low"]) / (narrow["value"] - narrow["low"]) == pytest.approx(ratio)


def test_late_layers():
    comparison = grid({2: 90, 5: 80}, {2: 70, 5: 0})
    assert found(comparison, LATEST)["verdict"] == HOLDS
    row = found(comparison, FALL)
    assert (row["verdict"], row["n"], row["value"]) == (HOLDS, 2, pytest.approx(0.7))
    assert "hidden_state, layer 5" in row["sentence"]
    flat = grid({2: 0, 5: 0}, {2: 70, 5: 70})
    assert found(flat, LATEST)["verdict"] == OPEN
    assert found(flat, FALL)["value"] == 0


def test_one_layer_says_nothing_about_late_layers():
    one = compared(
        cell("a", "learned", 3, 90),
        cell("a", "hidden_state", 3, 5),
        cell("a", "zero-shot", None, 0),
    )
    for claim in (LATEST, FALL):
        row = found(one, claim)
        assert (row["verdict"], row["n"]) == (OPEN, 0)
        assert "at two layers or more" in row["sentence"]


def test_linear_against_the_lowest_of_the_others():
    def row(linear, other):
        return found(
            compared(
                cell("a", "linear", 3, 50, linear),
                cell("a", "hidden_state", 3, 50, other),
                cell("a", "learned", 3, 50, 9.0),
                cell("a", "learned-dntp", 3, 50, 0.01),
                cell("a", "in-context", None, 50, 0.0),
            ),
            LINEAR,
        )

    assert (row(1.0, 2.0)["verdict"], row(1.0, 2.0)["value"]) == (HOLDS, pytest.approx(1.0))
    assert row(2.0, 1.0)["verdict"] == FAILS
    assert row(1.0, 1.1)["verdict"] == OPEN
    assert row(2.0, 1.0)["sentence"].endswith(" nats.")


def test_the_correlation_holds_if_its_interval_is_negative():
    def row(sign):
        points = [(10 + 8 * i, math.exp(sign * i / 3)) for i in range(10)]
        return found(
            compared(*(cell("a", "learned", i, *point) for i, point in enumerate(points))),
            CORRELATION,
        )

    falls, rises = row(-1), row(1)
    assert (falls["verdict"], falls["value"], falls["n"]) == (HOLDS, pytest.approx(-1), 10)
    assert "negative within 1 of 1 tasks" in falls["sentence"]
    assert (rises["verdict"], rises["value"]) == (FAILS, pytest.approx(1))


def test_labels_are_known_by_the_method_they_stand_for():
    comparison = grid({2: 90, 5: 80}, {2: 40, 5: 10})
    comparison.rows["method"] = comparison.rows["method"].replace("learned", "short")
    assert found(comparison, LEARNED)["n"] == 0
    assert found(comparison, LEARNED, kinds={"short": "learned"})["verdict"] == HOLDS


def test_seeds_are_averaged():
    comparison = compared(
        *(cell("a", "learned", 3, hits, seed=seed) for seed, hits in enumerate((90, 50))),
        *(cell("a", "hidden_state", 3, 10, seed=seed) for seed in (0, 1)),
    )
    row = found(comparison, LEARNED)
    assert (row["n"], row["value"]) == (1, pytest.approx(0.6))


@pytest.mark.parametrize("n", [4, 40, 400])
def test_no_claim_is_said_to_hold_when_its_interval_includes_the_opposite(n):
    rng = np.random.default_rng(n)
    names = ("learned", "hidden_state", "function_vector", "linear", "i2cl")
    verdicts = set()
    for _ in range(12):
        shift = rng.uniform(size=len(names))
        comparison = compared(
            *(
                cell(task, name, layer, int(rng.binomial(n, p)), float(rng.exponential() + 0.1), n)
                for task in ("a", "b")
                for name, p in zip(names, shift, strict=True)
                for layer in (1, 4)
            ),
            *(cell(task, "zero-shot", None, 0, n=n) for task in ("a", "b")),
        )
        for row in claims(comparison).to_dict("records"):
            low, high = row["low"], row["high"]
            if row["claim"] == CORRELATION:
                low, high = -high, -low
            assert (row["verdict"] == HOLDS) == (low > 0)
            assert (row["verdict"] == FAILS) == (high < 0)
            verdicts.add(row["verdict"])
    assert OPEN in verdicts
    assert n < 400 or verdicts == {HOLDS, FAILS, OPEN}


def test_without_scores_nothing_can_be_told():
    table = claims(MethodComparison(rows=pd.DataFrame(columns=["task", "method", "layer"])))
    assert len(table) == 5
    assert set(table["verdict"]) == {OPEN}

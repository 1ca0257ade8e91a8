"""Intervals and paired tests against their closed formulas."""

import random
from math import comb, isnan, sqrt

import numpy as np
import pytest
import torch

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import (
    RESAMPLES,
    Estimate,
    compare_means,
    compare_shares,
    intervals_of_ratios,
    mean_share,
    ratio,
    share,
)
from mechtv.evaluation.intervals import mean as mean_of

Z = 1.959963984540054  # 97.5 % of the standard normal distribution lie below


def hits(n_hits, n):
    return np.arange(n) < n_hits


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (61, 400)])
def test_a_share_has_the_wilson_interval(k, n):
    estimate = share(hits(k, n))
    p = k / n
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    assert (estimate.value, estimate.n) == (p, n)
    assert estimate.low == pytest.approx(centre - half, abs=1e-12)
    assert estimate.high == pytest.approx(centre + half, abs=1e-12)
    assert 0 <= estimate.low <= p <= estimate.high <= 1


def test_shares_of_several_trials_a_query_count_queries_alone():
    whole = share(hits(3, 10))
    assert mean_share(hits(3, 10)[:, None]) == whole
    for trials in ((hits(3, 10), hits(3, 10)), (hits(6, 10), hits(0, 10))):
        found = mean_share(np.stack(trials, axis=1))
        assert (found.value, found.n) == (0.3, 10)
        assert (found.low, found.high) == pytest.approx((whole.low, whole.high))


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (0, 5), (3, 3), (7, 2), (2, 7), (20, 9)])
@pytest.mark.parametrize("agreeing", [1, 30])
def test_mcnemars_p_value_is_a_sum_of_binomials(b, c, agreeing):
    first = np.array([True] * b + [False] * c + [True] * agreeing + [False] * agreeing)
    second = np.array([False] * b + [True] * c + [True] * agreeing + [False] * agreeing)
    n = b + c
    tail = sum(comb(n, k) for k in range(min(b, c) + 1)) / 2**n
    compared = compare_shares(first, second)
    assert compared.p_value == pytest.approx(min(1.0, 2 * tail), rel=1e-12)
    assert compared.test == "McNemar, exact"
    assert compared.difference.value == pytest.approx((b - c) / len(first))
    assert compared.difference.n == len(first)


def test_the_interval_of_a_difference_is_paired():
    """Two results that differ by the same hits as they agree: pairing leaves no uncertainty."""
    values = np.linspace(-3, 3, 50)
    compared = compare_means(values + 1, values)
    assert compared.difference.value == pytest.approx(1)
    assert compared.difference.high - compared.difference.low < 1e-12
    assert compared.p_value < 1e-8
    same = compare_means(values, values)
    assert (same.difference.low, same.difference.high, same.p_value) == (0, 0, 1)


def exact_signed_rank_p(differences):
    """Two-sided, by going through every choice of signs."""
    ranks = np.abs(differences).argsort().argsort() + 1
    total, n = ranks.sum(), len(ranks)
    observed = abs(ranks[differences > 0].sum() - total / 2)
    sums = [sum(r for i, r in enumerate(ranks) if signs >> i & 1) for signs in range(2**n)]
    return sum(abs(s - total / 2) >= observed for s in sums) / 2**n


def test_means_are_compared_by_the_signed_ranks():
    draw = np.random.default_rng(0)
    first, second = draw.normal(0.5, 1, 9), draw.normal(0, 1, 9)
    compared = compare_means(first, second)
    assert compared.p_value == pytest.approx(exact_signed_rank_p(first - second), rel=1e-9)
    assert compared.test == "Wilcoxon signed-rank"
    assert compared.difference.value == pytest.approx((first - second).mean())


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.0], [1.0, 0.0, 0.0], [2.0, 2.0, 1.0, 0.0]])
def test_means_of_few_queries_and_ties_are_compared_without_a_warning(values):
    compared = compare_means(np.array(values), np.zeros(len(values)))
    assert 0 < compared.p_value <= 1


def test_a_mean_lies_in_its_interval_which_is_the_same_every_time():
    values = np.random.default_rng(1).normal(size=60)
    estimate = mean_of(values)
    assert (estimate.value, estimate.n) == (values.mean(), 60)
    assert estimate.low < estimate.value < estimate.high
    error = values.std() / sqrt(60)
    assert estimate.low == pytest.approx(values.mean() - Z * error, abs=0.2 * error)
    assert estimate.high == pytest.approx(values.mean() + Z * error, abs=0.2 * error)
    np.random.seed(5)  # noqa: NPY002
    assert mean_of(values) == estimate
    assert RESAMPLES >= 1000


def test_a_mean_interval_is_the_bootstraps_percentiles():
    values = np.random.default_rng(2).normal(size=30)
    draws = np.random.default_rng(3).choice(values, (20_000, 30)).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    estimate = mean_of(values)
    assert estimate.low == pytest.approx(low, abs=0.03)
    assert estimate.high == pytest.approx(high, abs=0.03)


def test_equal_values_have_no_uncertainty_and_one_value_has_an_unknown_one():
    same = mean_of(np.full(4, 2.5))
    assert (same.low, same.value, same.high) == (2.5, 2.5, 2.5)
    alone = mean_of(np.array([2.5]))
    assert alone.value == 2.5
    assert isnan(alone.low)
    assert isnan(alone.high)


def ratios_by_hand(part, whole, n_draws=4000):
    """One resample at a time, with other draws."""
    rng, found = np.random.default_rng(7), []
    for _ in range(n_draws):
        chosen = rng.integers(len(whole), size=len(whole))
        found.append(sum(part[i] for i in chosen) / sum(whole[i] for i in chosen))
    return np.quantile(found, [0.025, 0.975])


@pytest.mark.parametrize("sign", [1, -1])
def test_ratios_are_resampled_as_pairs(sign):
    draw = np.random.default_rng(6)
    whole = sign * draw.normal(2, 1, size=25)
    parts = np.stack([0.5 * whole + draw.normal(0, 0.2, size=25), draw.normal(1, 1, size=25)])
    lows, highs = intervals_of_ratios(parts, whole)
    for part, low, high in zip(parts, lows, highs, strict=True):
        wanted = ratios_by_hand(part, whole)
        assert (low, high) == pytest.approx(wanted, abs=0.1 * (wanted[1] - wanted[0]))
        alone = ratio(part, whole)
        assert (alone.value, alone.n) == (pytest.approx(part.sum() / whole.sum()), 25)
        assert (alone.low, alone.high) == pytest.approx((low, high), abs=1e-12)
    many = intervals_of_ratios(np.stack([parts, 2 * parts]), whole)
    np.testing.assert_allclose(many, [[lows, 2 * lows], [highs, 2 * highs]])
    certain = ratio(3 * whole, whole)
    assert (certain.low, certain.value, certain.high) == pytest.approx((3, 3, 3), abs=1e-12)


def test_a_ratio_to_what_may_be_nothing_has_no_interval():
    part = np.array([1.0, 2.0, 3.0, 4.0])
    unsure = ratio(part, np.array([3.0, -2.0, 2.5, -1.5]))
    assert unsure.value == 5
    assert np.isnan([unsure.low, unsure.high]).all()
    nothing = ratio(part, np.zeros(4))
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()
    one = ratio(part[:1], part[:1])
    assert (one.value, one.n) == (1, 1)
    assert np.isnan([one.low, one.high]).all()
    with pytest.raises(InvalidInput, match="There are no queries to average over"):
        ratio(part[:0], part[:0])


def test_a_resample_without_any_whole_is_left_out():
    """Of four queries one has none of the whole: a resample in 256 is of that one alone."""
    whole = np.array([0.0, 1.0, 1.0, 1.0])
    low, high = intervals_of_ratios(whole[None], whole)
    assert (low[0], high[0]) == pytest.approx((1, 1))


def test_an_interval_covers_the_truth_as_often_as_it_says():
    draw = np.random.default_rng(4)
    covered = [
        (estimate := mean_of(draw.normal(size=40))).low <= 0 <= estimate.high for _ in range(60)
    ]
    assert np.mean(covered) > 0.85


def test_nothing_to_average_is_refused():
    for function, empty in ((share, np.zeros(0, bool)), (mean_of, np.zeros(0))):
        with pytest.raises(InvalidInput, match="There are no queries to average over"):
            function(empty)


@pytest.mark.usefixtures("unchecked")
def test_pairs_must_be_as_many():
    with pytest.raises(InvalidInput, match="one result has 3, the other 2"):
        compare_shares(hits(1, 3), hits(1, 2))
    with pytest.raises(InvalidInput, match="one result has 3, the other 2"):
        compare_means(np.zeros(3), np.zeros(2))


def test_an_estimate_reads_well_and_is_a_number():
    estimate = Estimate(value=0.5, low=0.25, high=0.75, n=12)
    assert str(estimate) == "0.500 [0.250, 0.750] (n=12)"
    assert float(estimate) == 0.5


def test_global_random_states_are_left_alone():
    random_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state()
    compare_means(np.arange(9.0), np.zeros(9))
    mean_of(np.arange(9.0))
    after = np.random.get_state()  # noqa: NPY002
    assert (after[1] == numpy_state[1]).all()
    assert after[2] == numpy_state[2]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == random_state

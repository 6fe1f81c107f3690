"""Confidence sequences hold at all times; ordinary intervals do not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recpo.evaluation.variants import ClusteredMean, EmpiricalBernstein, anytime_half_width, clustered_mean
from tests.refusals import refused


def reference(values, alpha, largest):
    """Theorem 2, value by value."""
    ends, mean, variance = [], 0.5, 0.25
    bets, weighted, variation, log = 0.0, 0.0, 0.0, math.log(2 / alpha)
    total, squares = 0.5, 0.25
    for t, x in enumerate(values, 1):
        bet = min(math.sqrt(2 * log / (variance * t * math.log(1 + t))), largest)
        bets, weighted = bets + bet, weighted + bet * x
        variation += 4 * (x - mean) ** 2 * (-math.log(1 - bet) - bet) / 4
        total += x
        mean = total / (t + 1)
        squares += (x - mean) ** 2
        variance = squares / (t + 1)
        half = (log + variation) / bets
        ends.append((max(weighted / bets - half, 0), min(weighted / bets + half, 1)))
    return np.array(ends).T


def test_empirical_bernstein_is_the_formula_in_any_pieces():
    values = np.random.default_rng(0).random(300) ** 3
    whole = np.stack(EmpiricalBernstein(alpha=0.1).update(values))
    np.testing.assert_allclose(whole, reference(values, 0.1, 0.5), atol=1e-12)
    pieces = EmpiricalBernstein(alpha=0.1)
    assert (pieces.low, pieces.high) == (0.0, 1.0)
    parts = [np.stack(pieces.update(part)) for part in np.split(values, [1, 1, 50, 299])]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-12)
    assert (pieces.low, pieces.high, pieces.count) == pytest.approx((whole[0, -1], whole[1, -1], 300))
    assert whole[1, -1] - whole[0, -1] < 0.25


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_empirical_bernstein_covers_at_all_times_and_shrinks(rate):
    generator = np.random.default_rng(1)
    sequence = EmpiricalBernstein((400,))
    low, high = sequence.update(generator.random((400, 3000)) < rate)
    missed = ((low > rate) | (high < rate)).any(1).mean()
    assert missed <= 0.05
    assert (high - low)[:, -1].max() < 9.5 * math.sqrt(rate * (1 - rate) / 3000) + 0.01


def test_empirical_bernstein_follows_a_mean_that_depends_on_the_past():
    """Users who return: a mean given the past, which an interval for equal distributions would miss."""
    generator = np.random.default_rng(2)
    taste = generator.beta(0.5, 0.5, (300, 1)).repeat(500, 1)
    sequence = EmpiricalBernstein((300,))
    low, high = sequence.update(generator.random((300, 500)) < taste)
    assert ((low > taste) | (high < taste)).any(1).mean() <= 0.05


def test_the_asymptotic_sequence_holds_where_the_ordinary_interval_fails():
    """1,000 experiments without an effect, looked at after every 20th of 4,000 skewed values."""
    generator = np.random.default_rng(3)
    values = generator.exponential(1.0, (1000, 4000))
    count = np.arange(1, 4001)
    mean = values.cumsum(1) / count
    error = np.sqrt((np.square(values).cumsum(1) / count - mean**2) / count)
    looks = slice(99, None, 20)
    off = np.abs(mean - 1)[:, looks]
    assert (off > 1.96 * error[:, looks]).any(1).mean() > 0.25
    half = anytime_half_width(error, count)[:, looks]
    assert (off > half).any(1).mean() <= 0.06
    assert (off[:, -1] > half[:, -1]).mean() < 0.02
    assert 1.4 * 1.96 < half[0, -1] / error[0, -1] < 1.7 * 1.96


def test_returning_users_make_the_clustered_sequence_conservative():
    """300 users come again and again, each with a mean of their own: hourly looks at the clustered error."""
    generator = np.random.default_rng(4)
    missed, naive = 0, 0
    for _ in range(150):
        own = generator.normal(0, 1, 300)
        sums, counts, failed, failed_naive = np.zeros(300), np.zeros(300), False, False
        for _ in range(40):
            came = generator.integers(0, 300, 60)
            np.add.at(sums, came, own[came] + generator.normal(0, 1, 60))
            np.add.at(counts, came, 1)
            found = clustered_mean(sums, counts)
            failed |= abs(found.mean) > found.sequence_half_width()
            failed_naive |= found.users >= 100 and abs(found.mean) > found.half_width
        missed, naive = missed + failed, naive + failed_naive
    assert missed / 150 <= 0.05 < naive / 150


def test_the_sequence_is_tightest_where_it_was_asked_to_be():
    count = np.arange(100, 20_000)
    factors = [anytime_half_width(1.0, 3000, tightest=int(one)) for one in np.linspace(300, 30_000, 100)]
    assert anytime_half_width(1.0, 3000, tightest=3000) < 1.02 * min(factors)
    half = anytime_half_width(1 / np.sqrt(count), count)
    assert (np.diff(half) < 0).all()
    assert math.isinf(anytime_half_width(1.0, 99))
    assert math.isinf(anytime_half_width(math.nan, 1000))


def test_one_impression_per_user_gives_the_ordinary_standard_error():
    values = np.random.default_rng(5).random(50)
    found = clustered_mean(values, np.ones(50))
    assert found == pytest.approx(ClusteredMean(values.mean(), values.std(ddof=1) / math.sqrt(50), 50, 50))
    double = clustered_mean(2 * values, np.full(50, 2))
    assert double == pytest.approx(found._replace(impressions=100))  # the same again tells nothing new
    difference = found - double
    assert (difference.mean, difference.error) == pytest.approx((0, math.sqrt(2) * found.error))
    assert math.isnan(clustered_mean([1.0], [3]).error)
    assert clustered_mean([], []).impressions == 0


def test_options_out_of_range_are_refused():
    with refused("out_of_range", "alpha"):
        EmpiricalBernstein(alpha=0.0)
    with refused("out_of_range", "alpha"):
        anytime_half_width(1.0, 100, alpha=1.0)
    with refused("out_of_range", "tightest"):
        anytime_half_width(1.0, 100, tightest=0)
    for values in ([1.5], [math.nan], [-0.1]):
        with refused("out_of_range", "values"):
            EmpiricalBernstein().update(values)

"""The distribution of weights, streamed, against the whole array; and the shape of its tail."""

import math

import numpy as np
import pytest

from recpo.evaluation.off_policy import diagnostics as weights_module
from recpo.evaluation.off_policy.diagnostics import WeightDistribution, effective_sample_size, pareto_shape


def tail_of(weight, chunks=7):
    distribution = WeightDistribution()
    for part in np.array_split(weight, chunks):
        distribution.update(part)
    return distribution.compute()


@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.995])
@pytest.mark.parametrize("rows", [300, 600_000])
def test_the_tail_is_that_of_the_whole_array(rows, zeros):
    rng = np.random.default_rng(0)
    weight = np.exp(2 * rng.standard_normal(rows)) * (rng.random(rows) >= zeros)
    tail, ordered = tail_of(weight), np.sort(weight)
    assert tail.median == pytest.approx(np.quantile(weight, 0.5, method="inverted_cdf"), rel=0.03)
    assert tail.quantile_99 == pytest.approx(np.quantile(weight, 0.99, method="inverted_cdf"), rel=0.03)
    assert tail.largest == weight.max()
    assert tail.largest_share == pytest.approx(weight.max() / weight.sum())
    assert tail.top_percent_share == pytest.approx(ordered[-max(1, round(rows / 100)) :].sum() / weight.sum(), rel=0.01)
    assert tail.zero_share == (weight == 0).mean()


@pytest.mark.parametrize("shape", [0.1, 0.5, 0.8, 1.2])
def test_the_shape_of_a_pareto_tail_is_found(shape):
    weight = (np.random.default_rng(1).random(300_000) ** -shape - 1) / shape
    assert tail_of(weight).pareto_k == pytest.approx(shape, abs=0.12)


def test_the_shape_estimate_is_close_to_maximum_likelihood():
    from scipy.stats import genpareto

    excess = np.sort(genpareto.rvs(0.6, scale=3.0, size=4000, random_state=2))
    assert pareto_shape(excess) == pytest.approx(genpareto.fit(excess, floc=0)[0], abs=0.01)


def shape_of(excess):
    """Zhang and Stephens' estimate with the prior of Vehtari et al. (appendix C), number by number."""
    n = len(excess)
    points = 30 + math.isqrt(n)
    quartile = excess[math.floor(n / 4 + 0.5) - 1]  # of numbers that count from 1
    theta, likelihood = [], []
    for j in range(1, points + 1):
        value = 1 / excess[-1] + (1 - math.sqrt(points / (j - 0.5))) / (3 * quartile)
        k = sum(math.log1p(-value * x) for x in excess) / n
        theta.append(value)
        likelihood.append(n * (math.log(-value / k) - k - 1))
    posterior = [1 / sum(math.exp(other - own) for other in likelihood) for own in likelihood]
    best = sum(p * value for p, value in zip(posterior, theta, strict=True))
    k = sum(math.log1p(-best * x) for x in excess) / n
    return (n * k + 5) / (n + 10)


@pytest.mark.parametrize("n", [20, 21, 22, 23, 57])
def test_the_shape_is_the_formula_of_the_papers(n):
    excess = np.sort(np.random.default_rng(n).pareto(1.5, n))
    assert pareto_shape(excess) == pytest.approx(shape_of(excess.tolist()), rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "zeros", "tail"),
    [(100, 0, 20), (104, 0, 20), (900, 0, 90), (1000, 950, 49), (1000, 979, 20)],  # a fifth; 3 sqrt(rows); all but one
)
def test_how_many_of_the_largest_weights_make_the_tail(rows, zeros, tail):
    weight = np.random.default_rng(3).pareto(1.2, rows)
    weight[:zeros] = 0.0
    ordered = np.sort(weight)
    assert tail_of(weight).pareto_k == pytest.approx(shape_of((ordered[-tail:] - ordered[-tail - 1]).tolist()))


@pytest.mark.parametrize("n", [20, 21, 22, 23])
def test_a_tail_whose_lower_quartile_equals_the_threshold_has_no_shape(n):
    rows = 5 * n
    ties = math.floor(n / 4 + 0.5)
    for tied, defined in ((ties, False), (ties - 1, True)):
        weight = np.concatenate([np.ones(rows - n + tied), np.linspace(2.0, 9.0, n - tied)])
        with np.errstate(all="raise"):
            assert math.isfinite(tail_of(weight).pareto_k) == defined


def test_quantiles_and_shares_with_zeros_and_at_the_ends_of_the_histogram():
    assert tail_of(np.array([0.0, 2.0**-65]), 1).median == 0.0
    assert tail_of(np.array([0.0, 0.0, 2.0**-65]), 1).median == 0.0
    assert tail_of(np.array([0.0, 2.0**-65, 2.0**-65]), 1).median == 2.0**-65
    assert tail_of(np.zeros(3), 1).median == 0.0
    # the outermost bins are those from -64 and to 64, 1 / 32 wide
    assert math.log2(tail_of(2.0 ** np.array([-64.5, -63.95]), 1).median) == pytest.approx(-64.5)
    assert math.log2(tail_of(2.0 ** np.array([63.95, 64.5]), 1).median) == pytest.approx(63.95)


def test_more_than_the_largest_weights_are_taken_from_the_bins(monkeypatch):
    monkeypatch.setattr(weights_module, "_LARGEST_KEPT", 2)
    weight = np.array([1.0] * 393 + [8.0] * 6 + [32.0])
    assert tail_of(weight, 1).top_percent_share == pytest.approx((32 + 3 * 8) / weight.sum())  # 4 of 400
    assert tail_of(weight[:200], 1).top_percent_share == pytest.approx(2 / 200)
    weight[-1] = 2.0**63.99  # in the last bin
    assert tail_of(weight, 1).top_percent_share == pytest.approx(1.0)


def test_ties_and_short_logs_have_no_shape():
    assert np.isnan(tail_of(np.where(np.arange(5000) % 20, 0.0, 50.0)).pareto_k), "a list, uniform propensities"
    assert np.isnan(tail_of(np.arange(1.0, 30.0)).pareto_k)
    nothing = WeightDistribution().compute()
    assert nothing.largest == 0
    assert np.isnan(nothing.largest_share)
    assert np.isnan(nothing.zero_share)


def test_effective_sample_size():
    assert effective_sample_size(np.ones(7)) == 7
    assert effective_sample_size(np.full(2, 0.25)) == 2
    assert effective_sample_size(np.array([3.0, 0, 0])) == 1
    assert effective_sample_size(np.zeros(3)) == 0

"""The distribution of weights, streamed, against the whole array; and the shape of its tail."""

import numpy as np
import pytest

from recpo.evaluation.off_policy.weights import WeightDistribution, effective_sample_size, pareto_shape


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


def test_ties_and_short_logs_have_no_shape():
    assert np.isnan(tail_of(np.where(np.arange(5000) % 20, 0.0, 50.0)).pareto_k), "a list, uniform propensities"
    assert np.isnan(tail_of(np.arange(1.0, 30.0)).pareto_k)
    nothing = WeightDistribution().compute()
    assert nothing.largest == 0
    assert np.isnan(nothing.largest_share)
    assert np.isnan(nothing.zero_share)


def test_effective_sample_size():
    assert effective_sample_size(np.ones(7)) == 7
    assert effective_sample_size(np.array([3.0, 0, 0])) == 1
    assert effective_sample_size(np.zeros(3)) == 0

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from recpo.evaluation import estimates
from recpo.evaluation.estimates import bootstrap_interval, estimate, estimate_over_seeds
from tests.refusals import refused


def test_bootstrap_of_means_agrees_with_the_normal_interval():
    values = torch.from_numpy(np.random.default_rng(0).random((3000, 2)))
    values[::3, 1] = math.nan
    low, high = bootstrap_interval(values, resamples=4000)
    for metric in range(2):
        normal = estimate(values[:, metric])
        assert ((high - low)[metric] / 2).item() == pytest.approx(normal.half_width, rel=0.06)
        assert ((high + low)[metric] / 2).item() == pytest.approx(normal.mean, abs=0.1 * normal.half_width)


def test_bootstrap_of_a_ratio_agrees_with_the_delta_method():
    rng = np.random.default_rng(1)
    weight = rng.random(4000) + 0.5
    value = weight * rng.normal(2, 1, 4000)
    ratio = value.sum() / weight.sum()
    half_width = 1.96 * np.std(value - ratio * weight) / weight.mean() / math.sqrt(4000)
    low, high = bootstrap_interval(torch.from_numpy(value)[:, None], torch.from_numpy(weight)[:, None], resamples=4000)
    assert (high - low).item() / 2 == pytest.approx(half_width, rel=0.06)
    assert low.item() < ratio < high.item()


def test_bootstrap_covers_the_truth_at_its_level():
    rng = np.random.default_rng(2)
    values = torch.from_numpy(rng.exponential(size=(200, 400)))  # 400 samples of 200 users
    low, high = bootstrap_interval(values, level=0.9)
    covered = ((low < 1) & (high > 1)).double().mean().item()
    assert abs(covered - 0.9) < 0.05


def test_bootstrap_does_not_depend_on_the_block_size(monkeypatch):
    values = torch.rand(50, 3, generator=torch.Generator().manual_seed(0))
    once = bootstrap_interval(values, resamples=64, seed=3)
    monkeypatch.setattr(estimates, "_DRAWS_AT_ONCE", 500)
    torch.testing.assert_close(bootstrap_interval(values, resamples=64, seed=3), once)
    assert not torch.equal(bootstrap_interval(values, resamples=64, seed=4)[0], once[0])


def test_bootstrap_of_nothing_is_nan():
    for values in (torch.full((5, 1), math.nan), torch.zeros(0, 1)):
        assert all(end.isnan().all() for end in bootstrap_interval(values, resamples=10))


def test_constant_values_have_no_width():
    low, high = bootstrap_interval(torch.full((20, 1), 0.25), resamples=50)
    assert low.item() == high.item() == 0.25


def test_three_seeds_by_hand():
    mean, half_width, n = estimate_over_seeds([1.0, 2.0, 3.0])
    assert (mean, n) == (2.0, 3)
    assert half_width == pytest.approx(4.302652729911275 / 3**0.5)  # t of 2 degrees of freedom, standard deviation 1


def test_it_is_scipys_interval():
    values = [0.3, 0.1, 0.7, 0.2]
    low, high = stats.t.interval(0.9, 3, loc=sum(values) / 4, scale=stats.sem(values))
    found = estimate_over_seeds(values, level=0.9)
    assert found.mean - found.half_width == pytest.approx(low)
    assert found.mean + found.half_width == pytest.approx(high)


def test_one_seed_gives_no_interval():
    with refused("wrong_shape", "values"):
        estimate_over_seeds([1.0])

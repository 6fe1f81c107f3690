from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from recpo.evaluation import Z95
from recpo.evaluation.estimates import adjusted_p_values, estimate, estimate_over_seeds
from tests.refusals import refused


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


def test_equal_weights_are_no_weights():
    values = torch.tensor([0.3, math.nan, 0.1, 0.7, 0.2])
    plain, weighted = estimate(values), estimate(values, torch.full((5,), 4.0))
    assert weighted == pytest.approx(plain)
    columns = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)) + 0.2
    assert adjusted_p_values(columns, torch.full((30,), 2.0)) == adjusted_p_values(columns)


def test_a_weighted_mean_by_hand():
    mean, half_width, n = estimate(torch.tensor([1.0, 2.0, 4.0, math.nan]), torch.tensor([1.0, 1.0, 2.0, 9.0]))
    assert (mean, n) == (2.75, 3)
    squares = (1 * 1.75**2 + 1 * 0.75**2 + 4 * 1.25**2) / 16
    assert half_width == pytest.approx(Z95 * math.sqrt(1.5 * squares))


def test_the_weighted_p_value_of_a_single_contender_is_the_normal_one():
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(500, generator=generator) * 5 + 0.1
    noise = torch.randn(500, generator=generator, dtype=torch.float64) / weights.sqrt()
    for shift in (0.0, 0.05, 0.1):
        found = estimate(noise + shift, weights)
        expected = stats.norm.sf(found.mean / found.half_width * Z95)
        (p_value,) = adjusted_p_values((noise + shift)[:, None], weights, resamples=20_000)
        assert p_value == pytest.approx(expected, abs=0.02)


def test_one_seed_gives_no_interval():
    with refused("wrong_shape", "values"):
        estimate_over_seeds([1.0])

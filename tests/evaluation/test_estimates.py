from __future__ import annotations

import pytest
from scipy import stats

from recpo.evaluation.estimates import estimate_over_seeds
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


def test_one_seed_gives_no_interval():
    with refused("wrong_shape", "values"):
        estimate_over_seeds([1.0])

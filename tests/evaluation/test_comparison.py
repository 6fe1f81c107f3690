from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import norm

from recpo.evaluation.document import with_holm
from recpo.evaluation.estimates import estimate, holm, p_value


def test_p_value_is_that_of_the_normal_interval():
    for z in (0.0, 0.5, 1.959963984540054, 4.0):
        assert p_value(0.1 * z, 0.1 * 1.959963984540054, 99) == pytest.approx(2 * norm.sf(z))
    assert p_value(0.0, 0.0, 0) == 1
    assert math.isnan(p_value(math.nan, math.nan, 0))
    assert math.isnan(p_value(0.2, math.nan, 1))


@pytest.mark.parametrize(("users", "expected"), [(2, 0.5), (5, 0.0625), (6, 0.03125)])
def test_equal_differences_of_a_few_users_have_the_p_value_of_the_sign_test(users, expected):
    mean, half_width, _ = estimate(torch.full((users,), 0.3))
    assert half_width == pytest.approx(0, abs=1e-12)
    assert p_value(mean, half_width, users) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40), st.integers(1, 200))
def test_a_p_value_is_never_0_and_below_six_users_nothing_is_significant(differences, repeats):
    values = torch.tensor(differences, dtype=torch.float64).repeat(repeats)
    differing = int((values != 0).sum())
    mean, half_width, _ = estimate(values)
    p = p_value(mean, half_width, differing)
    assert 0 < p <= 1
    assert differing > 5 or p > 0.05


@pytest.mark.parametrize("users", [2, 2000])
def test_an_exact_constant_difference_is_not_infinitely_certain(users):
    """Zero variance: the normal approximation alone gives 0."""
    assert 0 < p_value(0.25, 0.0, users) <= 0.5
    assert p_value(1e300, 1e-300, users) > 0


def test_holm_on_a_hand_worked_example():
    # m = 4: 0.005 * 4, 0.01 * 3, max(0.03, 0.03 * 2), max(0.06, 0.04)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02, math.nan])[0] == 0.02
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_the_p_value_and_bonferroni_and_keeps_the_order(p_values):
    adjusted = np.array(holm(p_values))
    p = np.array(p_values)
    assert (adjusted >= p).all()
    assert (adjusted <= np.minimum(1, len(p) * p)).all()
    order = np.argsort(p, kind="stable")
    assert (np.diff(adjusted[order]) >= 0).all()
    rejected_by_steps = 0
    for rank, place in enumerate(order):
        if p[place] * (len(p) - rank) > 0.05:
            break
        rejected_by_steps += 1
    assert (adjusted <= 0.05).sum() == rejected_by_steps


def test_every_metric_is_a_separate_family():
    def difference(mean):
        return {"mean": mean, "half_width": 0.1, "n": 20, "differing": 20}

    pairs = [{"metrics": {"a": difference(m), "b": difference(1.0)}, "off_policy": []} for m in (0.11, 0.0, 0.02)]
    pairs[1]["metrics"]["b"] = {"mean": math.nan, "half_width": math.nan, "n": 0, "differing": 0}
    marked = with_holm(pairs)
    assert [pair["metrics"]["a"]["survives_holm"] for pair in marked] == [False, False, False]  # 0.03 * 3 > 0.05
    assert marked[0]["metrics"]["a"]["p_value"] < 0.05
    assert [pair["metrics"]["b"]["survives_holm"] for pair in marked] == [True, False, True]
    assert math.isnan(marked[1]["metrics"]["b"]["p_holm"])

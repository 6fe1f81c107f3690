from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from recpo.evaluation.comparison import holm, p_value, with_holm
from recpo.evaluation.held_out import Estimate


def test_p_value_is_that_of_the_normal_interval():
    for z in (0.0, 0.5, 1.959963984540054, 4.0):
        assert p_value(Estimate(0.1 * z, 0.1 * 1.959963984540054, 9)) == pytest.approx(2 * norm.sf(z))
    assert p_value(Estimate(0.0, 0.0, 5)) == 1
    assert p_value(Estimate(0.2, 0.0, 5)) == 0
    assert math.isnan(p_value(Estimate(math.nan, math.nan, 0)))
    assert math.isnan(p_value(Estimate(0.2, math.nan, 1)))


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


def test_every_metric_is_a_family_of_its_own():
    def difference(mean):
        return {"mean": mean, "half_width": 0.1, "n": 10}

    pairs = [{"metrics": {"a": difference(m), "b": difference(1.0)}} for m in (0.11, 0.0, 0.02)]
    pairs[1]["metrics"]["b"] = {"mean": None, "half_width": None, "n": 0}
    marked = with_holm(pairs)
    assert [pair["metrics"]["a"]["survives_holm"] for pair in marked] == [False, False, False]  # 0.03 * 3 > 0.05
    assert marked[0]["metrics"]["a"]["p_value"] < 0.05
    assert [pair["metrics"]["b"]["survives_holm"] for pair in marked] == [True, False, True]
    assert marked[1]["metrics"]["b"]["p_holm"] is None
    assert "p_value" not in pairs[0]["metrics"]["a"]

"""The adaptive coefficient: direction, bounds, state."""

from __future__ import annotations

import pytest

from recpo.training.kl_control import AdaptiveKLCoefficient


def test_rises_when_the_divergence_is_too_large_and_falls_when_too_small():
    controller = AdaptiveKLCoefficient(0.1, target=1.0, horizon=100)
    assert controller.update(5.0, 10) == pytest.approx(0.1 * 1.02)
    assert controller.update(0.0, 10) == pytest.approx(0.1 * 1.02 * 0.98)
    assert controller.update(1.0, 10) == controller.value


def test_resumes_where_it_stopped():
    first = AdaptiveKLCoefficient()
    first.update(12.0, 256)
    second = AdaptiveKLCoefficient()
    second.load_state_dict(first.state_dict())
    assert second.update(3.0, 256) == first.update(3.0, 256)


def test_refuses_what_cannot_be_held():
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKLCoefficient(target=0.0)

"""Inclusion probabilities against all orderings, closed forms, and a finer grid."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recpo.lists import exploration as inclusion
from recpo.lists.exploration import inclusion_probabilities
from tests.reference import slates_by_enumeration
from tests.refusals import refused

logits = st.lists(st.floats(-1, 1), min_size=2, max_size=6)


@settings(max_examples=60, deadline=None)
@given(logits, st.sampled_from([0.0, 0.1, 1.0, 10.0, 40.0]), st.integers(1, 6))
def test_equal_to_the_sum_over_all_orderings(values, scale, k):
    scaled = scale * np.array(values)
    expected = slates_by_enumeration.inclusion(np.exp(scaled - scaled.max()), k)
    found = inclusion_probabilities(scaled[None], k)[0]
    assert np.abs(found - expected).max() < 1e-9
    np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.parametrize(("items", "k"), [(2, 1), (5, 2), (30, 7), (100, 10), (1000, 10), (60, 50)])
def test_equal_weights_give_k_of_m(items, k):
    chosen = np.arange(min(3, items))[None]
    found = inclusion_probabilities(np.full((1, items), -3.0), k, chosen)
    np.testing.assert_allclose(found, k / items, rtol=1e-9)


def test_two_places_have_a_closed_form():
    """P(i in 2) = p_i + sum_j p_j p_i / (1 - p_j)."""
    p = np.random.default_rng(0).dirichlet(np.full(200, 0.3))
    expected = p * (1 + (p / (1 - p)).sum() - p / (1 - p))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(inclusion_probabilities(np.log(p)[None], 2)[0], expected, rtol=1e-8)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.integers(1, 20), st.sampled_from([0.1, 1.0, 5.0, 100.0, 1e6]), st.integers(0, 99))
def test_sums_to_k_and_follows_the_order_of_the_weights(items, k, scale, seed):
    values = scale * np.random.default_rng(seed).normal(size=(1, items))
    found = inclusion_probabilities(values, k)[0]
    assert found.sum() == pytest.approx(min(k, items), rel=1e-8)
    assert (np.diff(found[np.argsort(values[0])]) >= -1e-9).all()
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 20.0, 300.0])
@pytest.mark.parametrize(("items", "k"), [(100, 2), (100, 10), (300, 25)])
def test_a_finer_and_longer_grid_says_the_same(monkeypatch, items, k, scale):
    generator = np.random.default_rng(1)
    values = scale * generator.normal(size=(1, items))
    chosen = np.argsort(-(values + generator.gumbel(size=values.shape)), axis=1)[:, :k]
    found = inclusion_probabilities(values, k, chosen)
    spacing = inclusion._spacing(k)
    monkeypatch.setattr(inclusion, "_spacing", lambda k: spacing / 3)
    monkeypatch.setattr(inclusion, "_TAIL", 1e-15)
    np.testing.assert_allclose(found, inclusion_probabilities(values, k, chosen), rtol=1e-8, atol=1e-10)


def test_rows_do_not_depend_on_each_other_and_chosen_columns_are_a_selection(monkeypatch):
    values = np.random.default_rng(2).normal(size=(7, 40)) * np.array([0.1, 1, 2, 4, 8, 50, 1e5])[:, None]
    values[3, :35] = -np.inf
    together = inclusion_probabilities(values, 6)
    for row, alone in zip(together, values, strict=True):
        np.testing.assert_allclose(inclusion_probabilities(alone[None], 6)[0], row, rtol=1e-9)
    chosen = np.array([[5, 0, 39]] * 7)
    np.testing.assert_allclose(
        inclusion_probabilities(values, 6, chosen), np.take_along_axis(together, chosen, 1), rtol=1e-9
    )
    monkeypatch.setattr(inclusion, "_CELLS", 1)  # one row at a time
    np.testing.assert_allclose(inclusion_probabilities(values, 6), together, rtol=1e-9)


def test_impossible_items_are_never_drawn_and_all_are_drawn_if_there_is_room():
    values = np.array([[0.0, -np.inf, 1.0, -np.inf], [-np.inf] * 4, [0.0, 0.0, 0.0, -900.0]])
    found = inclusion_probabilities(values, 3)
    assert found.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0], [pytest.approx(1)] * 3 + [pytest.approx(0)]]
    assert inclusion_probabilities(values, 1)[1].tolist() == [0, 0, 0, 0]


def test_weights_that_are_apart_by_more_than_a_float_holds():
    values = -1000.0 * np.arange(20)[None]
    assert inclusion_probabilities(values, 5)[0] == pytest.approx([1.0] * 5 + [0.0] * 15, abs=1e-9)
    # the fifth place is a coin toss between two items, far below the first four
    values = np.array([[4e5, 3e5, 2e5, 1e5, 0.0, math.log(3), -1e5]])
    assert inclusion_probabilities(values, 5)[0] == pytest.approx([1, 1, 1, 1, 0.25, 0.75, 0], abs=1e-9)


@pytest.mark.parametrize("bad", [np.array([[0.0, np.nan]]), np.array([[0.0, np.inf]]), np.zeros(3)])
def test_what_has_no_weights_is_refused(bad):
    with refused("wrong_shape", "logits"):
        inclusion_probabilities(bad, 2)
    with refused("out_of_range", "k"):
        inclusion_probabilities(np.zeros((1, 3)), 0)

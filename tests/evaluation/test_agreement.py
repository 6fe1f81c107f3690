"""Agreement of two rankings, against loops over sets and the infinite sum of the definition."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, strategies as st

from recpo.evaluation.comparison import agreement, kendall_tau, overlap, rank_biased_overlap

K = 6
LISTS = st.lists(st.integers(1, 9), max_size=K, unique=True)
PERSISTENCE = st.floats(0.1, 0.95)


def row(items):
    return torch.tensor([items + [0] * (K - len(items))])


def rbo_reference(one, other, p):
    """``(1 - p) sum_d A_d p^(d-1)`` far beyond the end, with the agreement of Webber et al. extrapolated."""
    short, long = sorted((one, other), key=len)
    s, l = len(short), len(long)  # noqa: E741
    if not l:
        return 1.0
    if not s:
        return 0.0
    at_short = len(set(short) & set(long[:s]))
    total = 0.0
    for depth in range(1, 1500):
        d = min(depth, l)
        shared = len(set(short[:d]) & set(long[:d])) + (at_short * (d - s) / s if d > s else 0.0)
        total += shared / d * p ** (depth - 1)
    return (1 - p) * total


def tau_reference(one, other):
    shared = [item for item in one if item in other]
    signs = [1 if other.index(a) < other.index(b) else -1 for a, b in combinations(shared, 2)]
    return sum(signs) / len(signs) if signs else math.nan


@given(LISTS, LISTS, PERSISTENCE)
def test_agreement_is_that_of_the_definitions(one, other, p):
    found = agreement(row(one), row(other), K, p)
    longest = max(len(one), len(other))
    expected = {
        "overlap": len(set(one) & set(other)) / longest if longest else 1.0,
        "rank_biased_overlap": rbo_reference(one, other, p),
        "kendall_tau": tau_reference(one, other),
        "equal_lists": float(one == other),
    }
    assert found.keys() == {f"{name}@{K}" for name in expected}
    for name, value in expected.items():
        assert found[f"{name}@{K}"].item() == pytest.approx(value, abs=1e-9, nan_ok=True), name


@given(LISTS, LISTS, PERSISTENCE)
def test_agreement_is_symmetric_and_bounded(one, other, p):
    forth, back = rank_biased_overlap(row(one), row(other), p), rank_biased_overlap(row(other), row(one), p)
    assert forth.item() == pytest.approx(back.item(), abs=1e-12)
    assert -1e-12 <= forth.item() <= 1 + 1e-12
    assert kendall_tau(row(one), row(other)).item() == pytest.approx(
        kendall_tau(row(other), row(one)).item(), nan_ok=True
    )


@given(LISTS, PERSISTENCE)
def test_a_list_agrees_fully_with_itself(items, p):
    found = agreement(row(items), row(items), K, p)
    assert found.pop(f"kendall_tau@{K}").item() == pytest.approx(1.0 if len(items) > 1 else math.nan, nan_ok=True)
    assert all(value.item() == pytest.approx(1.0, abs=1e-12) for value in found.values())


def test_a_reversed_list_has_tau_minus_1_and_the_top_counts_most():
    best, reverse = row([1, 2, 3, 4]), row([4, 3, 2, 1])
    assert kendall_tau(best, reverse).item() == -1
    assert overlap(best, reverse).item() == 1
    top, end = row([9, 2, 3, 4, 5, 6]), row([1, 2, 3, 4, 5, 9])
    whole = row([1, 2, 3, 4, 5, 6])
    assert rank_biased_overlap(whole, top) < rank_biased_overlap(whole, end)


def test_only_the_first_k_places_are_read():
    found = agreement(row([1, 2, 3]), row([1, 2, 4]), 2, 0.9)
    assert {value.item() for value in found.values()} == {1.0}

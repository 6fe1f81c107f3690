"""Interleaving against enumerations of all coins, and its symmetries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recpo.lists.interleaving import _Left, interleave, probabilistic, team_draft, team_draft_inclusion
from tests.refusals import refused

A, B = list("abcdefgh"), list("badgxyhc")
RANKINGS = st.permutations(range(9)).map(lambda order: order[:6])
METHODS = ("team_draft", "probabilistic")


def drafted(first, second, k, coins):
    """Team draft with given coins, one per round."""
    items = []
    for coin in coins:
        for ranking in (first, second) if coin else (second, first):
            left = [item for item in ranking if item not in items]
            items += left[:1] if len(items) < k else []
    return items


@given(RANKINGS, RANKINGS, st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_the_inclusion_of_team_draft_is_the_sum_over_all_coins(first, second, k):
    expected = {}
    rounds = 9
    for coins in itertools.product((0, 1), repeat=(k + 1) // 2):
        lists = drafted(first, second, k, (*coins, *[0] * rounds))
        for item in lists:
            expected[item] = expected.get(item, 0) + 0.5 ** len(coins)
    found = team_draft_inclusion(first, second, k)
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(min(k, len({*first, *second})))
    mirrored = team_draft_inclusion(second, first, k)
    assert found == pytest.approx(mirrored)


def test_team_draft_shows_items_as_often_as_its_propensities_say():
    generator, draws = np.random.default_rng(0), 4000
    shown = [team_draft(A, B, 5, generator) for _ in range(draws)]
    said = {item: p for one in shown for item, p in zip(one.items, one.propensity, strict=True)}
    for item, propensity in said.items():
        rate = sum(item in one.items for one in shown) / draws
        assert abs(rate - 5 * propensity) < 5 * np.sqrt(0.25 / draws)
    assert {len(set(one.items)) for one in shown} == {5}
    assert all(abs(one.credit.sum()) <= 1 for one in shown)  # equal teams, but for the last place


def test_rankings_of_disjoint_items_alternate():
    shown = team_draft("abc", "xyz", 6, np.random.default_rng(1))
    assert [item for item, team in zip(shown.items, shown.team, strict=True) if team == 0] == list("abc")
    assert sorted(shown.items) == sorted("abcxyz")
    assert team_draft("ab", "b", 9, np.random.default_rng(1)).propensity.tolist() == [0.5, 0.5]  # both end
    assert team_draft("", "", 3, np.random.default_rng(1)).items == []
    assert len(team_draft_inclusion(range(60), range(59, -1, -1), 50)) == 50


@pytest.mark.parametrize("method", METHODS)
def test_identical_rankings_have_no_expected_credit(method):
    generator, worth = np.random.default_rng(2), dict(zip(A, np.linspace(1, 0, len(A)), strict=True))
    totals = []
    for _ in range(2000):
        shown = interleave(method, A, A, 4, generator)
        totals.append(sum(credit * worth[item] for credit, item in zip(shown.credit, shown.items, strict=True)))
    if method == "probabilistic":
        assert totals == [0.0] * 2000  # exactly, list by list
    assert abs(np.mean(totals)) < 5 * max(np.std(totals), 1e-12) / np.sqrt(2000)


@pytest.mark.parametrize("method", METHODS)
def test_outcomes_that_do_not_depend_on_the_ranking_have_no_expected_credit(method):
    generator = np.random.default_rng(3)
    totals = [interleave(method, A, B, 4, generator).credit @ generator.random(4) for _ in range(3000)]
    assert abs(np.mean(totals)) < 5 * np.std(totals) / np.sqrt(3000)


def test_the_credit_of_probabilistic_interleaving_sums_over_all_coins():
    """Of all 2^n assignments of places to rankings, weighted by the probability of assignment and list."""
    first, second, tau = list("abcd"), list("dcae"), 2.0
    weights = [{item: rank**-tau for rank, item in enumerate(one, 1)} for one in (first, second)]
    for items in itertools.permutations("abcde", 3):
        probability, expected = 0.0, np.zeros(3)
        for teams in itertools.product((0, 1), repeat=3):
            chance = 1.0
            for place, (item, team) in enumerate(zip(items, teams, strict=True)):
                left = {one: weight for one, weight in weights[team].items() if one not in items[:place]}
                chance *= 0.5 * left.get(item, 0) / sum(left.values())
            probability += chance
            expected += chance * (2 * np.array(teams) - 1)
        left, mirrored = _Left(first, second, tau), _Left(second, first, tau)
        found = [left.take(item) for item in items]
        np.testing.assert_allclose(found, expected / probability, atol=1e-12)
        np.testing.assert_allclose(found, [-mirrored.take(item) for item in items])


def test_a_large_exponent_keeps_the_order_of_the_rankings():
    shown = [probabilistic(A, A, 5, np.random.default_rng(seed), tau=60.0) for seed in range(20)]
    assert all(one.items == A[:5] for one in shown)
    assert all(one.propensity is None for one in shown)
    short = probabilistic("ab", "", 5, np.random.default_rng(0))
    assert (sorted(short.items), short.credit.tolist()) == (["a", "b"], [-1.0, -1.0])


def test_rankings_that_cannot_be_interleaved_are_refused():
    generator = np.random.default_rng(0)
    with refused("duplicate", "second"):
        team_draft("ab", "aa", 2, generator)
    with refused("out_of_range", "k"):
        probabilistic("ab", "ab", 0, generator)
    with refused("out_of_range", "tau"):
        probabilistic("ab", "ab", 1, generator, tau=-1.0)

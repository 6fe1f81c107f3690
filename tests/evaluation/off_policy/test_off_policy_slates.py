"""Slate estimators: exact expectations by enumeration in worlds that satisfy or violate their assumptions."""

from itertools import product

import numpy as np
import pytest

from recpo.evaluation.off_policy.estimators import (
    IPS,
    IndependentIPS,
    RewardInteractionIPS,
    Rows,
    SlateRows,
    StandardIPS,
    sum_of_ratios,
)

ITEMS, POSITIONS = 3, 3
RNG = np.random.default_rng(0)
LOGGING, TARGET = (RNG.dirichlet(np.ones(ITEMS), POSITIONS) for _ in range(2))
SLATES = np.array(list(product(range(ITEMS), repeat=POSITIONS)))
PLACES = np.arange(POSITIONS)
CHANCE, WANTED = (policy[PLACES, SLATES].prod(1) for policy in (LOGGING, TARGET))
ITEM_REWARD = RNG.random((POSITIONS, ITEMS))


def rewards(world):
    own = ITEM_REWARD[PLACES, SLATES]
    if world == "independent":
        return own
    if world == "cascade":  # the item above changes what is thought of the one below
        above = np.concatenate([np.zeros((len(SLATES), 1)), own[:, :-1].cumsum(1)], axis=1)
        return own * np.exp(-above)
    return own * own.prod(1, keepdims=True)  # and the item below that of the one above


def expectation(estimator, world):
    weight = (TARGET / LOGGING)[PLACES, SLATES]
    terms = estimator.terms(SlateRows(rewards(world), weight, np.ones_like(SLATES, dtype=bool)))
    return float(sum_of_ratios(CHANCE @ terms))


@pytest.mark.parametrize("self_normalized", [False, True])
@pytest.mark.parametrize("world", ["independent", "cascade", "whole slate"])
def test_each_estimator_is_right_where_its_assumption_holds(world, self_normalized):
    value = float(WANTED @ rewards(world).sum(1))
    right = {
        "independent": (IndependentIPS, RewardInteractionIPS, StandardIPS),
        "cascade": (RewardInteractionIPS, StandardIPS),
        "whole slate": (StandardIPS,),
    }[world]
    for kind in (IndependentIPS, RewardInteractionIPS, StandardIPS):
        found = expectation(kind(self_normalized), world)
        assert (abs(found - value) < 1e-12) == (kind in right), kind


def test_the_more_is_assumed_the_smaller_the_variance():
    rng = np.random.default_rng(1)
    drawn = rng.choice(len(SLATES), 4000, p=CHANCE / CHANCE.sum())
    weight = (TARGET / LOGGING)[PLACES, SLATES][drawn]
    rows = SlateRows(rewards("independent")[drawn], weight, np.ones_like(weight, dtype=bool))
    kinds, positions = (IndependentIPS, RewardInteractionIPS, StandardIPS), weight.shape[1]
    spread = [kind().terms(rows)[:, :positions].sum(1).var() for kind in kinds]
    assert spread[0] < spread[1] < spread[2]


def test_one_position_is_one_item():
    rng = np.random.default_rng(2)
    reward, weight = rng.random((20, 1)), rng.exponential(size=(20, 1))
    single = IPS(Rows(reward[:, 0], weight[:, 0], np.ones(20)))
    rows = SlateRows(reward, weight, np.ones((20, 1), bool))
    for kind in (IndependentIPS, RewardInteractionIPS, StandardIPS):
        assert kind()(rows) == pytest.approx(single)


def test_by_hand_with_padding():
    rows = SlateRows(
        reward=np.array([[1.0, 1.0], [1.0, np.nan]]),
        weight=np.array([[2.0, 3.0], [0.5, np.nan]]),
        mask=np.array([[True, True], [True, False]]),
    )
    assert IndependentIPS()(rows) == pytest.approx((2 + 3 + 0.5) / 2)
    assert RewardInteractionIPS()(rows) == pytest.approx((2 + 6 + 0.5) / 2)
    assert StandardIPS()(rows) == pytest.approx((6 * 2 + 0.5) / 2)
    assert IndependentIPS(self_normalized=True)(rows) == pytest.approx(2.5 / 2.5 + 3 / 4)
    assert RewardInteractionIPS(self_normalized=True)(rows) == pytest.approx(2.5 / 2.5 + 6 / 6.5)

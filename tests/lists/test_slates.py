"""Slates: which are drawn, how often, and that values estimated with their propensities are unbiased."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from recpo.lists.exploration import Exploration, Pool
from tests.reference import slates_by_enumeration
from tests.refusals import refused

ITEMS = np.array([4, 9, 2, 7, 5])
LOGP = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
REWARD = np.array([0, 0.1, 0.9, 0.2, 0.3, 0.7, 0.5, 0.4, 0.6, 0.8])  # of items 0..9
CATALOG = Pool.of(9, exclude=[1, 8])


def enumerated(exploration, k, pool=None):
    """Every slate of items and its probability, from the definition."""
    if exploration.epsilon < 1:
        weights = np.exp(LOGP / exploration.temperature) if exploration.temperature else None
        greedy = [(tuple(range(k)), 1.0)]
        for slate, p in slates_by_enumeration.slates(weights, k) if weights is not None else greedy:
            yield tuple(ITEMS[list(slate)]), (1 - exploration.epsilon) * p
    if exploration.epsilon:
        every = list(permutations(ITEMS if pool is None else pool.at(np.arange(len(pool))), k))
        yield from ((slate, exploration.epsilon / len(every)) for slate in every)


CASES = [
    (Exploration(), None),
    (Exploration(temperature=0.5), None),
    (Exploration(temperature=3.0, epsilon=0.2, uniform_over="shortlist"), None),
    (Exploration(temperature=1.0, epsilon=0.3), CATALOG),
    (Exploration(temperature=0.0, epsilon=0.25), CATALOG),
    (Exploration(epsilon=1.0), CATALOG),
]


def propensities(exploration, k, pool, draws=400):
    """Item -> the propensity that slates give it; every slate says the same."""
    found = {}
    for seed in range(draws):
        slate = exploration.sample(ITEMS, LOGP, k, np.random.default_rng(seed), pool)
        for item, propensity in zip(slate.items.tolist(), slate.propensity.tolist(), strict=True):
            assert propensity == pytest.approx(found.setdefault(item, propensity), rel=1e-9)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("exploration", "pool"), CASES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_propensities_are_those_of_the_enumeration(exploration, pool, k):
    expected = {}
    for slate, p in enumerated(exploration, k, pool):
        for item in slate:
            expected[int(item)] = expected.get(int(item), 0) + p / k
    found = propensities(exploration, k, pool)
    assert sum(expected.values()) == pytest.approx(1)
    assert found == {item: pytest.approx(expected[item], rel=1e-8) for item in found}
    assert set(found) == {item for item, p in expected.items() if p > 1e-12}


@pytest.mark.slow
@pytest.mark.parametrize(("exploration", "pool"), CASES)
def test_the_mean_weighted_reward_of_a_slate_is_the_value_in_expectation(exploration, pool):
    """IPS over rows, exactly: the sum over all slates. Weights have the mean 1, as the diagnostics expect."""
    k, found = 3, propensities(exploration, 3, pool)
    target = np.zeros(10)
    shown = np.array(sorted(found))
    target[shown] = np.random.default_rng(0).dirichlet(np.ones(len(shown)))
    value = weight = total = 0.0
    for slate, p in enumerated(exploration, k, pool):
        for item in slate:
            w = target[item] / found[int(item)] / k
            total, weight, value = total + p / k, weight + p * w, value + p * w * REWARD[item]
    assert total == pytest.approx(1)
    assert weight == pytest.approx(1, rel=1e-8)
    assert value == pytest.approx(target @ REWARD, rel=1e-8)


def test_probabilities_given_what_stands_above_would_be_biased():
    """An item above cannot be drawn again: what the target has on it is missing from this place."""
    k, target, weights = 3, np.exp(LOGP), np.exp(LOGP)
    value = 0.0
    for slate, p in slates_by_enumeration.slates(weights, k):
        left = 1.0
        for item in slate:
            value += p * target[item] / (weights[item] / left) * REWARD[ITEMS[item]] / k
            left -= weights[item]
    assert value < 0.8 * target @ REWARD[ITEMS]


@pytest.mark.slow
def test_slates_are_drawn_with_their_probabilities():
    exploration, draws = Exploration(temperature=2.0, epsilon=0.2), 20_000
    items, logp = np.tile(ITEMS, (draws, 1)), np.tile(LOGP, (draws, 1))
    slates = exploration.sample_batch(items, logp, 2, np.random.default_rng(0), [CATALOG] * draws)
    expected = {}
    for slate, p in enumerated(exploration, 2, CATALOG):
        expected[slate] = expected.get(slate, 0) + p
    keys, counts = np.unique(slates.items, axis=0, return_counts=True)
    seen = dict(zip(map(tuple, keys), counts, strict=True))
    chi2 = sum((seen.get(slate, 0) - draws * p) ** 2 / (draws * p) for slate, p in expected.items())
    assert set(seen) <= set(expected)
    assert abs(chi2 - len(expected) + 1) < 4 * np.sqrt(2 * len(expected))
    assert slates.is_random.mean() == pytest.approx(0.2, abs=0.01)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 12),
    st.sampled_from([0.0, 1e-6, 0.1, 1.0, 100.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(["catalog", "shortlist"]),
    st.integers(0, 1000),
)
def test_every_slate_holds_allowed_items_once(k, filtered, temperature, epsilon, uniform_over, seed):
    generator = np.random.default_rng(seed)
    items = generator.permutation(30)[:12] + 1
    logp = np.where(generator.random(12) < 0.2, -np.inf, 300 * generator.normal(size=12))
    exclude = generator.choice(items, filtered, replace=False)
    exploration = Exploration(temperature, epsilon, uniform_over=uniform_over)
    slate = exploration.sample(items, logp, k, generator, Pool.of(30, exclude=exclude))
    drawable = set(items[logp > -np.inf].tolist()) - set(exclude.tolist())
    assert len(slate.items) == len(set(slate.items.tolist())) == min(k, len(drawable))
    assert not set(slate.items.tolist()) & set(exclude.tolist())
    if not (slate.is_random and uniform_over == "catalog"):
        assert set(slate.items.tolist()) <= drawable
    assert ((slate.propensity > 0) & (slate.propensity <= 1)).all()
    known = slate.positions >= 0
    assert (items[slate.positions[known]] == slate.items[known]).all()
    best = sorted(drawable, key=lambda item: -logp[list(items).index(item)])[: len(slate.items)]
    assert (slate.explored == ~np.isin(slate.items, best)).all()


def test_no_exploration_is_the_list_itself_and_says_so():
    slate = Exploration(temperature=0.0).sample(ITEMS, LOGP, 3, np.random.default_rng(0))
    assert slate.items.tolist() == [4, 9, 2]
    assert slate.propensity.tolist() == pytest.approx([1 / 3] * 3)
    assert not slate.explored.any()
    assert not slate.is_random
    cold = Exploration(temperature=1e-6).sample(ITEMS, LOGP, 3, np.random.default_rng(0))
    assert cold.items.tolist() == [4, 9, 2]
    assert cold.propensity.tolist() == pytest.approx([1 / 3] * 3)


def test_a_shortlist_of_k_shows_all_of_it():
    slate = Exploration(temperature=2.0).sample(ITEMS, LOGP, 5, np.random.default_rng(0))
    assert sorted(slate.items) == sorted(ITEMS)
    assert slate.propensity.tolist() == pytest.approx([0.2] * 5)


def test_short_lists_are_padded_in_a_batch_and_short_alone():
    logp = np.array([[0.0, -np.inf, -1.0, -2.0], [-np.inf] * 4, [0.0, -np.inf, -np.inf, -np.inf]])
    items = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [6, 0, 0, 0]])
    slates = Exploration(epsilon=0.5, uniform_over="shortlist").sample_batch(items, logp, 6, np.random.default_rng(1))
    assert slates.lengths.tolist() == [3, 0, 1]
    assert slates.items.shape == (3, 6)
    assert np.isnan(slates.propensity[1]).all()
    assert slates.propensity[0, :3].tolist() == pytest.approx([1 / 3] * 3)
    assert slates.of(2).items.tolist() == [6]
    assert slates.of(2).propensity.tolist() == pytest.approx([1.0])
    assert slates.of(1).items.tolist() == []
    assert not slates.of(1).is_random


def test_one_seed_one_slate():
    exploration = Exploration(temperature=1.5, epsilon=0.3)
    one, other = (exploration.sample(ITEMS, LOGP, 3, np.random.default_rng(7), CATALOG) for _ in range(2))
    assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"temperature": -1.0}, ("out_of_range", "temperature")),
        ({"temperature": 1e-9}, ("out_of_range", "temperature")),
        ({"temperature": float("nan")}, ("out_of_range", "temperature")),
        ({"epsilon": 1.5}, ("out_of_range", "epsilon")),
        ({"shortlist": 0}, ("out_of_range", "shortlist")),
        ({"uniform_over": "world"}, ("unknown_name", "uniform_over")),
    ],
)
def test_options_out_of_range_are_refused(options, refusal):
    with refused(*refusal):
        Exploration(**options)


def test_wrong_shortlists_are_refused():
    sample, generator = Exploration(epsilon=0.1).sample, np.random.default_rng(0)
    for items, logp, k, refusal in (
        (ITEMS, LOGP[:3], 2, ("wrong_shape", "items")),
        (ITEMS.astype(float), LOGP, 2, ("wrong_shape", "items")),
        (ITEMS, LOGP, 0, ("out_of_range", "k")),
        (ITEMS, LOGP * np.nan, 2, ("bad_value", "logp")),
        (np.array([4, 9, 2, 7, 4]), LOGP, 2, ("duplicate", "items")),
        (ITEMS, LOGP, 2, ("missing_option", "allowed")),
    ):
        with refused(*refusal):
            sample(items, logp, k, generator)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.integers(0, 20), max_size=12),
    st.none() | st.lists(st.integers(1, 20), min_size=0, max_size=15),
)
def test_a_pool_is_the_set_it_describes(num_items, exclude, ids):
    exclude = [item for item in exclude if item <= num_items]
    ids = None if ids is None else [item for item in ids if item <= num_items]
    pool = Pool.of(num_items, exclude=exclude, ids=ids)
    expected = sorted(set(range(1, num_items + 1) if ids is None else ids) - set(exclude))
    assert len(pool) == len(expected)
    assert pool.at(np.arange(len(pool))).tolist() == expected
    every = np.arange(-1, num_items + 3)
    assert every[pool.contains(every)].tolist() == expected


def test_a_pool_refuses_ids_that_are_none():
    for options in ({"exclude": [6]}, {"ids": [0, 1]}, {"exclude": [-1]}):
        with refused("out_of_range", next(iter(options))):
            Pool.of(5, **options)


@pytest.mark.parametrize(("exploration", "pool"), CASES)
@pytest.mark.parametrize("k", [1, 3, 9])
def test_probabilities_of_given_items_are_the_propensities_of_slates(exploration, pool, k):
    """Every item of the catalog at once: those that are drawn have their slates' propensity, and all sum to 1."""
    asked = np.arange(10)[None]
    pools = None if pool is None else [pool]
    found = exploration.probabilities(ITEMS[None], LOGP[None], k, asked, pools)[0]
    assert found.sum() == pytest.approx(1)
    assert found[0] == 0
    for item, propensity in propensities(exploration, k, pool, draws=60).items():
        assert found[item] == pytest.approx(propensity, rel=1e-9)

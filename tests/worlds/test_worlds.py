"""Named worlds: each has the properties of its preset."""

import numpy as np
import pytest

import recpo
from recpo.worlds.log import write_simulation
from recpo.worlds.parameters import WORLDS, SimulationParameters
from recpo.worlds.preferences import LoggingPolicy, Preferences
from recpo.worlds.truth import Truth


def drawn(world, **options):
    return Preferences.draw(SimulationParameters(**{**WORLDS[world], "users": 300, **options}))


def test_the_default_world_is_that_of_the_defaults():
    assert SimulationParameters(**WORLDS["default"]) == SimulationParameters()


@pytest.mark.parametrize("world", sorted(set(WORLDS) - {"default"}))
def test_every_preset_differs_from_the_defaults(world):
    standard = SimulationParameters()
    assert WORLDS[world]
    assert all(getattr(standard, name) != value for name, value in WORLDS[world].items())


def test_in_the_confounded_world_popular_items_are_not_better_and_clickbait_is_shown_more():
    exposed = {}
    for world in ("default", "confounded"):
        preferences = drawn(world, items=4000)
        items, users = preferences.items, np.arange(300)
        plain = ~items.clickbait
        known = np.corrcoef(items.popularity[plain], items.quality[plain])[0, 1]
        share = LoggingPolicy.of(preferences).propensity_of_all(users)[:, items.clickbait].sum(1).mean()
        exposed[world] = known, share
    assert exposed["default"][0] > 0.35
    assert abs(exposed["confounded"][0]) < 0.05
    assert exposed["confounded"][1] > 2 * exposed["default"][1]


def test_in_the_skewed_world_exposures_are_concentrated_on_a_users_topics():
    def effective_items(world):
        probability = LoggingPolicy.of(drawn(world)).propensity_of_all(np.arange(300))
        return float(np.median(1 / (probability**2).sum(1)))

    assert effective_items("skewed") < 0.75 * effective_items("default")
    smallest = LoggingPolicy.of(drawn("skewed")).propensity_of_all(np.arange(300)).min()
    assert smallest < 2 * 0.01 / 1000  # elsewhere the tenth that is random would keep it above .0001


def test_in_the_sparse_world_tastes_differ_and_exposures_know_them():
    preferences = Preferences.draw(SimulationParameters(**WORLDS["sparse"]))
    parameters, users = preferences.parameters, np.arange(300)
    assert parameters.events == 40 * parameters.users
    affinity = preferences.affinity_to_all(users, 0.0)
    centered = affinity - affinity.mean(1, keepdims=True)
    assert centered.mean(0).var() < 0.25 * centered.var()  # of the variance within a user, that between items
    shown = (LoggingPolicy.of(preferences).propensity_of_all(users) * affinity).sum(1).mean()
    assert shown > 2 * affinity.mean()
    dislikes = preferences.dislike_probability(affinity, preferences.items.clickbait)
    assert dislikes.mean() < 0.02


@pytest.mark.slow
def test_in_the_sparse_world_who_chose_what_is_worth_more_than_grades(tmp_path):
    world = recpo.simulate(tmp_path / "world", world="sparse")
    data = recpo.prepare(world.log, tmp_path / "prepared")
    done = recpo.evaluate(
        data,
        ["item_rate", "factorization", "implicit_als"],
        truth=world.root,
        ks=[10],
        segments=False,
        off_policy=None,
        bootstrap_resamples=10,
    )
    value = {one["name"]: one["metrics"]["true_reward@10"]["mean"] for one in done.document["contenders"]}
    assert value["item_rate"] < value["factorization"]
    assert value["factorization"] + 0.02 < value["implicit_als"] < 0.7 * value["oracle"]


@pytest.mark.slow
def test_the_truth_remembers_its_world(tmp_path):
    preferences = drawn("small", users=20, items=30, events=100)
    write_simulation(preferences, tmp_path / "out", world="small")
    assert Truth.load(tmp_path / "out").world == "small"

"""From prepared data to off-policy estimates of real contenders."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from recpo.batches.slates import evaluation_batches
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.evaluation.off_policy.measure import off_policy_setting, propensity_share, rewarded
from recpo.log.prepared import Prepared
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.rewards.counted import popularity_of
from recpo.rewards.rewards import LoggedReward

KS = [3, 10]


def evaluated(root, propensity, policy=None):
    data = Prepared.open(root)
    setting = off_policy_setting(OffPolicyOptions(propensity, resamples=50), data, "test", LoggedReward(), KS)
    measure = setting.measure(policy)
    recommender = (
        Recommender(popularity_of(data.item_counts()).recommend)
        if policy is None
        else Recommender(policy.recommend, policy.log_prob)
    )
    batches = evaluation_batches(root, "test", 20, 32, repeats=True)
    evaluate_ranking(recommender, batches, Ranking(num_items=data.num_items, ks=KS), measures=[measure])
    return setting, measure.result()


@pytest.mark.parametrize("propensity", ["logged", "uniform", "estimated"])
def test_a_policy_and_a_baseline(prepared, propensity):
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(Prepared.open(prepared).num_items, dim=16, max_history=20).eval()
    _, trained = evaluated(prepared, propensity, policy)
    _, baseline = evaluated(prepared, propensity)
    assert {e.target for e in trained.estimates} == {"logging policy", "policy", "top_3", "top_10"}
    assert {e.target for e in baseline.estimates} == {"logging policy", "top_3", "top_10"}
    assert {e.propensity for e in trained.estimates} == {propensity}
    values = {e.estimator: e.value for e in trained.estimates if e.target == "policy"}
    assert {"IPS", "clipped IPS", "SNIPS", "DM", "DR", "SNDR", "Switch-DR"} <= set(values)
    assert all(-1 <= values[name] <= 1 for name in ("SNIPS", "DM")), "within the range of the rewards"
    assert {d.target for d in trained.differences(baseline)} == {"top_3", "top_10"}


def test_the_reward_model_is_that_of_the_training_period(prepared):
    setting, _ = evaluated(prepared, "logged")
    events = Prepared.open(prepared).load("train", 0)
    reward = events.label - events.dislike
    assert setting.model.mean == pytest.approx(np.nanmean(reward), abs=1e-5)
    items, effect = np.unique(events.item_index), setting.model.item_effect.numpy()
    means = np.array([np.nanmean(reward[events.item_index == item]) for item in items])
    assert np.corrcoef(means, effect[items])[0, 1] > 0.8


@dataclass
class Shards:
    """Prepared data with these columns: a shard for each pair of propensities and which events are to be predicted."""

    shards: list[tuple[list[float], list[bool]]]

    def num_shards(self, split):
        return len(self.shards)

    def columns(self, split, shard, names):
        return dict(zip(names, map(np.array, self.shards[shard]), strict=True))


@pytest.mark.parametrize(
    ("shards", "found"),
    [
        ([], 0.0),
        ([([np.nan, 0.5], [True, False])], 0.0),  # a propensity, of an event that is history
        ([([np.nan, 0.5], [True, True])], 0.5),
        ([([np.nan, np.nan], [True, True]), ([0.5, 0.25], [True, True])], 0.5),
        ([([0.5, 0.5], [False, False])], 0.0),
    ],
)
def test_the_share_of_held_out_events_with_a_propensity(shards, found):
    assert propensity_share(Shards(shards), "test") == found


def test_the_rewards_of_a_shard_are_double_precision(prepared):
    data = Prepared.open(prepared)
    events = data.load("train", 0)
    found = rewarded(data, "train", 0, LoggedReward())
    assert found.reward.dtype == np.float64
    targets = events.is_target
    np.testing.assert_allclose(found.reward, (events.label - events.dislike)[targets], rtol=1e-6)
    np.testing.assert_array_equal(found.users, events.user_index[targets])
    np.testing.assert_array_equal(found.items, events.item_index[targets])

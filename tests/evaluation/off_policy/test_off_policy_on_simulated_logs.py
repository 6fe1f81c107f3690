"""On a simulated log, estimates rank policies as their true values do; the naive average does not."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau

from recpo.base.contracts import RewardFunction
from recpo.base.types import Recommendations, Slates
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.measures import Observed
from recpo.evaluation.off_policy.estimators import AdditiveRewardModel, OffPolicyOptions, RewardedExposures
from recpo.evaluation.off_policy.measure import ExposureModel, OffPolicyMeasure, OffPolicySetting
from recpo.evaluation.true_rewards import true_rewards
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import simulate

K, DEPTH = 10, 100


class TrueReward(RewardFunction):
    """What the users truly think, and a coin: the reward that the simulator's values are means of."""

    def __init__(self, expected):
        self.expected = expected

    def __call__(self, batch, candidates):
        rng = np.random.default_rng(int(batch.context_ids[0]))
        mean = self.expected[batch.context_ids.numpy()[:, None], (candidates.item_ids - 1).clamp_min(0).numpy()]
        return torch.from_numpy(mean + 0.2 * rng.standard_normal(mean.shape))


class World:
    """A simulated log, what is true of it, and policies that are softmaxes over scores ``[users, items]``."""

    def __init__(self, root):
        simulate(root / "world", users=800, items=150, events=100_000, days=10)
        prepare(str(root / "world" / "log"), root / "prepared")
        self.data = Prepared.open(root / "prepared")
        truth = true_rewards(root / "world", self.data, "test", [K])
        everything = truth.user_ids, np.broadcast_to(truth.item_ids, (len(truth.user_ids), self.data.num_items))
        self.expected = truth.truth.expected_reward(*everything, truth.day)
        self.logging = truth.truth.propensity(*everything)
        self.counts = self.data.item_counts()
        self.exposures = ExposureModel.fit(self.data, "test")
        self.rows = np.zeros(len(self.expected))
        for batch in self.batches():
            self.rows[batch.user_ids.numpy()] += batch.feedback.slates.mask.sum(1).numpy()
        noise = np.random.default_rng(0).standard_normal(self.expected.shape)
        popularity = np.tile(np.log(self.counts + 1.0), (len(self.expected), 1))
        self.policies = {
            "almost the truth": self.expected / 0.15,
            "a good model": (self.expected + 0.3 * noise) / 0.15,
            "a poor model": (self.expected + 0.8 * noise) / 0.3,
            "sharper than the log": 2 * np.log(self.logging),
            "as logged": np.log(self.logging),
            "popularity": popularity,
            "random": np.zeros_like(self.expected),
            "contrary": -self.expected / 0.3,
        }

    def batches(self):
        return evaluation_batches(self.data.root, "test", 50, 256)

    def true_value(self, name, target="policy"):
        weight = self.rows / self.rows.sum()
        logp = torch.from_numpy(self.policies[name]).log_softmax(1)
        if target == "policy":
            return float(weight @ (logp.exp().numpy() * self.expected).sum(1))
        listed = logp.topk(K if target == f"top_{K}" else DEPTH, dim=1).indices.numpy()
        places = np.ones(K) if target == f"top_{K}" else 1 / (K + np.arange(DEPTH))
        return float(weight @ np.average(np.take_along_axis(self.expected, listed, 1), axis=1, weights=places))

    def evaluate(self, name, reward, model=None, setting=OffPolicySetting, **options):
        logp = torch.from_numpy(self.policies[name]).log_softmax(1)
        options = OffPolicyOptions(resamples=100, **options)
        measure = OffPolicyMeasure(
            setting(options, reward, self.data.num_items, [K], model, self.exposures),
            lambda histories, size: torch.multinomial(logp[users].exp(), size, replacement=True) + 1,
        )
        for batch in self.batches():
            users, items = batch.user_ids, batch.feedback.slates.item_ids
            scores, order = logp[users].topk(DEPTH)
            scored, deep = logp[users[:, None], (items - 1).clamp_min(0)], Recommendations(order + 1, scores)
            measure.update(Observed(batch, Recommendations(*(one[:, :K] for one in deep)), None, scored, deep=deep))
        return measure.result()

    def reward_model(self, reward):
        def training():
            for shard in range(self.data.num_shards("train")):
                events = self.data.load("train", shard)
                item = torch.from_numpy(events.item_index)[:, None]
                columns = (torch.from_numpy(c)[:, None] for c in (events.label, events.dislike))
                slates = Slates(item, item * 0, item > 0, *columns)
                yield RewardedExposures(events.user_index, events.item_index, reward(None, slates)[:, 0].numpy())

        return AdditiveRewardModel.fit(training, num_users=len(self.expected), num_items=self.data.num_items)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("off_policy"))


@pytest.fixture(scope="module")
def by_true_reward(world):
    """Estimates by kind of propensity and name of a policy, of deep lists too, with intervals of 99.9 %."""
    reward = TrueReward(world.expected)
    return cache(lambda kind, name: world.evaluate(name, reward, propensity=kind, level=0.999, depth=DEPTH))


@pytest.fixture(scope="module")
def by_logged_reward(world):
    reward = LoggedReward(dislike_cost=2.0)
    model = world.reward_model(reward)
    return {name: world.evaluate(name, reward, model=model) for name in world.policies}


@pytest.mark.parametrize("target", ["policy", f"top_{K}"])
@pytest.mark.parametrize("name", ["almost the truth", "as logged", "popularity", "contrary"])
def test_the_true_value_is_recovered(world, by_true_reward, name, target):
    result, value = by_true_reward("logged", name), world.true_value(name, target)
    for estimator in ("IPS", "SNIPS", "beta-IPS"):
        found = result.estimate(target, estimator)
        low, high = found.intervals["normal"]
        assert low <= value <= high, f"{estimator} {found.value}"
        if found.effective_sample_size > 100:
            assert not any("mean weight" in warning for warning in found.warnings)


def test_estimates_rank_policies_as_their_true_values_do(world, by_logged_reward):
    names = list(world.policies)
    for target in ("policy", f"top_{K}"):
        kept = [n for n in names if target == "policy" or n != "random"]
        truth = [world.true_value(name, target) for name in kept]
        for estimator in ("IPS", "SNIPS", "DR", "SNDR", "beta-IPS", "combined"):
            values = [by_logged_reward[name].estimate(target, estimator).value for name in kept]
            assert kendalltau(truth, values).statistic > 0.85, (target, estimator)


@pytest.mark.slow
def test_no_interval_of_a_difference_claims_the_wrong_order(world, by_logged_reward):
    claimed = 0
    for one, other in combinations(world.policies, 2):
        for difference in by_logged_reward[one].differences(by_logged_reward[other]):
            if difference.estimator in ("SNIPS", "SNDR", "beta-IPS", "combined") and difference.target == "policy":
                gain = world.true_value(one) - world.true_value(other)
                low, high = difference.intervals["normal"]
                if (low > 0 or high < 0) and abs(gain) > 0.05:
                    claimed += 1
                    assert (difference.value > 0) == (gain > 0), (one, other)
    assert claimed > 60, "of 112 differences"


def test_the_naive_average_is_confounded(world, by_logged_reward):
    """Items are logged where they are liked, so a list of popular items borrows the merit of who it was shown to.

    The log shows an item to users of its topic. The rows in which a popular item was shown are rows of users who like
    its topic, and their mean reward says nothing of what everybody else would think of it. The list of the logging
    policy's own favorites is truly far better, and looks worse, for its rows are those of every user.
    """
    popular, logged = world.true_value("popularity", f"top_{K}"), world.true_value("as logged", f"top_{K}")
    assert logged - popular > 0.1
    estimates = {
        estimator: [by_logged_reward[n].estimate(f"top_{K}", estimator).value for n in ("popularity", "as logged")]
        for estimator in ("naive average", "SNIPS", "SNDR")
    }
    assert estimates["naive average"][0] > estimates["naive average"][1], "the wrong order"
    assert estimates["SNIPS"][0] < estimates["SNIPS"][1] - 0.05
    assert estimates["SNDR"][0] < estimates["SNDR"][1] - 0.05
    # a policy that knows nothing looks as good as the log itself
    random = by_logged_reward["random"]
    mean = random.estimate("logging policy", "mean").value
    assert random.estimate("policy", "naive average").value == pytest.approx(mean)
    gain = {(d.target, d.estimator): d for d in random.over_logging_policy()}["policy", "SNIPS"]
    assert gain.intervals["normal"].high < -0.05


def test_random_exposures_say_the_same_with_fewer_rows(world, by_true_reward):
    logged, random = (by_true_reward(kind, "almost the truth") for kind in ("logged", "uniform"))
    logged, random = (one.estimate("policy", "SNIPS") for one in (logged, random))
    assert random.rows < 0.15 * logged.rows
    assert random.intervals["normal"].low <= world.true_value("almost the truth") <= random.intervals["normal"].high


def test_estimated_propensities_know_who_is_shown_what(world):
    users, items = (torch.from_numpy(one) for one in np.indices(world.logging.shape))
    estimated = world.exposures(users[:, 0], items + 1).numpy()
    np.testing.assert_allclose(estimated.sum(1), 1.0, rtol=1e-5)
    popularity = np.broadcast_to((world.counts + 0.5) / (world.counts + 0.5).sum(), estimated.shape)
    active = world.rows > 0

    def divergence(guess):
        return (world.logging * np.log(world.logging / guess)).sum(1)[active].mean()

    assert divergence(estimated) < 0.5 * divergence(popularity)
    assert np.corrcoef(np.log(estimated[active]).ravel(), np.log(world.logging[active]).ravel())[0, 1] > 0.8


def test_estimated_propensities_take_out_most_of_what_the_logging_policy_knows(world, by_true_reward):
    found, value = by_true_reward("estimated", "random"), world.true_value("random")
    naive, estimated = (found.estimate("policy", name).value for name in ("naive average", "SNIPS"))
    assert abs(estimated - value) < 0.4 * (naive - value)
    assert any("estimated" in warning for warning in found.estimate("policy", "SNIPS").warnings)


@pytest.mark.parametrize("propensity", ["logged", "estimated"])
def test_deep_lists_order_policies_with_less_variance(world, by_true_reward, propensity):
    """SNIPS of an item of a deep list: its exact value within the interval, and the order of the lists of K."""
    names, target = [name for name in world.policies if name != "random"], f"discounted_{K}"
    found = {name: by_true_reward(propensity, name) for name in names}
    estimates = [found[name].estimate(target, "SNIPS") for name in names]
    of_lists = [world.true_value(name, f"top_{K}") for name in names]
    assert kendalltau([one.value for one in estimates], of_lists).statistic >= (0.9 if propensity == "logged" else 0.75)
    for name, one in zip(names, estimates, strict=True):
        (low, high), short = one.intervals["normal"], found[name].estimate(f"top_{K}", "SNIPS").intervals["normal"]
        assert high - low < short.high - short.low
        if propensity == "logged":
            assert low <= world.true_value(name, target) <= high


def test_missing_support_shows_in_the_mean_weight(world):
    """The log without its random exposures, as if nobody had ever been shown a bad item, under honest propensities."""

    class Without(OffPolicySetting):
        def propensities(self, users, slates):
            found = super().propensities(users, slates)
            return torch.where(found > 2e-3, found, torch.nan)

    found = world.evaluate("contrary", TrueReward(world.expected), setting=Without).estimate("policy", "IPS")
    assert found.diagnostics.mean_weight < 0.6
    assert any("the log cannot show" in warning for warning in found.warnings)

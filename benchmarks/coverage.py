"""Do intervals from explored logs cover the truth? Simulated days with the propensities of `recpo.Exploration`.

    python benchmarks/coverage.py                                # 200 days each
    python benchmarks/coverage.py --quick                        # two days, few users

Users and their true rewards are those of `recpo simulate` (20,000 users, 500 items). On every day 1,000 of them come, 1
+ Poisson(2) times each, and are shown slates of 10 by a logging policy that knows their tastes with an error. A row of
the log is one item of a slate: whether it satisfied the user and whether it was disliked are drawn, and its propensity
is kept as float32, as in a log. `recpo evaluate`'s own measure then estimates two other policies from the day:
`policy`, a softmax that knows tastes with another error, and `top_10`, its list. Its reward model was fitted on a day
before.

Prints one JSON line per logging policy, target and estimator: the true value (exact, over all users), the mean error of
the estimates, their standard deviation over days, the mean half-width of the 95 % intervals, the share of days whose
interval covers the truth with its standard error, and that share of each 200 days. The last logging policy is the first
one again with the probability of each item given those above it, which is not what the estimators need.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np
import torch

from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.evaluation.measures import Observed
from recpo.evaluation.off_policy.estimators import AdditiveRewardModel, OffPolicyOptions, RewardedExposures
from recpo.evaluation.off_policy.measure import OffPolicyMeasure, OffPolicySetting
from recpo.lists.exploration import Exploration, Pool
from recpo.worlds.parameters import SimulationParameters
from recpo.worlds.preferences import Preferences

K, DRAWS = 10, 32
LOGGING = {
    "temperature 1": Exploration(temperature=1.0),
    "epsilon .2, else greedy": Exploration(temperature=0.0, epsilon=0.2),
    "temperature 2, epsilon .1": Exploration(temperature=2.0, epsilon=0.1),
    "temperature 1, given the items above": Exploration(temperature=1.0),
}
SHOWN = (("policy", "SNIPS"), ("policy", "DR"), (f"top_{K}", "SNIPS"), (f"top_{K}", "DR"))


@dataclass
class World:
    """Everything by user and item: ``[U, V]`` each."""

    satisfied: np.ndarray
    disliked: np.ndarray
    cost: float
    logging: np.ndarray
    target: np.ndarray

    @classmethod
    def draw(cls, users: int, items: int, seed: int) -> World:
        """A population, and what two policies believe of it."""
        preferences = Preferences.draw(SimulationParameters(users=users, items=items, events=users, seed=seed))
        generator = np.random.default_rng([seed, 1])
        satisfied = preferences.affinity_to_all(np.arange(users), 0.0)
        clickbait = preferences.items.clickbait

        def believed(error: float) -> np.ndarray:
            taste = preferences.users.taste + error * generator.standard_normal(preferences.users.taste.shape)
            logit = 4.0 * taste @ preferences.items.latent.T.astype(np.float64)
            return logit - np.log(np.exp(logit).sum(1, keepdims=True))

        disliked = preferences.dislike_probability(satisfied, clickbait)
        return cls(satisfied, disliked, preferences.parameters.dislike_cost, believed(0.15), believed(0.1))

    @property
    def reward(self) -> np.ndarray:
        """True expected reward."""
        return self.satisfied - self.cost * self.disliked


class Target:
    """The policy to estimate; without uniform slates only items of the shortlist have a propensity, so only those."""

    def __init__(self, world: World, exploration: Exploration) -> None:
        order = np.argsort(-world.logging, axis=1, kind="stable")
        self.shortlist = order[:, : exploration.shortlist]
        logits = world.target
        if not exploration.epsilon:
            logits = np.full_like(logits, -np.inf)
            np.put_along_axis(logits, self.shortlist, np.take_along_axis(world.target, self.shortlist, 1), 1)
        weights = np.exp(logits)
        self.probability = weights / weights.sum(1, keepdims=True)
        self.cumulative = np.cumsum(self.probability, 1)
        self.top = np.argsort(-logits, axis=1, kind="stable")[:, :K]
        values = {"policy": (self.probability * world.reward).sum(1)}
        values[f"top_{K}"] = np.take_along_axis(world.reward, self.top, 1).mean(1)
        self.value = {name: float(value.mean()) for name, value in values.items()}

    def sample(self, histories: Histories, size: int) -> torch.Tensor:
        """Items drawn with replacement, for the reward model's value of the policy."""
        user = histories.item_ids[:, 0].numpy()
        uniform = torch.rand(len(user), size, dtype=torch.float64).numpy()
        drawn = [np.searchsorted(self.cumulative[u], row) for u, row in zip(user, uniform, strict=True)]
        return torch.from_numpy(np.stack(drawn).clip(max=self.cumulative.shape[1] - 1) + 1)


def given_the_items_above(logp: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The probability of each drawn item among those that are left, ``[B, k]``."""
    weights = np.exp(logp)
    drawn = np.take_along_axis(weights, positions, 1)
    return drawn / (weights.sum(1, keepdims=True) - np.cumsum(drawn, 1) + drawn)


def day(world: World, target: Target, name: str, users: int, generator: np.random.Generator) -> Observed:
    """The exposures of a day, as the pass of `recpo evaluate` hands them to its measures."""
    user = generator.choice(len(world.logging), users)  # again and again: each an independent draw
    times = 1 + generator.poisson(2.0, users)
    of_request = np.repeat(np.arange(users), times)
    rows = user[of_request]
    shortlist = target.shortlist[rows]
    logp = np.take_along_axis(world.logging[rows], shortlist, 1)
    catalog = [Pool.of(world.logging.shape[1])] * len(rows)
    slates = LOGGING[name].sample_batch(shortlist + 1, logp, K, generator, catalog)
    propensity = slates.propensity
    if name.endswith("above"):
        propensity = given_the_items_above(logp, slates.positions)
    item = slates.items - 1
    reward = 1.0 * (generator.random(item.shape) < np.take_along_axis(world.satisfied[rows], item, 1))
    reward -= world.cost * (generator.random(item.shape) < np.take_along_axis(world.disliked[rows], item, 1))
    pi = np.take_along_axis(target.probability[rows], item, 1)
    place = (np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times))[:, None] * K + np.arange(K)

    def per_user(values: np.ndarray, dtype: type) -> torch.Tensor:
        table = np.zeros((users, times.max() * K), dtype)
        table[of_request[:, None], place] = values
        return torch.from_numpy(table)

    mask = per_user(np.ones_like(item, bool), bool)
    shown = Slates(
        per_user(slates.items, np.int64),
        torch.zeros(mask.shape, dtype=torch.long),
        mask,
        reward=per_user(reward, np.float64),
        logp_behavior=per_user(np.log(propensity.astype(np.float32)), np.float32),
    )
    who = torch.from_numpy(user)
    batch = FeedbackBatch(Histories(who[:, None], torch.ones_like(who)), shown, who)
    with np.errstate(divide="ignore"):
        logp_target = per_user(np.log(pi), np.float64)
    lists = torch.from_numpy(target.top[user] + 1)
    return Observed(
        EvaluationBatch(batch, who[:, None][:, :0], who[:, None][:, :0]),
        Recommendations(lists, lists.double()),
        None,
        logp_target,
    )


def reward_model(world: World, observed: Observed) -> AdditiveRewardModel:
    slates = observed.batch.feedback.slates
    users = observed.batch.user_ids[:, None].expand_as(slates.mask)[slates.mask].numpy()
    chunk = RewardedExposures(users, slates.item_ids[slates.mask].numpy(), slates.reward[slates.mask].numpy())
    sizes = {"num_users": len(world.logging), "num_items": world.logging.shape[1]}
    return AdditiveRewardModel.fit(lambda: [chunk], **sizes)


def measured(world: World, name: str, days: int, users: int, seed: int) -> list[dict]:
    """One line per target and estimator."""
    target = Target(world, LOGGING[name])
    generators = [np.random.default_rng([seed, 2, number]) for number in range(days + 1)]
    model = reward_model(world, day(world, target, name, users, generators[-1]))
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {key: [] for key in SHOWN}
    begin = time.perf_counter()
    for number in range(days):
        setting = OffPolicySetting(
            OffPolicyOptions(resamples=1, samples=DRAWS, seed=number),
            reward=lambda batch, slates: slates.reward,
            num_items=world.logging.shape[1],
            ks=[K],
            model=model,
        )
        measure = OffPolicyMeasure(setting, target.sample)
        measure.update(day(world, target, name, users, generators[number]))
        for estimate in measure.result().estimates:
            if (key := (estimate.target, estimate.estimator)) in found:
                interval = estimate.intervals["normal"]
                found[key].append((estimate.value, interval.low, interval.high))
    seconds = (time.perf_counter() - begin) / days
    lines = []
    for (policy, estimator), values in found.items():
        value, low, high = np.array(values).T
        truth = target.value[policy]
        covers = (low <= truth) & (truth <= high)
        covered = float(covers.mean())
        lines.append(
            {
                "benchmark": "coverage",
                "logging": name,
                "target": policy,
                "estimator": estimator,
                "days": days,
                "truth": round(truth, 5),
                "mean error": round(float((value - truth).mean()), 5),
                "deviation": round(float(value.std()), 5),
                "half width": round(float((high - low).mean() / 2), 5),
                "covered": covered,
                "covered se": round(float(np.sqrt(covered * (1 - covered) / days)), 4),
                "covered of each 200": [float(covers[i : i + 200].mean()) for i in range(0, days - days % 200, 200)],
                "seconds per day": round(seconds, 3),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two days, few users")
    parser.add_argument("--days", type=int, default=200)
    parser.add_argument("--users", type=int, default=1000, help="a day")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logging", choices=list(LOGGING), nargs="*", default=list(LOGGING))
    options = parser.parse_args()
    torch.set_num_threads(1)
    population, days, users = (500, 2, 40) if options.quick else (20_000, options.days, options.users)
    world = World.draw(population, 100 if options.quick else 500, options.seed)
    for name in options.logging:
        for line in measured(world, name, days, users, options.seed):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

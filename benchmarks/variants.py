"""May one look every hour, and how much traffic does a decision need? Two policies on simulated users.

    python benchmarks/variants.py                                # a few minutes on one core
    python benchmarks/variants.py --quick                        # seconds, to see that it runs

Users and their true rewards are those of `recpo simulate` (4,000 users, 500 items). Every hour, users drawn at random
get a list of 10 from a policy that knows their tastes with an error; they come again and again. An item counts if the
user looks at it (probability .85^rank), and then it satisfies or is disliked. Lists, assignment, values, intervals,
confidence sequences and the guard's bounds are recpo's own.

Prints JSON lines. `false alarms`: two variants of one policy, or a rate of dislikes at the guard's bound; the share
of experiments that an hourly look stops in two weeks. `traffic`: a better and a worse policy; impressions until 80 %
of the experiments are decided by the confidence sequence with hourly looks (`sequence_80`), and until a single look
of an ordinary test has 80 % power, effect / standard error > 1.96 + .84 (`single_look_80`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np

from recpo.evaluation.variants import FIRST_LOOK, ClusteredMean, EmpiricalBernstein, clustered_mean
from recpo.lists.interleaving import interleave
from recpo.server.variants import Variant, assigned
from recpo.worlds.parameters import SimulationParameters
from recpo.worlds.preferences import Preferences

K, HOURLY, DRAWS, LOOKED_AT = 10, 200, 5, 0.85
Z95, Z80 = 1.959964, 0.841621
HALVES = (Variant("A", Path("a"), 0.5), Variant("B", Path("b"), 0.5))


class World:
    """Users, and the lists of two policies: plain ``[U, 1, K]``, and interleaved ``[U, DRAWS, K]``."""

    def __init__(self, users: int, items: int, errors: tuple[float, float], seed: int) -> None:
        preferences = Preferences.draw(SimulationParameters(users=users, items=items, events=users, seed=seed))
        generator = np.random.default_rng([seed, 1])
        self.users, self.cost = users, preferences.parameters.dislike_cost
        self.satisfied = preferences.affinity_to_all(np.arange(users), 0.0)
        self.disliked = preferences.dislike_probability(self.satisfied, preferences.items.clickbait)
        lists = []
        for error in errors:
            taste = preferences.users.taste + error * generator.standard_normal(preferences.users.taste.shape)
            lists.append(np.argsort(-(taste @ preferences.items.latent.T.astype(np.float64)), 1, kind="stable")[:, :K])
        self.plain = [one[:, None] for one in lists]
        self.mixed, self.credit = {}, {}
        for method in ("team_draft", "probabilistic"):
            found = [
                [interleave(method, a.tolist(), b.tolist(), K, generator) for _ in range(DRAWS)]
                for a, b in zip(*lists, strict=True)
            ]
            self.mixed[method] = np.array([[one.items for one in row] for row in found])
            self.credit[method] = np.array([[one.credit for one in row] for row in found])

    def outcomes(self, items: np.ndarray, user: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Values and dislikes ``[n, K]`` of the lists ``[n, K]`` of users ``[n]``."""
        looked = generator.random(items.shape) < LOOKED_AT ** np.arange(K)
        disliked = looked & (generator.random(items.shape) < self.disliked[user[:, None], items])
        satisfied = looked & ~disliked & (generator.random(items.shape) < self.satisfied[user[:, None], items])
        return satisfied - self.cost * disliked, disliked

    def true_values(self) -> list[float]:
        """Expected value of a list of each policy, over users."""
        looks = LOOKED_AT ** np.arange(K)
        found = []
        for lists in self.plain:
            rows = np.arange(self.users)[:, None]
            p, bad = self.satisfied[rows, lists[:, 0]], self.disliked[rows, lists[:, 0]]
            found.append(float((looks * (p * (1 - bad) - self.cost * bad)).sum(1).mean()))
        return found


class Totals:
    """Sums per user that grow by the hour."""

    def __init__(self, users: int) -> None:
        self.sums, self.counts = np.zeros(users), np.zeros(users)

    def add(self, user: np.ndarray, values: np.ndarray) -> None:
        """Adds one value per impression."""
        self.sums += np.bincount(user, values, len(self.sums))
        self.counts += np.bincount(user, minlength=len(self.counts))

    def mean(self) -> ClusteredMean:
        """The mean per impression so far."""
        return clustered_mean(self.sums, self.counts)


def assignment(users: int, experiment: int) -> np.ndarray:
    """Whether each user has the second variant."""
    return np.array([assigned(user, str(experiment), HALVES) == "B" for user in range(users)])


def ab_hours(world: World, lists: list[np.ndarray], experiment: int, hours: int):
    """After each hour: the difference of the second variant, and its dislikes of the hour."""
    generator, of_b = np.random.default_rng([experiment, 2]), assignment(world.users, experiment)
    totals = Totals(world.users), Totals(world.users)
    for _ in range(hours):
        user = generator.integers(0, world.users, HOURLY)
        b = of_b[user]
        items = np.where(b[:, None], lists[1][user, 0], lists[0][user, 0])
        values, disliked = world.outcomes(items, user, generator)
        for total, own in zip(totals, (~b, b), strict=True):
            total.add(user[own], values[own].sum(1))
        yield totals[1].mean() - totals[0].mean(), disliked[b].any(1).astype(float)


def mixed_hours(world: World, method: str, experiment: int, hours: int):
    """After each hour: the mean credit of the second policy in interleaved lists."""
    generator, total = np.random.default_rng([experiment, 3]), Totals(world.users)
    for _ in range(hours):
        user, draw = generator.integers(0, world.users, HOURLY), generator.integers(0, DRAWS, HOURLY)
        values, _ = world.outcomes(world.mixed[method][user, draw], user, generator)
        total.add(user, (values * world.credit[method][user, draw]).sum(1))
        yield total.mean()


def false_alarms(world: World, repetitions: int, hours: int) -> dict[str, object]:
    """Shares of experiments without an effect in which any hourly look sees one."""
    same, everybody = [world.plain[0], world.plain[0]], np.repeat(np.arange(world.users), 200)
    generator = np.random.default_rng(7)
    rate = float(world.outcomes(same[0][everybody, 0], everybody, generator)[1].any(1).mean())
    names = ("ordinary_at_the_end", "ordinary", "sequence", "dislikes_ordinary", "dislikes_sequence")
    alarms = dict.fromkeys(names, 0)
    for repetition in range(repetitions):
        seen, bounds, bad, count = set(), EmpiricalBernstein(), 0.0, 0
        for found, disliked in ab_hours(world, same, repetition, hours):
            bounds.update(disliked)
            bad, count = bad + disliked.sum(), count + len(disliked)
            share = bad / count
            signs = {
                "ordinary": found.users >= FIRST_LOOK and abs(found.mean) > found.half_width,
                "sequence": abs(found.mean) > found.sequence_half_width(),
                "dislikes_ordinary": share - rate > 1.96 * math.sqrt(share * (1 - share) / count),
                "dislikes_sequence": bounds.low > rate,
            }
            seen |= {name for name, sign in signs.items() if sign}
        seen |= {"ordinary_at_the_end"} if abs(found.mean) > found.half_width else set()
        for name in seen:
            alarms[name] += 1
    shares = {name: round(number / repetitions, 4) for name, number in alarms.items()}
    return {"what": "false alarms", "repetitions": repetitions, "looks": hours, "rate": round(rate, 4), **shares}


def traffic(world: World, method: str, repetitions: int, hours: int) -> dict[str, object]:
    """How many impressions a method needs to see which of two policies is better."""
    first, second = world.true_values()
    means, errors = np.zeros((repetitions, hours)), np.zeros((repetitions, hours))
    halves = np.full((repetitions, hours), np.inf)
    for repetition in range(repetitions):
        if method == "A/B":
            hourly = (found for found, _ in ab_hours(world, world.plain, repetition, hours))
        else:
            hourly = mixed_hours(world, method, repetition, hours)
        for hour, found in enumerate(hourly):
            means[repetition, hour], errors[repetition, hour] = found.mean, found.error
            halves[repetition, hour] = found.sequence_half_width()
    decided = np.abs(means) > halves
    stop = np.where(decided.any(1), decided.argmax(1), hours)
    ends = means[np.arange(repetitions), np.minimum(stop, hours - 1)]
    right = (ends * (second - first) > 0)[stop < hours]
    at_80 = float(np.quantile(stop, 0.8, method="higher"))
    effect = abs(means[:, -1].mean())
    powered = effect / np.nanmean(errors, 0) > Z95 + Z80
    return {
        "what": "traffic",
        "method": method,
        "gap": round(second - first, 4),
        "effect": round(float(means[:, -1].mean()), 4),
        "repetitions": repetitions,
        "decided": round(float((stop < hours).mean()), 4),
        "right": round(float(right.mean()), 4) if len(right) else None,
        "sequence_80": int((at_80 + 1) * HOURLY) if at_80 < hours else None,
        "single_look_80": int((powered.argmax() + 1) * HOURLY) if powered.any() else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=500, help="of experiments without an effect")
    parser.add_argument("--decisions", type=int, default=200, help="experiments with an effect, for each method")
    parser.add_argument(
        "--errors", type=float, nargs=2, default=[0.35, 0.3], help="of the policies' knowledge of tastes"
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    users, hours = (200, 48) if options.quick else (4000, 672)
    repetitions, decisions = (4, 4) if options.quick else (options.repetitions, options.decisions)
    world = World(users, 500, tuple(options.errors), 0)
    print(json.dumps(false_alarms(world, repetitions, hours // 2)), flush=True)
    for method in ("A/B", "team_draft", "probabilistic"):
        print(json.dumps(traffic(world, method, decisions, hours)), flush=True)
    print(json.dumps({"what": "minutes", "minutes": round((time.monotonic() - begun) / 60, 1)}))


if __name__ == "__main__":
    main()

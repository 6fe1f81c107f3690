"""Which contender should ship: a criterion of value on held-out users, and the rule that decides by it.

A trained policy ships only if it beats the strongest baseline beyond doubt: by a paired difference on the same users,
corrected for the number of policies that were compared. Otherwise the baseline ships. The criterion has the power to
tell two contenders apart; estimated reward says which baseline is the strongest, and which of several policies ships,
and it is the second test, where the criterion cannot tell.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from recpo.base.errors import RecpoError
from recpo.evaluation import Z95
from recpo.evaluation.estimates import LEVEL, Estimate, adjusted_p_values, estimate, or_least
from recpo.evaluation.held_out_pass import Evaluated
from recpo.evaluation.off_policy.results import DISCOUNTED, snips_of

#: The criterion of a log with exposures that were not liked.
CRITERION: Final = "AUC_mixed"
#: The criteria, and what they measure, as the end of a sentence.
CRITERIA: Final = {
    CRITERION: "how far positives rank above the same user's other exposures (weight .6) and above items that the "
    "user was never shown (.4)",
    "NDCG": "how high the lists have what users chose: too few users have both a positive and another exposure",
}
#: What is tested where the criterion cannot tell: see ``reward_of``.
REWARD: Final = "estimated reward"
_LEAST_USERS: Final = 30
#: A mean above so many half-widths is above 0 by a one-sided test at 5 %.
_BEYOND_DOUBT: Final = 1.6448536269514722 / Z95


def criterion_of(measured: Sequence[Evaluated], k: int) -> str:
    """The per-user metric that stands for value.

    ``AUC_mixed``, if enough users have it for every contender: it needs exposures that were not liked. A log of
    positives alone has ``NDCG@k``. ``AUC_unseen`` has more power there, but it weighs all ranks alike, and users see
    only the first: it ships policies whose lists are worse (docs/fit.md#positives-alone).
    """
    results = [one.result for one in measured]
    known = all(CRITERION in one.per_user and one.estimate(CRITERION).n >= _LEAST_USERS for one in results)
    return CRITERION if known else f"NDCG@{k}"


class Standing(NamedTuple):
    """A row of the leaderboard.

    Attributes:
        name: the contender.
        is_baseline: whether a team has it without recpo.
        value: mean of the criterion.
        half_width: half-width of its 95 % interval over users.
        behind: mean paired difference of the leader to it, on the same users.
        behind_half_width: half-width of the interval of that difference.
        lost: whether the leader is better beyond doubt.
        reward: estimated mean reward of the lists (``reward_of``); nan = unknown.
        reward_half_width: half-width of its 95 % interval.
    """

    name: str
    is_baseline: bool
    value: float
    half_width: float
    behind: float
    behind_half_width: float
    lost: bool
    reward: float
    reward_half_width: float


class Choice(NamedTuple):
    """What ships.

    Attributes:
        name: the contender that ships.
        strongest_baseline: the baseline with the highest estimated reward, or, if none is known, the best value.
        policy: the policy that may ship (``choose``); None = there is none.
        measure: by which it passed its test, the criterion or ``REWARD``; the criterion if it did not.
        gain: paired difference of that policy to the strongest baseline; of an AUC, weighted by precision. None = there
            is no policy.
        p_value: one-sided, corrected for the number of policies; None = there is no policy.
        reason: the sentence for people.
        standings: all contenders, best first.
    """

    name: str
    strongest_baseline: str
    policy: str | None
    measure: str
    gain: Estimate | None
    p_value: float | None
    reason: str
    standings: tuple[Standing, ...]

    @property
    def tested(self) -> list[str]:
        """What the test period is evaluated for: the baselines, the policies that have not lost, and what ships.

        What ships may have lost: a better policy, of which it is less sure, does not ship.
        """
        return [row.name for row in self.standings if row.is_baseline or not row.lost or row.name == self.name]

    @property
    def advice(self) -> list[str]:
        """What to do if the period cannot tell the best policy from the strongest baseline; empty if it can.

        A policy that is surely better and does not ship has a lower estimated reward, where NDCG decides (``choose``).

        A difference d of which n users know the half-width w would be as large as its half-width with about
        ``n (w / d)^2`` users.
        """
        gain = self.gain
        if gain is None or self.name != self.strongest_baseline or not gain.mean + gain.half_width > 0:
            return []
        if self.p_value is not None and self.p_value <= LEVEL:
            return [
                f"{self.policy} has lists that are surely more like what users chose than those of "
                f"{self.strongest_baseline}, whose estimated reward is higher: test both online."
            ]
        needed = math.ceil(gain.n * (gain.half_width / gain.mean) ** 2) if gain.mean > 0 else 0
        enough = f" It takes about {needed:,} such users to see a difference of this size." if needed > gain.n else ""
        differs = f"{gain.mean:+.4f}".replace("-", "\u2212")
        return [
            f"The validation period cannot tell {self.policy} from {self.strongest_baseline}: for its {gain.n:,} users "
            f"they differ by {differs} ± {gain.half_width:.4f} (p = {self.p_value:.2f}, corrected for the number of "
            f"policies).{enough} Choose a longer validation period (split of recpo prepare), or test both online."
        ]


def leaderboard(measured: Sequence[Evaluated], criterion: str, k: int) -> tuple[Standing, ...]:
    """The contenders, best first; those without a value last."""
    values = {one.name: one.result.estimate(criterion) for one in measured}
    ranked = sorted(measured, key=lambda one: -or_least(values[one.name].mean))
    leader, rows = ranked[0], []
    for one in ranked:
        behind = leader.result.difference(one.result, criterion)
        lost = behind.mean > _BEYOND_DOUBT * behind.half_width
        own, apart = values[one.name], (behind.mean, behind.half_width, lost)
        rows.append(Standing(one.name, one.kind == "baseline", own.mean, own.half_width, *apart, *reward_of(one, k)))
    return tuple(rows)


class _Test(NamedTuple):
    """Policies against the strongest baseline by one measure.

    Attributes:
        measure: the criterion or ``REWARD``.
        over: of whom the differences are means, in words.
        gains: mean paired difference of each policy.
        p_values: one-sided, corrected for the number of policies.
    """

    measure: str
    over: str
    gains: Sequence[Estimate]
    p_values: Sequence[float]

    def said(self, place: int) -> str:
        """The difference of one of the policies in words."""
        gain, number = self.gains[place], len(self.gains)
        known = f"{gain.mean:+.4f} ± {gain.half_width:.4f} {self.measure} over {gain.n:,} {self.over}"
        corrected = "" if number == 1 else f", corrected for the choice among {number} policies"
        return f"{known} (p = {self.p_values[place]:.2g}{corrected})".replace("-", "\u2212")


def choose(measured: Sequence[Evaluated], criterion: str, k: int) -> Choice:
    """The contender that ships: a policy that beats the strongest baseline beyond doubt, or else that baseline.

    "Beyond doubt": the one-sided p-value of the paired difference, corrected for the number of policies
    (``adjusted_p_values``), is at most 5 %. There are two tests, so at most one of ten decisions is an accident:

    1. The criterion. Users weigh by the precision of their AUC (``auc_precision``): a user with one pair of items says
       much less than one with fifty.
    2. Where no policy passes, and rewards are known: estimated reward (``reward_of``), for policies that are not below
       the baseline by the criterion beyond doubt. An AUC weighs all ranks alike, so it may not tell who knows the best
       items from who knows all the others as well.

    ``AUC_mixed`` has the power to tell a policy from a baseline, but it also rewards what was likely to be shown. So
    the strongest baseline is the one with the highest estimated reward, and of the policies that pass, the one with the
    highest estimated reward ships: it is noisier, and it estimates what people gain. Where no reward is known, both are
    the best ones by the criterion. A policy that some baseline beats by the criterion beyond doubt, and the strongest
    one by estimated reward, does not ship: neither measure speaks for it. One that some baseline beats by the criterion
    ships only if all that pass are so: where people are shown some of the items only, nothing is known of the rewards
    of the others, and lists of these may have any. ``NDCG@k`` with known rewards, where hardly a user has both a
    positive and another exposure, rewards the imitation of the log, and lists that people like less may have more of
    it: a policy must also have an estimated reward that is not below that of the baseline.

    Args:
        measured: the contenders on the same users.
        criterion: of ``criterion_of``.
        k: length of the lists.

    Raises:
        RecpoError: there is no baseline.
    """
    standings, by_name = leaderboard(measured, criterion, k), {one.name: one for one in measured}
    baselines = [row for row in standings if row.is_baseline]
    policies = [row for row in standings if not row.is_baseline and math.isfinite(row.value)]
    if not baselines:
        raise RecpoError("a decision needs a baseline to compare with", code="empty", field="contenders")
    by_reward = any(math.isfinite(row.reward) for row in standings)

    def worth(row: Standing) -> float:
        return or_least(row.reward if by_reward else row.value)

    best = max(baselines, key=worth)
    if not policies:
        reason = f"no policy was trained, so the strongest baseline, {best.name}, ships"
        return Choice(best.name, best.name, None, criterion, None, None, reason, standings)
    tests = _tests([by_name[row.name] for row in policies], by_name[best.name], criterion, k)
    behind = _gains([by_name[row.name] for row in policies], by_name[baselines[0].name], criterion)
    lost = [criterion == CRITERION and _is_lost(gain) for gain in behind]
    needs_reward = [by_reward and (criterion != CRITERION or one) for one in lost]
    allowed = [place for place, row in enumerate(policies) if not needs_reward[place] or worth(row) >= worth(best)]
    passed = [[place for place in allowed if test.p_values[place] <= LEVEL] for test in tests]
    test, sure = next((both for both in zip(tests, passed, strict=True) if both[1]), (tests[0], []))
    compared = [place for place in sure if not lost[place]] or sure
    place = max(compared or [0], key=lambda one: worth(policies[one]))
    policy, gain, p_value = policies[place], test.gains[place], test.p_values[place]
    by = "" if best is baselines[0] else " by estimated reward"
    baseline, known = f"{best.name}, the strongest baseline{by},", test.said(place)
    if sure:
        unless = "" if test is tests[0] else f", where {criterion} cannot tell"
        why = _first_of(len(compared), len(sure), criterion) if by_reward and math.isfinite(policy.reward) else ""
        reason = f"{policy.name} beats {baseline} by {known}{unless}{why}"
    else:
        beyond = "beyond doubt" if place in allowed or p_value > LEVEL else "without a lower estimated reward"
        reason = f"no policy beats {baseline} {beyond}, so it ships: {policy.name}, the best policy, differs by {known}"
    ships = policy.name if sure else best.name
    return Choice(ships, best.name, policy.name, test.measure, gain, p_value, reason, standings)


def _first_of(compared: int, passed: int, criterion: str) -> str:
    """Why one of several policies that pass ships: ``compared`` of ``passed``, those that no baseline beats, or all."""
    unbeaten = f"that no baseline beats by {criterion}"
    if compared == 1:
        return f"; of the {passed} policies that do, it is the only one {unbeaten}" if passed > 1 else ""
    also = f", and {unbeaten}" if compared < passed else ""
    return f"; of the {compared} policies that do{also}, it has the highest estimated reward"


def _gains(policies: Sequence[Evaluated], baseline: Evaluated, criterion: str) -> list[Estimate]:
    """Mean paired differences of policies to a baseline; of an AUC, weighted by precision."""
    weights = baseline.result.precision.get(criterion)
    return [estimate(one.result.differences(baseline.result, criterion), weights) for one in policies]


def _is_lost(gain: Estimate) -> bool:
    """Whether a difference is below 0 beyond doubt."""
    return gain.mean < -_BEYOND_DOUBT * gain.half_width


def _tests(policies: Sequence[Evaluated], baseline: Evaluated, criterion: str, k: int) -> list[_Test]:
    """The tests of ``choose``, in their order."""
    by_user = [(criterion, [one.result.differences(baseline.result, criterion) for one in policies])]
    weights = {criterion: baseline.result.precision.get(criterion)}
    values = [one.value for one in policies if one.value is not None]
    if baseline.value is not None and len(values) == len(policies):
        target = DISCOUNTED.format(k=k)
        by_user.append((REWARD, [torch.from_numpy(one.gains(baseline.value, target)) for one in values]))
    found = list[_Test]()
    for measure, columns in by_user:
        joined, of_users = torch.stack([*columns], 1), weights.get(measure)
        p_values = adjusted_p_values(joined, of_users)
        gains = [estimate(column, of_users) for column in columns]
        if found:  # what is surely below by the criterion does not pass
            p_values = [1.0 if _is_lost(gain) else one for gain, one in zip(found[0].gains, p_values, strict=True)]
        over = "users" if of_users is None else "users, weighted by precision"
        found.append(_Test(measure, over, gains, p_values))
    return found


def reward_of(one: Evaluated, k: int) -> tuple[float, float]:
    """The estimated mean reward of a contender's lists, and the half-width of its 95 % interval; nan = unknown.

    SNIPS of an item that is drawn from the first places of a deep list with probability proportional to
    ``1 / (k + place)``, with logged or estimated propensities (``recpo.evaluation.off_policy``). Judged by the true
    values of simulated worlds, it orders contenders better than ``AUC_mixed``, and on ratings of people about as well
    (docs/fit.md#estimated-reward).

    Args:
        one: the contender.
        k: length of the lists.
    """
    return snips_of(one.value, DISCOUNTED.format(k=k))

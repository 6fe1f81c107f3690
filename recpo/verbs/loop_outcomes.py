"""What the policies of a loop were expected to earn, beside what they then earned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from recpo.verbs.loop_rounds import Round


class Outcome(NamedTuple):
    """Expected and actual earnings of a policy, both by the labels of the round that made the estimate.

    Attributes:
        number: number of the round whose policy it is.
        value: the estimate before the day; None = not known.
        low: lower end of its 95 % interval.
        high: upper end.
        earned: mean logged reward of the day that the policy then served. Labels are quantiles of the train period,
            which grows by a day per round; the shift that this causes on the previous day is subtracted.
    """

    number: int
    value: float | None
    low: float | None
    high: float | None
    earned: float | None


def outcomes_of(rounds: Sequence[Round]) -> list[Outcome]:
    """One per policy that served, from the estimate of its own round and the day of the next one."""
    found = []
    for before, after in pairwise(rounds):
        known = None not in (before.earned, after.earned, after.earned_before)
        moved = (after.earned_before or 0.0) - (before.earned or 0.0)
        earned = (after.earned or 0.0) - moved if known else None
        ends = before.estimate
        if ends is None:
            found.append(Outcome(before.number, None, None, None, earned))
        else:
            found.append(Outcome(before.number, ends.value, ends.low, ends.high, earned))
    return found

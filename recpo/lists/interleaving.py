"""Interleaving: one list from two rankings, so that every user compares both, and who is credited for each item.

Differences between users cancel within a list; whether that saves traffic depends on how large they are
(docs/experiments.md). Both methods keep the order of each ranking as far as possible and treat the two alike: identical
rankings, and outcomes that do not depend on the ranking, have an expected credit of 0.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpo.base.errors import RecpoError, validate_range

FloatArray = NDArray[np.float64]
Interleaving = Literal["team_draft", "probabilistic"]
#: Exponent of the ranks in probabilistic interleaving, as in the paper.
TAU: Final = 3.0


class Interleaved(NamedTuple):
    """One list of items from two rankings.

    Attributes:
        items: n distinct items, in the order in which they are shown.
        team: ``[n]`` the ranking that contributed each item, 0 = first, 1 = second.
        credit: ``[n]`` in [-1, 1]: what a success of the item says for the second ranking: the probability, given the
            list, that the second ranking contributed it, minus that of the first.
        propensity: ``[n]`` probability of each item at a uniformly drawn place of the list; None = not known.
    """

    items: list[Any]
    team: NDArray[np.int64]
    credit: FloatArray
    propensity: FloatArray | None


def interleave(
    method: Interleaving, first: Sequence[Any], second: Sequence[Any], k: int, generator: np.random.Generator
) -> Interleaved:
    """One list of at most ``k`` items by the named method."""
    return (team_draft if method == "team_draft" else probabilistic)(first, second, k, generator)


def team_draft(first: Sequence[Any], second: Sequence[Any], k: int, generator: np.random.Generator) -> Interleaved:
    """Team draft interleaving (Radlinski, Kurup and Joachims, CIKM 2008).

    In every round a fair coin decides which ranking picks first; each then picks its best item that is not in the list.
    The credit of an item is that of its team, -1 or 1. The propensities are exact, see ``team_draft_inclusion``.

    Args:
        first: items of the first ranking, best first, distinct.
        second: items of the second ranking.
        k: length of the list; shorter if the rankings have fewer items.
        generator: source of the coins.

    Raises:
        RecpoError: a ranking lists an item twice, or ``k`` is not positive.
    """
    rankings = _validated(first, second, k)
    items: list[Any] = []
    teams: list[int] = []
    while len(items) < k:
        order = (0, 1) if generator.random() < 0.5 else (1, 0)
        before = len(items)
        for team in order:
            pick = next((item for item in rankings[team] if item not in items), None)
            if pick is not None and len(items) < k:
                items.append(pick)
                teams.append(team)
        if len(items) == before:
            break
    known = team_draft_inclusion(first, second, k)
    drafted = np.array(teams, np.int64)
    propensity = np.array([known[item] for item in items]) / max(1, len(items))
    return Interleaved(items, drafted, np.where(drafted, 1.0, -1.0), propensity)


def team_draft_inclusion(first: Sequence[Any], second: Sequence[Any], k: int) -> dict[Any, float]:
    """Exact probability that each item is in the list of ``team_draft``; the sum is the length of the list.

    After a round the list consists of the beginnings of both rankings, whatever the coins were. So the state of the
    draft is a set of which there are at most k per round, and summing over the coins takes polynomial time.
    """
    rankings = _validated(first, second, k)
    states: dict[frozenset[Any], float] = {frozenset(): 1.0}
    done: dict[frozenset[Any], float] = {}
    while states:
        following: dict[frozenset[Any], float] = {}
        for chosen, probability in states.items():
            for order in ((0, 1), (1, 0)):
                picked = chosen
                for team in order:
                    pick = next((item for item in rankings[team] if item not in picked), None)
                    if pick is not None and len(picked) < k:
                        picked = picked | {pick}
                into = done if len(picked) >= k or picked == chosen else following
                into[picked] = into.get(picked, 0.0) + probability / 2
        states = following
    found: dict[Any, float] = {}
    for chosen, probability in done.items():
        for item in chosen:
            found[item] = found.get(item, 0.0) + probability
    return found


def probabilistic(
    first: Sequence[Any], second: Sequence[Any], k: int, generator: np.random.Generator, tau: float = TAU
) -> Interleaved:
    """Probabilistic interleaving (Hofmann, Whiteson and de Rijke, CIKM 2011).

    At every place a fair coin chooses a ranking, which draws an item that is not in the list with probability
    proportional to ``rank^-tau``. So every order is possible. The credit sums over all coins that could have made
    the list:

        credit_j = (P_2(j | before j) - P_1(j | before j)) / (P_2(j | before j) + P_1(j | before j))

    Given the list, the coins of different places are independent, so the ``2^n`` assignments factorize. A ranking whose
    items are all in the list before j leaves the place to the other one. The probability that an item is in the list
    has no closed form: the propensity is None.

    Args:
        first: items of the first ranking, best first, distinct.
        second: items of the second ranking.
        k: length of the list; shorter if the rankings have fewer items.
        generator: source of the coins and draws.
        tau: exponent of the ranks; a large one keeps the order of the rankings.

    Raises:
        RecpoError: a ranking lists an item twice, ``k`` is not positive, or ``tau`` is negative.
    """
    rankings, left = _validated(first, second, k), _Left(first, second, tau)
    items: list[Any] = []
    teams: list[int] = []
    credit: list[float] = []
    while len(items) < k and left.items:
        team = int(generator.random() < 0.5)
        team = team if left.has(team) else 1 - team
        item = rankings[team][left.draw(team, generator.random())]
        items.append(item)
        teams.append(team)
        credit.append(left.take(item))
    return Interleaved(items, np.array(teams, np.int64), np.array(credit, np.float64), None)


class _Left:
    """The weights of both rankings for the items that are not in the list yet."""

    def __init__(self, first: Sequence[Any], second: Sequence[Any], tau: float) -> None:
        validate_range(0 <= tau < np.inf, "tau", "must be a number of at least 0", tau)
        self._weights = [np.arange(1, len(one) + 1, dtype=np.float64) ** -tau for one in (first, second)]
        self._places = [{item: place for place, item in enumerate(one)} for one in (first, second)]
        self.items = {*first, *second}

    def has(self, team: int) -> bool:
        return bool(self._weights[team].any())

    def draw(self, team: int, uniform: float) -> int:
        """The place in its ranking of an item of a team."""
        cumulative = self._weights[team].cumsum()
        below = np.nextafter(cumulative[-1], 0.0)  # the product may be rounded up to the sum
        return int(np.searchsorted(cumulative, min(uniform * cumulative[-1], below), side="right"))

    def take(self, item: Any) -> float:
        """The credit of an item, which is not left afterwards."""
        chances = [0.0, 0.0]
        for team, (weights, places) in enumerate(zip(self._weights, self._places, strict=True)):
            if (place := places.get(item)) is not None:
                chances[team] = float(weights[place] / weights.sum())
                weights[place] = 0.0
        self.items.remove(item)
        return (chances[1] - chances[0]) / (chances[1] + chances[0])


def _validated(first: Sequence[Any], second: Sequence[Any], k: int) -> tuple[Sequence[Any], Sequence[Any]]:
    for name, ranking in (("first", first), ("second", second)):
        if len(set(ranking)) < len(ranking):
            raise RecpoError(f"interleaving: the {name} ranking lists an item twice", code="duplicate", field=name)
    validate_range(k >= 1, "k", "must be at least 1", k)
    return first, second

"""True values of the requests of a day: of the shown items, the logging policy, and the best remaining items."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recpo.worlds.preferences import FloatArray, IntArray
from recpo.worlds.truth import Truth

_CELLS_PER_CHUNK = 1 << 20  # size of a requests x items matrix: 8 MiB each


class RequestValues(NamedTuple):
    """True values per request ``[R]``, means over the places of its slate; nan if the slate is empty.

    Attributes:
        value: true expected reward of the items shown.
        dislikes: true dislike probability of the items shown.
        logging_value: expected reward of the logging policy for the user.
        logging_dislikes: dislike probability of the logging policy for the user.
        oracle_value: true reward of the best available items of the same number, without those of
            the user's past that were excluded.
    """

    value: FloatArray
    dislikes: FloatArray
    logging_value: FloatArray
    logging_dislikes: FloatArray
    oracle_value: FloatArray


class Slates(NamedTuple):
    """Slates of some requests.

    Attributes:
        item_rows: ``[R, k]`` rows of the catalog; -1 pads on the right.
        lengths: ``[R]`` items in each slate.
    """

    item_rows: IntArray
    lengths: IntArray


def request_values(
    truth: Truth, day: float, user_rows: IntArray, slates: Slates, excluded: tuple[IntArray, IntArray]
) -> tuple[RequestValues, FloatArray]:
    """True values of slates that were shown on ``day``.

    Args:
        truth: truth of the simulation.
        day: the day that determines tastes.
        user_rows: ``[R]`` users of the requests.
        slates: the slates shown, without excluded items.
        excluded: requests ``[P]``, and rows ``[P]`` of items that must not be shown in them.

    Returns:
        The values, and the log of the probability ``[V]`` that the logging policy, with as many independent exposures
        for the same users, would not have shown the item.
    """
    preferences, policy, absent = truth.preferences, truth.policy_on(day), ~truth.available(day)
    clickbait = preferences.items.clickbait
    order = np.argsort(excluded[0], kind="stable")
    owner, barred = excluded[0][order], excluded[1][order]
    values, not_shown = RequestValues(*np.full((5, len(user_rows)), np.nan)), np.zeros(len(clickbait))
    step = max(1, _CELLS_PER_CHUNK // len(clickbait))
    for begin in range(0, len(user_rows), step):
        part = slice(begin, min(begin + step, len(user_rows)))
        users, shown, length = user_rows[part], slates.item_rows[part], slates.lengths[part]
        affinity = preferences.affinity_to_all(users, day)
        reward, dislike = preferences.reward(affinity, clickbait), preferences.dislike_probability(affinity, clickbait)
        probability = policy.propensity_of_all(users)
        filled = shown >= 0
        places = np.where(length > 0, length, np.nan)
        values.value[part] = (np.take_along_axis(reward, shown, 1) * filled).sum(1) / places
        values.dislikes[part] = (np.take_along_axis(dislike, shown, 1) * filled).sum(1) / places
        values.logging_value[part] = np.einsum("rv,rv->r", probability, reward)
        values.logging_dislikes[part] = np.einsum("rv,rv->r", probability, dislike)
        of_part = slice(*np.searchsorted(owner, [part.start, part.stop]))
        reward[owner[of_part] - begin, barred[of_part]] = -np.inf
        reward[:, absent] = -np.inf
        values.oracle_value[part] = _best(reward, length)
        with np.errstate(divide="ignore"):
            not_shown += length @ np.log1p(-probability)
    return values, not_shown


def _best(reward: FloatArray, length: IntArray) -> FloatArray:
    """Mean ``[R]`` of the ``length [R]`` largest numbers of each row; nan if length is 0."""
    longest = int(length.max(initial=0))
    if not longest:
        return np.full(len(reward), np.nan)
    top = -np.sort(np.partition(-reward, longest - 1, axis=1)[:, :longest], axis=1)
    kept = np.arange(longest) < length[:, None]
    total = np.where(kept, top, 0.0).sum(1)
    return total / np.where(length > 0, length, np.nan)

"""What lives in a world: parameters of births, fading and side information, and when each item is born.

The catalog grows by a constant share a day and has ``items`` items when it stops growing, on day D - 1 where D is
``birth_days``, or the days of the log. So day d has ``n(d) = items (1 + births)^(d - D + 1)`` items, and the j-th
oldest is born on the first day, maybe long before the log, on which ``n(d) >= j``. Items are born at 00:00 UTC; which
of them are old is drawn at random, so neither an item's id nor what it is worth tells its age.

    freshness(i, day) = 2^(-age / half_life),    age = max(day - born_i, 0)

Users like what is fresh: an item without any freshness left has lost ``fading`` of its affinity logit. So does the
logging policy, which weighs the popularity of an item by its freshness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Born = NDArray[np.int32]


@dataclass(frozen=True)
class LifeParameters:
    """The part of the parameters that worlds with a growing catalog alone read; ``births`` 0 = nothing lives.

    A signal is a ratio of variances, signal to noise: a linear regression of the factor on what was observed of it
    explains the share ``signal / (1 + signal)`` of its variance.

    Attributes:
        births: growth of the catalog, share a day; 0 = all items are there from the beginning, and for ever.
        birth_days: number of days, from day 0 on, on which items are born; 0 = those of the log. More than the log has
            let the catalog grow on the days that a policy serves after it.
        half_life: days after which an item has lost half of its freshness.
        fading: what an item that has lost all of its freshness has lost in the affinity logit.
        content_dim: width of the content vectors.
        content_signal: signal of every coordinate of the item latents in the content vectors.
        quality_signal: signal of the item quality in the content vectors.
        tags: number of different tags.
        category_noise: probability that an item's category is drawn at random, and is not its topic.
        author_items: mean number of items of an author, all of one topic.
        author_signal: signal of the item quality in the order by which items get their authors.
        attribute_signal: signal of the tastes of day 0 in the attributes of the users.
    """

    births: float = 0.0
    birth_days: int = 0
    half_life: float = 7.0
    fading: float = 1.0
    content_dim: int = 32
    content_signal: float = 4.0
    quality_signal: float = 0.5
    tags: int = 48
    category_noise: float = 0.15
    author_items: float = 20.0
    author_signal: float = 1.0
    attribute_signal: float = 1.0

    @property
    def lives(self) -> bool:
        """Items are born and fade."""
        return self.births > 0


def birth_days(order: NDArray[np.integer], births: float, last_day: int) -> Born:
    """The days ``[V]`` on which items are born.

    Args:
        order: ``[V]`` a permutation of 0..V-1, the items' places from the oldest to the newest.
        births: growth of the catalog, share a day.
        last_day: the day on which the last of them are born.
    """
    doublings = np.log(len(order) / (order + 1.0)) / math.log1p(births)
    # a place that falls exactly on the last of a day's belongs to that day, whatever the rounding of two logarithms
    return (last_day - np.floor(doublings + 1e-9)).astype(np.int32)

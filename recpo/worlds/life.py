"""Growing catalogs: parameters of births, fading and side information, and the birth day of each item.

The catalog grows by a constant share a day and has ``items`` items when it stops growing, on day D - 1 where D is
``birth_days``, or the days of the log. So day d has ``n(d) = items (1 + births)^(d - D + 1)`` items, and the j-th
oldest is born on the first day with ``n(d) >= j``, possibly long before the log. Items are born at 00:00 UTC. Ages are
assigned at random, so neither an item's id nor its value reveals its age.

    freshness(i, day) = 2^(-age / half_life),    age = max(day - born_i, 0)

Users prefer fresh items: an item with no freshness left has lost ``fading`` of its affinity logit. The logging policy
also prefers fresh items; it multiplies the popularity of an item by its freshness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Born = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class LifeParameters:
    """The parameters of worlds with a growing catalog; ``births`` 0 = a fixed catalog.

    A signal is a ratio of variances, signal to noise: a linear regression of the factor on its observation explains the
    share ``signal / (1 + signal)`` of its variance.
    """

    births: float = 0.0
    """growth of the catalog, as a share per day; 0 = all items exist from start to end"""
    birth_days: int = 0
    """number of days, from day 0 on, on which items are born; 0 = the days of the log. With more days than the log
    has, the catalog also grows on the days that a policy serves after it"""
    half_life: float = 7.0
    """days after which an item has lost half of its freshness"""
    fading: float = 1.0
    """loss in the affinity logit of an item with no freshness left"""
    content_dim: int = 32
    """width of the content vectors"""
    content_signal: float = 4.0
    """signal of every coordinate of the item latents in the content vectors"""
    quality_signal: float = 0.5
    """signal of the item quality in the content vectors"""
    tags: int = 48
    """number of different tags"""
    category_noise: float = 0.15
    """probability that an item's category is drawn at random instead of being its topic"""
    author_items: float = 20.0
    """mean number of items of an author, all of one topic"""
    author_signal: float = 1.0
    """signal of the item quality in the order by which items get their authors"""
    attribute_signal: float = 1.0
    """signal of the tastes of day 0 in the attributes of the users"""

    @property
    def lives(self) -> bool:
        """Whether items are born and fade."""
        return self.births > 0


def birth_days(order: NDArray[np.integer], births: float, last_day: int) -> Born:
    """The days ``[V]`` on which items are born.

    Args:
        order: ``[V]`` a permutation of 0..V-1, the items' places from the oldest to the newest.
        births: growth of the catalog, share a day.
        last_day: the day on which the last items are born.
    """
    doublings = np.log(len(order) / (order + 1.0)) / math.log1p(births)
    # a place that is exactly a day's last belongs to that day, regardless of how two logarithms are rounded
    return (last_day - np.floor(doublings + 1e-9)).astype(np.int32)

"""All numbers of the simulation: the size of a run, the constants of the user model, and how a catalog grows.

The catalog grows by a constant share a day and has ``items`` items when it stops growing, on day D - 1 where D is
``birth_days``, or the days of the log. So day d has ``n(d) = items (1 + births)^(d - D + 1)`` items, and the j-th
oldest is born on the first day with ``n(d) >= j``, possibly long before the log. Items are born at 00:00 UTC. Ages are
assigned at random, so neither an item's id nor its value reveals its age.

    freshness(i, day) = 2^(-age / half_life),    age = max(day - born_i, 0)

Users prefer fresh items: an item with no freshness left has lost ``fading`` of its affinity logit. The logging policy
also prefers fresh items; it multiplies the popularity of an item by its freshness.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from recpo.base.errors import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    validate_range,
    validate_ranges,
)

Born = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class LifeParameters:
    """The parameters of worlds with a growing catalog; ``births`` 0 = a fixed catalog.

    A signal is a ratio of variances, signal to noise: a linear regression of the factor on its observation explains the
    share ``signal / (1 + signal)`` of its variance.
    """

    births: ClosedUnitInterval = 0.0
    """growth of the catalog, as a share per day; 0 = all items exist from start to end"""
    birth_days: NonNegativeInt = 0
    """number of days, from day 0 on, on which items are born; 0 = the days of the log. With more days than the log
    has, the catalog also grows on the days that a policy serves after it"""
    half_life: PositiveFloat = 7.0
    """days after which an item has lost half of its freshness"""
    fading: NonNegativeFloat = 1.0
    """loss in the affinity logit of an item with no freshness left"""
    content_dim: int = 32
    """width of the content vectors"""
    content_signal: PositiveFloat = 4.0
    """signal of every coordinate of the item latents in the content vectors"""
    quality_signal: PositiveFloat = 0.5
    """signal of the item quality in the content vectors"""
    tags: PositiveInt = 48
    """number of different tags"""
    category_noise: ClosedUnitInterval = 0.15
    """probability that an item's category is drawn at random instead of being its topic"""
    author_items: float = 20.0
    """mean number of items of an author, all of one topic"""
    author_signal: PositiveFloat = 1.0
    """signal of the item quality in the order by which items get their authors"""
    attribute_signal: PositiveFloat = 1.0
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


MILLISECONDS_PER_DAY = 86_400_000
# Beyond this, the most active user (ten times the mean) would watch for more than 24 hours a day.
MAX_EVENTS_PER_USER_DAY = 200

World = Literal["default", "confounded", "skewed", "small", "living", "sparse", "replay"]
WORLDS: Final[Mapping[World, Mapping[str, float]]] = MappingProxyType(
    {
        "default": {},
        # popularity is independent of quality, and twice as much clickbait is promoted twice as much
        "confounded": {"popularity_quality": 0.0, "clickbait_share": 0.16, "clickbait_boost": 1.4},
        # hardly any random exposures, and users mostly see the topics that the logging policy estimates for them
        "skewed": {"random_share": 0.01, "topic_sharpness": 8.0},
        # four events per item, so the uncertainty of a model matters more than its estimates
        "small": {"users": 500, "items": 5_000, "events": 20_000},
        # 5 % more items every day, of which only the features are known; all items fade
        "living": {"items": 2_000, "births": 0.05},
        # 40 events a user over thousands of items; what is good for one user is not for another, the exposures know a
        # part of it, watch times are noisy and dislikes are rare
        "sparse": {
            "users": 1_500,
            "items": 2_600,
            "events": 60_000,
            "days": 28,
            "latent_dim": 32,
            "topics": 48,
            "taste_scale": 9.0,
            "quality_scale": 0.5,
            "affinity_bias": -3.0,
            "topic_sharpness": 8.0,
            "drift": 0.01,
            "activity_spread": 0.4,
            "watch_noise": 0.8,
            "skip_share": 0.5,
            "dislike_base": 0.01,
            "clickbait_share": 0.05,
            "clickbait_dislike": 0.05,
        },
        # the rewards of a given matrix (recpo.worlds.replay): equally active users in many short sessions, so that most
        # come back on the last day, and a logging policy that knows little of their tastes
        "replay": {
            "days": 7,
            "drift": 0.0,
            "activity_spread": 0.0,
            "session_length": 4.0,
            "clickbait_share": 0.0,
            "clickbait_dislike": 0.0,
            "popularity_spread": 0.5,
            "popularity_quality": 0.25,
            "topic_sharpness": 1.0,
            "topic_noise": 0.5,
        },
    }
)
"""Named worlds: the parameters of ``SimulationParameters`` in which each differs from the defaults."""


@dataclass(frozen=True, kw_only=True)
class SimulationParameters(LifeParameters):
    """The complete description of a simulation: equal parameters give equal bytes.

    It also has the parameters of ``LifeParameters``.
    """

    users: PositiveInt = 2000
    """number of users"""
    items: PositiveInt = 1000
    """number of items, V; for a growing catalog, the final number"""
    events: PositiveInt = 200_000
    """number of rows of the log, exactly"""
    days: PositiveInt = 14
    """the log covers days 0..days-1; a session that starts before midnight may run past it"""
    random_share: ClosedUnitInterval = 0.1
    """probability epsilon that an exposure is drawn uniformly from the catalog"""
    topics: PositiveInt = 16
    """number of topics; a topic may be empty when the catalog is small"""
    drift: NonNegativeFloat = 0.03
    """mean angular speed of a taste, radians per day; 0 = fixed tastes"""
    dislike_cost: NonNegativeFloat = 2.0
    """amount that one dislike subtracts from the reward"""
    seed: Seed = 0
    """every random number follows from it"""
    latent_dim: int = 8
    """dimension d of tastes and item latents"""
    start_ms: NonNegativeInt = 1_767_571_200_000
    """time of day 0, 00:00 UTC, milliseconds since the epoch (2026-01-05, a Monday)"""
    topic_share: ClosedUnitInterval = 0.5
    """share of an item latent's squared length that is its topic's center; the rest is its own"""
    taste_scale: float = 4.0
    """weight of ``<taste, latent>`` in the affinity logit"""
    quality_scale: float = 0.8
    """weight of the item quality (standard normal) in the affinity logit"""
    affinity_bias: float = -1.5
    """constant of the affinity logit"""
    clickbait_share: ClosedUnitInterval = 0.08
    """probability that an item is clickbait"""
    clickbait_boost: float = 0.7
    """amount that clickbait adds to an item's log-popularity"""
    dislike_base: NonNegativeFloat = 0.05
    """dislike probability of an ordinary item as its affinity goes to 0"""
    clickbait_dislike: NonNegativeFloat = 0.25
    """amount that clickbait adds to the dislike probability as the affinity goes to 0"""
    popularity_spread: float = 1.0
    """standard deviation of the log-popularity of items of equal quality"""
    popularity_quality: float = 0.5
    """weight of an item's quality in its log-popularity; small, so that popular items are not the best"""
    topic_sharpness: float = 4.0
    """inverse temperature of the logging policy's topic softmax"""
    topic_noise: NonNegativeFloat = 0.2
    """standard deviation of the logging policy's error about a user's affinity for a topic"""
    activity_spread: float = 0.8
    """standard deviation of the log-activity of users"""
    session_length: float = 12.0
    """mean number of exposures in a session (geometric)"""
    request_size: PositiveInt = 6
    """exposures that share a request; the last request of a session may be shorter"""
    duration_bias: NonNegativeFloat = 0.25
    """exponent by which the watch ratio falls with duration: ``(duration_median / duration)^bias``"""
    duration_median: PositiveFloat = 30.0
    """median duration, seconds"""
    duration_spread: float = 0.8
    """standard deviation of the log-duration"""
    skip_share: ClosedUnitInterval = 0.35
    """probability of an immediate skip as the affinity goes to 0"""
    watch_noise: float = 0.35
    """standard deviation of the log-watch-ratio of events that are not skipped"""

    def __post_init__(self) -> None:
        validate_ranges(self)
        for field in dataclasses.fields(SimulationParameters):
            value = getattr(self, field.name)
            self._require(field.name, isinstance(value, int | float) and math.isfinite(value), "be a finite number")
        self._require("latent_dim", self.latent_dim >= 2, "be at least 2, or a taste has nowhere to drift to")
        for name in ("popularity_spread", "activity_spread", "duration_spread", "watch_noise"):
            self._require(name, 0 <= getattr(self, name) <= 3, "be between 0 and 3")
        self._require("session_length", self.session_length >= 1, "be at least 1")
        total_dislike = self.dislike_base + self.clickbait_dislike
        self._require("clickbait_dislike", total_dislike <= 1, "be at most 1 - dislike_base")
        limit = MAX_EVENTS_PER_USER_DAY * self.users * self.days
        most = f"be at most {limit:,} ({MAX_EVENTS_PER_USER_DAY} per user and day): ask for fewer, more users or days"
        self._require("events", self.events <= limit, most)
        self._require("author_items", self.author_items >= 1, "be at least 1")
        if self.lives:
            first = self.items / (1 + self.births) ** max(0, self.last_birth_day)
            self._require("births", first >= 1, f"be so small that of {self.items} items one exists on day 0")
            least = self.latent_dim + 1
            self._require("content_dim", self.content_dim >= least, f"be at least {least}: latents and quality")
            return
        for field in dataclasses.fields(LifeParameters):
            rule = f"be {field.default!r} where births is 0 and nothing lives: set births above 0, or leave it out"
            self._require(field.name, getattr(self, field.name) == field.default, rule)

    def _require(self, name: str, fits: bool, rule: str) -> None:
        validate_range(fits, name, f"must {rule}", getattr(self, name))

    @property
    def last_birth_day(self) -> int:
        """The day on which the last items are born, if any are."""
        return (self.birth_days or self.days) - 1

    def as_json(self) -> dict[str, float]:
        """All parameters by name, without those of life if the catalog is fixed."""
        left_out = set() if self.lives else {field.name for field in dataclasses.fields(LifeParameters)}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}

    def generator(self, *stream: int) -> np.random.Generator:
        """Random numbers of one independent stream of this seed, so that no part depends on the order of drawing."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=stream))

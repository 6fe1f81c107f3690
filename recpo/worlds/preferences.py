"""The user model: latent tastes that drift, items with topics, and the true reward of an item for a user.

    taste(u, day)      = cos(rate_u day) taste_u + sin(rate_u day) direction_u              (unit length)
    affinity(u,i,day)  = sigmoid(taste_scale <taste(u, day), latent_i> + quality_scale quality_i + affinity_bias)
    dislike(u,i,day)   = dislike_base (1 - affinity)^2 + clickbait_dislike clickbait_i (1 - affinity)
    reward(u,i,day)    = affinity - dislike_cost dislike                                    in (-dislike_cost, 1)

In a living world, the logit of the affinity also has ``- fading (1 - freshness(i, day))``, see
``recpo.worlds.life``.

The affinity is the probability that the exposure satisfies the user. The log does not contain it: the log has watch
times and dislikes that depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recpo.worlds.life import Born, birth_days
from recpo.worlds.parameters import SimulationParameters

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]

_ITEM_STREAM, _USER_STREAM, _CENTRE_STREAM, _BIRTH_STREAM = 0, 1, 2, 6
_MAX_ID_GAP = 9
_FIRST_ID = 1_000
_TASTE_CONCENTRATION = 0.2  # a small Dirichlet parameter: a user likes a few topics, instead of all a little
_PERSONAL_SHARE = 0.3  # share of a taste's squared length that no topic explains
_MAX_ACTIVITY = 10.0  # in multiples of the median user
_MIN_DURATION, _MAX_DURATION = 3.0, 900.0  # seconds


class Items(NamedTuple):
    """The catalog, ascending by ``item_id``.

    Attributes:
        item_id: ``[V]`` int64, ascending with gaps.
        topic: ``[V]`` int32.
        latent: ``[V, d]`` float32, about unit length.
        quality: ``[V]`` float32, standard normal, unknown to the logging policy.
        clickbait: ``[V]`` bool, shown too often and disliked.
        duration: ``[V]`` float32, seconds.
        popularity: ``[V]`` float32, the logging policy's log-weight within the topic.
        born: ``[V]`` int32, the day at whose start the item appears, negative before the log; None = all items exist
            from the start.
    """

    item_id: IntArray
    topic: IntArray
    latent: FloatArray
    quality: FloatArray
    clickbait: NDArray[np.bool_]
    duration: FloatArray
    popularity: FloatArray
    born: Born | None = None


class Users(NamedTuple):
    """The population, ascending by ``user_id``.

    Attributes:
        user_id: ``[U]`` int64, ascending with gaps.
        taste: ``[U, d]`` float32, the taste on day 0, unit length.
        direction: ``[U, d]`` float32, where the taste drifts to, unit length, orthogonal to ``taste``.
        rate: ``[U]`` float32, radians per day.
        activity: ``[U]`` float32, the user's weight in the number of events.
        topic_logit: ``[U, T]`` float32, the logging policy's estimate of the user: noisy, and from day 0.
    """

    user_id: IntArray
    taste: FloatArray
    direction: FloatArray
    rate: FloatArray
    activity: FloatArray
    topic_logit: FloatArray


def topic_centers(parameters: SimulationParameters) -> FloatArray:
    """The centers ``[T, d]`` of the topics, unit length."""
    rng = parameters.generator(_CENTRE_STREAM)
    return _unit(rng.standard_normal((parameters.topics, parameters.latent_dim)))


def draw_items(parameters: SimulationParameters) -> Items:
    """Draws the catalog; popularity depends little on quality, and clickbait is more popular."""
    rng = parameters.generator(_ITEM_STREAM)
    size = parameters.items
    topic = rng.choice(parameters.topics, size=size, p=rng.dirichlet(np.full(parameters.topics, 5.0)))
    own = _unit(rng.standard_normal((size, parameters.latent_dim)))
    share = parameters.topic_share
    clickbait = rng.random(size) < parameters.clickbait_share
    duration = parameters.duration_median * np.exp(parameters.duration_spread * rng.standard_normal(size))
    quality = rng.standard_normal(size)
    popularity = parameters.popularity_spread * rng.standard_normal(size) + parameters.popularity_quality * quality
    born = None
    if parameters.lives:
        order = parameters.generator(_BIRTH_STREAM).permutation(size)
        born = birth_days(order, parameters.births, parameters.last_birth_day)
    return Items(
        item_id=_identifiers(rng, size),
        topic=topic.astype(np.int32),
        latent=(np.sqrt(share) * topic_centers(parameters)[topic] + np.sqrt(1 - share) * own).astype(np.float32),
        quality=quality.astype(np.float32),
        clickbait=clickbait,
        duration=np.clip(duration, _MIN_DURATION, _MAX_DURATION).round(3).astype(np.float32),
        popularity=(popularity + parameters.clickbait_boost * clickbait).astype(np.float32),
        born=born,
    )


def draw_users(parameters: SimulationParameters) -> Users:
    """Draws the population; a taste is a sparse mix of topics plus an individual part."""
    rng = parameters.generator(_USER_STREAM)
    size = parameters.users
    centers = topic_centers(parameters)
    taste = _draw_tastes(rng, centers, size)
    other = _draw_tastes(rng, centers, size)
    orthogonal = other - np.sum(other * taste, axis=1, keepdims=True) * taste
    believed = taste @ centers.T + parameters.topic_noise * rng.standard_normal((size, len(centers)))
    activity = np.exp(parameters.activity_spread * rng.standard_normal(size))
    return Users(
        user_id=_identifiers(rng, size),
        taste=taste.astype(np.float32),
        direction=_unit(orthogonal).astype(np.float32),
        rate=(parameters.drift * rng.uniform(0.5, 1.5, size)).astype(np.float32),
        activity=np.minimum(activity, _MAX_ACTIVITY).astype(np.float32),
        topic_logit=(parameters.topic_sharpness * believed).astype(np.float32),
    )


class Preferences(NamedTuple):
    """True preferences of users, by row numbers of ``users`` and ``items``.

    Attributes:
        parameters: the constants of the formulas.
        users: the population.
        items: the catalog.
    """

    parameters: SimulationParameters
    users: Users
    items: Items

    @classmethod
    def draw(cls, parameters: SimulationParameters) -> Preferences:
        """The population and the catalog of these parameters."""
        return cls(parameters, draw_users(parameters), draw_items(parameters))

    def taste(self, user_rows: IntArray, day: ArrayLike) -> FloatArray:
        """Tastes ``[N, d]`` float64 of users ``[N]`` on ``day`` (a number, or ``[N]``)."""
        angle = (self.users.rate[user_rows].astype(np.float64) * np.asarray(day, dtype=np.float64))[:, None]
        return np.cos(angle) * self.users.taste[user_rows] + np.sin(angle) * self.users.direction[user_rows]

    def exists(self, item_rows: IntArray, day: ArrayLike) -> NDArray[np.bool_]:
        """Which of the items have been born on ``day``; ``item_rows`` and ``day`` are broadcast against each other."""
        day, born = np.asarray(day, dtype=np.float64), self.items.born
        if born is None:
            return np.ones(np.broadcast_shapes(item_rows.shape, day.shape), bool)
        return np.asarray(born[item_rows] <= day)

    def freshness(self, item_rows: IntArray, day: ArrayLike) -> FloatArray:
        """``2^(-age / half_life)``, 1 if not born yet; ``item_rows`` and ``day`` broadcast as in ``exists``."""
        day, born = np.asarray(day, dtype=np.float64), self.items.born
        if born is None:
            return np.ones(np.broadcast_shapes(item_rows.shape, day.shape))
        return np.exp2(-np.maximum(day - born[item_rows], 0.0) / self.parameters.half_life)

    def affinity(self, user_rows: IntArray, item_rows: IntArray, day: ArrayLike) -> FloatArray:
        """Affinities ``[N, k]`` of users ``[N]`` for items ``[N, k]``."""
        taste = self.taste(user_rows, day)
        match = np.einsum("nd,nkd->nk", taste, self.items.latent[item_rows].astype(np.float64))
        return self._from_match(match, item_rows, day)

    def affinity_to_all(self, user_rows: IntArray, day: ArrayLike) -> FloatArray:
        """Affinities ``[N, V]`` of users ``[N]`` for the whole catalog."""
        match = self.taste(user_rows, day) @ self.items.latent.T.astype(np.float64)
        return self._from_match(match, np.arange(len(self.items.item_id)), day)

    def dislike_probability(self, affinity: FloatArray, clickbait: NDArray[np.bool_]) -> FloatArray:
        """Probability of a dislike given the affinity and, broadcast against it, whether the item is clickbait."""
        distance = 1 - affinity
        return distance * (self.parameters.dislike_base * distance + self.parameters.clickbait_dislike * clickbait)

    def reward(self, affinity: FloatArray, clickbait: NDArray[np.bool_]) -> FloatArray:
        """Expected reward, in (-dislike_cost, 1)."""
        return affinity - self.parameters.dislike_cost * self.dislike_probability(affinity, clickbait)

    def _from_match(self, match: FloatArray, item_rows: IntArray, day: ArrayLike) -> FloatArray:
        scale, quality_scale = self.parameters.taste_scale, self.parameters.quality_scale
        quality = self.items.quality[item_rows].astype(np.float64)
        logit = scale * match + quality_scale * quality + self.parameters.affinity_bias
        if self.items.born is not None:
            days = np.asarray(day, dtype=np.float64)
            days = days[:, None] if days.ndim else days
            logit = logit - self.parameters.fading * (1 - self.freshness(item_rows, days))
        return 1 / (1 + np.exp(-logit))


def _draw_tastes(rng: np.random.Generator, centers: FloatArray, size: int) -> FloatArray:
    topics, dim = centers.shape
    mix = _unit(rng.dirichlet(np.full(topics, _TASTE_CONCENTRATION), size) @ centers)
    personal = _unit(rng.standard_normal((size, dim)))
    return _unit(np.sqrt(1 - _PERSONAL_SHARE) * mix + np.sqrt(_PERSONAL_SHARE) * personal)


def _identifiers(rng: np.random.Generator, size: int) -> IntArray:
    return _FIRST_ID + np.cumsum(rng.integers(1, _MAX_ID_GAP + 1, size))


def _unit(vectors: FloatArray) -> FloatArray:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(length, np.finfo(np.float64).tiny)

"""The user model: latent tastes that drift, items with topics, and the true reward of an item for a user.

    taste(u, day)      = cos(rate_u day) taste_u + sin(rate_u day) direction_u              (unit length)
    affinity(u,i,day)  = sigmoid(taste_scale <taste(u, day), latent_i> + quality_scale quality_i + affinity_bias)
    dislike(u,i,day)   = dislike_base (1 - affinity)^2 + clickbait_dislike clickbait_i (1 - affinity)
    reward(u,i,day)    = affinity - dislike_cost dislike                                    in (-dislike_cost, 1)

In a living world, the logit of the affinity also has ``- fading (1 - freshness(i, day))``, see
``recpo.worlds.parameters``.

The affinity is the probability that the exposure satisfies the user. The log does not contain it: the log has watch
times and dislikes that depend on it.

The policy that makes the log is here too; its exact probabilities are known. A living world also has tables of items
and users. Their values are noisy observations of the factors that simulated users react to, with the signals of
``recpo.worlds.parameters.LifeParameters``:

    category_i  = topic_i, with probability category_noise a topic drawn at random
    author_i    : items are ordered by topic, then by quality_i + noise, and cut into runs of geometric lengths
    tags_i      : 0 to 4 of the tags, without replacement, with weights exp(sharpness <direction_tag, latent_i>)
    content_i   = A (sqrt(signal) * standardized (latent_i, quality_i)) + z,    A orthonormal columns, z ~ N(0, I)

    segment_u   = argmax over topics t of <taste_u, center_t> + noise
    age_u       = 40 + 12 (sqrt(s) p_u + z) / sqrt(s + 1),    p_u the standardized taste along one direction
"""

from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from recpo.worlds.parameters import MILLISECONDS_PER_DAY, Born, SimulationParameters, birth_days

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
        rewards: ``[U, V]`` float64, the true rewards of a world that replays them, nan = not known; they replace
            tastes. None = rewards follow from tastes.
    """

    user_id: IntArray
    taste: FloatArray
    direction: FloatArray
    rate: FloatArray
    activity: FloatArray
    topic_logit: FloatArray
    rewards: FloatArray | None = None


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
    duration = draw_durations(parameters, rng)
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
        duration=duration,
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
    activity = draw_activity(parameters, rng)
    return Users(
        user_id=_identifiers(rng, size),
        taste=taste.astype(np.float32),
        direction=_unit(orthogonal).astype(np.float32),
        rate=(parameters.drift * rng.uniform(0.5, 1.5, size)).astype(np.float32),
        activity=activity,
        topic_logit=(parameters.topic_sharpness * believed).astype(np.float32),
    )


def draw_durations(parameters: SimulationParameters, rng: np.random.Generator) -> FloatArray:
    """Durations of the items, seconds: log-normal, cut at both ends."""
    duration = parameters.duration_median * np.exp(parameters.duration_spread * rng.standard_normal(parameters.items))
    return np.clip(duration, _MIN_DURATION, _MAX_DURATION).round(3).astype(np.float32)


def draw_activity(parameters: SimulationParameters, rng: np.random.Generator) -> FloatArray:
    """Weights of the users in the number of events: log-normal, cut at the top."""
    activity = np.exp(parameters.activity_spread * rng.standard_normal(parameters.users))
    return np.minimum(activity, _MAX_ACTIVITY).astype(np.float32)


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
    def draw(cls, parameters: SimulationParameters) -> Self:
        """The population and the catalog of these parameters."""
        return cls(parameters, draw_users(parameters), draw_items(parameters))

    @property
    def replays(self) -> bool:
        """Whether the rewards are given, and do not follow from tastes."""
        return self.users.rewards is not None

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Which users ``[U]`` have a known reward for every item; where rewards follow from tastes, all."""
        rewards = self.users.rewards
        return np.full(len(self.users.user_id), True) if rewards is None else ~np.asarray(np.isnan(rewards).any(axis=1))

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
        """Affinities ``[N, k]`` of users ``[N]`` for items ``[N, k]``; nan where a replayed reward is not known."""
        if self.users.rewards is not None:
            return self._from_rewards(self.users.rewards[user_rows[:, None], item_rows])
        taste = self.taste(user_rows, day)
        match = np.einsum("nd,nkd->nk", taste, self.items.latent[item_rows].astype(np.float64))
        return self._from_match(match, item_rows, day)

    def affinity_to_all(self, user_rows: IntArray, day: ArrayLike) -> FloatArray:
        """Affinities ``[N, V]`` of users ``[N]`` for the whole catalog; nan as in ``affinity``."""
        if self.users.rewards is not None:
            return self._from_rewards(self.users.rewards[user_rows])
        match = self.taste(user_rows, day) @ self.items.latent.T.astype(np.float64)
        return self._from_match(match, np.arange(len(self.items.item_id)), day)

    def dislike_probability(self, affinity: FloatArray, clickbait: NDArray[np.bool_]) -> FloatArray:
        """Probability of a dislike given the affinity and, broadcast against it, whether the item is clickbait."""
        distance = 1 - affinity
        return distance * (self.parameters.dislike_base * distance + self.parameters.clickbait_dislike * clickbait)

    def reward(self, affinity: FloatArray, clickbait: NDArray[np.bool_]) -> FloatArray:
        """Expected reward, in (-dislike_cost, 1)."""
        return affinity - self.parameters.dislike_cost * self.dislike_probability(affinity, clickbait)

    def _from_rewards(self, rewards: FloatArray) -> FloatArray:
        """The affinities with which ``reward`` gives these rewards of ordinary items (``recpo.worlds.replay``)."""
        lost, cost = 1 - rewards, self.parameters.dislike_cost * self.parameters.dislike_base
        return np.asarray(1 - 2 * lost / (1 + np.sqrt(1 + 4 * cost * lost)))

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


class LoggingPolicy(NamedTuple):
    """A mixture of uniformly random exposures and "a topic the user seems to like, then a popular item of it".

        p(i | u) = random_share / V + (1 - random_share) P(topic_i | u) popularity_i / sum over the topic of popularity

    The topic probabilities are a softmax over a noisy estimate from day 0 and do not follow drift, so ``p`` is the same
    on every day. In a living world, the policy of a day knows the items born so far, V is their number, and popularity
    is multiplied by freshness (``recpo.worlds.parameters``). The policy does not know quality or taste within a topic,
    and it prefers clickbait. So popular items are exposed more often than their quality justifies, which confounds any
    plain average over the log.

    Attributes:
        random_share: probability of a uniformly random exposure.
        available: ``[A]`` rows of the items that can be shown, ascending.
        uniform: ``[U, V]`` float64, probability of a uniformly random exposure: ``random_share`` divided by the number
            of items that can be shown, or 0; a view of one row where it is equal for all users.
        topic: ``[V]`` topic of each item.
        topic_probability: ``[U, T]`` float64; empty topics have 0.
        share_of_topic: ``[V]`` float64, the item's probability within its topic, 0 if it cannot be shown.
        by_topic: ``[A]`` rows of the items that can be shown, grouped by topic.
        topic_end: ``[T]`` where each topic ends in ``by_topic``.
        cumulative: ``[A]`` float64, topic number + cumulative share of topic, in the order of ``by_topic``.
        known: ``[U, V]`` bool, the items that can be shown to each user of a world that replays rewards: those whose
            reward is known. None = the same items for all users.
    """

    random_share: float
    available: IntArray
    uniform: FloatArray
    topic: IntArray
    topic_probability: FloatArray
    share_of_topic: FloatArray
    by_topic: IntArray
    topic_end: IntArray
    cumulative: FloatArray
    known: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, preferences: Preferences, day: int = 0) -> Self:
        """The logging policy for these users and items; in a living world, on ``day``."""
        parameters, users, items = preferences
        topic, everything = items.topic.astype(np.int64), np.arange(len(items.topic))
        exists = preferences.exists(everything, day)
        available = np.flatnonzero(exists)
        size = np.bincount(topic[available], minlength=parameters.topics)
        # a topic of ancient items is still a topic
        freshness = np.maximum(preferences.freshness(everything, day), np.finfo(np.float64).tiny)
        weight = np.exp(items.popularity.astype(np.float64)) * freshness * exists
        total_weight = np.bincount(topic, weights=weight, minlength=parameters.topics)[topic]
        share = np.divide(weight, total_weight, out=np.zeros(len(weight)), where=exists)
        logit = np.where(size > 0, users.topic_logit.astype(np.float64), -np.inf)
        probability = np.exp(logit - logit.max(axis=1, keepdims=True))
        by_topic = available[np.argsort(topic[available], kind="stable")]
        total = np.cumsum(share[by_topic])
        end = np.cumsum(size)
        before = np.concatenate([[0.0], total])[(end - size)[topic[by_topic]]]
        known = None if users.rewards is None else ~np.isnan(users.rewards)
        shown = exists[None] if known is None else known
        uniform = parameters.random_share * shown / np.maximum(1, shown.sum(axis=1))[:, None]
        return cls(
            random_share=parameters.random_share,
            available=available,
            uniform=np.broadcast_to(uniform, (len(users.user_id), len(topic))),
            topic=topic,
            topic_probability=probability / probability.sum(axis=1, keepdims=True),
            share_of_topic=share,
            by_topic=by_topic,
            topic_end=end,
            cumulative=topic[by_topic] + np.minimum(total - before, 1.0),
            known=known,
        )

    def propensity(self, user_rows: IntArray, item_rows: IntArray) -> FloatArray:
        """Marginal probabilities ``[N, k]`` of items ``[N, k]`` under both parts of the mixture."""
        chosen = self.topic_probability[user_rows[:, None], self.topic[item_rows]] * self.share_of_topic[item_rows]
        return self.uniform[user_rows[:, None], item_rows] + (1 - self.random_share) * chosen

    def propensity_of_all(self, user_rows: IntArray) -> FloatArray:
        """Marginal probabilities ``[N, V]`` of the whole catalog; every row sums to 1."""
        chosen = self.topic_probability[user_rows][:, self.topic] * self.share_of_topic
        return self.uniform[user_rows] + (1 - self.random_share) * chosen

    def sample(self, user_rows: IntArray, rng: np.random.Generator) -> tuple[IntArray, NDArray[np.bool_]]:
        """One independent exposure for each of ``user_rows [N]``: item rows ``[N]`` and whether they are random."""
        size = len(user_rows)
        is_random = rng.random(size) < self.random_share
        uniform = self._sample_uniform(user_rows, rng)
        chosen = self._within_topic(self._sample_topic(user_rows, rng.random(size)), rng.random(size))
        return np.where(is_random, uniform, chosen), is_random

    def _sample_uniform(self, user_rows: IntArray, rng: np.random.Generator) -> IntArray:
        if self.known is None:
            return self.available[rng.integers(0, len(self.available), len(user_rows))]
        rows, position = np.unique(user_rows, return_inverse=True)
        known = self.known[rows]
        size = known.sum(axis=1)
        place = (np.cumsum(size) - size)[position] + rng.integers(0, size[position])
        return np.asarray(np.nonzero(known)[1][place])

    def _sample_topic(self, user_rows: IntArray, uniform: FloatArray) -> IntArray:
        # Inverse transform for all rows in one search: row r of the cumulative table is in [r, r + 1].
        rows, position = np.unique(user_rows, return_inverse=True)
        table = np.minimum(np.cumsum(self.topic_probability[rows], axis=1), 1.0)
        last = table.shape[1] - 1 - np.argmax(self.topic_probability[rows][:, ::-1] > 0, axis=1)
        flat = (table + np.arange(len(rows))[:, None]).ravel()
        found = np.searchsorted(flat, uniform + position, side="right") - position * table.shape[1]
        # Rounding may push a draw past the last non-empty topic, by 1e-16 of its probability.
        return np.clip(found, 0, last[position])

    def _within_topic(self, topic: IntArray, uniform: FloatArray) -> IntArray:
        found = np.searchsorted(self.cumulative, uniform + topic, side="right")
        first = np.concatenate([[0], self.topic_end[:-1]])
        return self.by_topic[np.clip(found, first[topic], self.topic_end[topic] - 1)]


ITEM_TABLE, USER_TABLE = "items.parquet", "users.parquet"
_ITEM_TABLE_STREAM, _USER_TABLE_STREAM = 7, 8
_MOST_TAGS: Final = 4
_TAG_SHARPNESS: Final = 6.0
_ROWS_AT_ONCE: Final = 1 << 16  # size of an items x tags matrix
_MEAN_AGE, _AGE_SPREAD = 40.0, 12.0


def write_side_information(preferences: Preferences, directory: Path, last_day: int) -> None:
    """Writes ``items.parquet``, with items born by ``last_day``, and ``users.parquet``, in a living world."""
    if preferences.parameters.lives:
        pq.write_table(item_table(preferences, last_day), directory / ITEM_TABLE, compression="zstd")
        pq.write_table(user_table(preferences), directory / USER_TABLE, compression="zstd")


def item_table(preferences: Preferences, last_day: int) -> pa.Table:
    """The table of the items that are born by ``last_day``.

    Columns: ``item_id``; ``available_from``, milliseconds since the epoch; ``category`` and ``author``, words;
    ``tags``, a list of words; ``duration``, seconds; ``content``, a list of ``content_dim`` numbers. An item's row is
    the same in the tables of all days.
    """
    parameters, _, items = preferences
    assert items.born is not None  # only called in a living world
    rng = parameters.generator(_ITEM_TABLE_STREAM)
    category, author = _categories(preferences, rng), _authors(preferences, rng)
    columns = {
        "item_id": pa.array(items.item_id),
        "available_from": pa.array(parameters.start_ms + items.born.astype(np.int64) * MILLISECONDS_PER_DAY),
        "category": _words("category", category, parameters.topics),
        "author": _words("author", author, int(author.max()) + 1),
        "tags": _tags(preferences, rng),
        "duration": pa.array(items.duration),
        "content": _vectors(_content(preferences, rng)),
    }
    return pa.table(columns).take(np.flatnonzero(items.born <= last_day))


def user_table(preferences: Preferences) -> pa.Table:
    """The table of the users: ``user_id``; ``segment``, a word; ``age``, years."""
    parameters, users, _ = preferences
    rng = parameters.generator(_USER_TABLE_STREAM)
    signal, taste = parameters.attribute_signal, users.taste.astype(np.float64)
    liking = taste @ topic_centers(parameters).T
    noise = liking.std() / np.sqrt(signal) * rng.standard_normal(liking.shape)
    direction = rng.standard_normal(parameters.latent_dim)
    along = _standardized(taste @ direction)
    age = (np.sqrt(signal) * along + rng.standard_normal(len(along))) / np.sqrt(signal + 1)
    columns = {
        "user_id": pa.array(users.user_id),
        "segment": _words("segment", (liking + noise).argmax(axis=1), parameters.topics),
        "age": pa.array((_MEAN_AGE + _AGE_SPREAD * age).astype(np.float32)),
    }
    return pa.table(columns)


def _categories(preferences: Preferences, rng: np.random.Generator) -> IntArray:
    parameters, _, items = preferences
    other = rng.integers(0, parameters.topics, len(items.topic))
    return np.where(rng.random(len(other)) < parameters.category_noise, other, items.topic)


def _authors(preferences: Preferences, rng: np.random.Generator) -> IntArray:
    parameters, _, items = preferences
    size = len(items.topic)
    observed = items.quality + rng.standard_normal(size) / np.sqrt(parameters.author_signal)
    order = np.lexsort((observed, items.topic))
    topic = items.topic[order]
    is_next = rng.random(size) < 1 / parameters.author_items
    is_next[0] = False
    is_next[1:] |= topic[1:] != topic[:-1]
    author = np.empty(size, np.int64)
    author[order] = np.cumsum(is_next)
    # so that an author's number reveals neither topic nor quality
    names: IntArray = rng.permutation(int(author.max()) + 1)
    return names[author]


def _tags(preferences: Preferences, rng: np.random.Generator) -> pa.Array:
    parameters, _, items = preferences
    directions = rng.standard_normal((parameters.tags, parameters.latent_dim))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    counts = rng.integers(0, min(_MOST_TAGS, parameters.tags) + 1, len(items.topic))
    chosen = []
    for begin in range(0, len(counts), _ROWS_AT_ONCE):
        latent = items.latent[begin : begin + _ROWS_AT_ONCE].astype(np.float64)
        # the largest sums of log-weights and Gumbel noise are draws without replacement
        keys = _TAG_SHARPNESS * latent @ directions.T + rng.gumbel(size=(len(latent), parameters.tags))
        order = np.argsort(-keys, axis=1, kind="stable")
        kept = np.arange(parameters.tags) < counts[begin : begin + _ROWS_AT_ONCE, None]
        chosen.append(order[kept])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), _words("tag", np.concatenate(chosen), parameters.tags))


def _content(preferences: Preferences, rng: np.random.Generator) -> FloatArray:
    parameters, _, items = preferences
    factors = np.concatenate([items.latent, items.quality[:, None]], axis=1).astype(np.float64)
    signal = np.full(factors.shape[1], parameters.content_signal)
    signal[-1] = parameters.quality_signal
    axes, _ = np.linalg.qr(rng.standard_normal((parameters.content_dim, factors.shape[1])))
    noise = rng.standard_normal((len(factors), parameters.content_dim))
    return (np.sqrt(signal) * _standardized(factors)) @ axes.T + noise


def _standardized(values: FloatArray) -> FloatArray:
    return (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), np.finfo(np.float64).tiny)


def _words(kind: str, numbers: IntArray, size: int) -> pa.Array:
    """``kind-007`` and so on, as plain strings."""
    digits = len(str(size - 1))
    names = pa.array([f"{kind}-{number:0{digits}d}" for number in range(size)])
    return names.take(pa.array(numbers))


def _vectors(values: FloatArray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.astype(np.float32).ravel()), values.shape[1])

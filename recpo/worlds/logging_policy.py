"""The policy that makes the log; its exact probabilities are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpo.worlds.preferences import FloatArray, IntArray, Preferences


class LoggingPolicy(NamedTuple):
    """A mixture of uniformly random exposures and "a topic the user seems to like, then a popular item of it".

        p(i | u) = random_share / V + (1 - random_share) P(topic_i | u) popularity_i / sum over the topic of popularity

    The topic probabilities are a softmax over a noisy estimate from day 0 and do not follow drift, so ``p`` is the same
    on every day. In a living world, the policy of a day knows the items born so far, V is their number, and popularity
    is multiplied by freshness (``recpo.worlds.life``). The policy does not know quality or taste within a topic,
    and it prefers clickbait. So popular items are exposed more often than their quality justifies, which confounds any
    plain average over the log.

    Attributes:
        random_share: probability of a uniformly random exposure.
        available: ``[A]`` rows of the items that can be shown, ascending.
        uniform: ``[V]`` float64, probability of a uniformly random exposure of the item: ``random_share / A``, or 0.
        topic: ``[V]`` topic of each item.
        topic_probability: ``[U, T]`` float64; empty topics have 0.
        share_of_topic: ``[V]`` float64, the item's probability within its topic, 0 if it cannot be shown.
        by_topic: ``[A]`` rows of the items that can be shown, grouped by topic.
        topic_end: ``[T]`` where each topic ends in ``by_topic``.
        cumulative: ``[A]`` float64, topic number + cumulative share of topic, in the order of ``by_topic``.
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

    @classmethod
    def of(cls, preferences: Preferences, day: int = 0) -> LoggingPolicy:
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
        return cls(
            random_share=parameters.random_share,
            available=available,
            uniform=np.where(exists, parameters.random_share / max(1, len(available)), 0.0),
            topic=topic,
            topic_probability=probability / probability.sum(axis=1, keepdims=True),
            share_of_topic=share,
            by_topic=by_topic,
            topic_end=end,
            cumulative=topic[by_topic] + np.minimum(total - before, 1.0),
        )

    def propensity(self, user_rows: IntArray, item_rows: IntArray) -> FloatArray:
        """Marginal probabilities ``[N, k]`` of items ``[N, k]`` under both parts of the mixture."""
        chosen = self.topic_probability[user_rows[:, None], self.topic[item_rows]] * self.share_of_topic[item_rows]
        return self.uniform[item_rows] + (1 - self.random_share) * chosen

    def propensity_of_all(self, user_rows: IntArray) -> FloatArray:
        """Marginal probabilities ``[N, V]`` of the whole catalog; every row sums to 1."""
        chosen = self.topic_probability[user_rows][:, self.topic] * self.share_of_topic
        return self.uniform + (1 - self.random_share) * chosen

    def sample(self, user_rows: IntArray, rng: np.random.Generator) -> tuple[IntArray, NDArray[np.bool_]]:
        """One independent exposure for each of ``user_rows [N]``: item rows ``[N]`` and whether they are random."""
        size = len(user_rows)
        is_random = rng.random(size) < self.random_share
        uniform = self.available[rng.integers(0, len(self.available), size)]
        chosen = self._within_topic(self._sample_topic(user_rows, rng.random(size)), rng.random(size))
        return np.where(is_random, uniform, chosen), is_random

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

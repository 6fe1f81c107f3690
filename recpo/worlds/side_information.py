"""Side information about items and users: the tables that a living world has in addition to its log.

All values are noisy observations of the factors that simulated users react to, with the signals of
``recpo.worlds.life.LifeParameters``:

    category_i  = topic_i, with probability category_noise a topic drawn at random
    author_i    : items are ordered by topic, then by quality_i + noise, and cut into runs of geometric lengths
    tags_i      : 0 to 4 of the tags, without replacement, with weights exp(sharpness <direction_tag, latent_i>)
    content_i   = A (sqrt(signal) * standardized (latent_i, quality_i)) + z,    A orthonormal columns, z ~ N(0, I)

    segment_u   = argmax over topics t of <taste_u, center_t> + noise
    age_u       = 40 + 12 (sqrt(s) p_u + z) / sqrt(s + 1),    p_u the standardized taste along one direction
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.worlds.parameters import MILLISECONDS_PER_DAY
from recpo.worlds.preferences import FloatArray, IntArray, Preferences, topic_centers

ITEM_TABLE, USER_TABLE = "items.parquet", "users.parquet"
_ITEM_STREAM, _USER_STREAM = 7, 8
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
    rng = parameters.generator(_ITEM_STREAM)
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
    rng = parameters.generator(_USER_STREAM)
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

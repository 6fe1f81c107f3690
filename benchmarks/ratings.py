"""Sequences for the pre-training benchmark: the ratings of MovieLens-1M, or a simulated log of its shape.

MovieLens-1M (Harper and Konstan, 2015) is fetched by its user from grouplens.org/datasets/movielens. The simulated log
is no substitute for it: it has the same sizes and something to learn, so speeds carry over and accuracies do not.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd


class Sequences(NamedTuple):
    """Every user's items, oldest first; items are 1..V.

    ``offsets [U + 1]`` cuts ``items`` into users: user ``u`` owns ``offsets[u] : offsets[u + 1]``.
    """

    items: np.ndarray
    offsets: np.ndarray
    source: str

    @property
    def num_items(self) -> int:
        """V."""
        return int(self.items.max())

    @property
    def sha256(self) -> str:
        """Of the arrays, to tell whether two runs saw the same log."""
        return hashlib.sha256(self.items.tobytes() + self.offsets.tobytes()).hexdigest()

    def frame(self) -> pd.DataFrame:
        """``user_id``, ``item_id`` and ``timestamp``, the position in the user's sequence."""
        counts = np.diff(self.offsets)
        position = np.arange(len(self.items)) - np.repeat(self.offsets[:-1], counts)
        return pd.DataFrame(
            {"user_id": np.repeat(np.arange(len(counts)), counts), "item_id": self.items, "timestamp": position}
        )


def read_ratings(path: Path) -> Sequences:
    """``user::item::rating::timestamp``; every rating is a positive; items with fewer than 5 ratings are left out."""
    names = ["user", "item", "rating", "timestamp"]
    ratings = pd.read_csv(path, sep="::", engine="python", names=names)
    ratings = ratings[ratings.groupby("item")["item"].transform("size") >= 5]
    ratings = ratings[ratings.groupby("user")["user"].transform("size") >= 5]
    ratings = ratings.sort_values(["user", "timestamp"], kind="stable")
    users = ratings["user"].to_numpy()
    offsets = np.flatnonzero(np.append(True, users[1:] != users[:-1]))
    items = np.unique(ratings["item"].to_numpy(), return_inverse=True)[1] + 1
    return Sequences(items.astype(np.int64), np.append(offsets, len(users)), path.name)


def simulate(users: int, items: int, events: int, seed: int = 0) -> Sequences:
    """A Markov chain over series of items, mixed with personal genres and popularity, without repeated items.

    Items form a circle of series of 17, and genres of 10 neighboring series. The next item is, in eight of ten cases,
    of the series of one of the last three items or of one beside it, else of a genre out of the user's own mix; within
    series and genre it is drawn by popularity, which falls off as 1 / rank^0.7.
    """
    rng = np.random.default_rng(seed)
    counts = _lengths(rng, users, min(20, events // users), min(2314, items // 2), events)
    # place p of the catalog belongs to series p // 17 and genre p // 170: both are ranges of one cumulative mass
    mass = np.append(0, np.cumsum(1.0 / np.arange(1, items + 1)[rng.permutation(items)] ** 0.7))
    series, genres = -(-items // 17), -(-items // 170)
    tastes = np.cumsum(rng.dirichlet(np.full(genres, 0.3), users), axis=1)
    order = np.argsort(-counts, kind="stable")  # the users that are still active are the first ones
    seen, drawn = np.zeros((users, items), bool), np.zeros((users, counts.max()), np.int64)
    for step in range(counts.max()):
        active = order[: np.searchsorted(-counts[order], -step)]
        shape = (len(active), 12)  # proposals, of which the first unseen one is taken
        genre = (tastes[active, None, :] < rng.random((*shape, 1))).sum(-1).clip(max=genres - 1)
        width = np.full(shape, 170)
        if step:
            back = np.minimum(rng.choice([1, 1, 2, 3], shape), step)
            series_now = drawn[active[:, None], step - back] // 17
            chained = rng.random((len(active), 1)) < 0.8
            beside = (series_now + rng.choice([-1, 0, 1, 2], shape, p=[0.1, 0.4, 0.3, 0.2])) % series
            genre, width = np.where(chained, beside, genre), np.where(chained, 17, width)
        low, high = mass[(genre * width).clip(max=items)], mass[((genre + 1) * width).clip(max=items)]
        proposals = np.searchsorted(mass, low + rng.random(shape) * (high - low), side="right").clip(1, items) - 1
        fresh = ~seen[active[:, None], proposals]
        chosen = proposals[np.arange(len(active)), fresh.argmax(1)]
        for row in np.flatnonzero(~fresh.any(1)):
            chosen[row] = rng.choice(np.flatnonzero(~seen[active[row]]))
        seen[active, chosen] = True
        drawn[active, step] = chosen
    names = rng.permutation(items) + 1  # so that ids say nothing of series and genres
    flat = names[drawn[np.arange(counts.max()) < counts[:, None]]]
    return Sequences(flat, np.append(0, np.cumsum(counts)), "simulated in the shape of MovieLens-1M")


def _lengths(rng: np.random.Generator, users: int, least: int, most: int, events: int) -> np.ndarray:
    """Log-normal sequence lengths between ``least`` and ``most`` that sum to ``events``."""
    raw = rng.lognormal(4.3, 1.05, users)
    low, high = 0.0, 1e4
    for _ in range(60):  # the scale at which the clipped lengths have the right sum
        scale = (low + high) / 2
        counts = (least + raw * scale).astype(np.int64).clip(max=most)
        low, high = (scale, high) if counts.sum() < events else (low, scale)
    missing = events - counts.sum()
    counts[rng.permutation(np.flatnonzero((counts < most) & (counts > least)))[: abs(missing)]] += np.sign(missing)
    return counts

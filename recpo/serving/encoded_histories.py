"""Histories as a policy reads them: padded arrays of some users, and the events of many users of which they are made.

NumPy and Arrow only; it does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recpo.base.features import FeatureArrays


class EncodedHistories(NamedTuple):
    """The input of a policy for some users, int64, padded with 0 on the right.

    Attributes:
        item_ids: ``[B, H]`` internal ids, oldest first.
        feedback: ``[B, H]`` feedback levels (``recpo.base.feedback``).
        exclude: ``[B, M]`` internal ids that must not be listed, in addition to ``item_ids``.
        timestamps: ``[B, H]`` milliseconds since the epoch; None if the policy does not read them.
        behaviors: ``[B, H]`` bit sets; None if the policy does not read them.
        user: features of the users, ``[B]``; None if the policy does not read them.
        context: features of requests, ``[B, H + 1]``, as in ``base.types.Histories``; None if the policy does not read
            them.
        allowed: ``[B, V + 1]`` bool, the items that may be listed; None = all.
    """

    item_ids: np.ndarray
    feedback: np.ndarray
    exclude: np.ndarray
    timestamps: np.ndarray | None = None
    behaviors: np.ndarray | None = None
    user: FeatureArrays | None = None
    context: FeatureArrays | None = None
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class ServingCounts:
    """Counts of what was served and what was left out. Events and items of users who are not served do not count.

    Attributes:
        users: number of users served.
        events: events of their histories, including the skipped ``unknown_items``.
        unknown_items: events whose item is not in the catalog.
        impossible_values: watch times and durations that cannot be true (negative, infinite); treated as missing.
        events_without_feedback: events of known items whose feedback level is 0 (unknown), because watch time, duration
            or label is missing.
        empty_histories: users without an event of a known item; they get the recommendations for an empty history.
        truncated_histories: users with more events than the policy reads. It reads the most recent ones; the older
            items are not listed either.
        unknown_excluded: items to exclude that are not in the catalog.
        unknown_candidates: candidates to score that are not in the catalog.
        short_lists: users with fewer than k items left.
    """

    users: int = 0
    events: int = 0
    unknown_items: int = 0
    impossible_values: int = 0
    events_without_feedback: int = 0
    empty_histories: int = 0
    truncated_histories: int = 0
    unknown_excluded: int = 0
    unknown_candidates: int = 0
    short_lists: int = 0

    def __add__(self, other: ServingCounts) -> ServingCounts:
        """The sum of two counts."""
        return ServingCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def to_dict(self) -> dict[str, int]:
        """By name, for JSON."""
        return dict(vars(self))


class PerUser(NamedTuple):
    """Columns of all users, concatenated: the values of user u are ``values[name][offsets[u] : offsets[u + 1]]``."""

    values: dict[str, np.ndarray]
    offsets: np.ndarray

    @classmethod
    def of(cls, num_users: int, user: np.ndarray, **values: np.ndarray) -> PerUser:
        """From values sorted by ``user [N]``."""
        return cls(values, np.concatenate([[0], np.cumsum(np.bincount(user, minlength=num_users))]))

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Number of values of the users ``begin .. end - 1``."""
        return self.offsets[begin + 1 : end + 1] - self.offsets[begin:end]

    def padded(self, begin: int, end: int, width: int) -> dict[str, np.ndarray]:
        """The last ``width`` values of the users ``begin .. end - 1``: ``[end - begin, width]`` of each column."""
        first, last, lengths = self.offsets[begin], self.offsets[end], self.lengths(begin, end)
        begins = self.offsets[begin + 1 : end + 1] - np.minimum(lengths, width)
        place = np.arange(first, last) - begins.repeat(lengths)
        kept = place >= 0
        target = (np.arange(end - begin) * width).repeat(lengths)[kept] + place[kept]
        tables = {}
        for name, column in self.values.items():
            table = np.zeros((end - begin) * width, np.int64)
            table[target] = column[first:last][kept]
            tables[name] = table.reshape(end - begin, width)
        return tables


@dataclass(frozen=True)
class UserHistories:
    """The histories of a number of users, ready to be read in batches.

    Attributes:
        users: external ids, in the order in which they are served.
        counts: what was read and what was left out.
        events: ``item_ids`` and ``feedback`` of every known event, sorted by user and time; also its ``timestamps``,
            ``behaviors`` and row of ``context`` if the policy reads them.
        exclude: items that must not be listed, including items that are too old to be read; distinct and ascending.
        max_history: H.
        unlisted: items that are listed for no user.
        user: features of the users ``[U]``; None = the policy does not read them.
        context: features of requests: one row for no event, the rows of ``events``, and the rows of the users' current
            requests; None as above.
    """

    users: pa.Array
    counts: ServingCounts
    events: PerUser
    exclude: PerUser
    max_history: int
    unlisted: np.ndarray
    user: FeatureArrays | None = None
    context: FeatureArrays | None = None

    def batches(self, size: int) -> Iterator[tuple[slice, EncodedHistories]]:
        """Yields ``size`` users at a time: their indices, and the input of the policy."""
        for begin in range(0, len(self.users), size):
            end = min(begin + size, len(self.users))
            yield slice(begin, end), self._encoded(begin, end)

    def _encoded(self, begin: int, end: int) -> EncodedHistories:
        columns: dict[str, Any] = {**self.events.padded(begin, end, self.max_history)}
        if self.context is not None:
            columns["context"] = self.context.rows(self._requests(begin, end, columns["context"]))
        if self.user is not None:
            columns["user"] = self.user.rows(np.arange(begin, end))
        width = max(1, int(self.exclude.lengths(begin, end).max()))
        exclude = self.exclude.padded(begin, end, width)["item_ids"]
        if len(self.unlisted):
            exclude = np.concatenate([exclude, np.tile(self.unlisted, (end - begin, 1))], 1)
        return EncodedHistories(exclude=exclude, **columns)

    def _requests(self, begin: int, end: int, rows: np.ndarray) -> np.ndarray:
        """Rows of ``context``, ``[B, H + 1]``: of the events, ``rows``, followed by the user's current request."""
        rows = np.pad(rows, ((0, 0), (0, 1)))
        lengths = np.minimum(self.events.lengths(begin, end), self.max_history)
        now = 1 + self.events.offsets[-1] + np.arange(begin, end)
        np.put_along_axis(rows, lengths[:, None], now[:, None], 1)
        return rows

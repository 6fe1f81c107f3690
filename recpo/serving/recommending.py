"""From frames of raw events to frames of lists and scores: what a run and a bundle answer with."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from recpo.base.errors import RecpoError
from recpo.base.frames import Frame, id_column, to_arrow
from recpo.log.id_map import IdMap
from recpo.serving.encoded_histories import ServingCounts, UserHistories
from recpo.serving.histories import ITEM_ID, LATEST_MS, SECONDS_UNTIL, USER_ID, HistoryReader, rows_of_users
from recpo.serving.runtimes import Runtime

BATCH_SIZE = 256

#: An ISO time, a time, or milliseconds since the epoch.
Moment: TypeAlias = str | datetime | int


class Served(NamedTuple):
    """An answer, and counts of skipped events.

    Attributes:
        table: of ``recommend``: ``user_id`` as given, ``rank`` int32 from 1, ``item_id`` external, ``score`` float32
            (natural-log probability); users in the order in which they were served, best item first. Of ``score``: the
            candidates' ``user_id`` and ``item_id`` as given, ``score``.
        counts: see ``ServingCounts``.
    """

    table: pa.Table
    counts: ServingCounts

    def to_pandas(self) -> pd.DataFrame:
        """The table; the counts are in ``attrs["counts"]``, by name."""
        frame = self.table.to_pandas()
        frame.attrs["counts"] = self.counts.to_dict()
        return frame


def recommend_lists(
    runtime: Runtime,
    known: IdMap,
    read: UserHistories,
    *,
    k: int | None = None,
    allowed: np.ndarray | None = None,
    batch_size: int = BATCH_SIZE,
) -> Served:
    """The best items of every user, without those of the history and those to exclude.

    Args:
        runtime: ranks.
        known: the items of the catalog.
        read: the users to serve, from ``HistoryReader.read``.
        k: list length; None = the longest that the runtime serves.
        allowed: ``[V + 1]`` bool, which items may be listed (``recpo.serving.attributes``); None = every one.
        batch_size: users ranked at once.

    Raises:
        RecpoError: k or batch_size is not an integer in its range.
    """
    k = validate_k(runtime.k if k is None else k, runtime.k)
    items, scores = [], []
    for _, inputs in read.batches(_validate_batch_size(batch_size)):
        if allowed is not None:
            inputs = inputs._replace(allowed=np.tile(allowed, (len(inputs.item_ids), 1)))
        top_items, top_scores = runtime.recommend(inputs, k)
        items.append(top_items)
        scores.append(top_scores)
    return _lists(
        read,
        known,
        np.concatenate(items) if items else np.zeros((0, k), np.int64),
        np.concatenate(scores) if scores else np.zeros((0, k), np.float32),
    )


def score_candidates(
    runtime: Runtime,
    reader: HistoryReader,
    histories: Frame,
    candidates: Frame,
    *,
    user_features: Frame | None = None,
    context: Frame | None = None,
    batch_size: int = BATCH_SIZE,
) -> Served:
    """Log-probabilities of given items after the users' whole histories.

    Args:
        runtime: scores.
        reader: reads the histories.
        histories: events in long format, see ``HistoryReader``.
        candidates: ``user_id`` and ``item_id``; users without an event are scored as new ones. An item that is not in
            the catalog scores nan and counts as ``unknown_candidates``.
        user_features: features of users, see ``HistoryReader.read``.
        context: features of the requests, see ``HistoryReader.read``.
        batch_size: users scored at once.

    Returns:
        One row per candidate, in the order given.

    Raises:
        RecpoError: see ``HistoryReader.read``, or the runtime only ranks.
    """
    table = to_arrow(candidates, "candidates")
    owner, items = id_column(table, USER_ID, "candidates"), reader.known_items(table, "candidates")
    reader.validate_columns(histories, user_features, context)
    read = reader.read(histories, users=owner.unique(), user_features=user_features, context=context)
    user = rows_of_users(owner, read.users, "candidates")
    order = np.argsort(user, kind="stable")
    column = np.empty(len(user), np.int64)
    counts = np.bincount(user, minlength=len(read.users))
    ends = np.cumsum(counts)
    column[order] = np.arange(len(user)) - np.repeat(ends - counts, counts)
    scores = np.full(len(user), np.nan, np.float32)
    for part, inputs in read.batches(_validate_batch_size(batch_size)):
        rows = order[ends[part.start] - counts[part.start] : ends[part.stop - 1]]
        padded = np.zeros((part.stop - part.start, int(counts[part].max())), np.int64)
        padded[user[rows] - part.start, column[rows]] = items[rows]
        scores[rows] = runtime.score(inputs, padded)[user[rows] - part.start, column[rows]]
    result = pa.table({USER_ID: owner, ITEM_ID: table[ITEM_ID], "score": scores})
    return Served(result, replace(read.counts, unknown_candidates=int((items == 0).sum())))


def milliseconds(at: Moment | None) -> int:
    """Milliseconds since the epoch of an ISO time or date (UTC without a zone), or of such a number; None = now.

    Raises:
        RecpoError: it is not a time.
    """
    if at is None:
        return int(time.time() * 1000)
    if isinstance(at, int) and not isinstance(at, bool) and SECONDS_UNTIL <= at < LATEST_MS:
        return at
    try:
        moment = datetime.fromisoformat(str(at))  # also of a datetime
    except ValueError as error:
        raise RecpoError(
            f"at is {at!r}, expected an ISO time such as 2026-11-23T18:00:00+01:00, or milliseconds since 1970",
            code="bad_value",
            field="at",
        ) from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def validate_k(k: object, longest: int) -> int:
    """Returns ``k``; raises ``RecpoError`` if it is not an integer from 1 to ``longest``."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise RecpoError(f"k is {k!r}, expected a whole number from 1 to {longest}", code="wrong_type", field="k")
    if not 1 <= k <= longest:
        raise RecpoError(
            f"k is {k}, expected 1 to {longest}; of a bundle, export one with a larger --k for more",
            code="out_of_range",
            field="k",
        )
    return int(k)


def _validate_batch_size(batch_size: object) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise RecpoError(
            f"batch_size is {batch_size!r}, expected a whole number of at least 1",
            code="out_of_range",
            field="batch_size",
        )
    return batch_size


def _lists(read: UserHistories, known: IdMap, items: np.ndarray, scores: np.ndarray) -> Served:
    filled = items > 0
    row, rank = np.nonzero(filled)
    columns = {
        USER_ID: read.users.take(pa.array(row)),
        "rank": pa.array((rank + 1).astype(np.int32)),
        ITEM_ID: known.to_external(items[filled]),
        "score": pa.array(scores[filled].astype(np.float32)),
    }
    return Served(pa.table(columns), replace(read.counts, short_lists=int((~filled).any(1).sum())))

"""Held-out users, streamed shard by shard: the same number of batches on every rank, every user once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from recpo.data.prepared import Period, Prepared
from recpo.data.slates import evaluation_batch
from recpo.types import EvaluationBatch


class Rank(NamedTuple):
    """This process among its peers, and how many micro-batches make one optimizer step."""

    rank: int = 0
    world_size: int = 1
    accumulate: int = 1


class HeldOutBatches(IterableDataset[EvaluationBatch]):
    """The users of a held-out split, batch by batch; every rank takes every ``world_size``-th batch.

    Every rank yields the same number of batches, as a lookup in a sharded table is one of all ranks: those that would
    fall short go on with a user who was counted already, and without that user's held-out events.
    With ``max_users`` so many of them, evenly spaced: the first ones of a log may be quite unlike the others.
    """

    def __init__(
        self,
        prepared: Prepared,
        split: Period,
        history_length: int,
        batch_size: int,
        rank: Rank,
        max_users: int | None = None,
    ) -> None:
        self._prepared, self._split, self._history_length = prepared, split, history_length
        self._batch_size, self._rank, self._max_users = batch_size, rank, max_users

    def __iter__(self) -> Iterator[EvaluationBatch]:
        plan = self._plan()
        number = int(plan.batches_before[-1])
        world_size, loaded = self._rank.world_size, -1
        for turn in range(self._rank.rank, -(-number // world_size) * world_size, world_size):
            shard, users = plan.batch(min(turn, number - 1), self._batch_size)
            if shard != loaded:
                events, loaded = self._prepared.load(self._split, shard), shard
            if turn < number:
                yield evaluation_batch(events, users, self._history_length)
            else:
                yield _without_targets(evaluation_batch(events, users[:1], self._history_length))

    def _plan(self) -> _HeldOutPlan:
        shards = self._prepared.manifest["shards"][self._split]
        users_before = np.concatenate([[0], np.cumsum([shard["users"] for shard in shards], dtype=np.int64)])
        total = int(users_before[-1])
        chosen = total if self._max_users is None else min(self._max_users, total)
        chosen_before = -(-users_before * chosen // max(1, total))
        batches_before = np.concatenate([[0], np.cumsum(-(-np.diff(chosen_before) // self._batch_size))])
        return _HeldOutPlan(users_before, chosen_before, batches_before)


class _HeldOutPlan(NamedTuple):
    """Numbers before each shard, ``[shards + 1]`` int64, the last one the total: of users, chosen users, batches."""

    users_before: np.ndarray
    chosen_before: np.ndarray
    batches_before: np.ndarray

    def batch(self, number: int, size: int) -> tuple[int, np.ndarray]:
        """The shard of batch ``number``, and its users as rows of that shard."""
        shard = int(np.searchsorted(self.batches_before, number, side="right")) - 1
        begin = self.chosen_before[shard] + (number - self.batches_before[shard]) * size
        chosen = np.arange(begin, min(begin + size, self.chosen_before[shard + 1]))
        return shard, chosen * self.users_before[-1] // self.chosen_before[-1] - self.users_before[shard]


def _without_targets(batch: EvaluationBatch) -> EvaluationBatch:
    slates = batch.feedback.slates
    masked = slates._replace(mask=torch.zeros_like(slates.mask))
    return batch._replace(feedback=batch.feedback._replace(slates=masked))

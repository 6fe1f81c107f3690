"""Batches from prepared shards, as a Lightning data module."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from recpo.base.errors import RecpoError, validate_range, validate_seed
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch
from recpo.batches.held_out import HeldOutBatches, Rank
from recpo.batches.slates import Layout, SequenceLayout
from recpo.batches.train_batches import Assign, Contents, Epochs, Phases, Planner, ResumableLoader, TrainBatches
from recpo.log.prepared import Prepared

_MOST_WORKERS = 256


class FeedbackDataModule(LightningDataModule):
    """Batches of logged feedback from a prepared directory.

    Args:
        prepared: directory written by ``recpo prepare``.
        batch_size: contexts per micro-batch on one rank.
        layout: how events become contexts and slates: ``SequenceLayout`` (every position of a user's history in one
            pass), ``ImpressionLayout`` (one request at a time) or ``PreferenceListLayout`` (one positive event and
            rejected items).
        num_workers: processes that gather batches; 0 gathers in the training process. The batches are the same.
        seed: determines the order of the epochs and the items that the layout samples.
        evaluation_batch_size: users per validation batch.
        max_validation_users: validate on this many users of the validation split, evenly spaced; null = all.
        assign: what is assigned to ranks. With "batches", every rank reads every shard and gathers every W-th batch,
            where W is the number of ranks; results do not depend on W. With "shards", the shards are divided among the
            ranks, in the same way in every epoch, and each rank reads only its own, so reading is divided by W. Every
            context still occurs once per epoch, in an order that depends on (seed, epoch, W). The content of an
            optimizer step then depends on W, the labels of a step (TernaryAdvantage) are those of the rank's own part,
            and a run can resume in the middle of an epoch only with the same number of ranks. Ranks with fewer batches
            than the first get empty ones. With one rank, both options are the same.
        segments: for data that was extended (``recpo prepare --extends``): use all of it, or only the events that the
            last extension added. The latter is for a nightly run that starts from the previous run, at a cost that does
            not grow with the log.
        replay: with segments newest, the number of batches of older events per batch of new ones; they differ in each
            epoch.

    Attributes:
        phases: how training goes through the epoch; set by the training workflow.
        step_labels: training reads ``FeedbackBatch.step_labels``; set by the training workflow.
        whole_steps: training reads ``FeedbackBatch.following``; set by the training workflow.
        reads: what batches contain beyond items, feedback and times; set by the training workflow.
        planner: adds to a batch the counts that the CPU can compute in advance (``FeedbackBatch.plan``); set by
            training.
    """

    phases = Phases()
    step_labels = False
    whole_steps = False
    reads = Reads()
    planner: Planner | None = None

    def __init__(
        self,
        prepared: str | Path,
        batch_size: int = 128,
        layout: Layout = SequenceLayout(),  # noqa: B008  frozen
        num_workers: int = 0,
        seed: int = 0,
        evaluation_batch_size: int = 512,
        max_validation_users: int | None = None,
        assign: Assign = "batches",
        segments: Literal["all", "newest"] = "all",
        replay: float = 0.0,
    ) -> None:
        super().__init__()
        rule = "is a number of at least 0, and above 0 only with data.segments newest"
        fits = 0.0 <= replay < float("inf") and not (replay and segments == "all")
        validate_range(fits, "data.replay", rule, f"{replay} and {segments}")
        sizes = {"batch_size": batch_size, "evaluation_batch_size": evaluation_batch_size}
        sizes |= {} if max_validation_users is None else {"max_validation_users": max_validation_users}
        for name, size, least in [*((n, s, 1) for n, s in sizes.items()), ("num_workers", num_workers, 0)]:
            validate_range(size >= least, f"data.{name}", f"must be at least {least}", size)
        rule = f"must be at most {_MOST_WORKERS}"
        validate_range(num_workers <= _MOST_WORKERS, "data.num_workers", rule, num_workers)
        validate_seed(seed, "data.seed")
        self.prepared = Prepared.open(prepared)
        self.layout = layout
        self._batch_size, self._num_workers, self._seed = batch_size, num_workers, seed
        self._assign, self._newest_only, self._replay = assign, segments == "newest", replay
        self._evaluation_batch_size, self._max_validation_users = evaluation_batch_size, max_validation_users

    def train_dataloader(self) -> ResumableLoader:
        """Batches of the training period, in the order of ``(seed, epoch)``."""
        batches = TrainBatches(
            self.prepared,
            self.layout,
            self._batch_size,
            self._seed,
            self._rank(),
            Epochs(self.phases, self._assign, self._newest_only, self._replay),
            Contents(self.reads, self.step_labels, self.whole_steps, self.planner),
            self._sum_over_ranks,
        )
        return ResumableLoader(batches, self._num_workers, self._current_epoch if self.trainer else None)

    def every_context(self) -> TrainBatches:
        """Every context of the training period once, on every rank.

        Raises:
            RecpoError: training uses only the newest segment.
        """
        if self._newest_only:
            raise RecpoError(
                "reference: cached needs every context: set reference to frozen, or data.segments to all",
                code="conflicting_options",
                field="reference",
            )
        return TrainBatches(
            self.prepared, self.layout, self._batch_size, self._seed, Rank(), contents=Contents(self.reads)
        )

    def val_dataloader(self) -> DataLoader[EvaluationBatch]:
        """Held-out users of the validation period."""
        length, size = self.layout.history_length, self._evaluation_batch_size
        held_out = HeldOutBatches(
            self.prepared, "valid", length, size, self._rank(), self._max_validation_users, self.reads
        )
        return DataLoader(held_out, batch_size=None)

    def _sum_over_ranks(self, counts: np.ndarray) -> np.ndarray:
        if self.trainer is None:
            return counts
        strategy = self.trainer.strategy
        mine = torch.from_numpy(counts).to(strategy.root_device)
        total: np.ndarray = strategy.reduce(mine, reduce_op="sum").cpu().numpy()
        return total

    def _current_epoch(self) -> int:
        assert self.trainer is not None
        return int(self.trainer.current_epoch)

    def _rank(self) -> Rank:
        trainer = self.trainer
        if trainer is None:
            return Rank()
        return Rank(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)

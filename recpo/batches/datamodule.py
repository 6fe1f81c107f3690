"""Batches from prepared shards, as a Lightning data module: split over ranks and workers, resumable within an epoch.

The order of an epoch depends only on ``(seed, epoch)``: the shards come in a random order, the windows of a shard come
in a random order, and batches are cut within a shard. Batch ``g`` of that order belongs to rank ``g % world_size``;
within a rank, the workers take turns. So neither the number of workers nor a resume changes what a rank receives, and a
process holds one shard at a time. If training visits the same contexts several times in a row (``Phases``), a process
holds the shards of one phase.

With ``assign="shards"`` (``FeedbackDataModule``) each rank has its own part of the shards, in an order of that kind.
The parts stay the same in all epochs, because a trainer asks for the length of an epoch only once and a node can keep
what it has read. They are balanced by size: the first part has the most batches, at most one shard more than any other
part, and the others are filled up with empty batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recpo.base.errors import MAX_SEED, RecpoError, validate_range
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch, FeedbackBatch
from recpo.batches.slates import HeldOutBatches, Layout, Rank, SequenceLayout, Windows
from recpo.log.locations import Location
from recpo.log.prepared import Events, Prepared

Assign = Literal["batches", "shards"]
"""What is assigned to ranks: batches, cut from all shards, or whole shards."""


class Phases(NamedTuple):
    """How an epoch is cut into phases: runs of optimizer steps that are repeated before the next run begins.

    The batches of a step stay together. From the second pass on, the steps of a phase come in a random order.

    Attributes:
        steps: optimizer steps of one pass; the last phase of an epoch may have fewer.
        passes: number of passes over a phase.
    """

    steps: int = 1
    passes: int = 1


@dataclass(frozen=True)
class Epochs:
    """How epochs go through the training shards.

    Attributes:
        phases: how an epoch is cut into phases.
        assign: what is assigned to ranks. With one rank both values mean the same.
        newest_only: read only the shards of the last extension, if the data was extended.
        replay: with ``newest_only``, number of batches of older shards for each batch of the newest ones. An epoch
            takes whole shards in a random order until it has that many batches, and a part of the last shard.
    """

    phases: Phases = Phases()  # noqa: RUF009  immutable
    assign: Assign = "batches"
    newest_only: bool = False
    replay: float = 0.0


@dataclass(frozen=True)
class Contents:
    """What batches contain besides items, feedback and times.

    Attributes:
        reads: columns of the prepared data.
        step_labels: whether batches carry the labels of their whole optimizer step (``FeedbackBatch.step_labels``).
        whole_steps: whether the first micro-batch of a step carries the others (``FeedbackBatch.later_micro_batches``).
        planner: adds to every batch the counts for which a training step would otherwise wait for its device
            (``FeedbackBatch.plan``).
    """

    reads: Reads = Reads()  # noqa: RUF009  immutable
    step_labels: bool = False
    whole_steps: bool = False
    planner: Callable[[FeedbackBatch], FeedbackBatch] | None = None


class _Planned(NamedTuple):
    """A batch before it is gathered: some windows of one shard."""

    events: Events
    windows: Windows
    context_ids: np.ndarray


class TrainBatches(IterableDataset[FeedbackBatch]):
    """One rank's batches of an epoch.

    Args:
        prepared: the prepared directory.
        layout: how events become contexts and slates.
        batch_size: contexts per batch.
        seed: determines the order, and what the layout samples.
        rank: rank of this process, and the number of ranks.
        epochs: how epochs go through the shards.
        contents: what batches contain besides items, feedback and times.
        sum_over_ranks: adds up arrays of all ranks. If given, every rank only counts the windows of its share of the
            shards.

    Raises:
        RecpoError: nothing to train on, or fewer shards than ranks with ``assign="shards"``.

    Attributes:
        prepared: the prepared directory.
        epoch: which epoch to yield next.
        start: number of this rank's batches of that epoch to skip, because they were consumed before a resume.
    """

    def __init__(
        self,
        prepared: Prepared,
        layout: Layout,
        batch_size: int,
        seed: int,
        rank: Rank,
        epochs: Epochs = Epochs(),
        contents: Contents = Contents(),
        sum_over_ranks: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        older = 0
        if epochs.newest_only:
            self._validate_segments(epochs.assign, prepared)
            older = sum(prepared.segments[:-1])
        self._older = np.arange(older)
        self.prepared, self._layout, self._batch_size = prepared, layout, batch_size
        self._seed, self._rank, self._phases, self._contents = seed, rank, epochs.phases, contents
        # number of parts that the shards are divided into, and number of ranks that share the batches of a part
        self._num_parts = rank.world_size if epochs.assign == "shards" else 1
        self._sharers = rank.world_size // self._num_parts
        self._validate_parts()
        self._windows = self._count_windows(sum_over_ranks)
        if self.num_contexts == 0:
            raise RecpoError(
                f"{prepared.root}: the training split holds no "
                + (f"context for {layout}: no event is positive" if layout.cuts_by_label else "events"),
                code="empty",
                field="train",
            )
        batches = -(-self._windows // batch_size)
        by_size = older + np.argsort(-batches[older:], kind="stable")
        self._shards = np.sort(by_size[rank.rank % self._num_parts :: self._num_parts])
        self._replayed = round(epochs.replay * int(batches[older:].sum())) if older else 0
        self._num_batches = int(batches[self._shards].sum()) + self._replayed
        self._most_batches = int(batches[by_size[:: self._num_parts]].sum()) + self._replayed
        self._make_batch = layout.batch_maker(prepared, seed)
        self.epoch = 0
        self.start = 0

    def _validate_parts(self) -> None:
        shards = self.prepared.num_shards("train")
        if 0 < shards < self._num_parts:
            raise RecpoError(
                f"{self.prepared.root}: {shards} training shards cannot be assigned to {self._num_parts} ranks: some "
                "would get none, and never train; prepare the log again with a smaller --rows_per_shard, or set "
                "data.assign to batches",
                code="conflicting_options",
                field="data.assign",
            )

    def _count_windows(self, sum_over_ranks: Callable[[np.ndarray], np.ndarray] | None) -> np.ndarray:
        counts = np.zeros(self.prepared.num_shards("train"), np.int64)
        first, step = (0, 1) if sum_over_ranks is None else (self._rank.rank, self._rank.world_size)
        for shard in range(len(self._older) + first, len(counts), step):
            counts[shard] = self._windows_of_shard(shard)
        return counts if sum_over_ranks is None else sum_over_ranks(counts)

    def _windows_of_shard(self, shard: int) -> int:
        keys = self.prepared.keys("train", shard, self._layout.cuts_by_label)
        return len(self._layout.scoring_windows(keys).slate_start)

    @staticmethod
    def _validate_segments(assign: Assign, prepared: Prepared) -> None:
        if len(prepared.segments) < 2:
            raise RecpoError(
                f"data.segments newest: {prepared.root} was never extended, so all of it is one segment: set "
                "data.segments to all",
                code="unused_option",
                field="data.segments",
            )
        if assign == "shards":
            raise RecpoError(
                "data.segments newest: the few shards of a segment are read by every rank: set data.assign to batches",
                code="conflicting_options",
                field="data.assign",
            )

    @cached_property
    def _first_context(self) -> np.ndarray:
        """The first context id of every shard. Older shards to replay are not read: their rows are counted instead."""
        if not len(self._older):
            return np.concatenate([[0], np.cumsum(self._windows)])
        rows = [shard["rows"] for shard in self.prepared.manifest["shards"]["train"]]
        return np.concatenate([[0], np.cumsum(rows)])

    @property
    def num_contexts(self) -> int:
        """Number of windows; context ids are 0 .. num_contexts - 1, unless older shards are only replayed."""
        return int(self._windows.sum())

    def __len__(self) -> int:
        return self._length // self._sharers * self._phases.passes

    def __iter__(self) -> Iterator[FeedbackBatch]:
        worker = get_worker_info()
        workers, mine = (worker.num_workers, worker.id) if worker else (1, 0)
        start = self.start
        # Phases that were consumed before a resume are skipped without reading them.
        consumed = start // self._visits_per_phase
        local = consumed * self._visits_per_phase - 1
        for step in self._visits(consumed):
            labels = _step_labels(step) if self._contents.step_labels and self._batches_per_step > 1 else None
            own = step[self._rank.rank // self._num_parts :: self._sharers]
            for place, planned in enumerate(own):
                local += 1
                if local >= start and (local - start) % workers == mine:
                    batch = self._gathered(planned, labels)
                    if self._contents.whole_steps and (place == 0 or local == start):
                        others = (self._gathered(other, labels) for other in own[place + 1 :])
                        batch = batch._replace(later_micro_batches=tuple(others))
                    yield batch

    def _gathered(self, planned: _Planned, step_labels: Tensor | None) -> FeedbackBatch:
        batch = self._make_batch(*planned, self.epoch)._replace(step_labels=step_labels)
        return batch if self._contents.planner is None else self._contents.planner(batch)

    @property
    def division(self) -> dict[str, Any]:
        """How an epoch is divided: the batch size, the number of ranks, and what is assigned to them."""
        assign: Assign = "shards" if self._num_parts > 1 else "batches"
        return {"batch_size": self._batch_size, "world_size": self._rank.world_size, "assign": assign}

    @property
    def _length(self) -> int:
        """Number of batches of one pass over a part, including empty ones.

        Every rank must take part in every step, so a rank with too few batches gets empty ones. A step that is repeated
        must also have all of its micro-batches; otherwise, the following steps would be cut at other places.
        """
        whole = self._sharers * (self._rank.accumulate if self._phases.passes > 1 else 1)
        return -(-self._most_batches // whole) * whole

    @property
    def _batches_per_step(self) -> int:
        return self._sharers * self._rank.accumulate

    @property
    def _steps_per_phase(self) -> int:
        return 1 if self._phases.passes == 1 else self._phases.steps

    @property
    def _visits_per_phase(self) -> int:
        return self._steps_per_phase * self._phases.passes * self._rank.accumulate

    def _visits(self, consumed: int) -> Iterator[list[_Planned]]:
        """The epoch's optimizer steps from phase ``consumed`` on, each one repeated for every pass of its phase."""
        steps = self._steps(consumed * self._steps_per_phase)
        for number in count(consumed):
            phase = list(islice(steps, self._steps_per_phase))
            if not phase:
                return
            yield from phase
            order = np.random.default_rng([self._seed, self.epoch, number])
            for _ in range(self._phases.passes - 1):
                yield from (phase[i] for i in order.permutation(len(phase)))

    def _steps(self, consumed: int) -> Iterator[list[_Planned]]:
        """The batches of the part, grouped into optimizer steps, without the first ``consumed`` steps."""
        batches = self._part(consumed * self._batches_per_step)
        while step := list(islice(batches, self._batches_per_step)):
            yield step

    def _part(self, consumed: int) -> Iterator[_Planned]:
        """The batches of the part without the first ``consumed``. A shard is not read if none of its batches remain."""
        order = np.random.Generator(np.random.PCG64([self._seed, self.epoch]).jumped(self._rank.rank % self._num_parts))
        first_context = self._first_context
        short = self._length - max(self._num_batches, consumed)
        loaded: tuple[Events, Windows] | None = None
        pieces = [*((int(shard), int(self._windows[shard]), None) for shard in self._shards), *self._replay()]
        for place in order.permutation(len(pieces)):
            shard, count, limit = pieces[place]
            contexts = order.permutation(count)  # always drawn: the next shard's order depends on it
            every = range(0, len(contexts), self._batch_size)[:limit]
            begins = every[consumed:]
            consumed = max(0, consumed - len(every))
            if not begins:
                continue
            loaded = events, windows = self._load(shard)
            for begin in begins:
                batch = contexts[begin : begin + self._batch_size]
                yield _Planned(events, windows.take(batch), batch + first_context[shard])
        if short > 0:
            events, _ = loaded or self._load(self._shards[0])
            nothing = np.zeros(1, np.int64)
            yield from repeat(_Planned(events, Windows(nothing, nothing, nothing, nothing), nothing), short)

    def _replay(self) -> list[tuple[int, int, int | None]]:
        """The older shards of this epoch: shard index, windows, and number of batches to take."""
        order, left = np.random.default_rng([self._seed, self.epoch, len(self._older)]), self._replayed
        pieces: list[tuple[int, int, int | None]] = []
        while left:
            before = left
            for shard in order.permutation(self._older).tolist():
                count = self._windows_of_shard(shard)
                taken = min(-(-count // self._batch_size), left)
                pieces += [(shard, count, taken)] * (taken > 0)
                left -= taken
                if not left:
                    break
            if left == before:  # no older shard has a window
                break
        return pieces

    def _load(self, shard: int) -> tuple[Events, Windows]:
        events = self.prepared.load("train", int(shard), self._contents.reads)
        return events, self._layout.scoring_windows(events.keys)


def _step_labels(step: list[_Planned]) -> Tensor:
    """The known labels of a whole optimizer step, so that a threshold does not depend on how the step is split."""
    labels = [
        batch.events.label[rows[batch.events.is_target[rows]]]
        for batch in step
        for begin, end in zip(batch.windows.slate_start, batch.windows.slate_stop, strict=True)
        for rows in [batch.events.by_request[begin:end]]
    ]
    known = np.concatenate(labels)
    return torch.from_numpy(known[~np.isnan(known)])


class ResumableLoader(DataLoader[FeedbackBatch]):
    """A data loader that knows its position, so that a resumed epoch continues with the next batch.

    Lightning keeps ``state_dict`` in its checkpoints and restores it. The current epoch comes from the trainer, because
    a trainer may leave an epoch before its last batch (``limit_train_batches``), make a new loader for it
    (``reload_dataloaders_every_n_epochs``), or restore nothing because the epoch of the checkpoint had ended.

    Args:
        batches: the batches of an epoch.
        num_workers: number of processes that gather batches; 0 = this process.
        current_epoch: returns the epoch that begins; None = every iteration is an epoch.
    """

    def __init__(self, batches: TrainBatches, num_workers: int, current_epoch: Callable[[], int] | None = None) -> None:
        super().__init__(
            batches,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            # clients of object stores do not survive a fork
            multiprocessing_context="spawn" if num_workers and isinstance(batches.prepared.root, Location) else None,
        )
        self._batches, self._current_epoch = batches, current_epoch
        self._epoch, self._yielded = -1, 0
        self._resume_from: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[FeedbackBatch]:  # type: ignore[override]
        # As this is a generator, it starts when the first batch is requested. By then the trainer knows its epoch.
        state, self._resume_from = self._resume_from, None
        if self._current_epoch is not None:
            self._epoch = self._current_epoch()
        else:
            self._epoch = self._epoch + 1 if state is None else state["epoch"]
        resumed = state is not None and state["epoch"] == self._epoch
        self._yielded = self._consumed(state) if state is not None and resumed else 0
        self._batches.epoch, self._batches.start = self._epoch, self._yielded
        for batch in super().__iter__():
            self._yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its batches that each rank consumed, and how it was divided."""
        if self._resume_from is not None:
            return self._resume_from
        return {"epoch": max(0, self._epoch), "batch": self._yielded, **self._batches.division}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration continues after ``state`` if it is in the same epoch.

        ``state`` may come from another number of ranks if all ranks share every shard.
        """
        self._resume_from = state

    def _consumed(self, state: dict[str, Any]) -> int:
        """Number of this rank's batches that were consumed before.

        Raises:
            RecpoError: the batch size changed, or the consumed batches cannot be divided among the ranks; or shards
                were or are assigned, and anything about the division changed.
        """
        now = self._batches.division
        before = {key: state[key] for key in now}
        left = f"data: the epoch was left after {state['batch']} batches of {before['batch_size']} on each of "
        left += f"{before['world_size']} ranks"
        if state["batch"] and before != now and "shards" in (before["assign"], now["assign"]):
            raise RecpoError(
                f"{left} (assign: {before['assign']}); it cannot continue with batch_size {now['batch_size']} on "
                f"{now['world_size']} (assign: {now['assign']}): where shards are assigned, which contexts are left "
                "depends on all three, so keep them until the epoch ends",
                code="conflicting_options",
                field="data.assign",
            )
        consumed, uneven = divmod(state["batch"] * before["world_size"], now["world_size"])
        if uneven or (consumed and before["batch_size"] != now["batch_size"]):
            raise RecpoError(
                f"{left}; it cannot continue with batch_size {now['batch_size']} on {now['world_size']}: keep "
                "batch_size, and let accumulate_grad_batches make up for other ranks",
                code="conflicting_options",
                field="data.batch_size",
            )
        return int(consumed)


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
        contents: what batches contain besides items, feedback and times; set by the training workflow.
    """

    phases = Phases()
    contents = Contents()

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
        validate_range(0 <= seed <= MAX_SEED, "data.seed", f"must be between 0 and {MAX_SEED}", seed)
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
            self.contents,
            self._sum_over_ranks,
        )
        trainer = self.trainer
        current_epoch = None if trainer is None else lambda: int(trainer.current_epoch)
        return ResumableLoader(batches, self._num_workers, current_epoch)

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
            self.prepared, self.layout, self._batch_size, self._seed, Rank(), contents=Contents(self.contents.reads)
        )

    def val_dataloader(self) -> DataLoader[EvaluationBatch]:
        """Held-out users of the validation period."""
        length, size, reads = self.layout.history_length, self._evaluation_batch_size, self.contents.reads
        held_out = HeldOutBatches(self.prepared, "valid", length, size, self._rank(), self._max_validation_users, reads)
        return DataLoader(held_out, batch_size=None)

    def _sum_over_ranks(self, counts: np.ndarray) -> np.ndarray:
        if self.trainer is None:
            return counts
        strategy = self.trainer.strategy
        mine = torch.from_numpy(counts).to(strategy.root_device)
        total: np.ndarray = strategy.reduce(mine, reduce_op="sum").cpu().numpy()
        return total

    def _rank(self) -> Rank:
        trainer = self.trainer
        if trainer is None:
            return Rank()
        return Rank(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)

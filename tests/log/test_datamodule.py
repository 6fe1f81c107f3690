"""The data module: the same order for any workers, ranks and resumes; held-out users without future events."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recpo.base.feedback import HIGHEST, FeedbackDefinition
from recpo.batches import slates
from recpo.batches.datamodule import Contents, Epochs, FeedbackDataModule, Phases, ResumableLoader, TrainBatches
from recpo.batches.slates import HeldOutBatches, ImpressionLayout, Rank, SequenceLayout
from recpo.log.prepared import Prepared
from recpo.log.schema import PAST_SCHEMA
from recpo.log.writing import write_manifest
from tests.refusals import refused

LAYOUT = SequenceLayout(history_length=6)


PAST = [list(range(1, 3 + 7 * (user % 3))) for user in range(11)]


def write_past(path, pairs):
    path.parent.mkdir()
    columns = {"user_index": [user for user, _ in pairs], "item_index": [item for _, item in pairs]}
    pq.write_table(pa.table(columns, schema=PAST_SCHEMA), path, row_group_size=16)


def write_shard(path, users, first_item, is_target=None):
    counts = [3 + 5 * (user % 4) for user in users]
    total = sum(counts)
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(first_item)
    columns = {
        "user_index": np.repeat(users, counts).astype(np.int32),
        "item_index": np.arange(first_item, first_item + total, dtype=np.int32),
        "timestamp": np.arange(total, dtype=np.int64),
        "label": np.where(rng.random(total) < 0.2, np.nan, rng.random(total)).astype(np.float32),
        "dislike": rng.random(total) < 0.1,
        "feedback": rng.integers(0, HIGHEST + 1, total).astype(np.int8),
        "watch_time": np.ones(total, np.float32),
        "duration": np.ones(total, np.float32),
        "propensity": np.full(total, 0.5, np.float32),
        "is_random": np.zeros(total, bool),
        "request": np.arange(total, dtype=np.int64),
        "is_target": np.ones(total, bool) if is_target is None else is_target(total),
    }
    pq.write_table(pa.table(columns), path)
    return total


@pytest.fixture
def shards(tmp_path):
    """Two training shards of 7 and 4 users, one validation shard."""
    first = write_shard(tmp_path / "train/00000.parquet", list(range(7)), 1)
    second = write_shard(tmp_path / "train/00001.parquet", list(range(7, 11)), first + 1)
    third = write_shard(tmp_path / "valid/00000.parquet", list(range(11)), 1, lambda n: np.arange(n) % 3 == 2)
    manifest = {
        "config": {"repeats": False},
        "feedback": FeedbackDefinition().to_json(),
        "num_users": 11,
        "num_items": max(first + second, third),
        "shards": {
            "train": [{"file": "train/00000.parquet"}, {"file": "train/00001.parquet"}],
            "valid": [{"file": "valid/00000.parquet", "users": 11, "past": "valid_past/00000.parquet"}],
            "test": [],
        },
        "files": ["items.parquet", "valid_past/00000.parquet"],
    }
    pq.write_table(pa.table({"item_index": np.arange(1, manifest["num_items"] + 1)}), tmp_path / "items.parquet")
    write_past(tmp_path / "valid_past/00000.parquet", [(user, item) for user in range(11) for item in PAST[user]])
    write_manifest(tmp_path, manifest)
    return Prepared.open(tmp_path)


def rows_of(batches):
    return [batch.context_ids.tolist() for batch in batches]


def test_an_epoch_holds_every_event_once_and_the_next_is_in_another_order(shards):
    batches = TrainBatches(shards, LAYOUT, 3, seed=0, rank=Rank())
    first = list(batches)
    assert len(first) == len(batches)
    rows = sorted(row for rows in rows_of(first) for row in rows)
    assert rows == list(range(batches.num_contexts))
    items = torch.cat([batch.slates.item_ids[batch.slates.mask] for batch in first])
    assert len(items) == len(items.unique())
    batches.epoch = 1
    second = rows_of(batches)
    assert sorted(row for batch in second for row in batch) == rows
    assert second != rows_of(first)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUT, ImpressionLayout(history_length=6, slate_length=4)])
def test_workers_do_not_change_the_batches(shards, layout):
    alone = list(ResumableLoader(TrainBatches(shards, layout, 3, seed=1, rank=Rank()), num_workers=0))
    helped = list(ResumableLoader(TrainBatches(shards, layout, 3, seed=1, rank=Rank()), num_workers=2))
    assert rows_of(alone) == rows_of(helped)
    for a, b in zip(alone, helped, strict=True):
        assert torch.equal(a.slates.item_ids, b.slates.item_ids)
        assert torch.equal(a.histories.item_ids, b.histories.item_ids)


def test_ranks_share_every_row_once_and_take_the_same_number_of_steps(shards):
    ranks = [list(TrainBatches(shards, LAYOUT, 2, seed=0, rank=Rank(rank, 3))) for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1
    rows = [row for batches in ranks for b in batches for row in b.context_ids[b.slates.mask.any(1)].tolist()]
    assert sorted(rows) == list(range(TrainBatches(shards, LAYOUT, 2, 0, Rank()).num_contexts))


def test_the_step_labels_are_those_of_every_micro_batch_and_rank(shards):
    whole = list(TrainBatches(shards, LAYOUT, 4, seed=0, rank=Rank(), contents=Contents(step_labels=True)))
    split = list(TrainBatches(shards, LAYOUT, 2, seed=0, rank=Rank(accumulate=2), contents=Contents(step_labels=True)))
    known = whole[0].slates.label[~whole[0].slates.label.isnan()]
    assert whole[0].step_labels is None
    for batch in split[:2]:
        assert torch.equal(batch.step_labels.sort().values, known.sort().values)
    unread = TrainBatches(shards, LAYOUT, 2, seed=0, rank=Rank(accumulate=2))
    assert all(batch.step_labels is None for batch in unread), "computed although nobody reads them"


@pytest.mark.parametrize("start", [0, 1, 4])
def test_the_first_micro_batch_of_a_step_carries_the_others(shards, start):
    batches = TrainBatches(
        shards, LAYOUT, 2, seed=0, rank=Rank(1, 2, accumulate=3), contents=Contents(whole_steps=True)
    )
    plain = list(TrainBatches(shards, LAYOUT, 2, seed=0, rank=Rank(1, 2, accumulate=3)))
    batches.start = start
    for number, batch in enumerate(batches, start):
        first = number % 3 == 0 or number == start
        expected = plain[number + 1 : number - number % 3 + 3] if first else []
        assert [b.context_ids.tolist() for b in batch.later_micro_batches] == [b.context_ids.tolist() for b in expected]
    assert not any(batch.later_micro_batches for batch in plain)


def test_a_trainer_that_counts_its_batches_gets_the_next_epoch_too(shards):
    loader = ResumableLoader(TrainBatches(shards, LAYOUT, 3, seed=0, rank=Rank()), num_workers=0)
    first, second = ([next(iterator) for _ in range(len(loader))] for iterator in (iter(loader), iter(loader)))
    assert rows_of(first) != rows_of(second)
    state = {"epoch": 1, "batch": len(loader), "batch_size": 3, "world_size": 1, "assign": "batches"}
    assert loader.state_dict() == state


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_continues_with_the_next_batch(shards, workers):
    def loader():
        return ResumableLoader(TrainBatches(shards, LAYOUT, 2, seed=3, rank=Rank()), num_workers=workers)

    whole = loader()
    expected = rows_of(whole) + rows_of(whole)
    stopped = loader()
    list(stopped)
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    resumed = loader()
    resumed.load_state_dict(stopped.state_dict())
    assert rows_of(resumed) == expected[len(stopped) + 3 :]
    state = {"epoch": 1, "batch": len(resumed), "batch_size": 2, "world_size": 1, "assign": "batches"}
    assert resumed.state_dict() == state


def test_the_epoch_is_that_of_the_trainer(shards):
    """It may leave an epoch early, make a new loader, or give back the state of an epoch that had ended."""

    def loader(epoch):
        return ResumableLoader(TrainBatches(shards, LAYOUT, 2, seed=3, rank=Rank()), 0, lambda: epoch)

    def first(loader, batches=3):
        iterator = iter(loader)
        return rows_of([next(iterator) for _ in range(batches)])

    order = [rows_of(loader(epoch)) for epoch in range(2)]
    assert order[0] != order[1]
    again = loader(0)
    assert first(again) == first(again) == order[0][:3], "the same epoch, however often it was begun"
    assert first(loader(1)) == order[1][:3]
    state = again.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 3)
    same, following = loader(0), loader(1)
    same.load_state_dict(state)
    following.load_state_dict(state)
    assert same.state_dict() == state
    assert rows_of(same) == order[0][3:]
    assert rows_of(following) == order[1]


def test_ranks_share_the_counting_of_windows(shards):
    """Each counts its own shards; the sum over ranks is what each would have counted alone."""
    alone = [TrainBatches(shards, LAYOUT, 2, 0, Rank(rank, 2)) for rank in range(2)]
    counted = []

    def remember(counts):
        counted.append(counts.copy())
        return sum(counted)

    first, second = (TrainBatches(shards, LAYOUT, 2, 0, Rank(rank, 2), sum_over_ranks=remember) for rank in range(2))
    assert first.num_contexts == counted[0].sum() < second.num_contexts == alone[0].num_contexts
    assert (counted[0] > 0).tolist() == [True, False]
    assert (counted[1] > 0).tolist() == [False, True]
    assert rows_of(second) == rows_of(alone[1])


def test_an_epoch_continues_with_another_number_of_ranks(shards):
    def loader(rank, size=2):
        return ResumableLoader(TrainBatches(shards, LAYOUT, size, seed=3, rank=rank), num_workers=0)

    stopped = loader(Rank(0, 2, 1))
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    alone = loader(Rank(0, 1, 2))
    alone.load_state_dict(stopped.state_dict())
    assert rows_of(alone) == rows_of(loader(Rank(0, 1, 2)))[6:]
    for rank, size in ((Rank(0, 2), 4), (Rank(0, 4), 2)):
        other = loader(rank, size)
        other.load_state_dict(stopped.state_dict())
        with refused("conflicting_options", "data.batch_size"):
            next(iter(other))
        other.load_state_dict(stopped.state_dict() | {"batch": 0})
        next(iter(other))


class Counting(Prepared):
    """Remembers which training shards were read."""

    def load(self, split, shard, *reads):
        self.manifest.setdefault("loads", []).append(shard)
        return super().load(split, shard, *reads)


@pytest.mark.parametrize("rank", [Rank(), Rank(1, 2, 1), Rank(0, 2, 2)], ids=str)
@pytest.mark.parametrize("phases", [Phases(), Phases(2, 3)], ids=str)
def test_a_resume_reads_no_consumed_shard_and_continues_with_the_same_batches(shards, rank, phases):
    counting = Counting(shards.root, shards.manifest)
    batches = TrainBatches(counting, LAYOUT, 2, 3, rank, Epochs(phases))
    whole = rows_of(batches)
    for start in range(len(whole) + 1):
        counting.manifest["loads"] = []
        batches.start = start
        assert rows_of(batches) == whole[start:]
        if start == len(whole) - 1:
            assert len(counting.manifest["loads"]) == 1


def test_held_out_users_are_split_over_ranks_and_can_be_limited(shards):
    def users(rank, limit=None):
        held_out = HeldOutBatches(shards, "valid", 6, 4, rank, limit)
        return [row for b in held_out for row in b.feedback.context_ids[b.feedback.slates.mask.any(1)].tolist()]

    assert users(Rank()) == list(range(11))
    assert sorted(users(Rank(0, 2)) + users(Rank(1, 2))) == list(range(11))
    assert users(Rank(), 5) == [0, 2, 4, 6, 8]  # evenly spaced
    assert users(Rank(), 99) == list(range(11))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 7])
def test_every_rank_validates_as_often_and_every_user_counts_once(shards, world_size, limit):
    ranks = [list(HeldOutBatches(shards, "valid", 6, 2, Rank(rank, world_size), limit)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [batch.user_ids.tolist() for batches in ranks for batch in batches if batch.feedback.slates.mask.any()]
    alone = [batch.user_ids.tolist() for batch in HeldOutBatches(shards, "valid", 6, 2, Rank(), limit)]
    assert sorted(counted) == sorted(alone)
    fillers = [batch for batches in ranks for batch in batches if not batch.feedback.slates.mask.any()]
    assert all(len(batch.exclude) == 1 for batch in fillers)
    assert len(fillers) == -len(alone) % world_size
    # Its list is that of a user who is counted elsewhere, so that not even the coverage changes.
    assert {row for batch in fillers for row in batch.user_ids.tolist()} <= {row for b in alone for row in b}


def test_every_item_of_a_users_past_is_excluded_however_long_ago(shards):
    """From row groups that hold many users, or a part of one."""
    for batch in HeldOutBatches(shards, "valid", 2, 4, Rank(), 7):
        for user, items in zip(batch.user_ids.tolist(), batch.exclude.tolist(), strict=True):
            assert [item for item in items if item] == PAST[user]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_most_active_user_limits_the_size_of_a_batch(shards, monkeypatch, world_size):
    ordinary = [b.user_ids.tolist() for b in HeldOutBatches(shards, "valid", 6, 4, Rank())]
    assert [len(users) for users in ordinary] == [4, 4, 3]
    monkeypatch.setattr(slates, "MOST_PLACES", 40)
    ranks = [list(HeldOutBatches(shards, "valid", 6, 4, Rank(rank, world_size))) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [b for batches in ranks for b in batches if b.feedback.slates.mask.any()]
    assert sorted(user for batch in counted for user in batch.user_ids.tolist()) == list(range(11))
    for batch in counted:
        users, width = batch.feedback.slates.mask.shape
        assert users == 1 or users * (width + batch.exclude.shape[1]) <= 40
    assert len({len(batch.user_ids) for batch in counted}) > 1, "few users where one is active, many elsewhere"


def test_the_module_yields_what_the_trainer_needs(shards):
    module = FeedbackDataModule(shards.root, batch_size=4, layout=LAYOUT)
    assert len(list(module.train_dataloader())) == len(module.train_dataloader())
    batch = next(iter(module.val_dataloader()))
    assert batch.feedback.histories.item_ids.shape[1] <= 6


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "manifest.json").unlink(), ("wrong_file", "manifest.json")),
        (
            lambda root: (root / "train/00001.parquet").unlink(),
            ("missing_file", "train/00001.parquet"),
        ),
        (lambda root: (root / "manifest.json").write_text('{"format_version": 99}'), ("old_format", "format_version")),
    ],
)
def test_a_damaged_directory_is_refused(shards, spoil, message):
    spoil(shards.root)
    with refused(*message):
        FeedbackDataModule(shards.root)


@pytest.mark.parametrize("rank", [Rank(), Rank(1, 2, 1), Rank(0, 2, 2)], ids=str)
def test_a_phase_comes_several_times_in_a_row(shards, rank):
    phases = Phases(steps=2, passes=3)
    once = rows_of(TrainBatches(shards, LAYOUT, 2, 0, rank))
    batches = TrainBatches(shards, LAYOUT, 2, 0, rank, Epochs(phases))
    visits = rows_of(batches)
    assert len(visits) == len(batches)
    size = rank.accumulate
    steps = [tuple(visits[i : i + size]) for i in range(0, len(visits), size)]
    assert len(steps) * size == len(visits)
    for start in range(0, len(steps), 6):
        phase = steps[start : start + 6]
        assert len(phase) in (3, 6)
        distinct = phase[: len(phase) // 3]
        assert sorted(phase) == sorted(distinct * 3)
        once_here = once[: len(distinct) * size]
        assert [row for step in distinct for row in step][: len(once_here)] == once_here
        once = once[len(distinct) * size :]
    assert not once


def test_workers_do_not_change_the_visits(shards):
    def visits(workers):
        batches = TrainBatches(shards, LAYOUT, 2, 0, Rank(), Epochs(Phases(2, 2)))
        return rows_of(ResumableLoader(batches, num_workers=workers))

    assert visits(2) == visits(0)


def test_a_resumed_phase_continues_with_the_next_visit(shards):
    def batches():
        return TrainBatches(shards, LAYOUT, 2, 0, Rank(), Epochs(Phases(2, 2)))

    whole, cut = rows_of(batches()), batches()
    cut.start = 3
    assert rows_of(cut) == whole[3:]


def test_a_session_ends_before_a_long_gap_and_not_where_the_log_does(prepared):
    data = Prepared.open(prepared)
    batch = next(iter(TrainBatches(data, SequenceLayout(history_length=500), 80, 0, Rank())))
    events = data.load("train", 0)
    ends = batch.slates.ends_session
    for row, user in enumerate(batch.user_ids.tolist()):
        mine = np.flatnonzero(events.user_index == user)
        gaps = np.diff(events.timestamp[mine]) > 30 * 60 * 1000
        assert ends[row, : len(mine)].tolist() == [*gaps.tolist(), False]
    assert 0 < ends.sum() < batch.slates.mask.sum()

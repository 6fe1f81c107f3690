"""Shards that are assigned to the ranks: every row once, each shard on one rank, ranks in step, exact resumes."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, strategies as st

from recpo.base.feedback import FeedbackDefinition
from recpo.batches.datamodule import Contents, Epochs, FeedbackDataModule, Phases, ResumableLoader, TrainBatches
from recpo.batches.preference_lists import PreferenceListLayout
from recpo.batches.slates import Rank, SequenceLayout
from recpo.log.prepared import Prepared
from recpo.log.writing import write_manifest
from tests.refusals import refused

LAYOUT = SequenceLayout(history_length=4)
ONCE = Phases()
USERS = [9, 2, 7, 5, 8, 1, 6]  # of the shards, on purpose of very different sizes


class Watched(Prepared):
    """Remembers which training shards were read."""

    def load(self, split, shard, *reads):
        self.manifest.setdefault("loads", []).append(shard)
        return super().load(split, shard, *reads)


def write_shard(path, users, positive):
    counts = [1 + 5 * (user % 3) for user in users]
    total = sum(counts)
    path.parent.mkdir(exist_ok=True)
    rng = np.random.default_rng(users[0])
    columns = {
        "user_index": np.repeat(users, counts).astype(np.int32),
        "item_index": rng.integers(1, 31, total).astype(np.int32),
        "timestamp": np.arange(total, dtype=np.int64),
        "label": (rng.random(total) if positive else np.full(total, np.nan)).astype(np.float32),
        "dislike": rng.random(total) < 0.2,
        "feedback": np.zeros(total, np.int8),
        "propensity": np.full(total, np.nan, np.float32),
        "is_target": np.ones(total, bool),
        "request": np.arange(total, dtype=np.int64),
    }
    pq.write_table(pa.table(columns), path)


def write_prepared(root, users=tuple(USERS), without_positives=()):
    firsts = np.cumsum([0, *users])
    files = [f"train/{shard}.parquet" for shard in range(len(users))]
    for shard, file in enumerate(files):
        write_shard(root / file, list(range(firsts[shard], firsts[shard + 1])), shard not in without_positives)
    shards = {"train": [{"file": file} for file in files], "valid": [], "test": []}
    manifest = {
        "config": {"repeats": False},
        "feedback": FeedbackDefinition().to_json(),
        "num_users": int(firsts[-1]),
        "num_items": 30,
        "shards": shards,
        "files": [],
    }
    write_manifest(root, manifest)
    return Prepared.open(root)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("assigned"))


def assigned(prepared, rank, size=2, phases=ONCE, seed=0, epoch=0, layout=LAYOUT):
    batches = TrainBatches(prepared, layout, size, seed, rank, Epochs(phases, "shards"), Contents(step_labels=True))
    batches.epoch = epoch
    return batches


def flat(lists):
    return [row for rows in lists for row in rows]


def rows_of(batches):
    """Row ids of every batch; none in an empty one."""
    return [batch.context_ids[batch.slates.mask.any(1)].tolist() for batch in batches]


@pytest.mark.slow
@given(
    world_size=st.integers(1, 4),
    size=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    phases=st.builds(Phases, st.integers(1, 3), st.integers(1, 3)),
    epoch=st.integers(0, 3),
)
def test_every_row_comes_once_per_pass_each_shard_on_one_rank_and_ranks_keep_step(
    shards, world_size, size, accumulate, phases, epoch
):
    ranks, loads = [], []
    for rank in range(world_size):
        watched = Watched(shards.root, dict(shards.manifest))
        batches = assigned(watched, Rank(rank, world_size, accumulate), size, phases, epoch=epoch)
        ranks.append(rows_of(batches))
        assert len(ranks[-1]) == len(batches)
        loads += watched.manifest["loads"]
    assert sorted(loads) == list(range(len(USERS)))  # no shard is read twice, by whomever
    assert len({len(rank) for rank in ranks}) == 1
    assert any(map(all, ranks)) or phases.passes > 1  # one rank has no empty batch
    if phases.passes > 1:
        assert len(ranks[0]) % (accumulate * phases.passes) == 0
    steps = [flat(batches) for batches in zip(*ranks, strict=True)]
    assert sum(map(len, steps)) == batches.num_contexts * phases.passes
    assert sorted(flat(steps)) == sorted(list(range(batches.num_contexts)) * phases.passes)


def test_the_longest_rank_has_at_most_one_shard_more_than_any_other(shards):
    windows = assigned(shards, Rank())._windows
    for world_size in (2, 3, 4):
        ranks = [rows_of(assigned(shards, Rank(rank, world_size), 1)) for rank in range(world_size)]
        real = [sum(map(bool, rows)) for rows in ranks]
        assert max(real) == len(ranks[0])
        assert max(real) - min(real) <= windows.max()


@pytest.mark.parametrize("phases", [Phases(), Phases(2, 3)], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_one_rank_it_is_assigning_batches(shards, accumulate, phases):
    rank = Rank(0, 1, accumulate)
    whole = TrainBatches(shards, LAYOUT, 3, 5, rank, Epochs(phases), Contents(step_labels=True))
    alone = assigned(shards, rank, 3, phases, seed=5)
    for epoch in range(2):
        whole.epoch = alone.epoch = epoch
        assert len(whole) == len(alone)
        for expected, batch in zip(whole, alone, strict=True):
            assert torch.equal(batch.context_ids, expected.context_ids)
            assert torch.equal(batch.slates.item_ids, expected.slates.item_ids)
            if accumulate > 1:
                assert torch.equal(batch.step_labels, expected.step_labels)


def test_the_order_is_that_of_seed_epoch_rank_and_number_of_ranks(shards):
    def order(rank, **options):
        return rows_of(assigned(shards, rank, **options))

    assert order(Rank(1, 2), seed=3, epoch=2) == order(Rank(1, 2), seed=3, epoch=2)
    same = [order(Rank(1, 2), seed=seed, epoch=epoch) for seed, epoch in [(3, 2), (3, 1), (4, 2)]]
    assert len({sum(map(len, rows)) for rows in same}) == 1  # a rank keeps its shards
    others = [*same, order(Rank(0, 2), seed=3, epoch=2), order(Rank(1, 3), seed=3, epoch=2)]
    assert len({str(rows) for rows in others}) == len(others)


def test_ranks_go_through_shards_of_one_size_in_different_orders(tmp_path):
    prepared = write_prepared(tmp_path, (6, 6, 6, 6))
    numbers = [prepared.keys("train", shard)[0] for shard in range(4)]
    assert len({len(users) for users in numbers}) == 1
    windows = assigned(prepared, Rank())._windows[0]
    places = [[row % windows for row in flat(rows_of(assigned(prepared, Rank(rank, 4))))] for rank in range(4)]
    assert sorted(places[0]) == sorted(places[1])
    assert len({str(order) for order in places}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("rank", [Rank(0, 2), Rank(1, 3, 2), Rank(3, 4)], ids=str)
@pytest.mark.parametrize("phases", [Phases(), Phases(2, 3)], ids=str)
def test_a_resume_continues_with_the_same_batches_and_reads_no_consumed_shard(shards, rank, phases):
    watched = Watched(shards.root, dict(shards.manifest))
    batches = assigned(watched, rank, 2, phases)
    whole = rows_of(batches)
    for start in range(len(whole) + 1):
        watched.manifest["loads"] = []
        batches.start = start
        assert rows_of(batches) == whole[start:]
        if phases.passes == 1 and start == len(whole) - 1:
            assert len(watched.manifest["loads"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [Rank(0, 3, 2), Rank(2, 3, 2)], ids=str)
def test_workers_change_nothing(shards, rank):
    def loader(workers):
        return ResumableLoader(assigned(shards, rank, 2, Phases(2, 2)), workers)

    alone, helped = loader(0), loader(2)
    assert rows_of(alone) == rows_of(helped)
    iterator = iter(helped)
    for _ in range(3):
        next(iterator)
    resumed = loader(2)
    resumed.load_state_dict(helped.state_dict())
    assert rows_of(resumed) == rows_of(alone)[3:]


def test_another_division_is_refused_in_mid_epoch_only(shards):
    def loader(world_size, size=2, assign="shards"):
        batches = TrainBatches(shards, LAYOUT, size, 0, Rank(0, world_size), Epochs(assign=assign))
        return ResumableLoader(batches, num_workers=0)

    stopped = loader(2)
    iterator = iter(stopped)
    for _ in range(2):
        next(iterator)
    state = stopped.state_dict()
    assert state == {"epoch": 0, "batch": 2, "batch_size": 2, "world_size": 2, "assign": "shards"}
    loader(2).load_state_dict(state)
    for other in (loader(4), loader(1), loader(2, 4), loader(2, assign="batches")):
        other.load_state_dict(state)
        with refused("conflicting_options", "data.assign"):
            next(iter(other))
        other.load_state_dict(state | {"batch": 0})
        next(iter(other))


def test_too_few_shards_for_the_ranks_are_refused_with_the_remedy(shards):
    assigned(shards, Rank(6, 7))
    with refused("conflicting_options", "data.assign"):
        assigned(shards, Rank(0, 8))


def test_a_rank_without_any_context_keeps_step(tmp_path):
    """Its shards hold events, but no positive to learn from."""
    prepared = write_prepared(tmp_path, (6, 6, 6), without_positives=(1, 2))
    layout = PreferenceListLayout(history_length=4, popularity=0)
    ranks = [list(assigned(prepared, Rank(rank, 3), layout=layout)) for rank in range(3)]
    assert len(ranks[0]) == len(ranks[1]) == len(ranks[2]) > 0
    assert all(rows_of(ranks[0]))
    assert not any(rows_of(ranks[1] + ranks[2]))


def test_step_labels_are_those_of_the_own_part_of_the_step(shards):
    assert next(iter(assigned(shards, Rank(1, 2)))).step_labels is None  # the batch is the rank's whole part
    batches = list(assigned(shards, Rank(1, 2, 2)))
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        own = torch.cat([b.slates.label[b.slates.mask] for b in (first, second)])
        assert torch.equal(first.step_labels, second.step_labels)
        assert torch.equal(first.step_labels.sort().values, own.sort().values)


def test_the_module_assigns_as_it_is_told_and_every_row_is_every_context(shards, monkeypatch):
    module = FeedbackDataModule(shards.root, batch_size=2, layout=LAYOUT, assign="shards")
    monkeypatch.setattr(module, "_rank", lambda: Rank(1, 3))
    monkeypatch.setattr(module, "_sum_over_ranks", lambda counts: assigned(shards, Rank())._windows)
    loader = module.train_dataloader()
    assert rows_of(loader) == rows_of(assigned(shards, Rank(1, 3)))
    rows = flat(rows_of(module.every_context()))
    assert sorted(rows) == list(range(module.every_context().num_contexts))


def test_counting_stays_divided_over_the_ranks(shards):
    whole = assigned(shards, Rank(0, 2))._windows
    counted = []

    def sum_over_ranks(counts):
        counted.append(counts)
        return whole

    batches = TrainBatches(shards, LAYOUT, 2, 0, Rank(1, 2), Epochs(assign="shards"), sum_over_ranks=sum_over_ranks)
    assert np.flatnonzero(counted[0]).tolist() == [1, 3, 5]
    assert rows_of(batches) == rows_of(assigned(shards, Rank(1, 2)))

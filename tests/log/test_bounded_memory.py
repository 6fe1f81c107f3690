"""Training data larger than memory: the memory of a process does not grow with the number of shards."""

import resource

import numpy as np
import pyarrow as pa
import pytest

from recpo.base.feedback import FeedbackDefinition
from recpo.batches.datamodule import TrainBatches
from recpo.batches.preference_lists import PreferenceListLayout
from recpo.batches.slates import HeldOutBatches, Rank, SequenceLayout
from recpo.log.prepared import Prepared
from recpo.log.schema import EVENT_SCHEMA
from recpo.log.writing import Encoding, write_manifest, write_parquet, write_past, write_shards
from tests.forks import forked

USERS, EVENTS_PER_USER = 2000, 50
SHARD_MIB = USERS * EVENTS_PER_USER * 50 / 2**20  # decoded, about 50 bytes for each event


def epochs(name, roots):
    """Rows, held-out users and the peak of this process in MiB after an epoch over each of the directories."""
    layout = {"sequence": SequenceLayout(50), "lists": PreferenceListLayout(50, uniform=2)}[name]
    for root in roots:
        data = Prepared.open(root)
        batches = TrainBatches(data, layout, 512, 0, Rank())
        rows = sum(len(batch.context_ids) for batch in batches)
        assert rows == batches.num_contexts
        users = sum(len(batch.exclude) for batch in HeldOutBatches(data, "valid", 50, 512, Rank()))
        yield rows, users, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def found(name, *roots):
    return list(epochs(name, roots))


def shard_batches(shards):
    """A log that is never in memory as a whole, by user and time."""
    events = USERS * EVENTS_PER_USER
    for shard in range(shards):
        rng = np.random.default_rng(shard)
        columns = {
            "user_index": np.repeat(np.arange(USERS, dtype=np.int32) + shard * USERS, EVENTS_PER_USER),
            "item_index": rng.integers(1, 10_000, events).astype(np.int32),
            "timestamp": np.tile(np.arange(EVENTS_PER_USER) * 60_000, USERS),
            "label": rng.random(events).astype(np.float32),
            "dislike": rng.random(events) < 0.02,
            "watch_time": rng.random(events).astype(np.float32),
            "duration": rng.random(events).astype(np.float32),
            "propensity": rng.random(events).astype(np.float32),
            "is_random": rng.random(events) < 0.1,
            "request": np.arange(events) + (shard << 32),
            "is_target": np.ones(events, bool),
        }
        schema = pa.schema([field for field in EVENT_SCHEMA if field.name in columns])
        yield from pa.table(columns).cast(schema).to_batches()


def prepared(root, shards):
    root.mkdir()
    made = {
        period: write_shards(
            shard_batches(number),
            root / period,
            USERS * EVENTS_PER_USER,
            Encoding(FeedbackDefinition()),
            lambda rows: None,
        )
        for period, number in (("train", shards), ("valid", shards // 2), ("test", 1))
    }
    for period in ("valid", "test"):
        pairs = (batch.select(["user_index", "item_index"]) for batch in shard_batches(len(made[period])))
        made[period] = write_past(pairs, made[period], root)
    items = pa.table({"train_count": np.ones(10_000, np.int64)})
    write_parquet(items, root / "items.parquet")
    manifest = {
        "config": {"repeats": False},
        "feedback": FeedbackDefinition().to_json(),
        "num_items": 10_000,
        "num_users": shards * USERS,
        "shards": made,
        "files": ["items.parquet", *(shard["past"] for p in ("valid", "test") for shard in made[p])],
    }
    write_manifest(root, manifest)
    return root


@pytest.mark.slow
def test_an_epoch_over_six_times_as_many_shards_takes_no_more_memory(tmp_path):
    few, many = prepared(tmp_path / "few", 4), prepared(tmp_path / "many", 24)
    for layout in ("sequence", "lists"):
        # in a process of its own, few first because peaks only grow, and twice because allocators settle late
        _, (few_rows, few_users, little), (many_rows, many_users, much) = forked(found, layout, few, few, many)
        assert (few_users, many_users) == (2 * USERS, 12 * USERS)
        assert many_rows > 5.9 * few_rows
        # 20 more shards would be 95 MiB if they stayed; the allocator's own differences were up to 25.
        assert much - little < 10 * SHARD_MIB, (little, much)

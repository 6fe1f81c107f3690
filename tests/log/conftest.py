from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.log.engine import DuckDBEngine

DAY_MS = 86_400_000
START_MS = 1_700_006_400_000  # 2023-11-15 00:00 UTC


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with DuckDBEngine(tmp_path_factory.mktemp("engine"), memory_limit="512MB", threads=1) as engine:
        yield engine


def make_log(users=40, items=25, events=1500, days=6, seed=0):
    """A log in the standard names with every optional column but a label; users are strings, items integers."""
    rng = np.random.default_rng(seed)
    item = rng.integers(0, items, events)
    duration = np.round(rng.uniform(3, 90, items), 2)[item]
    time = START_MS + np.sort(rng.integers(0, days * DAY_MS, events))
    return pa.table(
        {
            "user_id": pa.array([f"u{u}" for u in rng.integers(0, users, events)]),
            "item_id": pa.array(item * 7 - 20),
            "timestamp": pa.array(time),
            "watch_time": pa.array(np.round(rng.uniform(0, 1.4, events) * duration, 3)),
            "duration": pa.array(duration),
            "dislike": pa.array(rng.random(events) < 0.03),
            "propensity": pa.array(rng.uniform(0.001, 0.2, events)),
            "is_random": pa.array(rng.random(events) < 0.1),
            "request_id": pa.array(np.arange(events) // 3),
        }
    )


def write_log(path: Path, table: pa.Table) -> str:
    pq.write_table(table, path)
    return str(path)


@pytest.fixture
def log():
    return make_log()

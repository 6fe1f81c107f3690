from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from recpo.errors import RecpoError
from recpo.serving.bundle import Bundle
from recpo.types import Histories

NUM_ITEMS, MAX_HISTORY, K = 120, 12, 20


def external(number):
    return f"item-{NUM_ITEMS + 1 - number}"


def random_histories(users=41, longest=MAX_HISTORY, seed=0):
    """Internal histories (the first is empty) as lists, and the table that a server would be given."""
    rng = np.random.default_rng(seed)
    lengths = [0, longest, *rng.integers(0, longest + 1, users - 2)]
    ids = [rng.integers(1, NUM_ITEMS + 1, n).tolist() for n in lengths]
    levels = [rng.integers(0, 6, n).tolist() for n in lengths]
    times = [(1_650_000_000_000 + rng.integers(0, 10**9, n).cumsum()).tolist() for n in lengths]
    table = pa.table(
        {
            "user_id": pa.array([f"u{row}" for row in range(users)]),
            "item_ids": pa.array([[external(i) for i in row] for row in ids], pa.list_(pa.string())),
            "feedback": pa.array(levels, pa.list_(pa.int8())),
            "timestamps": pa.array(times, pa.list_(pa.int64())),
        }
    )
    return ids, levels, times, table


def as_histories(ids, levels, times):
    width = max(map(len, ids))
    padded = [torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]) for rows in (ids, levels, times)]
    return Histories(padded[0], torch.tensor([len(row) for row in ids]), padded[1], padded[2])


def lists_of(table):
    frame = table.to_pandas()
    return {user: group.item_id.tolist() for user, group in frame.groupby("user_id", sort=False)}


@pytest.fixture(scope="module")
def bundle(bundle_path):
    return Bundle.load(bundle_path)


@pytest.mark.parametrize("engine", ["onnx", "torch"])
@pytest.mark.parametrize("users", [2, 41])
def test_bundle_gives_the_policys_lists_and_scores(exported, engine, users):
    policy, path = exported
    ids, levels, times, table = random_histories(users)
    histories = as_histories(ids, levels, times)
    if not policy.reads_timestamps:
        histories = histories._replace(timestamps=None)
    with torch.inference_mode():
        expected = policy.recommend(histories, 10, exclude=histories.item_ids)
    served = Bundle.load(path, engine).recommend(table, k=10).table.to_pandas()
    assert served["item_id"].tolist() == [external(i) for i in expected.item_ids.flatten().tolist()]
    np.testing.assert_allclose(served["score"], expected.scores.flatten(), atol=1e-4)
    assert served["rank"].tolist() == list(range(1, 11)) * users
    assert served["user_id"].tolist() == np.repeat(table["user_id"].to_numpy(zero_copy_only=False), 10).tolist()


def test_the_answer_does_not_depend_on_the_batch(bundle):
    _, _, _, table = random_histories()
    whole = bundle.recommend(table).table
    parts = pa.concat_tables([bundle.recommend(table.slice(row, 1)).table for row in range(5)])
    assert lists_of(parts) == {user: items for user, items in lists_of(whole).items() if user in set(lists_of(parts))}


def test_history_and_blocked_items_are_not_recommended(bundle):
    ids, _, _, table = random_histories()
    favorites = lists_of(bundle.recommend(table).table)
    blocked = pa.array([[*items[:4], "no such item"] for items in favorites.values()])
    served = bundle.recommend(table.append_column("blocked", blocked))
    for row, (user, items) in enumerate(lists_of(served.table).items()):
        assert not {external(i) for i in ids[row]} & set(items)
        assert not set(favorites[user][:4]) & set(items)
        assert items[: K - 4] == favorites[user][4:]
    assert served.counts.unknown_blocked == len(ids)


def test_unknown_items_are_skipped_with_their_feedback_and_counted(bundle):
    known = {"user_id": [1], "item_ids": [[external(3), external(8)]], "feedback": [[5, 1]]}
    mixed = {"user_id": [1], "item_ids": [["?", external(3), None, external(8)]], "feedback": [[2, 5, 3, 1]]}
    plain, with_unknown = (bundle.recommend(pa.table(columns)) for columns in (known, mixed))
    assert with_unknown.table.equals(plain.table)
    assert with_unknown.counts.unknown_items == 2


def test_nothing_known_is_answered_alike_however_it_is_said(bundle):
    histories = pa.array([[], None, ["?"]], pa.list_(pa.string()))
    served = bundle.recommend(pa.table({"user_id": [1, 2, 3], "item_ids": histories}))
    lists = lists_of(served.table)
    assert len(lists[1]) == K
    assert lists[1] == lists[2] == lists[3]
    assert served.counts.empty_histories == 3


def test_long_histories_keep_the_most_recent_events_and_hide_the_older_ones(bundle):
    rng = np.random.default_rng(1)
    order = rng.permutation(NUM_ITEMS)[: MAX_HISTORY + 30] + 1
    items = [external(i) for i in order]
    long = bundle.recommend(pa.table({"user_id": [1], "item_ids": [items]}))
    short = {"user_id": [1], "item_ids": [items[-MAX_HISTORY:]], "blocked": [items[:-MAX_HISTORY]]}
    assert long.table.equals(bundle.recommend(pa.table(short)).table)
    assert long.counts.truncated_histories == 1


def test_a_list_is_short_where_hardly_anything_is_allowed(bundle):
    blocked = [external(i) for i in range(1, NUM_ITEMS - 2)]
    served = bundle.recommend(pa.table({"user_id": [7], "item_ids": [[external(NUM_ITEMS)]], "blocked": [blocked]}))
    assert sorted(served.table["item_id"].to_pylist()) == sorted(external(i) for i in (NUM_ITEMS - 2, NUM_ITEMS - 1))
    assert served.counts.short_lists == 1


def test_pandas_large_lists_and_no_users_at_all(bundle):
    _, _, _, table = random_histories(5)
    expected = bundle.recommend(table).table
    assert bundle.recommend(table.to_pandas()).table.to_pandas().equals(expected.to_pandas())
    large = table.set_column(1, "item_ids", table["item_ids"].cast(pa.large_list(pa.string())))
    assert bundle.recommend(large).table.equals(expected)
    assert bundle.recommend(table.slice(0, 0)).table.schema.equals(expected.schema)
    assert bundle.recommend(pd.DataFrame({"user_id": [1], "item_ids": [[]]})).table.num_rows == K


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user_id": [1]}, "column item_ids is missing"),
        ({"item_ids": [["item-1"]]}, "column user_id is missing"),
        ({"user_id": [1], "item_ids": ["item-1"]}, "column item_ids is string, expected a list"),
        ({"user_id": [1], "item_ids": [[1, 2]]}, "cast them"),
        ({"user_id": ["a", "b"], "item_ids": [["x"], ["y"]], "feedback": [[1], [1, 2]]}, "user_id 'b' with 2 and 1"),
        ({"user_id": [1], "item_ids": [["x"]], "feedback": [["good"]]}, "feedback must hold whole numbers"),
    ],
)
def test_faulty_histories_are_refused(bundle, columns, message):
    with pytest.raises(RecpoError, match=message):
        bundle.recommend(pa.table(columns))


@pytest.mark.parametrize("k", [0, K + 1])
def test_list_lengths_out_of_range_are_refused(bundle, k):
    with pytest.raises(RecpoError, match=f"serves 1 to {K}"):
        bundle.recommend(pa.table({"user_id": [1], "item_ids": [["item-1"]]}), k=k)


def test_a_policy_that_reads_time_wants_timestamps(exported):
    policy, path = exported
    table = random_histories(3)[-1]
    if policy.reads_timestamps:
        with pytest.raises(RecpoError, match="column timestamps is missing"):
            Bundle.load(path).recommend(table.drop_columns("timestamps"))
        times = table["timestamps"].cast(pa.list_(pa.timestamp("ms")))
        typed = table.set_column(3, "timestamps", times)
        assert Bundle.load(path).recommend(typed).table.equals(Bundle.load(path).recommend(table).table)
    else:
        Bundle.load(path).recommend(table.drop_columns("timestamps"))

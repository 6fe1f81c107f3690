"""Extending day by day equals preparing the whole log, and does not read train shards."""

import os
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings, strategies as st

import recpo
from recpo.batches.datamodule import TrainBatches
from recpo.batches.slates import HeldOutBatches, ImpressionLayout, Rank, SequenceLayout
from recpo.log.prepare import SHOWN_OUTSIDE
from recpo.log.schema import LogColumns
from recpo.log.shaping import D2Q, NumericColumn, WatchQuantiles
from recpo.log.splits import LeaveLastOut, TemporalSplit
from tests.log.conftest import DAY_MS, START_MS, make_log
from tests.refusals import refused

CONTEXT = 4
OPTIONS = {
    "label": NumericColumn(0, 1),
    "max_context": CONTEXT,
    "rows_per_shard": 60,
    "memory_limit": "512MB",
    "threads": 1,
}


def living_log(seed, days, users=12, events=70):
    """Every day brings users and items that were not there before; requests may go on after midnight."""
    rng = np.random.default_rng(seed)
    day = np.repeat(np.arange(days), events)
    time = START_MS + day * DAY_MS + rng.integers(0, DAY_MS // 600_000, len(day)) * 600_000
    time = np.sort(time)
    day = (time - START_MS) // DAY_MS
    item = rng.integers(0, 8 + 4 * day)
    request = np.cumsum(rng.random(len(day)) < 0.5)
    user = rng.integers(0, users // 2 + day)[np.searchsorted(request, request)]  # of the request
    return pa.table(
        {
            "user_id": pa.array([f"u{u}" for u in user]),
            "item_id": pa.array(rng.permutation(1000)[item]),
            "timestamp": pa.array(time),
            "watch_time": pa.array(np.round(rng.uniform(0, 50, len(day)), 3)),
            "duration": pa.array(np.round(20.0 + item, 2), mask=rng.random(len(day)) < 0.1),
            "dislike": pa.array(rng.random(len(day)) < 0.05),
            "label": pa.array(np.round(rng.random(len(day)), 2), mask=rng.random(len(day)) < 0.1),
            "propensity": pa.array(rng.uniform(0.001, 0.2, len(day))),
            "is_random": pa.array(rng.random(len(day)) < 0.1),
            "request_id": pa.array(request),
        }
    )


def between(log, first, last):
    """The days ``first <= day < last``; a request does not go on in another file."""
    day = (log["timestamp"].to_numpy() - START_MS) // DAY_MS
    chosen = log.filter(pa.array((day >= first) & (day < last)))
    place = chosen.schema.get_field_index("request_id")
    return chosen.set_column(
        place, "request_id", pa.array([f"{first}-{name}" for name in chosen["request_id"].to_pylist()])
    )


def events_of(data, split):
    """Every row of a period with external ids in place of numbers, sorted; requests by place within their user."""
    items = data.table("items.parquet", ["item_id"]).column(0).to_numpy()
    users = data.table("users.parquet", ["user_id"]).column(0).to_numpy(zero_copy_only=False)
    names = ["user_index", "item_index", "timestamp", "label", "dislike", "feedback", "watch_time", "duration"]
    names += ["propensity", "is_random", "request", "is_target"]
    pieces = (
        data.train_columns(names)
        if split == "train"
        else (data.columns(split, shard, names) for shard in range(data.num_shards(split)))
    )
    frame = pd.concat([pd.DataFrame(piece) for piece in pieces], ignore_index=True)
    assert (frame["user_index"] == frame["request"] // 2**32).all()
    frame["request"] %= 2**32
    frame["user_index"], frame["item_index"] = users[frame["user_index"]], items[frame["item_index"] - 1]
    return frame.sort_values("user_index", kind="stable").reset_index(drop=True)


def past_of(data, split):
    items = data.table("items.parquet", ["item_id"]).column(0).to_numpy()
    users = data.table("users.parquet", ["user_id"]).column(0).to_pylist()
    found = set()
    for shard in data.manifest["shards"][split]:
        pairs = pq.read_table(data.root / shard["past"])
        assert len(pairs) == len(set(zip(*(column.to_pylist() for column in pairs.columns), strict=True)))
        found |= {
            (users[user], items[item - 1]) for user, item in zip(*(c.to_pylist() for c in pairs.columns), strict=True)
        }
    return found


def examples(data, layout):
    """(user, items of the history that it sees, item) of every scored position of an epoch."""
    items = np.append(-1, data.table("items.parquet", ["item_id"]).column(0).to_numpy())
    users = data.table("users.parquet", ["user_id"]).column(0).to_pylist()
    found = []
    for batch in TrainBatches(data, layout, 16, 0, Rank()):
        history, slate = items[batch.histories.item_ids.numpy()], items[batch.slates.item_ids.numpy()]
        for row, place in batch.slates.mask.nonzero().tolist():
            seen = history[row, : int(batch.slates.visible[row, place])]
            found.append((users[int(batch.user_ids[row])], tuple(seen), slate[row, place]))
    return sorted(found)


def held_out_batches(data, split):
    items = np.append(-1, data.table("items.parquet", ["item_id"]).column(0).to_numpy())
    users = data.table("users.parquet", ["user_id"]).column(0).to_pylist()
    found = {}
    for batch in HeldOutBatches(data, split, CONTEXT, 7, Rank()):
        for row, user in enumerate(batch.feedback.user_ids.tolist()):
            length, mask = int(batch.feedback.histories.lengths[row]), batch.feedback.slates.mask[row]
            past = batch.exclude[row][batch.exclude[row] > 0]
            found[users[user]] = (
                tuple(items[batch.feedback.histories.item_ids[row, :length].numpy()]),
                tuple(items[batch.feedback.slates.item_ids[row][mask].numpy()]),
                tuple(sorted(items[past.numpy()])),
            )
    return found


def assert_equal(extended, whole):
    for split in ("train", "valid", "test"):
        expected = events_of(whole, split)
        given = (expected[name].to_numpy() for name in ("watch_time", "duration", "dislike", "label"))
        expected["feedback"] = extended.feedback.levels(*given)  # by the kept cutoffs
        found = events_of(extended, split)
        context = ~found["is_target"]  # of context, nobody reads these, and histories do not have them
        found.loc[context, ["propensity", "is_random", "request"]] = expected.loc[
            ~expected["is_target"], ["propensity", "is_random", "request"]
        ]
        pd.testing.assert_frame_equal(found, expected)
    for split in ("valid", "test"):
        assert past_of(extended, split) == past_of(whole, split)
        assert held_out_batches(extended, split) == held_out_batches(whole, split)
    columns = {"items.parquet": "item_id", "users.parquet": "user_id", "histories.parquet": "user_id"}
    for file, key in columns.items():
        one, other = (
            data.table(file).to_pandas().drop(columns=["item_index", "user_index"], errors="ignore")
            for data in (extended, whole)
        )
        one, other = (frame.sort_values(key, kind="stable").reset_index(drop=True) for frame in (one, other))
        pd.testing.assert_frame_equal(one, other)
    counts, expected = ({**data.manifest["counts"]} for data in (extended, whole))
    for each in (counts, expected):
        each["splits"]["train"].pop("rows")  # context rows of the extension
        each.pop("watch_time_ties")  # of what was fitted
        for name in SHOWN_OUTSIDE:
            each.pop(name, None)  # of the rows of today's table
    assert counts == expected
    assert extended.manifest["boundaries"] == whole.manifest["boundaries"]
    layout = ImpressionLayout(history_length=CONTEXT, slate_length=3)
    assert examples(extended, layout) == examples(whole, layout)
    # windows of a sequence are cut in each segment: every event is a target once all the same
    layout = SequenceLayout(history_length=3)
    assert sorted((u, i) for u, _, i in examples(extended, layout)) == sorted(
        (u, i) for u, _, i in examples(whole, layout)
    )


@pytest.mark.slow
@settings(max_examples=2, derandomize=True, phases=[Phase.generate])  # a log is prepared many times to shrink it
@given(seed=st.integers(0, 1000), days=st.integers(5, 7), data=st.data())
def test_extending_by_any_days_equals_preparing_the_whole_log(tmp_path_factory, seed, days, data):
    folder, log = tmp_path_factory.mktemp("living"), living_log(seed, days)
    cuts = sorted({4, *data.draw(st.sets(st.integers(5, days - 1), max_size=2))}) if days > 5 else [4]
    catalog = data.draw(st.sampled_from(["train", "log"]))
    parts = [between(log, first, last) for first, last in zip([0, *cuts], [*cuts, days], strict=True)]
    whole = recpo.prepare(pa.concat_tables(parts), folder / "whole", catalog=catalog, **OPTIONS)
    extended = recpo.prepare(parts[0], folder / "0", catalog=catalog, **OPTIONS)
    for number, part in enumerate(parts[1:], start=1):
        before = extended
        extended = recpo.prepare(part, folder / str(number), extends=before, memory_limit="512MB", threads=1)
        for file, key in (("items.parquet", "item_id"), ("users.parquet", "user_id")):
            kept, now = (each.table(file, [key]).column(0).to_pylist() for each in (before, extended))
            assert now[: len(kept)] == kept
    extended.verify()
    assert_equal(extended, whole)


@pytest.mark.slow
def test_days_with_strings_as_request_ids_may_follow_days_with_integers(tmp_path):
    """As when a server, whose request ids are strings, has taken over."""
    log = living_log(3, 6)
    place, last = log.schema.get_field_index("request_id"), between(log, 5, 6)
    text = [f"0-{number:06d}" for number in log["request_id"].to_pylist()]  # in the order of the numbers
    first = between(log, 0, 5)
    named = first.set_column(place, "request_id", pa.array(text[: len(first)]))
    numbered = first.set_column(place, "request_id", log["request_id"].slice(0, len(first)))
    whole = recpo.prepare(pa.concat_tables([named, last]), tmp_path / "whole", **OPTIONS)
    prepared = recpo.prepare(numbered, tmp_path / "first", **OPTIONS)
    assert_equal(recpo.prepare(last, tmp_path / "second", extends=prepared), whole)


@pytest.mark.slow
def test_rows_without_a_user_are_left_out_as_yesterday(tmp_path):
    log = living_log(5, 6)
    users = [None if number % 10 == 0 else user for number, user in enumerate(log["user_id"].to_pylist())]
    log = log.set_column(log.column_names.index("user_id"), "user_id", pa.array(users, log["user_id"].type))
    data = recpo.prepare(between(log, 0, 5), tmp_path / "a", skip_incomplete=True, end="2024-01-01", **OPTIONS)
    data = recpo.prepare(between(log, 5, 6), tmp_path / "b", extends=data)
    counts = data.manifest["counts"]
    assert (counts["read"], counts["dropped"]["row without user_id"]) == (log.num_rows, users.count(None))


@pytest.fixture(scope="module")
def yesterday(tmp_path_factory):
    log = living_log(3, 6)
    data = recpo.prepare(between(log, 0, 5), tmp_path_factory.mktemp("yesterday") / "prepared", **OPTIONS)
    return data, between(log, 5, 6)


@pytest.mark.slow
def test_train_shards_are_linked_and_never_read(yesterday, tmp_path):
    data, new = yesterday
    damaged = tmp_path / "damaged"
    shutil.copytree(data.root, damaged)
    train = [damaged / shard["file"] for shard in data.manifest["shards"]["train"]]
    for file in train:
        file.write_bytes(bytes(file.stat().st_size))
    extended = recpo.prepare(new, tmp_path / "out", extends=damaged)
    for file in train:
        assert os.path.samefile(file, tmp_path / "out" / file.relative_to(damaged))
    for shard in data.manifest["shards"]["train"]:  # undamaged, it is a whole directory
        (tmp_path / "out" / shard["file"]).write_bytes((data.root / shard["file"]).read_bytes())
    extended.verify()
    assert extended.segments == [len(train), extended.num_shards("train") - len(train)]


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.0, 0.7])
def test_new_labels_are_those_of_the_kept_quantiles(exponent, tmp_path):
    """A new user's share is that of all users' watch times of yesterday's train period."""
    log = make_log(users=10, items=6, events=400)
    new = log.filter(pc.greater_equal(log["timestamp"], START_MS + 5 * DAY_MS))
    newcomers = new.set_column(0, "user_id", pa.array([f"new{i}" for i in range(len(new))]))
    label = WatchQuantiles(min_history=5, duration_exponent=exponent)
    options = {"memory_limit": "512MB", "threads": 1, "label": label}
    kept = recpo.prepare(log.filter(pc.less(log["timestamp"], START_MS + 5 * DAY_MS)), tmp_path / "kept", **options)
    extended = recpo.prepare(newcomers, tmp_path / "out", extends=kept)
    assert extended.manifest["feedback"] == kept.manifest["feedback"]
    quantiles = kept.table("quantiles.parquet").to_pandas()
    columns = [
        extended.columns("test", shard, ["watch_time", "duration", "label"])
        for shard in range(extended.num_shards("test"))
    ]
    watch, duration, label = (
        np.concatenate([column[name] for column in columns]) for name in ("watch_time", "duration", "label")
    )
    assert len(label) == len(new)
    for w, d, found in zip(watch, duration, label, strict=True):
        bucket = int(np.floor(np.log2(d + 1e-6)))
        table = quantiles[quantiles["bucket"] == bucket]
        time = np.floor(round(w * 1000) * (2 ** (bucket + 0.5) / (d + 1e-6)) ** exponent + 0.5)
        below, equal = (
            table.loc[rows, "count"].sum() for rows in (table["watch_ms"] < time, table["watch_ms"] == time)
        )
        expected = (below + equal / 2) / table["count"].sum() if table["count"].sum() >= 5 else np.nan
        np.testing.assert_allclose(found, 0.0 if w == 0 else expected, rtol=1e-6)


def test_what_cannot_be_extended_is_refused(yesterday, tmp_path):
    data, new = yesterday
    cases = [
        ({"label": WatchQuantiles(base=3.0)}, "mismatch", "label"),
        ({"split": TemporalSplit(valid_days=2)}, "mismatch", "split"),
        ({"columns": recpo.Columns(item_id="video")}, "mismatch", "columns"),
        ({"engine": "spark"}, "unsupported", "engine"),
    ]
    for options, code, field in cases:
        with refused(code, field):
            recpo.prepare(new, tmp_path / "out", extends=data, **options)
    with refused("mismatch", "timestamp"):
        recpo.prepare(pa.concat_tables([new, between(living_log(3, 6), 4, 5)]), tmp_path / "out", extends=data)
    with refused("missing_column", "dislike"):
        recpo.prepare(new.drop_columns([LogColumns.DISLIKE]), tmp_path / "out", extends=data)
    with refused("not_local", "out"):
        recpo.prepare(new, "memory://bucket/out", extends=data)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_split_or_label_that_cannot_roll_forward_is_refused(yesterday, tmp_path):
    _, new = yesterday
    log = between(living_log(3, 5), 0, 5)
    options = {"memory_limit": "512MB", "threads": 1}
    last_out = recpo.prepare(log, tmp_path / "last", split=LeaveLastOut(), **options)
    with refused("unsupported", "split"):
        recpo.prepare(new, tmp_path / "out", extends=last_out)
    grouped = recpo.prepare(log, tmp_path / "d2q", label=D2Q(groups=2), **options)
    with refused("unsupported", "label"):
        recpo.prepare(new, tmp_path / "out", extends=grouped)


@pytest.mark.slow
def test_retired_items_stay_in_histories_and_are_candidates_no_more(yesterday, tmp_path):
    data, new = yesterday
    ids = data.table("items.parquet", ["item_id"]).column(0).to_pylist()
    first = recpo.prepare(new, tmp_path / "first", extends=data, retire=ids[1:2])
    pq.write_table(pa.table({"item_id": ids[4:6]}), tmp_path / "retired.parquet")
    place = new.schema.get_field_index("timestamp")
    later = new.set_column(place, "timestamp", pc.add(new["timestamp"], DAY_MS))
    second = recpo.prepare(later, tmp_path / "second", extends=first, retire=tmp_path / "retired.parquet")
    assert second.retired_items.tolist() == [2, 5, 6]
    assert second.item_ids().retired.tolist() == [2, 5, 6]
    for batch in HeldOutBatches(second, "test", CONTEXT, 4, Rank()):
        for excluded in batch.exclude.tolist():
            assert {2, 5, 6} <= set(excluded)
    trained = np.concatenate([piece["item_index"] for piece in second.train_columns(["item_index"])])
    assert set(trained.tolist()) >= {2}
    with refused("unknown_name", "retire"):
        recpo.prepare(new, tmp_path / "out", extends=data, retire=[-5])
    with refused("missing_option", "retire"):
        recpo.prepare(new, tmp_path / "out", retire=[-5])


@pytest.mark.slow
def test_ids_to_retire_are_read_as_they_stand(yesterday, tmp_path):
    data, new = yesterday
    (tmp_path / "ids.csv").write_text("item_id\n007\n")
    with refused("wrong_type", "retire"):
        recpo.prepare(new, tmp_path / "out", extends=data, retire=tmp_path / "ids.csv")
    log = living_log(3, 6)
    padded = pc.utf8_lpad(log["item_id"].cast(pa.string()), 5, "0")
    log = log.set_column(log.schema.get_field_index("item_id"), "item_id", padded)
    own = recpo.prepare(
        between(log, 0, 5).rename_columns({"item_id": "song"}),
        tmp_path / "own",
        columns=recpo.Columns(item_id="song"),
        **OPTIONS,
    )
    known = own.table("items.parquet", ["item_id"]).column(0)[2].as_py()
    (tmp_path / "ids.csv").write_text(f"song\n{known}\n")
    new = between(log, 5, 6).rename_columns({"item_id": "song"})
    later = recpo.prepare(new, tmp_path / "next", extends=own, retire=tmp_path / "ids.csv")
    assert later.retired_items.tolist() == [3]


@pytest.mark.slow
def test_units_of_the_new_files_are_checked(tmp_path):
    log = make_log()
    is_new = pc.greater_equal(log["timestamp"], START_MS + 5 * DAY_MS)
    kept = recpo.prepare(log.filter(pc.invert(is_new)), tmp_path / "kept", memory_limit="512MB", threads=1)
    new = log.filter(is_new)
    place = new.schema.get_field_index("watch_time")
    wrong = new.set_column(place, "watch_time", pc.divide(new["watch_time"], 1000))
    for days, warnings in ((new, 0), (wrong, 1)):
        extended = recpo.prepare(days, tmp_path / "out", extends=kept, overwrite=True)
        found = [text for text in extended.manifest["warnings"] if "watch_time_unit" in text]
        assert len(found) == warnings


@pytest.mark.slow
def test_what_is_read_does_not_grow_with_the_past(tmp_path):
    """But for the pairs of today's users, whose past grows with them."""
    log, read, train = living_log(7, 16, events=300), [], []
    new = between(log, 15, 16)
    for first in (10, 0):
        data = recpo.prepare(between(log, first, 15), tmp_path / f"from-{first}", **OPTIONS)
        train.append(sum((data.root / shard["file"]).stat().st_size for shard in data.manifest["shards"]["train"]))
        pairs = sum(file.stat().st_size for file in (data.root / "train_past").iterdir())
        extended = recpo.prepare(new, tmp_path / f"extended-{first}", extends=data)
        read.append(extended.manifest["extends"]["bytes_read"] - pairs)
    assert train[1] > 2 * train[0]
    assert read[1] < 1.4 * read[0]  # more users and items are known

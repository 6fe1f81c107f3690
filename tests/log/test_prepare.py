import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recpo.base.feedback import HIGHEST
from recpo.log.engine import EngineOptions
from recpo.log.id_map import IdMap
from recpo.log.inspection import inspect_log
from recpo.log.prepare import Preparation
from recpo.log.prepared import Prepared
from recpo.log.schema import EVENT_SCHEMA, PERIODS, Columns
from recpo.log.shaping import EveryEvent, NumericColumn
from recpo.log.splits import LeaveLastOut, TemporalSplit
from recpo.log.writing import Output, Sources
from tests.log.conftest import DAY_MS, START_MS, make_log, write_log
from tests.reference import watch_labels as reference
from tests.refusals import refused


def run(log, out, **choice):
    return Preparation(**choice).write(
        Sources(log), Output(out, progress=False, engine=EngineOptions(memory_limit="512MB"))
    )


def files(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A prepared directory of several shards with short contexts, its log and its manifest."""
    folder = tmp_path_factory.mktemp("small")
    log = make_log(users=25, events=900)
    manifest = run(write_log(folder / "log.parquet", log), folder / "out", max_context=5, rows_per_shard=200)
    return log.to_pandas(), folder / "out", manifest


def expected_events(log):
    """The kept events in pandas, in the stated order, with indices and periods."""
    log = log.assign(period=np.searchsorted([START_MS + 4 * DAY_MS, START_MS + 5 * DAY_MS], log["timestamp"], "right"))
    catalog = np.sort(log.loc[log["period"] == 0, "item_id"].unique())
    log = log[log["item_id"].isin(catalog)]
    first = log.groupby("user_id")["period"].min().reset_index().sort_values(["period", "user_id"])
    users = {user: index for index, user in enumerate(first["user_id"])}
    items = {item: index for index, item in enumerate(catalog, start=1)}
    log = log.assign(user_index=log["user_id"].map(users), item_index=log["item_id"].map(items))
    return log.sort_values(["user_index", "timestamp", "request_id", "item_id"]).reset_index(drop=True)


@pytest.mark.slow
def test_the_shards_hold_what_the_contract_says(small):
    log, out, manifest = small
    events = expected_events(log)
    lists = [events[name].tolist() for name in ("user_id", "watch_time", "duration", "period")]
    watch, duration = ([round(1000 * value) for value in column] for column in lists[1:3])
    label = reference.watch_quantiles(lists[0], watch, duration, lists[3])
    level = reference.feedback_levels(watch, duration, events["dislike"].tolist(), lists[3])
    events = events.assign(label=label.astype(np.float32), feedback=level)
    for number, period in enumerate(PERIODS):
        wanted = []
        for _, user in events.groupby("user_index"):
            user, targets = user.reset_index(drop=True), np.flatnonzero(user["period"] == number)
            if len(targets):
                begin = targets[0] if number == 0 else max(0, targets[0] - 5)
                chosen = user.iloc[begin : targets[-1] + 1]
                wanted.append(chosen.assign(is_target=chosen["period"] == number))
        wanted = [row for user in wanted for row in user.itertuples()]
        table = pa.concat_tables([pq.read_table(out / shard["file"]) for shard in manifest["shards"][period]])
        assert table.schema.equals(EVENT_SCHEMA)
        found = table.to_pandas()
        assert len(found) == len(wanted)
        for name in ("user_index", "item_index", "timestamp", "dislike", "feedback", "is_random", "is_target"):
            assert found[name].tolist() == [getattr(row, name) for row in wanted], name
        for name in ("label", "watch_time", "duration", "propensity"):
            values = np.array([getattr(row, name) for row in wanted], dtype=np.float32)
            np.testing.assert_array_equal(found[name], values, err_msg=name)
        request = np.array([row.request_id for row in wanted])
        one_user = np.diff(found["user_index"]) == 0
        np.testing.assert_array_equal((np.diff(found["request"]) == 0)[one_user], (np.diff(request) == 0)[one_user])


def test_no_user_straddles_shards_and_the_manifest_counts_them(small):
    _, out, manifest = small
    assert len(manifest["shards"]["train"]) > 2
    for period in PERIODS:
        seen = set()
        totals = manifest["counts"]["splits"][period]
        for shard in manifest["shards"][period]:
            table = pq.read_table(out / shard["file"]).to_pandas()
            users = set(table["user_index"])
            assert not users & seen
            seen |= users
            assert shard["rows"] == len(table)
            assert shard["users"] == len(users)
            assert shard["targets"] == table["is_target"].sum()
        assert totals["users"] == len(seen)
        assert totals["rows"] == sum(shard["rows"] for shard in manifest["shards"][period])
    kept = sum(totals["targets"] for totals in manifest["counts"]["splits"].values())
    assert kept == manifest["counts"]["read"] - sum(manifest["counts"]["dropped"].values())


def test_held_out_users_keep_every_item_of_their_past(small):
    """More than the max_context events that the shards hold of it, each item once."""
    log, out, manifest = small
    events = expected_events(log)
    opened = Prepared.open(out)
    longer = 0
    for number, period in enumerate(("valid", "test"), start=1):
        for shard in range(opened.num_shards(period)):
            rows = pq.read_table(out / manifest["shards"][period][shard]["file"]).to_pandas()
            users = np.unique(rows["user_index"])
            counts, items = opened.past_items(period, shard, users)
            assert counts.sum() == len(items)
            sizes = opened.held_out_sizes(period, shard)
            assert sizes[0].tolist() == rows.groupby("user_index")["is_target"].sum().tolist()
            assert sizes[1].tolist() == counts.tolist()
            for user, found in zip(users, np.split(items, np.cumsum(counts)[:-1]), strict=True):
                before = events[(events["user_index"] == user) & (events["period"] < number)]
                assert found.tolist() == sorted(set(before["item_index"]))
                longer += len(before) > manifest["max_context"]
    assert longer, "no user has more than the shards hold"


def test_items_users_and_histories(small):
    log, out, manifest = small
    events = expected_events(log)
    items = pq.read_table(out / "items.parquet")
    train = events[events["period"] == 0]
    assert items["item_index"].to_pylist() == list(range(1, manifest["num_items"] + 1))
    assert items["train_count"].to_pylist() == train.groupby("item_index").size().tolist()
    shards = pq.read_table(out / "train").to_pandas()
    liked = (shards["label"] >= 0.75) & ~shards["dislike"]
    assert items["train_positives"].to_pylist() == liked.groupby(shards["item_index"]).sum().tolist()
    durations = train.groupby("item_index")["duration"].first().to_numpy(np.float32)
    np.testing.assert_array_equal(items["duration"].to_numpy(), durations)
    users = pq.read_table(out / "users.parquet").to_pydict()
    assert users["user_index"] == list(range(manifest["num_users"]))
    histories = pq.read_table(out / "histories.parquet").to_pandas()
    assert histories["user_id"].unique().tolist() == users["user_id"]
    expected = events.groupby("user_id", sort=False).tail(5)
    for name in ("item_id", "timestamp"):
        by_user = expected.groupby("user_id")[name].apply(list).to_dict()
        assert histories.groupby("user_id")[name].apply(list).to_dict() == by_user
    assert IdMap.load(out / "items.parquet").to_internal(log["item_id"].to_numpy()).min() >= 0
    assert Prepared.open(out).num_items == manifest["num_items"]


def test_the_levels_of_the_shards_are_those_of_raw_events(small):
    log, out, _ = small
    feedback = Prepared.open(out).feedback
    columns = ("watch_time", "duration", "dislike", "label")
    histories = pq.read_table(out / "histories.parquet").to_pandas()
    test = pq.read_table(out / "test").to_pandas()
    last_user = test[test["user_index"] == test["user_index"].iloc[-1]]
    user = pq.read_table(out / "users.parquet").to_pandas()["user_id"][last_user["user_index"].iloc[0]]
    own = histories[histories["user_id"] == user]
    served = feedback.levels(*(own[name].to_numpy() for name in columns))
    assert served.tolist() == last_user["feedback"].tolist()[-len(own) :]
    events = expected_events(log)
    events = events[events["period"] == 0]
    levels = feedback.levels(*(events[name].to_numpy() for name in columns[:3]), np.full(len(events), np.nan))
    assert levels.tolist() == pq.read_table(out / "train")["feedback"].to_pylist()
    assert len(set(levels.tolist())) > 12


@pytest.mark.slow
def test_preparing_twice_gives_equal_bytes_for_any_order_of_rows_and_files(tmp_path):
    log = make_log(seed=3)
    # Ties in time within a user, told apart by nothing but the watch time.
    tied = log.slice(0, 50).set_column(3, "watch_time", pa.array(np.arange(50) + 0.5))
    log = pa.concat_tables([log, tied])
    for name, order in (("first", np.arange(len(log))), ("second", np.random.default_rng(1).permutation(len(log)))):
        (tmp_path / name).mkdir()
        shuffled = log.take(pa.array(order))
        for part in range(3):
            size = len(log) // 3 + 1
            write_log(tmp_path / name / f"part-{part}.parquet", shuffled.slice(part * size, size))
        run(str(tmp_path / name), tmp_path / f"out-{name}", rows_per_shard=300)
    assert files(tmp_path / "out-first") == files(tmp_path / "out-second")
    assert not any(".work" in name for name in files(tmp_path / "out-first"))
    assert str(tmp_path) not in (tmp_path / "out-first/manifest.json").read_text()


@pytest.mark.slow
def test_nothing_of_the_train_period_depends_on_later_events(tmp_path):
    log = make_log(seed=5)
    other = make_log(users=90, items=70, seed=6)
    boundary = START_MS + 4 * DAY_MS
    changed = pa.concat_tables(
        [log.filter(pc.field("timestamp") < boundary), other.filter(pc.field("timestamp") >= boundary)]
    )
    manifests = [
        run(write_log(tmp_path / f"{name}.parquet", table), tmp_path / name, min_user_events=2)
        for name, table in (("a", log), ("b", changed))
    ]
    a, b = files(tmp_path / "a"), files(tmp_path / "b")
    same = [name for name in a if name.startswith(("train/", "items", "quantiles"))]
    assert {name: a[name] for name in same} == {name: b[name] for name in same}
    assert manifests[0]["feedback"] == manifests[1]["feedback"]
    assert a["test/00000.parquet"] != b["test/00000.parquet"]


@pytest.mark.slow
def test_rare_items_and_idle_users_are_dropped_and_counted(tmp_path):
    log = make_log(users=200, items=300, seed=2)
    path = write_log(tmp_path / "log.parquet", log)
    manifest = run(path, tmp_path / "out", min_item_events=4, min_user_events=3)
    counts = manifest["counts"]
    assert {key.partition(" (")[0] for key in counts["dropped"]} == {
        "item outside the catalog",
        "user below min_user_events",
    }
    kept = sum(split["targets"] for split in counts["splits"].values())
    assert kept + sum(counts["dropped"].values()) == counts["read"] == log.num_rows
    train = pq.read_table(tmp_path / "out/train").to_pandas()
    assert train.groupby("user_index").size().min() >= 3
    whole = run(path, tmp_path / "whole", catalog="log")
    assert whole["counts"]["dropped"] == {}
    items = pq.read_table(tmp_path / "whole/items.parquet").to_pydict()
    trained = [count > 0 for count in items["train_count"]]
    assert trained == sorted(trained, reverse=True), "items of the train period come first"


def test_leave_last_out_without_a_clock(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 30)
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(30), lengths).astype(np.int32),
            "pos": np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
            "item_id": rng.integers(0, 12, lengths.sum()).astype(np.int32),
        }
    )
    choice = {"columns": Columns(timestamp="pos", time_unit="order"), "label": EveryEvent(), "catalog": "log"}
    manifest = run(write_log(tmp_path / "log.parquet", log), tmp_path / "out", split=LeaveLastOut(), **choice)
    held_out = int((lengths >= 3).sum())
    assert manifest["counts"]["splits"]["test"]["targets"] == held_out
    assert manifest["counts"]["splits"]["valid"]["targets"] == held_out
    test = pq.read_table(tmp_path / "out/test").to_pandas()
    assert (test.groupby("user_index").size().to_numpy() == lengths[lengths >= 3]).all()
    assert (test.groupby("user_index")["is_target"].last()).all()
    assert (test["feedback"] == HIGHEST).all()
    assert pq.read_schema(tmp_path / "out/items.parquet").field("item_id").type == pa.int32()


def test_a_log_without_times_has_a_random_order_that_rows_and_grades_do_not_change(tmp_path):
    """The last events of users are not the last items, as in a matrix of ratings that is written row by row."""
    random = np.random.default_rng(0)
    users, items = (one.ravel() for one in np.mgrid[:200, :20])
    kept = random.random(len(users)) < 0.7
    log = pa.table({"user_id": users[kept], "item_id": items[kept], "rating": random.integers(1, 6, kept.sum())})
    shuffled = log.take(random.permutation(log.num_rows))
    choice = {
        "columns": Columns(label="rating", time_unit="none"),
        "label": NumericColumn(low=1.0, high=5.0),
        "split": LeaveLastOut(),
        "catalog": "log",
    }
    for name, table in (("one", log), ("two", shuffled)):
        run(write_log(tmp_path / f"{name}.parquet", table), tmp_path / name, **choice)
    one, two = (
        pd.concat([pq.read_table(tmp_path / name / period).to_pandas() for period in PERIODS])
        for name in ("one", "two")
    )
    pd.testing.assert_frame_equal(one, two)
    ids = pq.read_table(tmp_path / "one/items.parquet").to_pandas().set_index("item_index")["item_id"]
    test = pq.read_table(tmp_path / "one/test").to_pandas()
    last = ids[test.loc[test["is_target"], "item_index"]]
    assert abs(last.mean() - items.mean()) < 4 * items.std() / len(last) ** 0.5
    assert json.loads((tmp_path / "one/manifest.json").read_text())["columns"]["timestamp"] is None
    with refused("conflicting_options", "time_unit"):
        run(write_log(tmp_path / "log.parquet", log), tmp_path / "three", **choice | {"split": TemporalSplit()})


@pytest.mark.slow
def test_an_exposure_and_its_outcome_of_the_same_day_are_one_event(tmp_path):
    """The first one with the highest label; a view stays without a purchase, or on another day."""
    hour, kinds = 3_600_000, {"view": 0.0, "cart": 0.5, "purchase": 1.0, "scroll": None}
    rows = [  # user, item, hour, kind, whether it stays
        (1, 10, 0, "view", False),
        (1, 10, 1, "cart", False),
        (1, 10, 2, "purchase", True),
        (1, 10, 23, "scroll", False),
        (1, 10, 24, "view", True),
        (1, 20, 3, "view", True),
        (2, 10, 4, "view", False),
        (2, 10, 5, "cart", True),
        (2, 10, 6, "cart", False),
    ] + [(user, item, 24 * day, "view", True) for user in (1, 2) for item, day in ((30, 2), (30, 3), (30, 4))]
    user, item, hours, kind, stays = zip(*rows, strict=True)
    times = [START_MS // DAY_MS * DAY_MS + hour * one for one in hours]
    columns = {"user_id": user, "item_id": item, "timestamp": times, "label": [kinds[one] for one in kind]}
    columns["dislike"] = [number == 1 for number in range(len(rows))]  # after the exposure that stays
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    label = NumericColumn(low=0.0, high=1.0)
    manifest = run([tmp_path / "log.parquet"], tmp_path / "out", label=label, outcome_rows=True)
    found = pd.concat([pq.read_table(tmp_path / "out" / period).to_pandas() for period in PERIODS])
    dropped = manifest["counts"]["dropped"]["another event of the user with the item on the same day"]
    assert dropped == len(rows) - sum(stays)
    disliked = found[found["is_target"] & found["dislike"].astype(bool)]
    assert (disliked["timestamp"] // DAY_MS * DAY_MS).tolist() == [times[1] // DAY_MS * DAY_MS]
    labels = sorted((row.timestamp, row.label) for row in found[found["is_target"]].itertuples())
    assert labels == sorted((time, kinds[one]) for time, one, stay in zip(times, kind, stays, strict=True) if stay)
    with refused("conflicting_options", "outcome_rows"):
        Preparation(label=EveryEvent(), outcome_rows=True)


def test_the_sample_log_prepares(tmp_path):
    sample = Path(__file__).parents[2] / "data" / "sample.parquet"
    manifest = run(str(sample), tmp_path / "out")
    assert manifest["counts"]["dropped"] == manifest["counts"]["neutralized"] == {}
    assert sample.stat().st_size <= 60_000


def test_checksums_find_a_changed_file(small, tmp_path):
    _, out, _ = small
    Prepared.open(out).verify()
    shutil.copytree(out, tmp_path / "copy")
    copy = Prepared.open(tmp_path / "copy")
    shard = tmp_path / "copy/test/00000.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"x")
    with refused("damaged", "test/00000.parquet"):
        copy.verify()
    shard.write_bytes(content)
    (tmp_path / "copy/quantiles.parquet").unlink()
    with refused("missing_file", "quantiles.parquet"):
        copy.verify()


@pytest.mark.slow
def test_decimals_are_numbers(tmp_path):
    """As databases write them: times in seconds and ratings."""
    log = make_log(seed=3).select(["user_id", "item_id", "timestamp"])
    log = log.set_column(2, "timestamp", pc.divide(log["timestamp"], 1000).cast(pa.int64()))
    log = log.append_column("label", pa.array(np.random.default_rng(0).integers(2, 11, len(log)) / 2))
    found = []
    for name, kind in (("floats", pa.float64()), ("decimals", pa.decimal128(20, 1))):
        (tmp_path / name).mkdir()
        numbers = {column: log[column].cast(kind) for column in ("timestamp", "label")}
        given = pa.table({"user_id": log["user_id"], "item_id": log["item_id"], **numbers})
        pq.write_table(given, tmp_path / name / "log.parquet")
        inspected = inspect_log(tmp_path / name / "log.parquet")
        assert inspected.label.init_args == {"low": 0.5, "high": 5}
        columns = Columns(user_id="user_id", item_id="item_id", timestamp="timestamp", label="label", time_unit="s")
        out, label = tmp_path / f"{name}.out", NumericColumn(low=1.0, high=5.0)
        run([tmp_path / name / "log.parquet"], out, label=label, columns=columns)
        found.append({file: checksum for file, checksum in files(out).items() if "manifest" not in file})
    assert found[0] == found[1]


def test_csv_equals_parquet(tmp_path):
    log = make_log()
    log.to_pandas().to_csv(tmp_path / "log.csv", index=False)
    csv = run(str(tmp_path / "log.csv"), tmp_path / "csv")
    parquet = run(write_log(tmp_path / "log.parquet", log), tmp_path / "parquet")
    assert csv["shards"] == parquet["shards"]


@pytest.mark.slow
def test_a_word_among_integer_ids_is_a_warning_and_makes_texts_of_the_ids_of_all_files(tmp_path):
    log = make_log().to_pandas()
    log.to_csv(tmp_path / "good.csv", index=False)
    log["item_id"] = ["oops", *map(str, log["item_id"].tolist()[1:])]
    log["timestamp"] += 1
    log.to_csv(tmp_path / "bad.csv", index=False)
    (warning,) = run(str(tmp_path / "bad.csv"), tmp_path / "csv")["warnings"]
    assert "bad.csv, column item_id: 1 row" in warning
    assert "row 0 ('oops')" in warning
    both = run([str(tmp_path / name) for name in ("good.csv", "bad.csv")], tmp_path / "both")
    assert both["warnings"][0] == warning
    assert both["counts"]["read"] == 2 * len(log)


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_that_counts_as_prepared(tmp_path):
    path = write_log(tmp_path / "log.parquet", make_log(users=200, items=100, events=40_000))
    arguments = ["prepare", "--log", path, "--out", str(tmp_path / "out"), "--rows_per_shard", "1000"]
    process = subprocess.Popen([sys.executable, "-m", "recpo.cli.main", *arguments], stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("out.recpo-unfinished-*/*")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    (working,) = tmp_path.glob("out.recpo-unfinished-*")
    with refused("wrong_file", "manifest.json"):
        Prepared.open(working)
    run(path, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.parquet", "out"]
    Prepared.open(tmp_path / "out").verify()

import datetime as dt

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.base.errors import RecpoError
from recpo.log.engine import EngineOptions
from recpo.log.prepare import Preparation
from recpo.log.prepared import Prepared
from recpo.log.schema import Columns
from recpo.log.shaping import BinaryColumn, EveryEvent, NumericColumn, WatchQuantiles
from recpo.log.splits import LeaveLastOut
from recpo.log.writing import Output, Sources
from tests.log.conftest import START_MS, make_log, write_log
from tests.refusals import refused


def put(table, column, values, kind=None):
    """``table`` with ``values`` ({row: value}) put into a column."""
    kept = [int(value) if kind == pa.int64() else value for value in table[column].to_pylist()]
    for row, value in values.items():
        kept[row] = value
    array = pa.array(kept, kind or table[column].type)
    return table.set_column(table.column_names.index(column), column, array)


def run(log, out, **choice):
    return Preparation(**choice).write(
        Sources(log), Output(out, progress=False, engine=EngineOptions(memory_limit="512MB", threads=1))
    )


def fault(log, tmp_path, **choice):
    with pytest.raises(RecpoError) as caught:
        run(log, tmp_path / "out", **choice)
    assert list(tmp_path.glob("out*")) == [], "nothing may be left behind"
    return str(caught.value)


@pytest.mark.parametrize(
    ("column", "values", "kind", "message"),
    [
        ("user_id", {3: None, 9: None}, None, "column user_id: 2 rows: null key [first: row 3 (null), row 9 (null)]"),
        ("item_id", {4: None}, None, "column item_id: 1 row: null key [first: row 4 (null)]"),
        ("timestamp", {1: None}, None, "column timestamp: 1 row: null time"),
        ("timestamp", {5: 1_700_006_400}, None, "unparseable or impossible time [first: row 5 (1700006400)]"),
        ("timestamp", {5: -7}, None, "set --columns.time_unit to s, ms, us, ns or order"),
        ("dislike", {2: 3.0}, pa.float64(), "column dislike: 1 row: neither 0 nor 1 [first: row 2 (3.0)]"),
        ("is_random", {2: -1}, pa.int64(), "column is_random: 1 row: neither 0 nor 1"),
    ],
)
def test_fatal_values(tmp_path, log, column, values, kind, message):
    table = put(log, column, values, kind)
    found = fault(write_log(tmp_path / "clicks.parquet", table), tmp_path)
    assert "1 fault " in found
    assert "clicks.parquet, " + message in found or message in found


@pytest.mark.slow
def test_times_as_strings(tmp_path, log):
    times = [dt.datetime.fromtimestamp(t / 1000, dt.UTC).isoformat() for t in log["timestamp"].to_pylist()]
    table = log.set_column(2, "timestamp", pa.array(times))
    manifest = run(write_log(tmp_path / "log.parquet", table), tmp_path / "text")
    numbers = run(write_log(tmp_path / "log.parquet", log), tmp_path / "numbers")
    assert manifest["shards"] == numbers["shards"]
    found = fault(write_log(tmp_path / "log.parquet", put(table, "timestamp", {7: "yesterday"})), tmp_path)
    assert "1 row: unparseable or impossible time [first: row 7 ('yesterday')]; write ISO times" in found


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["us", "ns"])
def test_equal_times_in_any_type(tmp_path, log, unit):
    seconds = np.array(log["timestamp"]) // 1000
    factor = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    columns = Columns(time_unit=unit)
    plain = run(
        write_log(tmp_path / "log.parquet", log.set_column(2, "timestamp", pa.array(seconds * factor))),
        tmp_path / "numbers",
        columns=columns,
    )
    clock = pa.array(seconds * factor).cast(pa.timestamp(unit, "Asia/Shanghai"))
    zoned = run(write_log(tmp_path / "log.parquet", log.set_column(2, "timestamp", clock)), tmp_path / "zoned")
    assert plain["shards"] == zoned["shards"]
    assert plain["boundaries"] == zoned["boundaries"]


IMPOSSIBLE = [
    ("watch_time", (-0.5, -3.0), "watch_time: negative"),
    ("watch_time", (float("inf"), 1e9), "watch_time: infinite or longer than max_watch_time = 86400 s"),
    ("watch_time", (float("nan"), None), "watch_time: missing"),
    ("duration", (0.0, None), "duration: missing or zero"),
    ("duration", (-4.0, float("inf")), "duration: negative or infinite"),
    ("propensity", (0.0, 1.5), "propensity: outside (0, 1]"),
    ("propensity", (None, float("nan")), "propensity: missing"),
    ("dislike", (None, None), "dislike: missing, taken as false"),
]


@pytest.mark.slow
def test_impossible_values_are_neutralized_and_counted_or_refused(tmp_path, log):
    rows = {reason: (2 * number, 2 * number + 1) for number, (_, _, reason) in enumerate(IMPOSSIBLE)}
    table = log
    for column, values, reason in IMPOSSIBLE:
        table = put(table, column, dict(zip(rows[reason], values, strict=True)))
    path = write_log(tmp_path / "log.parquet", table)
    manifest = run(path, tmp_path / "prepared")
    assert manifest["counts"]["neutralized"] == dict.fromkeys(rows, 2)
    assert sum(split["targets"] for split in manifest["counts"]["splits"].values()) == log.num_rows
    events = pq.read_table(tmp_path / "prepared/train").to_pandas().sort_values("timestamp")
    said = fault(path, tmp_path, strict=True)
    for column, _, reason in IMPOSSIBLE:
        found = events.iloc[list(rows[reason])]
        if column in ("watch_time", "duration"):
            assert found["label"].isna().all()
            assert (found["feedback"] <= 1).all()
        if column != "dislike":
            assert found[column].isna().all()
        if "missing" not in reason:
            assert f"{reason.partition(': ')[2]} [first: row {rows[reason][0]}" in said


@pytest.mark.slow
def test_a_nan_is_found_for_any_statistics_of_the_file(tmp_path, log):
    label = np.where(np.arange(len(log)) % 10 == 3, np.nan, np.arange(len(log)) % 2)
    path = write_log(tmp_path / "log.parquet", log.append_column("label", pa.array(label)))
    manifest = run(path, tmp_path / "prepared", label=BinaryColumn())
    assert manifest["counts"]["neutralized"] == {"label: missing": int(np.isnan(label).sum())}
    counts = Prepared.open(tmp_path / "prepared").feedback_counts
    assert counts["train"] == {kind: manifest["counts"]["splits"]["train"][kind] for kind in counts["train"]}
    disliked = log["dislike"].to_numpy()
    assert sum(split["unknown"] for split in counts.values()) == (np.isnan(label) & ~disliked).sum()
    assert sum(split["disliked"] for split in counts.values()) == disliked.sum()
    assert sum(split["positive"] for split in counts.values()) == ((label == 1) & ~disliked).sum()
    assert sum(split["skipped"] for split in counts.values()) == ((label == 0) & ~disliked).sum()
    assert sum(split["neutral"] for split in counts.values()) == 0


@pytest.mark.slow
def test_exact_duplicates_are_dropped_and_counted_or_refused(tmp_path, log):
    table = pa.concat_tables([log, log.slice(10, 2), log.slice(10, 1)])
    path = write_log(tmp_path / "log.parquet", table)
    manifest = run(path, tmp_path / "prepared")
    assert manifest["counts"]["read"] == log.num_rows + 3
    assert manifest["counts"]["dropped"] == {"exact duplicate of another event": 3}
    found = fault(path, tmp_path, strict=True)
    assert f"3 rows: exact duplicates of an earlier event [first: row {log.num_rows} " in found
    timeless = {"columns": Columns(time_unit="none"), "split": LeaveLastOut(), "label": EveryEvent()}
    found = fault(path, tmp_path, strict=True, **timeless)
    assert "exact duplicates of an earlier event" in found


@pytest.mark.slow
def test_files_that_cannot_be_read(tmp_path, log):
    folder = tmp_path / "log"
    folder.mkdir()
    whole = write_log(folder / "a.parquet", log)
    content = (folder / "a.parquet").read_bytes()
    (folder / "b.parquet").write_bytes(content[: len(content) // 2])
    (folder / "c.parquet").write_bytes(b"")
    (folder / "d.parquet").write_text("user_id,item_id\n")
    found = fault(str(folder), tmp_path)
    assert "3 faults" in found
    assert "b.parquet: a truncated or damaged Parquet file" in found
    assert "c.parquet: the file is empty: 0 bytes" in found
    assert "d.parquet: not a Parquet file, 16 bytes" in found
    assert run([whole, whole], tmp_path / "prepared")["counts"]["read"] == log.num_rows, "one file, named twice"


@pytest.mark.slow
def test_empty_logs_and_empty_parts(tmp_path, log):
    empty = write_log(tmp_path / "part-0.parquet", log.slice(0, 0))
    assert "part-0.parquet: the file is empty: it has no rows" in fault(empty, tmp_path)
    manifest = run([empty, write_log(tmp_path / "part-1.parquet", log)], tmp_path / "prepared")
    assert manifest["counts"]["empty_files"] == 1
    assert manifest["counts"]["read"] == log.num_rows


@pytest.mark.slow
def test_nothing_found(tmp_path):
    for name in ("none.parquet", "part-*.parquet", "s3://bucket/log"):
        assert name in fault(name, tmp_path)


@pytest.mark.slow
def test_columns(tmp_path, log):
    path = write_log(tmp_path / "log.parquet", log.rename_columns({"user_id": "userId", "watch_time": "watched"}))
    found = fault(path, tmp_path)
    assert "log.parquet, column user_id: no such column (wanted as user_id); near: userId;" in found
    assert "pass --columns.user_id NAME" in found
    assert "label WatchQuantiles needs watch_time" in found
    columns = Columns(user_id="userId", watch_time="seen")
    assert "column seen: no such column (wanted as watch_time)" in fault(path, tmp_path, columns=columns)
    manifest = run(path, tmp_path / "prepared", columns=Columns(user_id="userId", watch_time="watched"))
    assert manifest["columns"]["watch_time"] == "watched"
    assert manifest["columns"]["label"] is None


def test_types(tmp_path, log):
    table = log.set_column(0, "user_id", pa.array(np.arange(log.num_rows) > 5))
    table = table.set_column(3, "watch_time", log["watch_time"].cast(pa.string()))
    found = fault(write_log(tmp_path / "log.parquet", table), tmp_path)
    assert "column user_id: type bool, wanted as user_id; expected integers or strings: cast it" in found
    assert "column watch_time: type string, wanted as watch_time; expected a number: cast it" in found
    other = log.set_column(1, "item_id", log["item_id"].cast(pa.string()))
    paths = [write_log(tmp_path / "a.parquet", log), write_log(tmp_path / "b.parquet", other)]
    assert "b.parquet, column item_id: type string differs between files" in fault(paths, tmp_path)


@pytest.mark.slow
def test_labels_say_what_they_cannot_read(tmp_path, log):
    table = log.append_column("label", pa.array([0, 1, 2] * (log.num_rows // 3)))
    path = write_log(tmp_path / "log.parquet", table)
    found = fault(path, tmp_path, label=BinaryColumn())
    assert "column label: 500 rows: a value that BinaryColumn cannot read [first: row 2 (2)" in found
    bare = write_log(tmp_path / "bare.parquet", log.select(["user_id", "item_id", "timestamp"]))
    assert "label WatchQuantiles needs watch_time and duration" in fault(bare, tmp_path, label=WatchQuantiles())
    run(bare, tmp_path / "prepared", label=EveryEvent())


@pytest.mark.slow
def test_a_numeric_label_needs_its_ends_and_counts_values_outside_them(tmp_path, log):
    table = log.append_column("label", pa.array([0.0, 1.0, 2.5, 4.0, None] * (log.num_rows // 5)))
    path = write_log(tmp_path / "log.parquet", table)
    assert "--label.low 0 --label.high 4" in fault(path, tmp_path, label=NumericColumn())
    reason = "label: outside low 0 and high 1, taken as the nearer one"
    manifest = run(path, tmp_path / "prepared", label=NumericColumn(0, 1))
    assert manifest["counts"]["neutralized"] == {"label: missing": 300, reason: 600}
    found = fault(path, tmp_path, label=NumericColumn(0, 1), strict=True)
    assert "600 rows: outside low 0 and high 1" in found
    scaled = run(path, tmp_path / "scaled", label=NumericColumn(0, 4))
    assert scaled["counts"]["neutralized"] == {"label: missing": 300}
    constant = write_log(tmp_path / "same.parquet", log.append_column("label", pa.array([3.0] * log.num_rows)))
    assert "its values do not differ" in fault(constant, tmp_path, label=NumericColumn())


def test_every_fault_is_in_one_report(tmp_path, log):
    table = put(put(log, "user_id", {0: None}), "timestamp", {1: 12})
    table = table.rename_columns({"item_id": "photo"})
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    found = fault([write_log(tmp_path / "log.parquet", table), str(tmp_path / "broken.parquet")], tmp_path)
    assert "4 faults (rows count from 0), nothing written" in found
    for part in ("broken.parquet: ", "column item_id: no such", "null key", "impossible time"):
        assert part in found


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"preset": "tiktok"}, ("unknown_name", "preset")),
        ({"max_context": 0}, ("out_of_range", "max_context")),
        ({"rows_per_shard": 0}, ("out_of_range", "rows_per_shard")),
        ({"max_watch_time": -1.0}, ("out_of_range", "max_watch_time")),
    ],
)
def test_options(choice, message):
    with refused(*message):
        Preparation(**choice)


def test_a_period_without_events(tmp_path):
    log = make_log()
    strangers = log.slice(log.num_rows - 1).set_column(1, "item_id", pa.array([10**6]))
    last = START_MS + 9 * 86_400_000
    strangers = strangers.set_column(2, "timestamp", pa.array([last]))
    found = fault(write_log(tmp_path / "log.parquet", pa.concat_tables([log, strangers])), tmp_path)
    assert "the valid period has no events" in found
    assert "1 item outside the catalog (test)" in found


def test_memory_limit(tmp_path, log):
    path = write_log(tmp_path / "log.parquet", log)
    with refused("bad_value", "memory_limit"):
        Preparation().write(Sources(path), Output(tmp_path / "out", engine=EngineOptions(memory_limit="lots")))


@pytest.mark.slow
@pytest.mark.parametrize("times", ["numbers", "texts"])
def test_rows_without_a_key_or_outside_the_given_times_are_left_out_and_counted(tmp_path, log, times):
    kept = log.slice(30).to_pydict()
    users, items, dates = (log[name].to_pylist() for name in ("user_id", "item_id", "timestamp"))
    dates = [dt.datetime.fromtimestamp(t / 1000, dt.UTC).isoformat() for t in dates] if times == "texts" else dates
    users[:8], items[6:16] = [None, "", " "] + [None] * 5, [None] * 10  # both are null in two of them
    dates[16:20] = ["0000-00-00", "soon", None, ""] if times == "texts" else [0, -1, None, 7]
    early, late = START_MS - 9 * 86_400_000, START_MS + 90 * 86_400_000
    iso = [dt.datetime.fromtimestamp(t / 1000, dt.UTC).isoformat() for t in (early, late)]
    dates[20:30] = ([iso[0]] * 4 + [iso[1]] * 6) if times == "texts" else ([early] * 4 + [late] * 6)
    table = log.set_column(0, "user_id", pa.array(users)).set_column(1, "item_id", pa.array(items, pa.float64()))
    table = table.set_column(2, "timestamp", pa.array(dates))
    path = write_log(tmp_path / "log.parquet", table)
    begin, end = "2023-11-15", "2023-12-01T00:00:00+00:00"
    assert "--skip_incomplete true" in fault(path, tmp_path)
    found = run(path, tmp_path / "out", skip_incomplete=True, begin=begin, end=end)
    counts = found["counts"]
    assert counts["read"] == log.num_rows
    assert {reason: count for reason, count in counts["dropped"].items() if "outside" not in reason} == {
        "row without user_id": 8,
        "row without item_id": 8,
        "row without timestamp": 4,
        "before begin": 4,
        "at end or later": 6,
    }
    assert found["shards"] == run(write_log(tmp_path / "log.parquet", pa.table(kept)), tmp_path / "plain")["shards"]
    with refused("bad_value", "begin"):
        Preparation(begin="soon")
    assert "no row is left" in fault(path, tmp_path / "none", skip_incomplete=True, begin="2090-01-01")

"""Spark and DuckDB prepare the same bytes."""

import hashlib
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recpo.base.errors import RecpoError
from recpo.cli.main import main
from recpo.log.column_facts import DATE_FORMS
from recpo.log.engine import DuckDBEngine, EngineOptions, start_engine
from recpo.log.events import timestamp_ms
from recpo.log.locations import Location, locate
from recpo.log.prepare import Preparation
from recpo.log.prepared import Prepared
from recpo.log.schema import Columns, FlagColumn
from recpo.log.shaping import D2Q, BinaryColumn, EveryEvent, NumericColumn, WatchQuantiles, WatchRatio, bucket_counts
from recpo.log.splits import LeaveLastOut
from recpo.log.writing import Output, Sources
from tests.log.conftest import START_MS, make_log, write_log
from tests.log.test_features import BEHAVIORS, COLUMNS, enriched, item_rows, user_rows
from tests.refusals import refused

SPARK = EngineOptions(
    engine="spark",
    memory_limit="1GB",
    threads=2,
    spark_conf={"spark.sql.shuffle.partitions": "3", "spark.default.parallelism": "2"},
)
DUCKDB = EngineOptions(memory_limit="512MB")


@pytest.fixture(scope="module")
def java():
    """Java that compiles little: its processes, one of which serves the whole module, end before that would pay."""
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    from recpo.log.engine import _has_java

    if not _has_java():
        pytest.skip("Spark needs Java, and there is none")
    with pytest.MonkeyPatch.context() as patched:
        quick = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
        patched.setenv("JAVA_TOOL_OPTIONS", f"{quick} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        patched.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def spark(java, tmp_path_factory):
    """One session for the module: every preparation finds it running and leaves it running."""
    from recpo.log.engine import _session

    session, _ = _session(tmp_path_factory.mktemp("spark"), SPARK)
    yield session
    session.stop()


def contents(directory):
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def hostile_log():
    """Ties, duplicates, nulls, nans, impossible values, ids of letters that collations disagree about."""
    log = make_log(users=20, events=600, seed=4)
    rng = np.random.default_rng(5)

    def spoiled(name, value, share=0.05):
        chosen = pa.array(rng.random(len(log)) < share)
        column = log[name].combine_chunks()
        return pc.if_else(chosen, pa.scalar(value, column.type), column)

    names = ["Zoe", "zoe", "Ärger", "a b", "a", "A", "é", "_", "-", "10", "9", "ß", "z", "\u0001", "日本", "😀"]
    item = np.asarray(log["item_id"]) + 20
    for name, value in (("watch_time", -1.0), ("watch_time", None), ("watch_time", float("nan"))):
        log = log.set_column(log.schema.get_field_index(name), name, spoiled(name, value))
    for name, value in (("watch_time", float("inf")), ("duration", 0.0), ("duration", None), ("propensity", 2.0)):
        log = log.set_column(log.schema.get_field_index(name), name, spoiled(name, value))
    for name in ("dislike", "is_random", "request_id"):
        log = log.set_column(log.schema.get_field_index(name), name, spoiled(name, None))
    log = log.set_column(1, "item_id", pa.array([names[i % len(names)] + str(i // 40) for i in item]))
    coarse = (np.asarray(log["timestamp"]) - START_MS) // 3_600_000 * 3_600_000 + START_MS
    log = log.set_column(2, "timestamp", pa.array(coarse))
    label = np.where(rng.random(len(log)) < 0.1, np.nan, rng.integers(1, 11, len(log)) / 2)
    log = enriched(log.append_column("label", pa.array(label)))
    return pa.concat_tables([log, log.slice(0, 40)])


def write_kinds(folder):
    """Files with rows of the same users: of other width and order, CSV beside Parquet, odd names, an empty one."""
    log = make_log(users=12, events=600, seed=7).drop_columns(["request_id", "watch_time", "duration"])
    log = log.set_column(0, "user_id", pa.array([int(user[1:]) for user in log["user_id"].to_pylist()], pa.uint32()))
    first, second, third = log.slice(0, 200), log.slice(200, 200), log.slice(400)
    second = second.set_column(1, "item_id", second["item_id"].cast(pa.int16())).select(log.schema.names[::-1])
    folder.mkdir()
    write_log(folder / "a b.parquet", first)
    write_log(folder / "c+é.parquet", second)
    third.to_pandas().to_csv(folder / "d.csv", index=False)
    write_log(folder / "e.parquet", log.slice(0, 0))
    return str(folder)


@pytest.mark.slow
def test_a_cluster_of_two_workers_prepares_files_of_several_kinds_to_the_same_bytes(java, monkeypatch, tmp_path):
    """First of the module: the preparation makes a session of its own, on the cluster, and stops it."""
    import pyspark
    from pyspark.sql import SparkSession

    words = ["prepare", "--log", write_kinds(tmp_path / "log %1"), "--memory_limit", "1GB", "--progress", "false"]
    words += ["--catalog", "log", "--label", "EveryEvent", "--split.timezone", "+08:00"]
    assert main([*words, "--out", str(tmp_path / "duckdb")]) == 0
    # tasks too small to pay for compilers and new plans, which other tests have
    conf = {"spark.sql.shuffle.partitions": 2, "spark.sql.codegen.wholeStage": "false"}
    conf |= {"spark.sql.codegen.factoryMode": "NO_CODEGEN", "spark.sql.adaptive.enabled": "false"}
    assert SparkSession.getActiveSession() is None
    # The master and the workers are threads of the driver; executors are processes, with settings as in any cluster.
    home = tmp_path / "home"
    home.mkdir()
    for name in ("bin", "jars"):
        (home / name).symlink_to(Path(pyspark.__file__).parent / name)
    monkeypatch.setenv("SPARK_HOME", str(home))
    words += ["--engine", "spark", "--spark_conf", json.dumps(conf), "--spark_master", "local-cluster[2,1,1024]"]
    assert main([*words, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "spark")]) == 0
    assert len({log.parent.name for log in (home / "work").glob("*/*/stderr")}) == 2  # both had an executor
    assert SparkSession.getActiveSession() is None
    assert contents(tmp_path / "spark") == contents(tmp_path / "duckdb")
    assert Prepared.open(tmp_path / "spark").manifest["counts"]["read"] == 600
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.slow
def test_a_hostile_log_with_features_gives_the_same_bytes(spark, tmp_path):
    log = hostile_log()
    choice = {"features": COLUMNS, "behaviors": BEHAVIORS, "split": LeaveLastOut(2, 0.2, 0.1), "min_user_events": 2}
    choice |= {"label": WatchQuantiles(min_history=3, smoothing=2.5, duration_exponent=0.7)}
    choice |= {"rows_per_shard": 80, "max_context": 7}
    items, users = item_rows(ids=log["item_id"].unique().to_pylist()), user_rows()
    for options in (DUCKDB, SPARK):
        sources = Sources(write_log(tmp_path / "log.parquet", log), items=items, users=users)
        output = Output(tmp_path / options.engine, engine=options, progress=False)
        manifest = Preparation(**choice).write(sources, output)
    assert contents(tmp_path / "spark") == contents(tmp_path / "duckdb")
    assert len(manifest["shards"]["train"]) > 2
    assert manifest["counts"]["neutralized"]
    assert manifest["counts"]["dropped"]["exact duplicate of another event"] >= 40
    assert len(manifest["feature_tables"]) == 2


def compared(spark, tmp_path, table, expressions):
    """The columns that ``expressions`` makes of the rows of ``table``, by either engine, in order of ``row``."""
    file = tmp_path / "rows.parquet"
    pq.write_table(table.append_column("row", pa.array(np.arange(len(table)))), file)
    found = []
    for options in (DUCKDB, SPARK):
        work = tmp_path / options.engine
        work.mkdir()
        with start_engine(options, work) as engine:
            rows = engine.read_parquet([file], [*table.schema.names, "row"])
            found.append(engine.table(expressions(rows).order_by("row")).to_pydict())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "label",
    [WatchRatio(1.3), D2Q(groups=7), NumericColumn(0.5, 5), NumericColumn(threshold=4), BinaryColumn(), EveryEvent()],
)
def test_labels_are_the_same_numbers(spark, tmp_path, label):
    rng = np.random.default_rng(3)
    events = pa.table(
        {
            "period": pa.array(rng.integers(0, 3, 500), pa.int8()),
            "watch_ms": pa.array(rng.integers(0, 10**5, 500), mask=rng.random(500) < 0.1),
            "duration_ms": pa.array(rng.integers(1, 10**5, 500), mask=rng.random(500) < 0.1),
            "value": pa.array(rng.integers(0, 11, 500) / 2, mask=rng.random(500) < 0.1),
        }
    )
    duckdb, spark_found = compared(
        spark, tmp_path, events, lambda rows: label.add(rows, bucket_counts(rows, label)).select("row", "label")
    )
    assert duckdb == spark_found


@pytest.mark.slow
def test_grades_of_texts_and_a_random_order_give_the_same_bytes(spark, tmp_path):
    log = hostile_log().select(["user_id", "item_id"])
    kinds = np.random.default_rng(6).choice(["view", " cart", "purchase", None], len(log)).tolist()
    file = write_log(tmp_path / "log.parquet", log.append_column("event", pa.array(kinds, pa.string())))
    columns = Columns(label=FlagColumn("event", {"cart": 0.5, "purchase": 1.0}), time_unit="none")
    choice = {"columns": columns, "label": NumericColumn(0, 1), "split": LeaveLastOut(2, 0.2, 0.1), "catalog": "log"}
    for options in (DUCKDB, SPARK):
        output = Output(tmp_path / options.engine, engine=options, progress=False)
        manifest = Preparation(**choice).write(Sources(file), output)
    assert contents(tmp_path / "spark") == contents(tmp_path / "duckdb")
    assert all(manifest["counts"]["splits"]["train"][kind] for kind in ("positive", "neutral", "skipped", "unknown"))


@pytest.mark.slow
def test_times_of_every_type_are_the_same_milliseconds(spark, tmp_path):
    moments = make_log(events=200, seed=7)["timestamp"].to_pylist()
    clocks = [datetime.fromtimestamp(moment / 1000, UTC) for moment in moments]
    table = pa.table(
        {
            "s": pa.array([moment // 1000 * 1000 for moment in moments], pa.timestamp("ms")).cast(pa.timestamp("s")),
            "us": pa.array([moment * 1000 + 999 for moment in moments], pa.timestamp("us", tz="Asia/Shanghai")),
            "ns": pa.array([moment * 1_000_000 + 999_999 for moment in moments], pa.timestamp("ns")),
            "ns_utc": pa.array([moment * 1_000_000 for moment in moments], pa.timestamp("ns", tz="UTC")),
            "day": pa.array(clocks, pa.date32()),
            "text": [clock.replace(tzinfo=None).isoformat() for clock in clocks],
            "offset": [(clock + timedelta(hours=8)).isoformat()[:23] + "+08:00" for clock in clocks],
            "digits": [str(moment) for moment in moments],
            "whole": moments,
            "float": pa.array(moments, pa.float64()),
            "unsigned": pa.array(moments, pa.uint64()),
        }
    )
    duckdb, spark_found = compared(
        spark,
        tmp_path,
        table,
        lambda rows: rows.select("row", **{name: timestamp_ms(rows[name], "ms") for name in table.schema.names}),
    )
    assert duckdb == spark_found
    for name in set(table.schema.names) - {"s", "ns", "day", "offset"}:
        assert duckdb[name] == moments, name


@pytest.mark.slow
def test_the_faults_of_a_log_are_reported_alike(spark, tmp_path):
    log = make_log(events=200)
    spoiled = {"item_id": None, "timestamp": 12, "dislike": None}
    for name, value in spoiled.items():
        column = log[name].combine_chunks()
        wrong = pa.array(np.arange(len(log)) % 50 == 7)
        log = log.set_column(
            log.schema.get_field_index(name), name, pc.if_else(wrong, pa.scalar(value, column.type), column)
        )
    (tmp_path / "log").mkdir()
    write_log(tmp_path / "log" / "part 1.parquet", log.slice(0, 100))
    write_log(tmp_path / "log" / "part 2.parquet", pa.concat_tables([log.slice(100), log.slice(0, 3)]))
    messages = []
    for engine in (DUCKDB, SPARK):
        with pytest.raises(RecpoError) as caught:
            Preparation(strict=True).write(
                Sources(str(tmp_path / "log")), Output(tmp_path / "out", engine=engine, progress=False)
            )
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "part 1.parquet row 7 (null)" in messages[0]
    assert "exact duplicates" in messages[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_text_is_the_same_time_to_both_engines_or_to_one_of_them_none(spark, tmp_path):
    """A log with a text that only one of them reads is refused by the other, never misread."""
    texts = ["2024", "2024-05", "12:00", "2024-05-01", "2024-05-01 7:5", "2024/05/01", "2024-05-01T24:00:00", "epoch"]
    texts += [" 2024-05-01", "2024-05-01 12:00:00 +08:00", "1e12", "1700000000000.5", "17_000", "now", "0x11"]
    texts += ["2024-05-01 UTC", "2024-13-01", "2024-02-30", "20240501", "2024-05-01T12:00:00,5", "1700000000000 "]
    texts += ["2024-05-01T12:00:00.1239"]
    dates = ["31.01.2026 18:30", "31-Jan-2026", "Sat, 31 Jan 2026 18:30:00 +0100", "1/31/2026 6:30 PM", "1/2/2026"]
    dates += ["Sat Jan 31 18:30:00 +0000 2026", "Jan 31, 2026 12:05 a.m.", "20260131", "20260131183000", "20261331"]
    dates += ["2026-01-31 06:30 PM", "2026.01.31 18:30", "31.01.26", "", "45.01.2026"]
    texts += dates
    duckdb, spark_found = compared(
        spark,
        tmp_path,
        pa.table({"time": texts}),
        lambda rows: rows.select("row", **{unit: timestamp_ms(rows["time"], unit) for unit in ("ms", *DATE_FORMS)}),
    )
    for form in DATE_FORMS:
        read = duckdb[form][-len(dates) :]
        assert read == spark_found[form][-len(dates) :]
        assert sum(one is not None for one in read) >= 4, form
    duckdb, spark_found = {"ms": duckdb["ms"]}, {"ms": spark_found["ms"]}
    for text, ours, theirs in zip(texts, duckdb["ms"], spark_found["ms"], strict=True):
        assert None in (ours, theirs) or ours == theirs, text
    both_read = [text for text, *ms in zip(texts, duckdb["ms"], spark_found["ms"], strict=True) if None not in ms]
    assert {"2024-05-01", "2024-05-01 12:00:00 +08:00"} <= set(both_read)
    assert not {"2024", "12:00", "2024-05", "now"} & set(both_read)


def test_a_missing_spark_or_java_is_one_clear_error(tmp_path, monkeypatch):
    path = write_log(tmp_path / "log.parquet", make_log(events=50))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyspark.errors", None)
        with refused("not_installed", "pyspark"):
            Preparation().write(Sources(path), Output(tmp_path / "out", engine=SPARK, progress=False))
    pytest.importorskip("pyspark")
    # another test may have left its session in this process
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with refused("not_installed", "java"):
        Preparation().write(Sources(path), Output(tmp_path / "out", engine=SPARK, progress=False))
    assert not (tmp_path / "out").exists()


def test_memory_limits_mean_the_same_to_both_engines(tmp_path):
    pytest.importorskip("pyspark")
    from recpo.log.engine import _settings

    def memory(limit, master="local[*]"):
        settings = _settings(tmp_path, EngineOptions(engine="spark", memory_limit=limit, spark_master=master))
        return settings["spark.driver.memory" if master == "local[*]" else "spark.executor.memory"]

    assert memory("4GB") == "3814m"
    assert memory("2GiB") == "2048m"
    assert memory("8GB", "yarn") == memory("8GB", "local-cluster[2,1,8192]") == "7629m"
    with refused("bad_value", "memory_limit"):
        memory("lots")
    chosen = EngineOptions(engine="spark", threads=3, spark_conf={"spark.executor.cores": "5"})
    settings = _settings(tmp_path, chosen)
    assert settings["spark.master"] == "local[3]"
    assert settings["spark.executor.cores"] == "5"


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path):
    from recpo.log.engine import _parts

    for number in ("00002", "00010", "100000", "99999"):
        (tmp_path / f"part-{number}-6f1c-c000.snappy.parquet").touch()
    (tmp_path / "_SUCCESS").touch()
    found = [[file.name.split("-")[1] for file in _parts(place)] for place in (tmp_path, locate(f"file://{tmp_path}"))]
    assert found[0] == found[1] == ["00002", "00010", "99999", "100000"]


def test_duckdb_works_in_a_local_directory_only():
    with refused("not_local", "work"):
        DuckDBEngine(Location("s3://bucket/work"))

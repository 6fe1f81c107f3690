"""Preparing a log: recpo against pandas and polars doing the same work, one JSON line for each.

    python benchmarks/prepare.py --events 10000000
    python benchmarks/prepare.py --events 5000000 --contenders recpo recpo_on_spark

The work: read the log, drop duplicates, split by time, index users and items, label with watch quantiles per user and
duration bucket (fitted on train, with the fallback to all users), sort by user and time, write train, valid and test
with contexts as Parquet. Every contender runs in a fresh process; the mean label of the train events must agree. recpo
also checks every row, computes feedback levels, histories, item statistics and checksums, which the others leave out.
``manifest`` is the checksum of everything that recpo wrote: equal for both of its engines. Peaks include Spark's JVM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CONTENDERS = {
    "recpo": ("recpo", "ibis-framework", "duckdb"),
    "recpo_on_spark": ("recpo", "ibis-framework", "pyspark"),
    "pandas": ("pandas",),
    "polars": ("polars",),
}
MIN_HISTORY, MAX_CONTEXT, DAY_MS = 5, 200, 86_400_000


def with_recpo(log, out):
    from recpo.log.prepare import Preparation
    from recpo.log.writing import Output, Sources

    Preparation().write(Sources(str(log)), Output(out, progress=False))


def with_recpo_on_spark(log, out):
    from recpo.log.engine import EngineOptions
    from recpo.log.prepare import Preparation
    from recpo.log.writing import Output, Sources

    Preparation().write(Sources(str(log)), Output(out, EngineOptions(engine="spark"), progress=False))


def with_pandas(log, out):
    import numpy as np
    import pandas as pd

    events = pd.read_parquet(log).drop_duplicates()
    test = events["timestamp"].max() // DAY_MS * DAY_MS
    events["period"] = np.searchsorted([test - DAY_MS, test], events["timestamp"], side="right")
    catalog = np.sort(events.loc[events["period"] == 0, "item_id"].unique())
    events = events[events["item_id"].isin(catalog)]
    events["item_index"] = np.searchsorted(catalog, events["item_id"]) + 1
    events["watch_ms"] = (events["watch_time"].astype("float64") * 1000).round().astype("int64")
    events["bucket"] = np.floor(np.log2(events["duration"].astype("float64") + 1e-6)).astype("int64")
    events["fitted"] = (events["period"] == 0).astype("int64")
    shares = {}
    for name, group in (("own", ["user_id", "bucket"]), ("all", ["bucket"])):
        events = events.sort_values([*group, "watch_ms"])
        events["sum"] = events.groupby(group)["fitted"].cumsum()
        at_most = events.groupby([*group, "watch_ms"])["sum"].transform("max")
        total = events.groupby(group)["fitted"].transform("sum")
        equal = events.groupby([*group, "watch_ms"])["fitted"].transform("sum")
        shares[name] = ((at_most - equal / 2) / total).where(total >= MIN_HISTORY)
    events["label"] = shares["own"].fillna(shares["all"])
    events = events.drop(columns=["sum", "fitted"]).sort_values(["user_id", "timestamp", "request_id", "item_id"])
    events["position"] = events.groupby("user_id").cumcount()
    out.mkdir()
    events[events["period"] == 0].to_parquet(out / "train.parquet", compression="zstd")
    for number, name in ((1, "valid"), (2, "test")):
        begin = events[events["period"] == number].groupby("user_id")["position"].min()
        start = events["user_id"].map(begin)
        rows = events[(events["period"] <= number) & (events["position"] >= start - MAX_CONTEXT)]
        rows.to_parquet(out / f"{name}.parquet", compression="zstd")


def with_polars(log, out):
    import polars as pl

    files = str(log / "*.parquet")
    events = pl.scan_parquet(files).unique()
    test = pl.scan_parquet(files).select(pl.col("timestamp").max()).collect().item() // DAY_MS * DAY_MS
    time_, watch = pl.col("timestamp"), pl.col("watch_ms")
    events = events.with_columns(
        period=(time_ >= test).cast(pl.Int8) + (time_ >= test - DAY_MS).cast(pl.Int8),
        watch_ms=(pl.col("watch_time").cast(pl.Float64) * 1000).round().cast(pl.Int64),
        bucket=(pl.col("duration").cast(pl.Float64) + 1e-6).log(2).floor().cast(pl.Int64),
    )
    catalog = (
        events.filter(pl.col("period") == 0).select(pl.col("item_id").unique().sort()).with_row_index("item_index", 1)
    )
    events = events.join(catalog, on="item_id").collect()
    for name, group in (("own", ["user_id", "bucket"]), ("all", ["bucket"])):
        counts = events.group_by([*group, "watch_ms"]).agg(n=(pl.col("period") == 0).sum()).sort([*group, "watch_ms"])
        counts = counts.with_columns(at_most=pl.col("n").cum_sum().over(group), total=pl.col("n").sum().over(group))
        share = pl.when(pl.col("total") >= MIN_HISTORY).then((pl.col("at_most") - pl.col("n") / 2) / pl.col("total"))
        events = events.join(counts.select(*group, watch, share.alias(name)), on=[*group, "watch_ms"])
    events = events.with_columns(label=pl.coalesce("own", "all")).drop("own", "all")
    events = events.sort("user_id", "timestamp", "request_id", "item_id")
    events = events.with_columns(position=pl.int_range(pl.len()).over("user_id"))
    out.mkdir()
    events.filter(pl.col("period") == 0).write_parquet(out / "train.parquet")
    for number, name in ((1, "valid"), (2, "test")):
        begin = events.filter(pl.col("period") == number).group_by("user_id").agg(begin=pl.col("position").min())
        rows = events.join(begin, on="user_id", maintain_order="left").filter(
            (pl.col("period") <= number) & (pl.col("position") >= pl.col("begin") - MAX_CONTEXT)
        )
        rows.write_parquet(out / f"{name}.parquet")


def mean_label(out):
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    path = out / "train" if (out / "train").is_dir() else out / "train.parquet"
    column = ds.dataset(path).to_table(columns=["label"])["label"].cast("float64")
    return round(pc.mean(column.filter(pc.is_finite(column))).as_py(), 5)


def children():
    """Processes that this one started and that still run: Spark's JVM."""
    tasks = Path("/proc/self/task")
    pids = [pid for task in tasks.glob("*/children") for pid in task.read_text().split()] if tasks.is_dir() else []
    return [Path("/proc") / pid for pid in pids]


def peak_of_children():
    lines = [line for child in children() for line in (child / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def cpu_of_children():
    fields = [(child / "stat").read_text().rpartition(")")[2].split() for child in children()]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def measure(contender, log, out, events):
    start, cpu = time.perf_counter(), time.process_time()
    work = {"recpo": with_recpo, "recpo_on_spark": with_recpo_on_spark, "pandas": with_pandas, "polars": with_polars}
    work[contender](log, out)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu + cpu_of_children()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 + peak_of_children()
    manifest = out / "manifest.json"
    print(
        json.dumps(
            {
                "benchmark": "prepare",
                "contender": contender,
                "versions": {name: version(name) for name in CONTENDERS[contender]},
                "events": events,
                "seconds": round(seconds, 2),
                "cpu_seconds": round(cpu, 2),
                "rows_per_second": round(events / seconds),
                "peak_rss_mib": round(peak),
                "mean_train_label": mean_label(out),
                "manifest": hashlib.sha256(manifest.read_bytes()).hexdigest()[:12] if manifest.exists() else None,
            }
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000_000)
    usual = ["recpo", "pandas", "polars"]
    parser.add_argument("--contenders", nargs="*", default=usual, choices=list(CONTENDERS))
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.log:
        measure(options.contenders[0], options.log, options.out, options.events)
        return
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder) / "world"
        sizes = {
            "users": max(100, options.events // 50),
            "items": max(100, options.events // 100),
            "events": options.events,
        }
        flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        simulate = [sys.executable, "-m", "recpo.cli.main", "simulate", "--out", str(world), *flags]
        subprocess.run(simulate, check=True, stdout=subprocess.DEVNULL)
        for contender in options.contenders:
            try:
                [version(name) for name in CONTENDERS[contender]]
            except PackageNotFoundError as error:
                print(
                    json.dumps(
                        {"benchmark": "prepare", "contender": contender, "skipped": f"{error.name} is not installed"}
                    )
                )
                continue
            arguments = ["--contenders", contender, "--log", str(world / "log"), "--out", str(Path(folder) / contender)]
            subprocess.run([sys.executable, __file__, *arguments, "--events", str(options.events)], check=True)


if __name__ == "__main__":
    main()

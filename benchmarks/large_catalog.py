"""Training with a catalog that is sharded over two ranks of one machine: memory and speed.

    python benchmarks/large_catalog.py --items 20000000 --work large      # 20 GB of disk, 15 minutes on 2 cores
    python benchmarks/large_catalog.py --items 1000000 --work features --contenders sampled features --steps 20

Writes a log that shows every item at least once, prepares it, gives the items codes, and trains a policy with a sampled
normalizer and one with semantic ids (item vectors and codes) through the command line, on two gloo ranks: some steps,
a checkpoint, and ten more steps after a resume, with a validation over the full catalog. The contender ``features`` is
the first policy on a log that was prepared with a table of the items: five categories and a vector of 64. Prints one
JSON line per preparation and policy: the largest memory of all processes together (proportional set size, pages mapped
from files included, GiB), the same of a single process, and the size of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

DAY_MS = 86_400_000
PARTS = 24
CONTENDERS = ("sampled", "semantic", "features")
CATEGORIES, WIDTH = (20, 200, 2000, 50, 8), 64


def write_log(file: Path, items: int, seed: int = 0) -> None:
    """1.2 events per item by one user per 50 items: every item once, then popular ones."""
    rng = np.random.default_rng(seed)
    order, count = rng.permutation(items), items * 6 // 5 // PARTS + 1
    with pq.ParquetWriter(
        file, pa.schema([("user_id", "int64"), ("item_id", "int64"), ("timestamp", "int64")])
    ) as writer:
        for part in range(PARTS):
            first = np.arange(part * count, (part + 1) * count)
            popular = (rng.pareto(1.0, count) * 1000).astype(np.int64) % items
            shown = order[np.where(first < items, first, popular) % items]
            when = 1_700_000_000_000 + rng.integers(0, 10 * DAY_MS, count)
            users = rng.integers(0, max(1, items // 50), count)
            writer.write_table(pa.table({"user_id": users, "item_id": shown, "timestamp": when}))


def write_items(file: Path, items: int, seed: int = 1) -> None:
    """Five categories and a vector of 64 for every item."""
    rng = np.random.default_rng(seed)
    kinds = {f"category_{size}": pa.int64() for size in CATEGORIES}
    schema = pa.schema({"item_id": pa.int64(), **kinds, "text": pa.list_(pa.float32(), WIDTH)})
    with pq.ParquetWriter(file, schema) as writer:
        for ids in np.array_split(np.arange(items), PARTS):
            vectors = pa.array(rng.standard_normal(len(ids) * WIDTH, np.float32))
            drawn = [pa.array(rng.integers(0, size, len(ids))) for size in CATEGORIES]
            columns = [pa.array(ids), *drawn, pa.FixedSizeListArray.from_arrays(vectors, WIDTH)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def prepare(work: Path, out: Path, items: int, *others: str) -> None:
    """Prepares the log, and prints what it took in memory."""
    verb = ["prepare", "--log", str(work / "log.parquet"), "--out", str(out), "--catalog", "log", *others]
    label = ["--label", "EveryEvent", "--columns.time_unit", "ms"]
    took = measured([sys.executable, "-m", "recpo.cli.main", *verb, *label])
    print(json.dumps({"items": items, "prepared": out.name, **took}), flush=True)


def write_codes(prepared: Path, out: Path) -> None:
    """Three codes per item, spread over the tuples: what an item is like does not matter to the cost."""
    from recpo.artifacts.semantic_codes import Codes
    from recpo.log.prepared import Prepared

    data = Prepared.open(prepared)
    size = 8
    while size**3 < 4 * data.num_items:
        size *= 2
    tuples = np.arange(data.num_items, dtype=np.int64) * (size**3 // data.num_items)
    codes = np.stack(np.unravel_index(tuples, (size,) * 3), 1)
    out.mkdir()
    items = pq.read_table(prepared / "items.parquet", columns=["item_id"]).column(0)
    Codes(codes, (size,) * 3, data.catalog_checksum).save(out, items, {})


def config(prepared: Path, policy: dict[str, Any], batch_size: int) -> dict[str, Any]:
    strategy = {"sharding": "row_wise", "table_optimizer": {"optimizer": "rowwise_adagrad", "lr": 0.05}}
    return {
        "data": {
            "prepared": str(prepared),
            "batch_size": batch_size,
            "layout": {"class_path": "SequenceLayout", "init_args": {"history_length": 50}},
            "max_validation_users": 64,
            "evaluation_batch_size": 32,
        },
        "policy": policy,
        "objective": {"class_path": "Likelihood"},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "strategy": {"class_path": "recpo.sharding.ShardedStrategy", "init_args": strategy},
        },
    }


def measured(command: list[str]) -> dict[str, float]:
    """Runs a command and watches the memory of its processes."""
    peak, single = 0.0, 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        sizes = [resident(pid) for pid in family(process.pid)]
        peak, single = max(peak, sum(sizes)), max(single, *sizes)
        time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    return {"peak_gib": round(peak, 2), "peak_of_a_process_gib": round(single, 2)}


def family(pid: int) -> list[int]:
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(member for child in children for member in family(int(child)))]


def resident(pid: int) -> float:
    """Proportional set size in GiB: what processes share is split between them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / (1 << 20)


def train(work: Path, prepared: Path, name: str, policy: dict[str, Any], steps: int, batch_size: int) -> dict[str, Any]:
    run, file = work / name, work / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config(prepared, policy, batch_size)))
    shutil.rmtree(run, ignore_errors=True)
    verb = [sys.executable, "-m", "recpo.cli.main", "train", "--config", str(file), "--out", str(run)]
    verb += ["--trainer.val_check_interval", str(steps + 5)]  # the same in both: a run resumes with its own options
    first = measured([*verb, "--trainer.max_steps", str(steps)])
    saved = sum(part.stat().st_size for part in (run / "checkpoints" / "last.ckpt").iterdir())
    rest = ["--resume", "true", "--trainer.max_epochs", "2", "--trainer.max_steps", str(steps + 10)]
    resumed = measured([*verb, *rest])
    results = json.loads((run / "run.json").read_text())["results"]
    return {
        "contender": name,
        "training": first,
        "resumed with validation": resumed,
        "checkpoint_gib": round(saved / (1 << 30), 2),
        "validated": sorted(name for name in results if name.startswith("val/")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=20_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--contenders", choices=CONTENDERS, nargs="+", default=["sampled", "semantic"])
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "log.parquet").is_file():
        write_log(work / "log.parquet", arguments.items)
    plain, featured = work / "prepared", work / "prepared_features"
    if not plain.is_dir() and {"sampled", "semantic"} & set(arguments.contenders):
        prepare(work, plain, arguments.items)
    if not featured.is_dir() and "features" in arguments.contenders:
        write_items(work / "items.parquet", arguments.items)
        prepare(work, featured, arguments.items, "--items", str(work / "items.parquet"))
    if not (work / "codes").is_dir() and "semantic" in arguments.contenders:
        write_codes(plain, work / "codes")
    common = {"dim": arguments.dim, "layers": 2, "heads": 2, "max_history": 50}
    sampled = {"class_path": "CatalogSoftmaxPolicy", "init_args": common | {"normalizer": "sampled"}}
    reading = {"class_path": "CatalogSoftmaxPolicy", "init_args": {**sampled["init_args"], "item_features": {}}}
    semantic = {
        "class_path": "SemanticIdPolicy",
        "init_args": common | {"codes": str(work / "codes"), "beam_width": 20},
    }
    policies = {"sampled": (plain, sampled), "semantic": (plain, semantic), "features": (featured, reading)}
    for name in arguments.contenders:
        prepared, policy = policies[name]
        line = train(work, prepared, name, policy, arguments.steps, arguments.batch_size)
        print(json.dumps({"items": arguments.items, "dim": arguments.dim, "ranks": 2} | line), flush=True)


if __name__ == "__main__":
    main()

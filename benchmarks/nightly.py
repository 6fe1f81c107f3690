"""Every night: extend the data by a day and go on training from yesterday's run, against training from scratch.

    recpo simulate --out nightly/world --world living --users 400 --items 600 --events 40000 --days 24
    python benchmarks/nightly.py --world nightly/world --work nightly/runs --nights 14

Night n prepares the log up to its day by ``prepare --extends`` (and the first one in full), trains one run from the run
of the night before (``init_from``, ``data.segments newest`` and a share of older batches) and one from scratch on all
of it, and ranks the catalog for the users of the day that was held out. Prints one JSON line per night and one for all:
the true expected reward of the top-10 lists of both runs, the mean paired difference over users with the half-width of
its 95 % interval, the CPU seconds of both, the bytes that the extension read of yesterday's directory, and how many
items and training events there are. With ``--semantic`` the policies generate semantic ids: codes are made once, and
kept by ``tokenize --extends``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import torch

import recpo
from recpo.data.datamodule import evaluation_batches
from recpo.evaluation.true_rewards import true_rewards

K, DAY_MS = 10, 86_400_000


def days_of(log):
    """The log in one table per calendar day."""
    rows = ds.dataset(log, format="parquet").to_table()
    time_ms = rows["timestamp"].cast(pa.int64()) if pa.types.is_timestamp(rows["timestamp"].type) else rows["timestamp"]
    day = pc.divide(time_ms, DAY_MS)
    day = pc.subtract(day, pc.min(day)).to_numpy()
    return [rows.filter(pa.array(day == number)) for number in range(int(day.max()) + 1)]


def true_values(run, data, truth):
    """True reward of every held-out user's list, ``[U]``."""
    rewards, policy, found = true_rewards(truth, data, "test", [K]), run.policy(), []
    with torch.no_grad():
        for batch in evaluation_batches(data.root, "test", policy.max_history, 512):
            items = policy.recommend(batch.feedback.histories, K, batch.exclude).item_ids
            found.append(rewards.of_lists(batch.user_ids, items)[f"true_reward@{K}"])
    return torch.cat(found).numpy()


def timed(function, *arguments, **options):
    """The result, and the CPU seconds that it took."""
    began = time.process_time()
    return function(*arguments, **options), time.process_time() - began


class Nights:
    """The two ways, and where they stand."""

    def __init__(self, options):
        self.options, self.data, self.warm, self.codes = options, None, None, None

    def extend(self, table, night):
        """Tonight's data."""
        out = self.options.work / f"data-{night}"
        kept = {} if self.data is None else {"extends": self.data}
        self.data, seconds = timed(recpo.prepare, table, out, overwrite=True, threads=1, **kept)
        return seconds

    def tokenize(self, night):
        """Tonight's codes: all of yesterday's, and those of the new items."""
        out = self.options.work / f"codes-{night}"
        kept = {"levels": 3, "codebook_size": 64} if self.codes is None else {"extends": self.codes}
        self.codes, seconds = timed(recpo.tokenize, self.data, out, overwrite=True, **kept)
        return seconds

    def train(self, name, night, epochs, **more):
        """A run on tonight's data."""
        policy = {"dim": self.options.dim, "layers": 1, "heads": 1}
        kind = "CatalogSoftmaxPolicy"
        if self.options.semantic:
            kind, policy = "SemanticIdPolicy", policy | {"codes": str(self.codes.root), "decoder_layers": 1}
        return timed(
            recpo.train,
            self.data,
            out=self.options.work / f"{name}-{night}",
            policy={"class_path": kind, "init_args": policy},
            trainer={"max_epochs": epochs, "logger": False},
            overwrite=True,
            seed=self.options.seed,
            **{"data.batch_size": 32, "data.seed": self.options.seed, **more},
        )

    def night(self, table, number):
        """One night of both ways, as a JSON line."""
        seconds = {"prepare": self.extend(table, number)}
        if self.options.semantic:
            seconds["tokenize"] = self.tokenize(number)
        scratch, seconds["scratch"] = self.train("scratch", number, self.options.epochs)
        if self.warm is None:
            self.warm = scratch
            return None
        newest = {"data.segments": "newest", "data.replay": self.options.replay, "init_from": self.warm}
        self.warm, seconds["warm"] = self.train("warm", number, self.options.warm_epochs, **newest)
        truth = self.options.world / "truth"
        warm, scratch = (true_values(run, self.data, truth) for run in (self.warm, scratch))
        gain = warm - scratch
        train = self.data.manifest["counts"]["splits"]["train"]
        return {
            "night": number,
            "items": self.data.num_items,
            "train_events": train["targets"],
            "bytes_read": self.data.manifest["extends"]["bytes_read"],
            "cpu_seconds": {name: round(value, 2) for name, value in seconds.items()},
            "warm": round(float(warm.mean()), 5),
            "scratch": round(float(scratch.mean()), 5),
            "difference": round(float(gain.mean()), 5),
            "half_width": round(float(1.96 * gain.std(ddof=1) / len(gain) ** 0.5), 5),
        }


def summary(lines):
    """All nights together: nights are the units of the interval."""
    gain = np.array([line["difference"] for line in lines])
    cost = {name: sum(line["cpu_seconds"][name] for line in lines) for name in ("warm", "scratch", "prepare")}
    return {
        "nights": len(lines),
        "warm": round(float(np.mean([line["warm"] for line in lines])), 5),
        "scratch": round(float(np.mean([line["scratch"] for line in lines])), 5),
        "difference": round(float(gain.mean()), 5),
        "half_width": round(float(2.2 * gain.std(ddof=1) / len(gain) ** 0.5), 5) if len(gain) > 1 else None,
        "cpu_ratio": round(cost["warm"] / cost["scratch"], 4),
        "cpu_ratio_with_prepare": round((cost["warm"] + cost["prepare"]) / cost["scratch"], 4),
    }


def main():
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=Path, required=True, help="directory that recpo simulate wrote")
    parser.add_argument("--work", type=Path, required=True, help="directory for data and runs")
    parser.add_argument("--nights", type=int, default=14, help="nights after the first preparation")
    parser.add_argument("--epochs", type=int, default=8, help="epochs from scratch")
    parser.add_argument("--warm_epochs", type=int, default=4, help="epochs of a night over the newest segment")
    parser.add_argument("--replay", type=float, default=1.0, help="older batches per new one")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--semantic", action="store_true", help="policies of semantic ids")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    days = days_of(options.world / "log")
    first, nights = len(days) - options.nights, Nights(options)
    nights.night(pa.concat_tables(days[:first]), 0)
    lines = []
    for number, table in enumerate(days[first:], start=1):
        lines.append(nights.night(table, number))
        print(json.dumps(lines[-1]), flush=True)
    print(json.dumps(summary(lines)), flush=True)


if __name__ == "__main__":
    main()

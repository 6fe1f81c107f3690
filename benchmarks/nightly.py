"""Nightly training: extend the data by a day and train from the previous run, against training from scratch.

    recpo simulate --out nightly/world --world living --users 400 --items 600 --events 40000 --days 24
    python benchmarks/nightly.py --world nightly/world --work nightly/runs --nights 14

Night n prepares the log up to its day by ``prepare --extends`` (and the first one in full) and trains a run from the
run of the previous night (``init_from``, ``data.segments newest`` and a share of older batches). The other way prepares
the whole log again and trains on all of it from scratch, with the same options and ``--epochs`` epochs. Both rank the
catalog for the users of the day that was held out. Prints one JSON line per night and one for all: the true expected
reward of the top-10 lists of both runs, the mean paired difference over users with the half-width of its 95 % interval,
the CPU seconds of every step, the bytes that the extension read of the previous directory, and how many items and
training events there are. With ``--semantic`` the policies generate semantic ids: codes are made once, and kept by
``tokenize --extends``; scratch makes its own. They are made from the vectors of the table of items, or from
co-occurrence (``--vectors``). With ``--features`` policies read the features of items and users.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from scipy.special import stdtrit

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.true_rewards import true_rewards
from recpo.log.feature_columns import FeatureColumns

K, DAY_MS = 10, 86_400_000


def days_of(log):
    """The log in one table per calendar day."""
    rows = ds.dataset(log, format="parquet").to_table()
    time_ms = rows["timestamp"].cast(pa.int64()) if pa.types.is_timestamp(rows["timestamp"].type) else rows["timestamp"]
    day = pc.divide(time_ms, DAY_MS)
    day = pc.subtract(day, pc.min(day)).to_numpy()
    return [rows.filter(pa.array(day == number)) for number in range(int(day.max()) + 1)]


def true_values(run, data, truth):
    """True reward of every held-out user's list, by external user id."""
    rewards, policy, found, users = true_rewards(truth, data, "test", [K]), run.policy(), [], []
    with torch.no_grad():
        for batch in evaluation_batches(data.root, "test", policy.max_history, 512, policy.reads):
            items = policy.recommend(batch.feedback.histories, K, batch.exclude).item_ids
            found.append(rewards.of_lists(batch.user_ids, items)[f"true_reward@{K}"])
            users.append(batch.user_ids)
    ids = data.table("users.parquet", ["user_id"]).column(0).to_numpy()[torch.cat(users).numpy()]
    return pd.Series(torch.cat(found).numpy(), index=ids).sort_index()


def timed(function, *arguments, **options):
    """The result, and the CPU seconds that it took."""
    began = time.process_time()
    return function(*arguments, **options), time.process_time() - began


class Nights:
    """The two ways, and where they stand."""

    def __init__(self, options):
        self.options, self.data, self.warm, self.codes = options, None, None, None
        self.tables = {}
        if options.features or self._content():
            self.tables = {side: pq.read_table(options.world / f"{side}.parquet") for side in ("items", "users")}

    def _content(self):
        """Whether codes are made from the vectors of the table of items."""
        return self.options.semantic and self.options.vectors == "features"

    def prepare(self, table, name, until, extends=None):
        """The data of one night; the table of items holds those that were born."""
        more = {"extends": extends} if extends is not None else {}
        if self.tables:
            items = self.tables["items"]
            born = pc.less(items["available_from"], until)
            more |= {"items": items.filter(pc.fill_null(born, True)), "users": self.tables["users"]}
            more |= {} if extends is not None else {"features": FeatureColumns(available_from="available_from")}
        return timed(recpo.prepare, table, self.options.work / name, overwrite=True, threads=1, **more)

    def tokenize(self, data, name, **options):
        """Codes: the previous ones and codes of the new items, or all new ones."""
        vectors = recpo.VectorsFromFeatures() if self._content() else recpo.VectorsFromCooccurrence()
        return timed(recpo.tokenize, data, self.options.work / name, vectors=vectors, overwrite=True, **options)

    def _sizes(self):
        return {"levels": self.options.levels, "codebook_size": self.options.codebook_size}

    def train(self, data, name, epochs, codes=None, **more):
        """A run on one night's data."""
        policy = {"dim": self.options.dim, "layers": 1, "heads": 1, "max_history": 50}
        kind = "CatalogSoftmaxPolicy"
        if codes is not None:
            kind, policy = "SemanticIdPolicy", policy | {"codes": str(codes.root), "decoder_layers": 1}
        if self.options.features:
            policy |= {"user_features": True, "item_features": {"id_dropout": 0.1}}
        return timed(
            recpo.train,
            data,
            out=self.options.work / name,
            policy={"class_path": kind, "init_args": policy},
            objective=recpo.Likelihood(positive_only=True),
            advantage=recpo.TernaryAdvantage(positive_fraction=0.25),
            trainer={"max_epochs": epochs, "logger": False},
            overwrite=True,
            seed=self.options.seed,
            **{
                "data.batch_size": 64,
                "data.seed": self.options.seed,
                "data.layout.class_path": "SequenceLayout",
                "data.layout.init_args.history_length": 50,
                "optimizer.class_path": "torch.optim.AdamW",
                "optimizer.init_args.lr": self.options.lr,
                "optimizer.init_args.weight_decay": 0.01,
            },
            **more,
        )

    def scratch(self, days, until):
        """The whole log: data, run, and CPU seconds of every step."""
        seconds, codes = {}, None
        data, seconds["prepare_whole"] = self.prepare(pa.concat_tables(days), "whole", until)
        if self.options.semantic:
            codes, seconds["tokenize_whole"] = self.tokenize(data, "whole-codes", **self._sizes())
        run, seconds["scratch"] = self.train(data, "scratch", self.options.epochs, codes)
        return data, run, seconds

    def first(self, days, until):
        """The run that all nights start from."""
        self.data, _ = self.prepare(pa.concat_tables(days), "data-0", until)
        if self.options.semantic:
            self.codes, _ = self.tokenize(self.data, "codes-0", **self._sizes())
        self.warm, _ = self.train(self.data, "warm-0", self.options.epochs, self.codes)

    def night(self, days, number, until):
        """One night of both ways, as a JSON line; None if nothing is trained from scratch."""
        seconds = {}
        self.data, seconds["prepare"] = self.prepare(days[-1], f"data-{number}", until, self.data)
        if self.options.semantic:
            self.codes, seconds["tokenize"] = self.tokenize(self.data, f"codes-{number}", extends=self.codes)
        newest = {"data.segments": "newest", "data.replay": self.options.replay, "init_from": self.warm}
        epochs = self.options.warm_epochs
        self.warm, seconds["warm"] = self.train(self.data, f"warm-{number}", epochs, self.codes, **newest)
        if number % self.options.every:
            return None
        whole, scratch, more = self.scratch(days, until)
        truth = self.options.world / "truth"
        warm, scratch = true_values(self.warm, self.data, truth), true_values(scratch, whole, truth)
        assert warm.index.equals(scratch.index)
        gain = warm - scratch
        train = self.data.manifest["counts"]["splits"]["train"]
        return {
            "night": number,
            "items": self.data.num_items,
            "train_events": train["targets"],
            "bytes_read": self.data.manifest["extends"]["bytes_read"],
            "cpu_seconds": {name: round(value, 2) for name, value in (seconds | more).items()},
            "warm": round(float(warm.mean()), 5),
            "scratch": round(float(scratch.mean()), 5),
            "difference": round(float(gain.mean()), 5),
            "half_width": round(float(1.96 * gain.std(ddof=1) / len(gain) ** 0.5), 5),
        }


def summary(lines):
    """All nights together: nights are the units of the interval."""
    gain = np.array([line["difference"] for line in lines])
    cost = {name: sum(line["cpu_seconds"][name] for line in lines) for name in lines[0]["cpu_seconds"]}
    night = sum(cost.get(name, 0.0) for name in ("prepare", "tokenize", "warm"))
    quantile = float(stdtrit(max(1, len(lines) - 1), 0.975))
    return {
        "nights": len(lines),
        "warm": round(float(np.mean([line["warm"] for line in lines])), 5),
        "scratch": round(float(np.mean([line["scratch"] for line in lines])), 5),
        "difference": round(float(gain.mean()), 5),
        "half_width": round(float(quantile * gain.std(ddof=1) / len(gain) ** 0.5), 5) if len(gain) > 1 else None,
        "cpu_ratio": round(cost["warm"] / cost["scratch"], 4),
        "cpu_ratio_of_the_night": round(night / (sum(cost.values()) - night), 4),
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
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of both")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--features", action="store_true", help="tables of items and users")
    parser.add_argument("--semantic", action="store_true", help="policies of semantic ids")
    parser.add_argument("--vectors", choices=("features", "cooccurrence"), default="features", help="codes are made of")
    parser.add_argument("--levels", type=int, default=3, help="codes of an item")
    parser.add_argument("--codebook_size", type=int, default=64)
    parser.add_argument("--every", type=int, default=1, help="train from scratch only every this many nights")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    days = days_of(options.world / "log")
    first, nights = len(days) - options.nights, Nights(options)
    times = [int(pc.max(pc.cast(pc.cast(day["timestamp"], pa.timestamp("ms")), pa.int64())).as_py()) for day in days]
    nights.first(days[:first], times[first - 1])
    lines = []
    for number in range(1, options.nights + 1):
        line = nights.night(days[: first + number], number, times[first + number - 1])
        if line is not None:
            lines.append(line)
            print(json.dumps(line), flush=True)
    print(json.dumps(summary(lines)), flush=True)


if __name__ == "__main__":
    main()

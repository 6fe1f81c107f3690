"""What policies are worth on a real log, KuaiRand, beside the baselines that a team would use: several training seeds.

    python benchmarks/kuairand.py --log 'KuaiRand-Pure/data/log_standard_*.csv' --work runs/kuairand

Prepares the log (the last day is the test period, the day before it the validation period), fits a factorization of
grades, and for every training seed pre-trains a policy and aligns it in three ways: with GBPO, with
value_dpo_kuairand.yaml, and with that and the likelihood of positives. The second of these is also tilted toward the
factorization. Then one evaluation of all of them with the baselines, and with two contenders that are made here: the
smoothed positive rate of an item, and boosted trees on smoothed rates and counts of items and users, and duration
(scikit-learn, 200 iterations). What is in the work directory already is not made again.

Prints one JSON line per contender and seed, and a table: AUC_other, the mean over users of the probability that a
positive scores above another exposure of the same user; NDCG, Recall, dislikes and coverage of lists of 10, the whole
catalog ranked without the user's earlier items. The first ± is half of a 95 % interval over training seeds (Student),
the second over users (normal, mean over seeds). ``--split valid`` measures on the day that hyper-parameters may be
chosen on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import sklearn
import torch
from rich.console import Console
from rich.table import Table
from sklearn.ensemble import HistGradientBoostingClassifier

import recpo
from recpo.cli.factorize import factorize
from recpo.cli.main import run
from recpo.cli.prepare import prepare
from recpo.cli.tilt import tilt
from recpo.cli.train import train
from recpo.data.datamodule import evaluation_batches
from recpo.data.prepared import Prepared
from recpo.evaluation.baselines import Popularity, first_allowed
from recpo.evaluation.catalog_ranking import evaluate_ranking
from recpo.evaluation.estimates import estimate, estimate_over_seeds
from recpo.evaluation.measures import Recommender
from recpo.types import Recommendations

BASELINES = ("popularity", "factorization", "implicit_als", "ease")
ITEM_RATE, TREES = "item rate", "boosted trees"
METRICS = ("AUC_other", "NDCG@10", "Recall@10", "disliked@10", "coverage@10")
# events of prior weight, which draw the rate of an item or a user of whom little is known to the mean of all
ITEM_PRIOR, USER_PRIOR = 20, 5


class Stage(NamedTuple):
    """How a policy is trained.

    Attributes:
        config: name of the configuration.
        start: the contender that it starts from.
        options: that differ from those of the configuration.
    """

    config: str
    start: str | None = None
    options: Mapping[str, float] = MappingProxyType({})


STAGES = {
    "pre-trained": Stage("pretrain"),
    "GBPO": Stage("gbpo", "pre-trained"),
    "value-aligned": Stage("value_dpo_kuairand", "pre-trained"),
    "value-aligned and likelihood": Stage(
        "value_dpo_kuairand",
        "pre-trained",
        {"objective__init_args__nll_coef": 0.1, "optimizer__init_args__weight_decay": 1.0},
    ),
}
TILTED = "value-aligned, tilted"


def call(verb, **arguments):
    with redirect_stdout(sys.stderr):
        run(verb, [word for key, value in arguments.items() for word in (f"--{key.replace('__', '.')}", str(value))])


def prepared_log(options):
    """The prepared data, and the factorization of its grades."""
    prepared, factors = options.work / "prepared", options.work / "factors"
    if not (prepared / "manifest.json").is_file():
        call(prepare, log=options.log, preset="kuairand", split__timezone="+08:00", out=prepared)
    if not factors.is_dir():
        call(factorize, prepared=prepared, out=factors)
    return prepared, factors


def trained(seed, prepared, factors, options):
    """The runs of one training seed, by contender."""
    runs = {}
    common = {"data__prepared": prepared, "seed": seed, "data__seed": seed, "progress": "false"}
    common |= {"trainer__max_epochs": 1} if options.quick else {}
    for name, (config, start, others) in STAGES.items():
        out = runs[name] = directory(name, seed, options)
        if not (out / "run.json").is_file():
            first = {} if start is None else {"init_from": runs[start]}
            file = options.configs / f"{config}.yaml"
            call(train, config=file, out=out, overwrite="true", **common, **first, **others)
    out = runs[TILTED] = directory(TILTED, seed, options)
    if not (out / "run.json").is_file():
        call(tilt, run=runs["value-aligned"], factors=factors, prepared=prepared, out=out, overwrite="true")
    return runs


def directory(name, seed, options):
    return options.work / f"{name.replace(',', '').replace(' ', '_')}-{seed}"


class Exposures(NamedTuple):
    """Labeled or disliked events: users and items by their prepared index, and whether the event is positive."""

    users: np.ndarray
    items: np.ndarray
    positive: np.ndarray


def exposures(data, split, targets):
    """The events of a split that are targets, or those before the period."""
    names = ["user_index", "item_index", "label", "dislike", "is_target"]
    shards = [data.columns(split, shard, names) for shard in range(data.num_shards(split))]
    columns = {name: np.concatenate([shard[name] for shard in shards]) for name in names}
    label, dislike = columns["label"], columns["dislike"].astype(bool)
    kept = (dislike | ~np.isnan(label)) & (columns["is_target"].astype(bool) == targets)
    positive = data.feedback.rule.positive(label, dislike)
    return Exposures(columns["user_index"][kept], columns["item_index"][kept], positive[kept])


def rates(index, positive, size, prior, mean):
    """``[size, 2]``: smoothed share of positives, and the logarithm of 1 + the number of events."""
    counts = np.bincount(index, minlength=size)
    positives = np.bincount(index, weights=positive, minlength=size)
    return np.stack([(positives + prior * mean) / (counts + prior), np.log1p(counts)], 1)


class Trees:
    """Gradient-boosted trees on what ids and durations tell; the rates of a training event leave its fold out.

    Users are known by their events before the period, as policies know them, and items by the training period.
    """

    def __init__(self, data, split, seed, iterations):
        """Fits them to the training events."""
        fitted, known = exposures(data, "train", True), exposures(data, split, False)
        durations = data.table("items.parquet", ["item_index", "duration"])
        self._duration = np.full(data.num_items + 1, np.nan)
        self._duration[durations["item_index"].to_numpy()] = durations["duration"].to_numpy()
        self._sizes = (int(data.manifest["num_users"]), data.num_items + 1)
        self._mean = fitted.positive.mean()
        fold = np.random.default_rng(seed).integers(0, 5, len(fitted.users))
        rows = np.zeros((len(fitted.users), 5))
        for number in range(5):
            out = fold == number
            rest = Exposures(*(column[~out] for column in fitted))
            rows[out] = self._rows(self._of_users(rest)[fitted.users[out]], self._of_items(rest), fitted.items[out])
        model = HistGradientBoostingClassifier(max_iter=iterations, early_stopping=False, random_state=seed)
        model.fit(rows, fitted.positive)
        # users of equal rates and counts have the same scores
        self._kinds, self._kind_of = np.unique(self._of_users(known), axis=0, return_inverse=True)
        items, of_items = np.arange(1, data.num_items + 1), self._of_items(fitted)
        scores = [model.decision_function(self._rows(kind[None], of_items, items)) for kind in self._kinds]
        self._scores = torch.from_numpy(np.stack(scores).astype(np.float32))

    def _of_users(self, known):
        return rates(known.users, known.positive, self._sizes[0], USER_PRIOR, self._mean)

    def _of_items(self, known):
        return rates(known.items, known.positive, self._sizes[1], ITEM_PRIOR, self._mean)

    def _rows(self, users, of_items, items):
        users = np.broadcast_to(users, (len(items), 2))
        return np.concatenate([users, of_items[items], self._duration[items, None]], 1)

    def _of(self, users):
        return self._scores[torch.from_numpy(self._kind_of.reshape(-1))[users]]

    def lists(self, users, k, exclude):
        """See ``Recommender.recommend_to_users``."""
        scores = self._of(users)
        depth = min(scores.shape[1], k + (0 if exclude is None else exclude.shape[1]))
        items = first_allowed(scores.topk(depth).indices + 1, k, exclude)
        return Recommendations(items, scores.gather(1, (items - 1).clamp_min(0)).masked_fill(items == 0, -torch.inf))

    def score(self, batch):
        """See ``Recommender.score``."""
        return self._of(batch.context_ids).gather(1, (batch.slates.item_ids - 1).clamp_min(0))


def made_here(name, seed, data, options):
    """Metrics of a contender that recpo has not: the means and the half-widths over users."""
    if name == TREES:
        trees = Trees(data, options.split, seed, 10 if options.quick else 200)
        recommender = Recommender(recommend_to_users=trees.lists, score=trees.score, name=name)
    else:
        known = exposures(data, "train", True)
        rate = rates(known.items, known.positive, data.num_items + 1, ITEM_PRIOR, known.positive.mean())[1:, 0]
        rule = Popularity(torch.from_numpy(rate))
        recommender = Recommender(rule.recommend, score=rule.score, name=name)
    batches = evaluation_batches(data.root, options.split, 1, 512)
    found = evaluate_ranking(recommender, batches, num_items=data.num_items, ks=[10])
    values = {metric: estimate(per_user)._asdict() for metric, per_user in found.per_user.items()}
    return values | {metric: {"mean": total} for metric, total in found.totals.items()}


def kept(file, make):
    """What a JSON file holds, or what ``make`` gives, which is then kept in it."""
    if not file.is_file():
        file.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def evaluated(data, runs, options):
    """Metrics of the runs and of recpo's baselines, by the name of the directory or of the baseline."""
    out = options.work / f"evaluation-{options.split}"
    names = {*BASELINES, *(path.name for path in runs)}
    if (out / "metrics.json").is_file():
        document = recpo.load(out).document
        if {one["name"] for one in document["contenders"]} == names:
            return {one["name"]: metrics_of(one) for one in document["contenders"]}
    with redirect_stdout(sys.stderr):
        found = recpo.evaluate(
            data, [*BASELINES, *runs], out=out, split=options.split, ks=[10], segments=False, overwrite=True
        )
    return {one["name"]: metrics_of(one) for one in found.document["contenders"]}


def metrics_of(contender):
    return contender["metrics"] | {metric: {"mean": total} for metric, total in contender["totals"].items()}


def results(options):
    """Contender -> training seed -> metrics; contenders without a seed have the seed None."""
    prepared, factors = prepared_log(options)
    data = Prepared.open(prepared)
    runs = {seed: trained(seed, prepared, factors, options) for seed in options.seeds}
    found = evaluated(data, [path for paths in runs.values() for path in paths.values()], options)
    here = {
        (name, seed): kept(
            options.work / f"{name.replace(' ', '_')}-{seed}-{options.split}.json",
            lambda name=name, seed=seed: made_here(name, seed, data, options),
        )
        for name, seed in [(ITEM_RATE, None), *((TREES, seed) for seed in options.seeds)]
    }
    table = {"popularity": {None: found["popularity"]}, ITEM_RATE: {None: here[ITEM_RATE, None]}}
    table |= {name: {None: found[name]} for name in BASELINES[1:]}
    table[TREES] = {seed: here[TREES, seed] for seed in options.seeds}
    return table | {name: {seed: found[runs[seed][name].name] for seed in runs} for name in (*STAGES, TILTED)}


def cell(values):
    """The mean over seeds with its half-widths, over seeds and over users, where there are any."""
    if any(value.get("mean") is None for value in values):
        return ""
    text = f"{np.mean([value['mean'] for value in values]):.4f}"
    if len(values) > 1:
        text += f" ± {estimate_over_seeds([value['mean'] for value in values]).half_width:.4f}"
    widths = [value["half_width"] for value in values if value.get("half_width") is not None]
    return text + (f" ± {np.mean(widths):.4f}" if widths else "")


def table(found, options):
    """A row per contender."""
    title = f"{options.split} period; mean ± over training seeds {options.seeds} ± over users"
    shown = Table(title=title)
    for column in ("contender", *METRICS):
        shown.add_column(column, justify="left" if column == "contender" else "right")
    for name, by_seed in found.items():
        shown.add_row(name, *(cell([by_seed[seed].get(metric, {}) for seed in by_seed]) for metric in METRICS))
    Console(width=170).print(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", required=True, help="the published log: Parquet or CSV, a file or a pattern")
    parser.add_argument("--work", type=Path, default=Path("runs/kuairand"))
    parser.add_argument("--configs", type=Path, default=Path("configs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of training")
    parser.add_argument("--split", choices=("valid", "test"), default="test")
    parser.add_argument("--quick", action="store_true", help="one epoch, two seeds, small trees")
    options = parser.parse_args()
    if options.quick:
        options.seeds = options.seeds[:2]
    options.work.mkdir(parents=True, exist_ok=True)
    found = results(options)
    for name, by_seed in found.items():
        for seed, metrics in by_seed.items():
            means = {metric: metrics.get(metric, {}).get("mean") for metric in METRICS}
            print(json.dumps({"contender": name, "seed": seed, "split": options.split, **means}), flush=True)
    versions = {"torch": torch.__version__, "scikit-learn": sklearn.__version__}
    print(json.dumps({**versions, "threads": torch.get_num_threads(), "cores": os.cpu_count()}))
    table(found, options)


if __name__ == "__main__":
    main()

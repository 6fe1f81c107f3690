"""Policies on a real log, KuaiRand, against the baselines that a team would use, with several training seeds.

    python benchmarks/kuairand.py --log 'KuaiRand-Pure/data/log_standard_*.csv' --work runs/kuairand
    python benchmarks/kuairand.py --log 'KuaiRand-Pure/data/log_standard_*.csv' --work runs/kuairand_features \
        --items KuaiRand-Pure/data/video_features_basic_pure.csv --users KuaiRand-Pure/data/user_features_pure.csv

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

With ``--items`` and ``--users`` it is another table: policies and reward models on ids alone and with the features of
both tables, requests and behaviors, over a catalog that holds the items of the table before their first event, and
boosted trees on the same features. Reward models and these trees score an exposure in the request in which it was made.
AUC is that over all exposures of all users together, new_Recall@10 the recall of positives without an event in the
training period. Last come the differences that features make, paired over training seeds.
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
from sklearn.metrics import roc_auc_score
from verbs import QUICK_FACTORS, QUICK_TRAINING, call, configurations

import recpo
from recpo.base.contracts import RewardFunction
from recpo.base.features import FeatureArrays, Reads
from recpo.base.types import FeedbackBatch, Histories, Recommendations, Slates
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.contenders import loaded_model
from recpo.evaluation.estimates import estimate, estimate_over_seeds
from recpo.evaluation.measures import Recommender
from recpo.evaluation.segments import NewItems, new_items
from recpo.log.prepared import Prepared
from recpo.ops.exposures import exposure_auc, held_out_targets
from recpo.ops.ranking import first_allowed, first_places
from recpo.rewards.counted import popularity_of
from recpo.rewards.rewards import EnsembleReward
from recpo.training.learned_reward import LearnedReward
from recpo.verbs.factorize import factorize
from recpo.verbs.prepare import prepare
from recpo.verbs.tilt import tilt
from recpo.verbs.train import train

BASELINES = ("popularity", "factorization", "implicit_als", "ease")
ITEM_RATE, TREES = "item rate", "boosted trees"
METRICS = ("AUC_other", "NDCG@10", "Recall@10", "disliked@10", "coverage@10")
FEATURE_METRICS = ("AUC", "AUC_new", "AUC_other", "NDCG@10", "Recall@10", "coverage@10", "new_Recall@10")
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
    options: Mapping[str, float | str] = MappingProxyType({})


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

SIDES = ("user_features", "context_features", "behaviors", "time_gaps")
FEATURES = {f"policy__init_args__{side}": "true" for side in SIDES}
FEATURES |= {"policy__init_args__item_features": '{"hidden": 64, "id_dropout": 0.1}'}
NO_FEATURES = {f"policy__init_args__{side}": "false" for side in SIDES} | {"policy__init_args__item_features": "null"}
SHORT = {"policy__init_args__fold_in": 0, "trainer__max_epochs": 4}
FEATURE_STAGES = {
    "pre-trained": Stage("pretrain", None, SHORT),
    "pre-trained, features": Stage("pretrain", None, SHORT | FEATURES),
    "value-aligned": Stage("value_dpo_kuairand", "pre-trained"),
    "value-aligned, features": Stage("value_dpo_kuairand", "pre-trained, features", FEATURES),
    "value-aligned and likelihood, features": Stage(
        "value_dpo_kuairand", "pre-trained, features", STAGES["value-aligned and likelihood"].options
    ),
    "reward model": Stage("features_reward_model", None, NO_FEATURES),
    "reward model, features": Stage("features_reward_model"),
}
MEAN = "mean of the reward models, features"
#: boosted trees on everything: as scikit-learn has them, and slower with larger leaves
FEATURE_TREES = {
    "boosted trees, features": {},
    "slow boosted trees, features": {"learning_rate": 0.04, "min_samples_leaf": 100},
}


def prepared_log(options):
    """The prepared data, and the factorization of its grades."""
    prepared, factors = options.work / "prepared", options.work / "factors"
    if not (prepared / "manifest.json").is_file():
        tables = {"items": options.items, "users": options.users, "catalog": "items"} if options.items else {}
        call(prepare, log=options.log, preset="kuairand", split__timezone="+08:00", out=prepared, **tables)
    if not factors.is_dir() and not options.items:
        call(factorize, prepared=prepared, out=factors, **(QUICK_FACTORS if options.quick else {}))
    return prepared, factors


def trained(seed, prepared, factors, options):
    """The runs of one training seed, by contender."""
    runs = {}
    common = {"data__prepared": prepared, "seed": seed, "data__seed": seed, "progress": "false"}
    common |= QUICK_TRAINING if options.quick else {}
    for name, (config, start, others) in (FEATURE_STAGES if options.items else STAGES).items():
        out = runs[name] = directory(name, seed, options)
        if not (out / "run.json").is_file():
            first = {} if start is None else {"init_from": runs[start]}
            files = configurations(options.configs, config)
            call(train, config=files, out=out, overwrite="true", **first, **{**others, **common})
    if options.items:
        return runs
    out = directory(TILTED, seed, options)
    if not (out / "run.json").is_file():
        call(tilt, run=runs["value-aligned"], factors=factors, prepared=prepared, out=out, overwrite="true")
    # where no temperature is better, the untilted policy is what tilting gives
    runs[TILTED] = out if (out / "run.json").is_file() else runs["value-aligned"]
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
        self.folded, self._known, self._fitted = rows, self._of_users(known), self._of_items(fitted)
        model = HistGradientBoostingClassifier(max_iter=iterations, early_stopping=False, random_state=seed)
        model.fit(rows, fitted.positive)
        # users of equal rates and counts have the same scores
        self._kinds, self._kind_of = np.unique(self._known, axis=0, return_inverse=True)
        items = np.arange(1, data.num_items + 1)
        scores = [model.decision_function(self._rows(kind[None], self._fitted, items)) for kind in self._kinds]
        self._scores = torch.from_numpy(np.stack(scores).astype(np.float32))

    def _of_users(self, known):
        return rates(known.users, known.positive, self._sizes[0], USER_PRIOR, self._mean)

    def _of_items(self, known):
        return rates(known.items, known.positive, self._sizes[1], ITEM_PRIOR, self._mean)

    def _rows(self, users, of_items, items):
        users = np.broadcast_to(users, (len(items), users.shape[1]))
        return np.concatenate([users, of_items[items], self._duration[items, None]], 1)

    def rows(self, users, items):
        """``[N, 5]`` of exposures of the period."""
        return self._rows(self._known[users], self._fitted, items)

    def _of(self, users):
        return self._scores[torch.from_numpy(self._kind_of.reshape(-1))[users]]

    def lists(self, batch, k, exclude):
        """See ``Recommender.recommend_to_batch``."""
        scores = self._of(batch.user_ids)
        depth = min(scores.shape[1], k + exclude.shape[1])
        items = first_allowed(scores.topk(depth).indices + 1, k, exclude)
        return Recommendations(items, scores.gather(1, (items - 1).clamp_min(0)).masked_fill(items == 0, -torch.inf))

    def score(self, batch):
        """See ``Recommender.score``."""
        return self._of(batch.context_ids).gather(1, (batch.slates.item_ids - 1).clamp_min(0))


class Asked:
    """The requests in which the items of a period were shown: features of each, by user and item."""

    def __init__(self, data, split):
        """Reads the period; of several exposures of an item to a user the first counts."""
        parts = [data.load(split, shard, Reads(context=True)) for shard in range(data.num_shards(split))]
        targets = [part.is_target.astype(bool) for part in parts]
        self._size = data.num_items + 1
        keys = [self._key(part.user_index, part.item_index)[kept] for part, kept in zip(parts, targets, strict=True)]
        self._keys, first = np.unique(np.concatenate(keys), return_index=True)
        rows = [part.context.rows(np.flatnonzero(kept)) for part, kept in zip(parts, targets, strict=True)]
        self._features = rows[0].joined(*rows[1:]).rows(first)

    def _key(self, users, items):
        return users.astype(np.int64) * self._size + items

    def of(self, users: np.ndarray, items: np.ndarray) -> FeatureArrays:
        """Features of the requests in which these items were shown to these users."""
        return self._features.rows(np.searchsorted(self._keys, self._key(users, items)))

    def answered(self, histories: Histories, users, items) -> Histories:
        """The histories of such exposures, with their request as the one that is answered."""
        codes, rows = histories.context.codes.clone(), torch.arange(len(users))
        codes[rows, histories.lengths] = torch.from_numpy(self.of(users, items).codes)
        return histories._replace(context=histories.context._replace(codes=codes))


def scored(batch: FeedbackBatch, score):
    """``[B, S]``: ``score(rows, users, items)`` of every exposure of the batch."""
    rows, places = batch.slates.mask.nonzero(as_tuple=True)
    values = torch.zeros(batch.slates.mask.shape)
    items = batch.slates.item_ids[rows, places]
    values[rows, places] = score(rows, batch.context_ids[rows].numpy(), items.numpy())
    return values


class FeatureTrees:
    """Boosted trees on all that the tables, the request, and smoothed rates and counts tell of an exposure."""

    def __init__(self, data, split, seed, iterations, asked, **options):
        """Fits them to the training events."""
        known = exposures(data, "train", True)
        self._rates = Trees(data, split, seed, 1)  # for its rows
        self._items, self._users, self._asked = data.item_features(), data.user_features(), asked
        rows = np.concatenate([self._rates.folded, self._tables(known.users, known.items, Asked(data, "train"))], 1)
        self._model = HistGradientBoostingClassifier(
            max_iter=iterations, early_stopping=False, random_state=seed, **options
        ).fit(rows, known.positive)

    def _tables(self, users, items, asked):
        of_items = self._items.rows(torch.from_numpy(items))
        parts = [of_items.codes, of_items.lists[0][:, :1], of_items.numbers]
        of_users, of_requests = self._users.rows(users), asked.of(users, items)
        return np.concatenate([*map(np.asarray, parts), of_users.codes, of_users.numbers, of_requests.codes], 1)

    def score(self, batch):
        """See ``Recommender.score``."""

        def of(rows, users, items):
            known = np.concatenate([self._rates.rows(users, items), self._tables(users, items, self._asked)], 1)
            return torch.from_numpy(self._model.decision_function(known)).float()

        return scored(batch, of)


def reward_score(reward: RewardFunction, asked):
    """Scores of exposures by a reward, each in its request."""

    def score(batch):
        def of(rows, users, items):
            histories = asked.answered(batch.histories.rows(rows), users, items)
            chosen = torch.from_numpy(items)[:, None]
            slates = Slates(chosen, histories.lengths[:, None], torch.ones_like(chosen, dtype=torch.bool))
            return reward(FeedbackBatch(histories, slates, torch.from_numpy(users)), slates)[:, 0].float()

        return scored(batch, of)

    return score


@torch.inference_mode()
def metrics_of_scores(score, data, options, max_history=50):
    """AUC over all users together, of new items alone too, and the mean of that of every user; see ``exposure_auc``."""
    new = np.append(False, data.item_counts() == 0)
    per_user, parts = [], []
    for batch in evaluation_batches(data.root, options.split, max_history, 2048, Reads(True, True, True)):
        targets = held_out_targets(batch).without(batch.exclude)
        scores = score(batch.feedback)
        per_user.append(exposure_auc(scores, targets)["AUC_other"])
        for kind, positive in ((targets.positive, 1), (targets.other, 0)):
            kept = first_places(targets.item_ids, kind)
            items = targets.item_ids[kept].numpy()
            parts.append(np.stack([np.full(len(items), positive), scores[kept].numpy(), new[items]], 1))
    positive, scores, is_new = np.concatenate(parts).T
    only_new = is_new == 1
    both_kinds = len(np.unique(positive[only_new])) == 2
    return {
        "AUC": {"mean": roc_auc_score(positive, scores)},
        "AUC_new": {"mean": roc_auc_score(positive[only_new], scores[only_new]) if both_kinds else None},
        "AUC_other": estimate(torch.cat(per_user))._asdict(),
    }


def policy_metrics(run, data, options):
    """Lists of a policy among all candidates, its log-probabilities, and its new items."""
    policy = recpo.load(run).policy()
    recommender = Recommender(policy.recommend, policy.log_prob, run.name, scores_are_logp=True)
    counts = torch.from_numpy(np.append(0, data.item_counts()))
    measures = [NewItems(new_items(counts, None), [10])]
    batches = evaluation_batches(data.root, options.split, policy.max_history, 512, policy.reads)
    found = evaluate_ranking(recommender, batches, Ranking(num_items=data.num_items, ks=[10]), measures=measures)
    scores = metrics_of_scores(lambda asked: policy.log_prob(asked)[..., 0], data, options, policy.max_history)
    values = {metric: estimate(per_user)._asdict() for metric, per_user in found.per_user.items()}
    values |= {metric: {"mean": total} for metric, total in found.totals.items()}
    return values | {metric: scores[metric] for metric in ("AUC", "AUC_new")}


def feature_results(options):
    """As ``results``, of what reads features."""
    prepared, _ = prepared_log(options)
    data = Prepared.open(prepared)
    runs = {seed: trained(seed, prepared, None, options) for seed in options.seeds}
    asked = Asked(data, options.split)
    iterations = 10 if options.quick else 200

    def of_scores(make):
        return lambda: metrics_of_scores(make(), data, options)

    def model(seed):
        return LearnedReward(runs[seed]["reward model, features"], calibrated=False)

    makers = {("item rate", None): of_scores(lambda: item_rate(data).score)}
    for seed in options.seeds:
        makers[TREES, seed] = of_scores(lambda seed=seed: Trees(data, options.split, seed, iterations).score)
        for name, others in FEATURE_TREES.items():
            makers[name, seed] = of_scores(
                lambda seed=seed, others=others: (
                    FeatureTrees(data, options.split, seed, iterations, asked, **others).score
                )
            )
        for name, stage in FEATURE_STAGES.items():
            run = runs[seed][name]
            if stage.config == "features_reward_model":
                makers[name, seed] = of_scores(
                    lambda run=run: reward_score(LearnedReward(run, calibrated=False), asked)
                )
            else:
                makers[name, seed] = lambda run=run: policy_metrics(run, data, options)
    if len(options.seeds) > 1:
        members = [model(seed) for seed in options.seeds]
        makers[MEAN, None] = of_scores(lambda: reward_score(EnsembleReward(members), asked))
    found = {}
    for (name, seed), make in makers.items():
        file = options.work / f"{directory(name, seed, options).name}-{options.split}.json"
        found.setdefault(name, {})[seed] = kept(file, make)
    return found


def item_rate(data):
    """Every user gets the same: the smoothed positive rate of an item."""
    known = exposures(data, "train", True)
    rate = rates(known.items, known.positive, data.num_items + 1, ITEM_PRIOR, known.positive.mean())[1:, 0]
    return loaded_model(popularity_of(rate), "item rate")


def made_here(name, seed, data, options):
    """Metrics of a contender that recpo has not: the means and the half-widths over users."""
    if name == TREES:
        trees = Trees(data, options.split, seed, 10 if options.quick else 200)
        recommender = Recommender(recommend_to_batch=trees.lists, score=trees.score, name=name)
    else:
        rule = item_rate(data)
        recommender = Recommender(rule.recommend, score=rule.score, name=name)
    batches = evaluation_batches(data.root, options.split, 1, 512)
    found = evaluate_ranking(recommender, batches, Ranking(num_items=data.num_items, ks=[10]))
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
    found = evaluated(data, list({path: None for paths in runs.values() for path in paths.values()}), options)
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


def differences(found):
    """What features add, by contender and metric: the mean over training seeds, and half of Student's 95 % interval."""
    for name in ("reward model", "pre-trained", "value-aligned"):
        with_features = found[f"{name}, features"]
        for metric in FEATURE_METRICS:
            pairs = [(with_features[seed].get(metric), ids.get(metric)) for seed, ids in found[name].items()]
            if all(pair[0] and pair[1] and None not in (pair[0]["mean"], pair[1]["mean"]) for pair in pairs):
                gained = estimate_over_seeds([one["mean"] - other["mean"] for one, other in pairs])
                yield {"contender": name, "metric": metric, "difference": gained.mean, "half width": gained.half_width}


def cell(values):
    """The mean over seeds with its half-widths, over seeds and over users, where there are any."""
    if any(value.get("mean") is None for value in values):
        return ""
    text = f"{np.mean([value['mean'] for value in values]):.4f}"
    if len(values) > 1:
        text += f" ± {estimate_over_seeds([value['mean'] for value in values]).half_width:.4f}"
    widths = [value["half_width"] for value in values if value.get("half_width") is not None]
    return text + (f" ± {np.mean(widths):.4f}" if widths else "")


def table(found, options, metrics):
    """A row per contender."""
    title = f"{options.split} period; mean ± over training seeds {options.seeds} ± over users"
    shown = Table(title=title)
    for column in ("contender", *metrics):
        shown.add_column(column, justify="left" if column == "contender" else "right")
    for name, by_seed in found.items():
        shown.add_row(name, *(cell([by_seed[seed].get(metric, {}) for seed in by_seed]) for metric in metrics))
    Console(width=170).print(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", required=True, help="the published log: Parquet or CSV, a file or a pattern")
    parser.add_argument("--work", type=Path, default=Path("runs/kuairand"))
    parser.add_argument("--configs", type=Path, default=Path("configs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of training")
    parser.add_argument("--split", choices=("valid", "test"), default="test")
    parser.add_argument("--quick", action="store_true", help="one epoch, two seeds, small trees")
    parser.add_argument("--items", help="the published table of videos; with --users, what features are worth")
    parser.add_argument("--users", help="the published table of users")
    options = parser.parse_args()
    if (options.items is None) != (options.users is None):
        parser.error("--items and --users go together")
    if options.quick:
        options.seeds = options.seeds[:2]
    options.work.mkdir(parents=True, exist_ok=True)
    metrics_shown = FEATURE_METRICS if options.items else METRICS
    found = feature_results(options) if options.items else results(options)
    for name, by_seed in found.items():
        for seed, metrics in by_seed.items():
            means = {metric: metrics.get(metric, {}).get("mean") for metric in metrics_shown}
            print(json.dumps({"contender": name, "seed": seed, "split": options.split, **means}), flush=True)
    for difference in differences(found) if options.items and len(options.seeds) > 1 else ():
        print(json.dumps(difference))
    versions = {"torch": torch.__version__, "scikit-learn": sklearn.__version__}
    print(json.dumps({**versions, "threads": torch.get_num_threads(), "cores": os.cpu_count()}))
    table(found, options, metrics_shown)


if __name__ == "__main__":
    main()

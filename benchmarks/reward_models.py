"""Reward models of one log: factorizations with and without tables, averages, and boosted trees.

    python benchmarks/reward_models.py --prepared runs/kuairand_features/prepared runs/priors/living-0/prepared

Fits every model on the training period and measures it on the test period, every user from the history before it
(``--split valid``: the day that hyper-parameters may be chosen on; ``--models`` names some models). Averages are a
factorization of rank 0, the others have rank 8; consumption is 16 singular vectors. The trees are scikit-learn's (200
iterations, leaves of at least 100 events), on the rate and number of events of the item, the user's mean grade, the
same less the items' rates, the number of events of the user, and 16 principal components of each table. In training, an
item's rate comes from the other four fifths of the users, and what a user did from the events before, so that no row
contains its own grade. Last, the mean of the trees and the best factorization on the validation period.

Prints, per log and model, the squared error of the grade, and means over users of the AUC among the user's own
exposures: of grades in the upper quartile against the others, and of positives against the others (``AUC_other``).
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import roc_auc_score

from recpo.base.features import Reads
from recpo.base.feedback import GRADES
from recpo.batches.slates import evaluation_batches
from recpo.log.prepared import Prepared
from recpo.rewards.graded import FactorOptions, chunks
from recpo.rewards.prior_features import of_table, of_user_table
from recpo.rewards.selection import fit_factors

FOLDS, ITEM_PRIOR, USER_PRIOR, COMPONENTS = 5, 20.0, 5.0, 16
COLUMNS = ("model", "squared error", "AUC", "AUC_other", "s")


class Model(NamedTuple):
    """Options of a factorization: rank, and what prior means depend on."""

    rank: int
    consumption: int = 0
    item_features: bool = False
    user_features: bool = False


MODELS = {
    "averages": Model(0),
    "averages, both tables": Model(0, item_features=True, user_features=True),
    "factorization": Model(8),
    "factorization, consumption": Model(8, 16),
    "factorization, item table": Model(8, item_features=True),
    "factorization, user table": Model(8, user_features=True),
    "factorization, both tables": Model(8, 0, item_features=True, user_features=True),
    "factorization, consumption and both tables": Model(8, 16, item_features=True, user_features=True),
}
TREES, MEAN = "boosted trees", "mean of trees and factorization"


class HeldOut(NamedTuple):
    """Graded exposures of a held-out period: their users, grades, positives, and the batches that they are from."""

    user: np.ndarray
    grade: np.ndarray
    positive: np.ndarray
    batches: list

    @classmethod
    def of(cls, data, split):
        """All users of the period, each with the complete history that the data keep."""
        reads = Reads(user=bool(data.feature_schema.user))
        batches = list(evaluation_batches(data.root, split, int(data.manifest["max_context"]), 256, reads))
        columns = zip(*(cls._columns(batch.feedback.slates, batch.user_ids) for batch in batches), strict=True)
        return cls(*map(np.concatenate, columns), batches)

    @staticmethod
    def _columns(slates, users):
        known = graded(slates)
        columns = users[:, None].expand_as(slates.item_ids), slates.grade, slates.positive
        return [column[known].numpy() for column in columns]

    def measured(self, predicted):
        """The numbers of the table for predictions of the grades."""
        found = {"squared error": float(np.square(predicted - self.grade).mean())}
        for name, label in (("AUC", self.grade >= GRADES[-1]), ("AUC_other", self.positive)):
            found[name] = self._auc(predicted, label)
        return found

    def _auc(self, predicted, label):
        starts = np.flatnonzero(np.diff(self.user, prepend=-1, append=-1))
        parts = [slice(*ends) for ends in pairwise(starts)]
        return float(np.mean([roc_auc_score(label[p], predicted[p]) for p in parts if 0 < label[p].mean() < 1]))


def graded(slates):
    """The positions with a grade."""
    return slates.mask & ~slates.grade.isnan()


def factor_model(data, model, sweeps=20, seed=0):
    """A fitted factorization; None if the data have no table for it."""
    schema = data.feature_schema
    if (model.item_features and not schema.item) or (model.user_features and not schema.user):
        return None
    options = {**model._asdict(), "ranks": (model.rank,), "consumption": (model.consumption,)}
    del options["rank"]
    return fit_factors(data, FactorOptions(**options, sweeps=sweeps, seed=seed, uncertainty=False, lower_bound=0.0))


def of_factors(factors, held_out):
    """Predicted grades of the exposures."""
    found = []
    for batch in held_out.batches:
        slates = batch.feedback.slates
        grades = factors.grades(factors.fold_in(batch.feedback.histories), slates.item_ids)
        found.append(grades[graded(slates)].numpy())
    return np.concatenate(found)


class Trees:
    """Boosted trees, and the statistics of the training period that their inputs are made of."""

    def __init__(self, data, iterations):
        parts = list(chunks(data))
        user = np.concatenate([chunk.users[chunk.user] for chunk in parts])
        item = np.concatenate([chunk.items[chunk.item] for chunk in parts])
        grade = np.concatenate([chunk.grade for chunk in parts])
        self.num_items, self.mean = data.num_items, grade.mean()
        self.rate, self.count = self._rates(item, grade)
        self.items, self.users = self._tables(data)
        fold = np.random.default_rng(0).integers(0, FOLDS, data.manifest["num_users"])[user]
        rate, count = np.zeros(len(grade)), np.zeros(len(grade))
        for number in range(FOLDS):
            own = fold == number
            rates, counts = self._rates(item[~own], grade[~own])
            rate[own], count[own] = rates[item[own]], counts[item[own]] * FOLDS / (FOLDS - 1)
        before = _before(user)
        known = [before(grade - self.mean), before(grade - self.mean - rate), before(np.ones(len(grade)))]
        inputs = self._inputs(item, user, rate, count, known)
        options = {"learning_rate": 0.05, "max_iter": iterations, "min_samples_leaf": 100, "random_state": 0}
        self.model = HistGradientBoostingRegressor(**options, early_stopping=False).fit(inputs, grade)

    def predict(self, held_out):
        """Predicted grades of the exposures."""
        found = []
        for batch in held_out.batches:
            slates, histories = batch.feedback.slates, batch.feedback.histories
            context, place = (index.numpy() for index in graded(slates).nonzero(as_tuple=True))
            item = slates.item_ids.numpy()[context, place] - 1
            grades, past = np.array(GRADES)[histories.feedback.numpy()], histories.item_ids.numpy() - 1
            seen = (past >= 0) & ~np.isnan(grades)
            gain = np.where(seen, grades - self.mean, 0.0)
            less = np.where(seen, gain - self.rate[past], 0.0)
            known = [values.sum(1)[context] for values in (gain, less, seen)]
            user = batch.user_ids.numpy()[context]
            found.append(self.model.predict(self._inputs(item, user, self.rate[item], self.count[item], known)))
        return np.concatenate(found)

    def _inputs(self, item, user, rate, count, known):
        gain, less, events = known
        own = [gain / (events + USER_PRIOR), less / (events + USER_PRIOR), np.log1p(events)]
        return np.column_stack([rate, np.log1p(count), *own, self.items[item], self.users[user]])

    def _rates(self, item, grade):
        count = np.bincount(item, minlength=self.num_items)
        return np.bincount(item, grade - self.mean, self.num_items) / (count + ITEM_PRIOR), count

    @staticmethod
    def _tables(data):
        items, users, schema = np.zeros((data.num_items, 0)), None, data.feature_schema
        if schema.item:
            features = data.item_features().map(lambda column: column[1:])
            items = of_table(partial(chunks, data), schema.item, features, 0).items[:, :COMPONENTS]
        if schema.user:
            users = of_user_table(schema.user, data.user_features().tensors(), 0)
        nothing = np.zeros((data.manifest["num_users"], 0))
        return items, nothing if users is None else users.rows[:, :COMPONENTS]


def _before(user):
    """A function that sums, for every event, the values of the user's earlier events."""
    start = np.maximum.accumulate(np.where(np.diff(user, prepend=-1) != 0, np.arange(len(user)), 0))

    def summed(values):
        total = np.concatenate([[0.0], np.cumsum(values)])
        return total[:-1] - total[start]

    return summed


def measured(prepared, split, models, quick):
    """Yields the models of one log and their numbers."""
    data, best = Prepared.open(prepared), None
    held_out = HeldOut.of(data, split)
    for name, model in ((name, MODELS[name]) for name in models):
        begin = time.perf_counter()
        rank, sweeps = (min(model.rank, 2), 5) if quick else (model.rank, 20)
        factors = factor_model(data, model._replace(rank=rank), sweeps)
        if factors is not None:
            predicted, error = of_factors(factors, held_out), factors.facts["chosen"]["squared_error"]
            best = min(best or (error, predicted), (error, predicted), key=lambda one: one[0])
            yield name, {**held_out.measured(predicted), "s": time.perf_counter() - begin}
    begin = time.perf_counter()
    predicted = Trees(data, 10 if quick else 200).predict(held_out)
    yield TREES, {**held_out.measured(predicted), "s": time.perf_counter() - begin}
    yield MEAN, {**held_out.measured((predicted + best[1]) / 2), "s": 0.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, nargs="+", required=True)
    parser.add_argument("--split", choices=("valid", "test"), default="test")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="small models, to see that it runs")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    for prepared in options.prepared:
        table = Table(*COLUMNS, title=str(prepared))
        for name, one in measured(prepared, options.split, options.models, options.quick):
            print(json.dumps({"prepared": str(prepared), "model": name, **one}), flush=True)
            table.add_row(name, *(f"{one[column]:.4f}" for column in COLUMNS[1:-1]), f"{one['s']:.0f}")
        Console(width=120).print(table)


if __name__ == "__main__":
    main()

"""`recpo tilt` and `recpo calibrate` list no item that did not exist when the lists were made."""

from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import recpo
from recpo.evaluation import calibration
from recpo.log.feature_columns import FeatureColumns
from recpo.training import tilting

UNBORN = 20


@pytest.fixture(scope="module")
def data(world, tmp_path_factory):
    """A catalog with items that begin to exist after the log."""
    log = pd.read_parquet(world / "log")
    shown = np.unique(log["item_id"])
    ids = np.append(shown, shown.max() + 1 + np.arange(UNBORN))
    born = [None] * len(shown) + [int(log["timestamp"].max()) + 86_400_000] * UNBORN
    items = pa.table({"item_id": ids, "born": pa.array(born, pa.int64())})
    features = FeatureColumns(item=(), available_from="born")
    out = tmp_path_factory.mktemp("candidates") / "prepared"
    return recpo.prepare(log, out, items=items, catalog="items", features=features, threads=1, memory_limit="512MB")


@pytest.mark.slow
def test_lists_of_candidates_alone_choose_beta_and_are_worth_something(data, tmp_path, monkeypatch):
    policy = partial(recpo.CatalogSoftmaxPolicy, dim=8, layers=1, heads=1, max_history=10)
    options = {"data.layout": recpo.SequenceLayout(history_length=10), "trainer.limit_train_batches": 2}
    base = recpo.train(data, policy=policy, out=tmp_path / "base", **{"trainer.max_epochs": 1}, **options)
    recpo.factorize(data, tmp_path / "factors", method="als", ranks=[2], ridges=[4.0], sweeps=2)
    listed = []

    def ranked(recommender, ranking, measures):
        class Lists:
            def update(self, observed):
                listed.append(observed.lists.item_ids.numpy())
                return {}

            def totals(self):
                return {}

        return one_pass(recommender, ranking, [*measures, Lists()])

    one_pass, lists_of = tilting.RankingPass, calibration.greedy_lists
    monkeypatch.setattr(tilting, "RankingPass", ranked)
    tilted = recpo.tilt(base, tmp_path / "factors", data, out=tmp_path / "run", temperatures=[0.05, 0.5])
    assert len(tilted.trials) == 3
    known = data.num_items - UNBORN
    assert listed
    assert max(lists.max() for lists in listed) <= known

    def greedy(*arguments):
        found = lists_of(*arguments)
        listed.append(found.item_ids.numpy())
        return found

    listed.clear()
    monkeypatch.setattr(calibration, "greedy_lists", greedy)
    recpo.calibrate(data, tmp_path / "factors", k=5, resamples=10)
    assert listed
    assert max(lists.max() for lists in listed) <= known

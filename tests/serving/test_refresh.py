"""Updating the candidates of an existing bundle."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recpo.cli.main import main
from recpo.data.id_map import IdMap
from recpo.errors import RecpoError
from recpo.feedback import FeedbackDefinition
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.bundle import Bundle
from recpo.serving.export import export_bundle
from recpo.serving.golden import check_golden
from recpo.workflows.export import refresh

ITEMS = 12


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(ITEMS, dim=4, layers=1, heads=1, max_history=5)
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    items = IdMap(pa.array([f"i{number}" for number in range(1, ITEMS + 1)]))
    export_bundle(policy, items, FeedbackDefinition(), out, k=ITEMS)
    return Bundle.load(out)


def lists(bundle):
    events = pd.DataFrame({"user_id": [1, 1, 2], "item_id": ["i3", "i5", "i9"], "timestamp": [1, 2, 3]})
    return bundle.recommend(events, bundle.k, users=[1, 2, 3])


def test_ids_may_have_the_name_that_they_had_in_the_log(tmp_path):
    policy = CatalogSoftmaxPolicy(ITEMS, dim=4, layers=1, heads=1, max_history=5)
    named = [f"i{number}" for number in range(1, ITEMS + 1)]
    origin = {"item_column": "track"}
    export_bundle(policy, IdMap(pa.array(named)), FeedbackDefinition(), tmp_path / "bundle", k=ITEMS, origin=origin)
    for column in ("track", "item_id"):
        pq.write_table(pa.table({column: named[2:], "note": named[2:]}), tmp_path / "items.parquet")
        fresh = refresh(tmp_path / "bundle", tmp_path / "items.parquet", tmp_path / column)
        assert (fresh.listed, fresh.retired) == (ITEMS - 2, 2)
    pq.write_table(pa.table({"song": named}), tmp_path / "items.parquet")
    with pytest.raises(RecpoError, match="a column track or item_id"):
        refresh(tmp_path / "bundle", tmp_path / "items.parquet", tmp_path / "out")


def test_retired_items_are_listed_no_more_and_stay_in_histories(bundle, tmp_path):
    # i2 is not named, i7 is retired, and two items are new
    named = [f"i{number}" for number in range(1, ITEMS + 1) if number != 2] + ["new1", "new2"]
    table = pa.table({"item_id": named, "retired": [name == "i7" for name in named]})
    pq.write_table(table, tmp_path / "items.parquet")
    fresh = refresh(bundle, tmp_path / "items.parquet", tmp_path / "fresh")
    assert (fresh.listed, fresh.retired, fresh.left_out) == (ITEMS - 2, 2, 2)
    before, now = lists(bundle), lists(fresh.bundle)
    expected = before[~before["item_id"].isin(["i2", "i7"])]
    assert now["item_id"].tolist() == expected["item_id"].tolist()
    np.testing.assert_allclose(now["score"], expected["score"], atol=1e-5)
    # a retired item of the history is read as before
    events = [{"item_id": "i7", "timestamp": 1}]
    old = dict(bundle.recommend_one(events, ITEMS))
    for item, score in fresh.bundle.recommend_one(events, ITEMS):
        assert score == pytest.approx(old[item], abs=1e-5)
    assert check_golden(fresh.bundle) > 0
    # what is retired stays so
    pq.write_table(pa.table({"item_id": [f"i{number}" for number in range(1, 7)]}), tmp_path / "fewer.parquet")
    assert (
        main(
            [
                "export",
                "--refresh",
                str(tmp_path / "fresh"),
                "--items",
                str(tmp_path / "fewer.parquet"),
                "--out",
                str(tmp_path / "again"),
            ]
        )
        == 0
    )
    assert set(lists(Bundle.load(tmp_path / "again"))["item_id"]) == {"i1", "i3", "i4", "i5", "i6"}


def test_what_cannot_be_refreshed_is_refused(bundle, tmp_path):
    pq.write_table(pa.table({"item_id": ["x"]}), tmp_path / "others.parquet")
    with pytest.raises(RecpoError, match="none of its items is a candidate"):
        refresh(bundle, tmp_path / "others.parquet", tmp_path / "out")
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "unnamed.parquet")
    with pytest.raises(RecpoError, match="with a column item_id"):
        refresh(bundle, tmp_path / "unnamed.parquet", tmp_path / "out")
    assert main(["export", "--refresh", str(bundle.root), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()

"""Updating the candidates of an existing bundle."""

import time
from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpo
from recpo.base.feedback import FeedbackDefinition
from recpo.cli.main import main
from recpo.log.id_map import IdMap
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.bundle import Bundle, check_golden
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from tests.refusals import refused

pytestmark = pytest.mark.slow

ITEMS = 12


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(ITEMS, dim=4, layers=1, heads=1, max_history=5)
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    items = IdMap(pa.array([f"i{number}" for number in range(1, ITEMS + 1)]))
    facts = PolicyFacts(FeedbackDefinition(), origin={"item_column": "track"})
    export_bundle(policy, items, facts, out, BundleOptions(k=ITEMS))
    return Bundle.open(out)


def refresh(bundle, items, out):
    return recpo.export(refresh=bundle, items=items, out=out)


def lists(bundle, **options):
    events = pd.DataFrame({"user_id": [1, 1, 2], "item_id": ["i3", "i5", "i9"], "timestamp": [1, 2, 3]})
    return bundle.recommend(events, bundle.k, users=[1, 2, 3], **options)


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
    # what is retired stays so; ids may have the name that they had in the log
    fewer = [f"i{number}" for number in range(1, 7)]
    pq.write_table(pa.table({"track": fewer, "note": fewer}), tmp_path / "fewer.parquet")
    words = ["export", "--refresh", str(tmp_path / "fresh"), "--items", str(tmp_path / "fewer.parquet")]
    assert main([*words, "--out", str(tmp_path / "again")]) == 0
    assert set(lists(Bundle.open(tmp_path / "again"))["item_id"]) == {"i1", "i3", "i4", "i5", "i6"}


MONDAY, TUESDAY = 1_900_000_000_000, 1_900_086_400_000


@pytest.fixture(scope="module")
def timed(bundle, tmp_path_factory):
    """A refreshed bundle: i1 comes on Monday, i2 on Tuesday, i3 leaves on Tuesday; i4 is retired."""
    root = tmp_path_factory.mktemp("timed")
    begin, end = {"i1": MONDAY, "i2": TUESDAY, "i4": TUESDAY}, {"i3": TUESDAY}
    named = [f"i{number}" for number in range(1, ITEMS + 1)]
    table = pa.table(
        {
            "item_id": named,
            "retired": [name == "i4" for name in named],
            "available_from": pa.array([begin.get(name) for name in named], pa.timestamp("ms", "UTC")),
            "available_until": pa.array([end.get(name) for name in named], pa.int64()),
        }
    )
    pq.write_table(table, root / "items.parquet")
    return refresh(bundle, root / "items.parquet", root / "fresh")


def test_items_are_listed_only_while_they_are_available(bundle, timed, monkeypatch):
    assert (timed.listed, timed.retired) == (ITEMS - 1, 1)
    whole = set(lists(bundle)["item_id"])
    expected = {
        MONDAY - 1: whole - {"i1", "i2", "i4"},
        MONDAY: whole - {"i2", "i4"},
        TUESDAY: whole - {"i3", "i4"},
    }
    for at, items in expected.items():
        assert set(lists(timed.bundle, at=at)["item_id"]) == items
        assert {item for item, _ in timed.bundle.recommend_one([], ITEMS, at=at)} == items
        monkeypatch.setattr(time, "time", lambda now=at: now / 1000)  # the default is now
        assert set(lists(timed.bundle)["item_id"]) == items
        assert {item for item, _ in timed.bundle.recommend_one([], ITEMS)} == items
        assert check_golden(timed.bundle) > 0  # at any time
    monday = datetime.fromtimestamp(MONDAY / 1000, UTC)
    for at in (monday, monday.isoformat(), monday.replace(tzinfo=None).isoformat()):
        assert set(lists(timed.bundle, at=at)["item_id"]) == expected[MONDAY]
    for at in ("Monday", 1_900_000_000, True):
        with refused("bad_value", "at"):
            lists(timed.bundle, at=at)


def test_recommend_takes_a_time(timed, tmp_path):
    pq.write_table(pa.table({"user_id": [1], "item_id": ["i9"], "timestamp": [1]}), tmp_path / "histories.parquet")
    given = ["--source", str(timed.bundle.root), "--histories", str(tmp_path / "histories.parquet")]
    for at, listed in (("2030-03-17", False), ("2030-03-18T12:00", True)):
        assert main(["recommend", *given, "--out", str(tmp_path / "lists.parquet"), "--at", at]) == 0
        assert ("i1" in pq.read_table(tmp_path / "lists.parquet")["item_id"].to_pylist()) is listed
    assert main(["recommend", *given, "--out", str(tmp_path / "lists.parquet"), "--at", "soon"]) == 1


def test_where_all_items_have_ended_lists_are_of_the_newest_event(timed, tmp_path):
    """As of an old log: lists of today would be empty."""
    named = [f"i{number}" for number in range(1, ITEMS + 1)]
    pq.write_table(pa.table({"item_id": named, "available_until": [TUESDAY] * ITEMS}), tmp_path / "ended.parquet")
    ended = refresh(timed.bundle, tmp_path / "ended.parquet", tmp_path / "ended").bundle
    past = {"user_id": [1, 1], "item_id": ["i9", "i8"], "timestamp": [MONDAY + 1, MONDAY]}
    pq.write_table(pa.table(past), tmp_path / "histories.parquet")
    out = tmp_path / "lists.parquet"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time", lambda: 2.1e9)
        with pytest.warns(UserWarning, match="2030-03-17T17:46:40"):
            found = ended.recommend(past)
        with pytest.warns(UserWarning, match="newest event"):
            recpo.recommend(ended, tmp_path / "histories.parquet", out=out)
        assert not ended.recommend_one([], ITEMS), "a server lists nothing that has ended"
    assert set(found["item_id"]) == set(pq.read_table(out)["item_id"].to_pylist())
    assert found["item_id"].tolist() == ended.recommend(past, at=MONDAY + 1)["item_id"].tolist() != []
    assert not len(ended.recommend(past, at="2040-01-01"))


def test_times_stay_unless_the_table_has_them(timed, tmp_path):
    named = [f"i{number}" for number in range(1, ITEMS + 1)]
    pq.write_table(pa.table({"item_id": named}), tmp_path / "plain.parquet")
    again = refresh(timed.bundle, tmp_path / "plain.parquet", tmp_path / "again")
    assert "i1" not in set(lists(again.bundle, at=MONDAY - 1)["item_id"])
    table = pa.table({"item_id": named, "available_from": pa.nulls(ITEMS, pa.int64())})
    pq.write_table(table, tmp_path / "always.parquet")
    always = refresh(timed.bundle, tmp_path / "always.parquet", tmp_path / "always")
    assert "i1" in set(lists(always.bundle, at=MONDAY - 1)["item_id"])
    assert "i3" not in set(lists(always.bundle, at=TUESDAY)["item_id"])
    pq.write_table(pa.table({"item_id": named, "available_from": [1_700_000_000] * ITEMS}), tmp_path / "s.parquet")
    with refused("out_of_range", "available_from"):
        refresh(timed.bundle, tmp_path / "s.parquet", tmp_path / "out")


def test_what_cannot_be_refreshed_is_refused(bundle, tmp_path):
    pq.write_table(pa.table({"item_id": ["x"]}), tmp_path / "others.parquet")
    with refused("mismatch", "items"):
        refresh(bundle, tmp_path / "others.parquet", tmp_path / "out")
    pq.write_table(pa.table({"id": ["x"]}), tmp_path / "unnamed.parquet")
    with refused("wrong_file", "items"):
        refresh(bundle, tmp_path / "unnamed.parquet", tmp_path / "out")
    assert main(["export", "--refresh", str(bundle.root), "--out", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()

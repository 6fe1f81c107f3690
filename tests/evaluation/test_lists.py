"""Recommendations of other systems as contenders: in any order, and with any fault."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.contenders import Lists, read_lists
from recpo.log.prepared import Prepared
from recpo.rewards.counted import popularity_of
from tests.refusals import refused

KS = [5, 10]


@pytest.fixture(scope="module")
def data(prepared):
    return Prepared.open(prepared)


@pytest.fixture(scope="module")
def users(data):
    return data.table("users.parquet", ["user_id"]).column(0).to_pylist()


@pytest.fixture(scope="module")
def items(data):
    return data.item_ids().to_external(np.arange(1, data.num_items + 1)).to_pylist()


@pytest.fixture(scope="module")
def popular(data, users):
    """The popularity baseline's own lists of 10, as rows of external ids."""
    recommend = popularity_of(data.item_counts()).recommend
    rows = []
    for batch in evaluation_batches(data.root, "test", 1, 512):
        lists = recommend(batch.feedback.histories, 10, batch.exclude).item_ids
        ids = data.item_ids().to_external(lists.numpy()).to_pylist()
        names = [users[user] for user in batch.user_ids.tolist() for _ in range(10)]
        rows.append(pd.DataFrame({"user_id": names, "item_id": ids, "rank": list(range(1, 11)) * len(lists)}))
    return pd.concat(rows, ignore_index=True)


@pytest.fixture(scope="module")
def reference(data):
    return recpo.evaluate(data, ["popularity"], ks=KS).document["contenders"][0]


def entry_of(data, given, **options):
    found = recpo.evaluate(data, [given], **({"ks": KS, "baselines": False} | options))
    return found.document["contenders"][0], found.warnings


def of_lists(metrics):
    """Without those of scores, which lists do not have."""
    return {name: value for name, value in metrics.items() if not name.startswith("AUC")}


def test_lists_of_a_contender_have_exactly_its_numbers(data, popular, reference):
    found, warnings = entry_of(data, Lists("other", popular))
    assert (found["name"], found["kind"]) == ("other", "lists")
    for part in ("totals", "off_policy"):
        assert found[part] == reference[part]
    assert found["metrics"] == of_lists(reference["metrics"])
    for segment, bins in reference["segments"].items():
        assert found["segments"][segment] == {name: of_lists(metrics) for name, metrics in bins.items()}
    assert not any(warning.startswith("other") for warning in warnings)
    assert found["counts"]["list_rows"] == len(popular)
    assert reference["counts"].items() <= found["counts"].items()


@settings(max_examples=8)
@given(seed=st.integers(0, 1 << 30), scored=st.booleans(), repeats=st.integers(0, 20))
def test_the_order_of_rows_repeats_and_unknown_ids_change_nothing(data, popular, reference, seed, scored, repeats):
    rng = np.random.default_rng(seed)
    again = popular.iloc[rng.integers(len(popular), size=repeats)].assign(rank=1000)
    strange = popular.iloc[:6].copy()
    strange.loc[strange.index[:2], "user_id"] = -7
    strange.loc[strange.index[2:6], "item_id"] = [-1, -1, -2, -3]
    rows = pd.concat([popular, again, strange]).iloc[rng.permutation(len(popular) + repeats + 6)]
    if scored:
        rows = rows.assign(score=np.exp(-rows["rank"] / 50.0)).drop(columns="rank")
    found, warnings = entry_of(data, Lists("other", rows), off_policy=None, segments=False)
    assert found["metrics"] == of_lists(reference["metrics"])
    counts = found["counts"]
    assert (counts["list_rows"], counts["list_rows_repeated"]) == (len(rows), repeats)
    assert (counts["list_rows_of_unknown_users"], counts["list_unknown_users"]) == (2, 1)
    assert (counts["list_rows_of_unknown_items"], counts["list_unknown_items"]) == (4, 3)
    assert any("2 rows are left out: the prepared data do not know their user (1 users)" in w for w in warnings)
    assert any(f"{repeats} rows repeat an item" in w for w in warnings) == (repeats > 0)


def test_short_lists_absent_users_and_items_of_the_past_are_counted(data, popular, users):
    served = popular["user_id"].drop_duplicates().tolist()
    batch = next(iter(evaluation_batches(data.root, "test", 1, 512)))
    row = next(i for i, user in enumerate(batch.user_ids.tolist()) if users[user] == served[1])
    past = data.item_ids().to_external(batch.exclude[row][batch.exclude[row] > 0][:3].numpy()).to_pylist()
    kept = popular[~popular["user_id"].isin(served[:1])]
    kept = kept[~((kept["user_id"] == served[1]) & (kept["rank"] > 7))]
    rows = pd.concat([kept, pd.DataFrame({"user_id": served[1], "item_id": past, "rank": 0})])
    found, warnings = entry_of(data, Lists("other", rows), off_policy=None)
    counts = found["counts"]
    assert counts["users_without_list"] == 1
    assert counts["list_items_excluded"] == 3
    assert (counts["users_with_short_list@5"], counts["users_with_short_list@10"]) == (0, 1)
    assert sum(warning.startswith("other: ") for warning in warnings) == 3
    assert found["metrics"]["novelty@5"]["n"] == counts["users"] - 1
    kept_past, _ = entry_of(data, Lists("other", rows), off_policy=None, repeats=True)
    assert kept_past["counts"]["list_items_excluded"] == 0


def test_ranks_order_the_list_and_scores_against_them_are_counted(data, popular, reference):
    agrees = popular.assign(score=-popular["rank"].astype(float))
    assert entry_of(data, Lists("a", agrees), off_policy=None)[0]["counts"]["list_rows_against_scores"] == 0
    found, warnings = entry_of(data, Lists("a", popular.assign(score=popular["rank"].astype(float))), off_policy=None)
    assert found["metrics"]["NDCG@10"] == reference["metrics"]["NDCG@10"]
    assert found["counts"]["list_rows_against_scores"] == len(popular) * 9 // 10
    assert any("the ranks count" in warning for warning in warnings)


@pytest.mark.parametrize("kind", ["arrow", "columns", "parquet", "directory", "csv", "csv.gz"])
def test_any_frame_and_any_file(data, popular, reference, tmp_path, kind):
    place = tmp_path / f"lists.{kind}"
    if kind == "arrow":
        source = pa.Table.from_pandas(popular.astype({"rank": "int16"}), preserve_index=False)
    elif kind == "columns":
        source = {name: popular[name].to_numpy() for name in popular}
    elif kind == "parquet":
        source = str(place)
        popular.assign(why="because").to_parquet(place)
    elif kind == "directory":
        source = place
        place.mkdir()
        popular[:100].to_parquet(place / "a.parquet")
        popular[100:].to_parquet(place / "b.parquet")
    else:
        source = place
        popular.assign(why='said, "so"').to_csv(place, index=False)
    found, _ = entry_of(data, Lists("other", source), off_policy=None)
    assert found["metrics"]["NDCG@10"] == reference["metrics"]["NDCG@10"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.drop(columns="rank"), ("missing_column", "rank")),
        (lambda rows: rows.drop(columns="item_id"), ("missing_column", "item_id")),
        (lambda rows: rows.assign(rank=[np.nan, None, *range(len(rows) - 2)]), ("missing_value", "rank")),
        (lambda rows: rows.drop(columns="rank").assign(score=np.nan), ("missing_value", "score")),
        (lambda rows: rows.assign(rank="first"), ("wrong_type", "rank")),
        (lambda rows: rows.assign(item_id="x"), ("wrong_type", "item_id")),
        (lambda rows: rows.assign(user_id=-1), ("mismatch", "lists other")),
        (lambda rows: rows[:0], ("mismatch", "lists other")),
        (
            lambda rows: rows.assign(user_id=[None, *rows["user_id"][1:]]).convert_dtypes(),
            ("missing_value", "user_id"),
        ),
    ],
)
def test_unusable_lists_are_refused(data, popular, change, message):
    with refused(*message):
        read_lists(Lists("other", change(popular)), data)


def test_unusable_files_and_names_are_refused(data, tmp_path, popular):
    for name in ("nowhere.parquet", "nowhere.csv"):
        with refused("wrong_file", str(tmp_path / name)):
            read_lists(Lists("other", tmp_path / name), data)
    (tmp_path / "bad.csv").write_text("user_id,item_id,rank\nsomebody,1,1\n")
    with refused("wrong_file", str(tmp_path / "bad.csv")):
        read_lists(Lists("other", tmp_path / "bad.csv"), data)
    for text in ("", "als", "als=", "=als.parquet"):
        with refused("bad_value", "contenders"):
            Lists.parse(text)
    assert Lists.parse("als=a=b.parquet") == Lists("als", "a=b.parquet")
    with refused("missing_value", "name"):
        Lists("", popular)
    with refused("duplicate", "popularity"):
        recpo.evaluate(data, ["popularity", Lists("popularity", popular)])


def test_equal_scores_go_by_the_index_of_the_item(data, users, items):
    rows = pd.DataFrame({"user_id": users[0], "item_id": items[:5][::-1], "score": [1.0, 1.0, 2.0, 1.0, 1.0]})
    listed = read_lists(Lists("other", rows), data)
    assert listed.items.tolist() == [3, 1, 2, 4, 5]
    assert listed.users.tolist() == [0]

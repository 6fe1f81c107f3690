"""``recpo recommend`` of factors and baselines: the same frames as those of a run."""

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.base.types import Histories
from recpo.cli.main import main
from recpo.log.prepared import Prepared
from recpo.rewards.graded import FactorOptions
from recpo.rewards.selection import fit_factors
from recpo.serving.histories import HistoryReader
from tests.refusals import refused

COLUMNS = ["user_id", "rank", "item_id", "score"]


@pytest.fixture(scope="module")
def data(prepared):
    return Prepared.open(prepared)


@pytest.fixture(scope="module")
def factors(data):
    return fit_factors(data, FactorOptions(method="als", ranks=(3,), ridges=(2.0,), sweeps=3))


@pytest.fixture(scope="module")
def histories(data):
    return pd.read_parquet(data.root / "histories.parquet")


def test_a_baseline_lists_the_items_with_the_highest_counts_that_the_user_has_not_seen(data, histories):
    lists = recpo.recommend("popularity", histories, 7, prepared=data)
    assert list(lists) == COLUMNS
    items = pd.read_parquet(data.root / "items.parquet")
    ranked = items.sort_values("train_count", ascending=False, kind="stable")["item_id"].tolist()
    seen = histories.groupby("user_id")["item_id"].agg(set)
    for user, listed in lists.groupby("user_id", sort=False):
        assert listed["item_id"].tolist() == [item for item in ranked if item not in seen[user]][:7]
        assert listed["rank"].tolist() == list(range(1, 8))


def test_factors_list_the_items_with_the_highest_grades(data, factors, histories):
    lists = recpo.recommend(factors, histories, 5, prepared=data)
    reader = HistoryReader(data.item_ids(), data.feedback, factors.max_history)
    read = reader.read(histories)
    (batch,) = (inputs for _, inputs in read.batches(1_000))
    ids, levels, seen = (torch.from_numpy(one) for one in (batch.item_ids, batch.feedback, batch.exclude))
    expected = factors.recommend(Histories(ids, (ids > 0).sum(1), levels), 5, torch.cat([ids, seen], 1))
    assert lists["user_id"].tolist() == np.repeat(read.users.to_pylist(), 5).tolist()
    assert reader.items.to_internal(lists["item_id"].to_numpy()).tolist() == expected.item_ids.flatten().tolist()
    gaps, grades = (np.diff(one.reshape(-1, 5)) for one in (lists["score"].to_numpy(), expected.scores.numpy()))
    np.testing.assert_allclose(gaps, grades / 0.05, rtol=1e-3, atol=1e-3)
    assert (lists.groupby("user_id")["score"].agg(lambda logp: np.exp(logp).sum()) < 1).all()


@pytest.mark.parametrize("source", ["factors", "popularity"])
def test_the_command_writes_the_same_lists_of_ten(source, data, factors, histories, tmp_path, capsys):
    named = [source]
    if source == "factors":
        factors.save(tmp_path / "factors")
        named = [str(tmp_path / "factors")]
    out = tmp_path / "lists.parquet"
    words = [
        "--prepared",
        str(data.root),
        "--histories",
        str(data.root / "histories.parquet"),
        "--out",
        str(out),
    ]
    assert main(["recommend", *named, *words]) == 0
    assert "up to 10 items each" in capsys.readouterr().out
    lists = recpo.recommend(tmp_path / "factors" if source == "factors" else source, histories, prepared=data)
    pd.testing.assert_frame_equal(pd.read_parquet(out), lists, check_like=False)
    assert lists["rank"].max() == 10


def test_what_is_missing_or_too_much_is_said(data, factors, histories, tmp_path, capsys):
    with refused("missing_option", "prepared"):
        recpo.recommend(factors, histories)
    with refused("wrong_type", "histories"):
        factors.recommend(histories, 5)
    for source in ("popularty", data.root):
        with refused("wrong_file", str(source)):
            recpo.recommend(source, histories, prepared=data)
    with refused("unsupported", "run"):  # it ranks for evaluations alone
        recpo.recommend("random", histories, prepared=data)
    words = ["--histories", str(data.root / "histories.parquet"), "--out", str(tmp_path / "lists.parquet")]
    assert main(["recommend", "popularity", *words]) == 1
    assert "popularity" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

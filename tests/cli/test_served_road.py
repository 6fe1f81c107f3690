"""export and recommend on a small simulated log, through the command line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from recpo.cli.main import main
from recpo.data.datamodule import evaluation_batches
from recpo.data.id_map import IdMap
from recpo.serving.bundle import Bundle
from recpo.training.run import load_policy


def test_a_run_on_other_items_is_not_exported(road, tmp_path, capsys):
    other = shutil.copytree(road / "run-0", tmp_path / "other")
    finished = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(finished | {"catalog_checksum": "0"}))
    options = ["--run", str(other), "--prepared", str(road / "prepared"), "--out", str(tmp_path / "bundle")]
    assert main(["export", *options]) == 1
    assert "other items" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_the_bundle_gives_every_test_user_the_policys_list(road, engine):
    policy = load_policy(road / "run-0")
    bundle, items = Bundle.load(road / "bundle", engine), IdMap.load(road / "prepared" / "items.parquet")
    for batch in evaluation_batches(road / "prepared", "test", policy.max_history, 32):
        histories = batch.feedback.histories
        with torch.inference_mode():
            expected = policy.recommend(histories, 10, batch.exclude)
        lengths = histories.lengths.tolist()
        columns = {"user_id": batch.user_ids.numpy(), "blocked": external(items, batch.exclude)}
        columns["item_ids"] = external(items, histories.item_ids)
        columns["feedback"] = [row[:n].tolist() for row, n in zip(histories.feedback, lengths, strict=True)]
        served = bundle.recommend(pd.DataFrame(columns), k=10).table
        assert served["item_id"].to_pylist() == items.to_external(expected.item_ids.numpy()).to_pylist()
        np.testing.assert_allclose(served["score"].to_numpy(), expected.scores.flatten(), atol=1e-4)


def external(items, ids):
    return [items.to_external(row[row > 0]).to_pylist() for row in ids.numpy()]


def test_recommend_serves_the_histories_of_prepare(road, tmp_path, capsys):
    out = tmp_path / "lists.parquet"
    options = ["--bundle", str(road / "bundle"), "--histories", str(road / "prepared" / "histories.parquet")]
    assert main(["recommend", *options, "--out", str(out), "--k", "5", "--batch_size", "16", "--show", "2"]) == 0
    printed = capsys.readouterr().out
    assert "up to 5 items each" in printed
    lists = pd.read_parquet(out)
    histories = pq.read_table(road / "prepared" / "histories.parquet").to_pandas()
    assert lists.groupby("user_id", sort=False)["rank"].apply(list).map(lambda ranks: ranks == [1, 2, 3, 4, 5]).all()
    assert lists["user_id"].unique().tolist() == histories["user_id"].tolist()
    seen = histories.explode("item_ids")[["user_id", "item_ids"]].rename(columns={"item_ids": "item_id"})
    assert lists.merge(seen.astype("int64"), on=["user_id", "item_id"]).empty


@pytest.mark.parametrize("content", [None, b"", b"PAR1 cut off"])
def test_unreadable_histories_are_refused(road, tmp_path, capsys, content):
    histories = tmp_path / "histories.parquet"
    if content is not None:
        histories.write_bytes(content)
    options = ["--bundle", str(road / "bundle"), "--histories", str(histories), "--out", str(tmp_path / "o.parquet")]
    assert main(["recommend", *options]) == 1
    assert str(histories) in capsys.readouterr().err
    assert not (tmp_path / "o.parquet").exists()


def test_export_refuses_an_existing_output_and_caps_k_at_the_catalog(road, capsys):
    options = ["--run", str(road / "run-0"), "--prepared", str(road / "prepared"), "--out", str(road / "bundle")]
    assert main(["export", *options]) == 1
    assert "exists already" in capsys.readouterr().err
    bundle = Bundle.load(road / "bundle")
    assert bundle.k == min(100, bundle.manifest["num_items"])
    assert bundle.manifest["feedback"]["cutoffs"]
    assert bundle.manifest["origin"]["policy"]["class_path"].endswith("CatalogSoftmaxPolicy")

"""evaluate, export and recommend on a small simulated log, through the command line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recpo.cli.main import main
from recpo.data.datamodule import evaluation_batches
from recpo.data.id_map import IdMap
from recpo.serving.bundle import Bundle
from recpo.training.run import load_policy

SMALL = ["--policy.init_args.dim", "16", "--policy.init_args.layers", "1", "--policy.init_args.max_history", "20"]
SMALL += ["--data.layout.init_args.history_length", "20", "--trainer.max_epochs", "1"]


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """A directory with a simulated log, prepared data, two short runs and a bundle."""
    root = tmp_path_factory.mktemp("road")
    log, prepared = str(root / "log"), str(root / "prepared")
    sizes = ["--users", "60", "--items", "80", "--events", "3000"]
    assert main(["simulate", "--out", log, *sizes]) == 0
    assert main(["prepare", "--log", f"{log}/log", "--out", prepared]) == 0
    for seed in ("0", "1"):
        options = ["--data.prepared", prepared, "--out", str(root / f"run-{seed}"), "--seed", seed]
        assert main(["train", "--config", "configs/pretrain.yaml", *options, *SMALL]) == 0
    export = ["export", "--run", str(root / "run-0"), "--prepared", prepared, "--out", str(root / "bundle")]
    assert main(export) == 0
    return root


@pytest.fixture(autouse=True)
def in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.fixture(scope="module", autouse=True)
def module_in_repository(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(request.config.rootpath)
        yield


def test_evaluate_writes_a_document_and_prints_tables(road, tmp_path, capsys):
    runs = json.dumps([str(road / "run-0"), str(road / "run-1")])
    options = ["--prepared", str(road / "prepared"), "--run", runs, "--ks", "[5, 10]", "--truth", str(road / "log")]
    options += ["--baselines", '["popularity","positives","random"]', "--out", str(tmp_path / "metrics.json")]
    assert main(["evaluate", *options]) == 0
    printed = capsys.readouterr().out
    for expected in ("NDCG", "popularity", "run-1", "seen items: excluded", "paired differences"):
        assert expected in printed
    document = json.loads((tmp_path / "metrics.json").read_text())
    names = [contender["name"] for contender in document["contenders"]]
    assert names == ["popularity", "positives", "random", "run-0", "run-1"]
    assert len(document["differences"]) == 10
    metrics = document["contenders"][3]["metrics"]
    assert {"NDCG@5", "Recall@10", "disliked@10", "true_reward@10", "true_dislike@5"} <= set(metrics)
    assert all(-2 <= metrics[f"true_reward@{k}"]["mean"] <= 1 for k in (5, 10))
    resolved = yaml.safe_load((tmp_path / "metrics.resolved.yaml").read_text())
    assert resolved["ks"] == [5, 10]
    # the resolved options repeat the result
    again = ["--config", str(tmp_path / "metrics.resolved.yaml"), "--out", str(tmp_path / "again.json")]
    assert main(["evaluate", *again]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == document


def test_kept_seen_items_are_said_and_change_the_targets(road, tmp_path, capsys):
    options = ["--prepared", str(road / "prepared"), "--out", str(tmp_path / "metrics.json"), "--exclude_seen", "false"]
    assert main(["evaluate", *options]) == 0
    assert "seen items: kept" in capsys.readouterr().out
    counts = json.loads((tmp_path / "metrics.json").read_text())["contenders"][0]["counts"]
    assert counts["positive_events"] > 0
    assert counts["positive_events_removed_as_seen"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--baselines", "[]"], "nothing to evaluate"),
        (["--ks", "[0]"], "ks must be"),
        (["--run", '["nowhere"]'], "nowhere is no run directory"),
        (["--truth", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_one_message(road, tmp_path, capsys, options, message):
    out = tmp_path / "metrics.json"
    assert main(["evaluate", "--prepared", str(road / "prepared"), "--out", str(out), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not out.exists()


def test_the_same_run_twice_and_a_run_on_other_items_are_refused(road, tmp_path, capsys):
    run = str(road / "run-0")
    common = ["evaluate", "--prepared", str(road / "prepared"), "--out", str(tmp_path / "metrics.json")]
    assert main([*common, "--run", json.dumps([run, run])]) == 1
    assert "named twice" in capsys.readouterr().err
    other = shutil.copytree(road / "run-0", tmp_path / "other")
    finished = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(finished | {"catalogue_checksum": "0"}))
    for options in ([*common, "--run", json.dumps([str(other)])], ["export", "--run", str(other), *common[1:3]]):
        options = options if options[0] == "evaluate" else [*options, "--out", str(tmp_path / "bundle")]
        assert main(options) == 1
        assert "other items" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_the_bundle_gives_every_test_user_the_policys_list(road, engine):
    policy = load_policy(road / "run-0")
    bundle, items = Bundle.load(road / "bundle", engine), IdMap.load(road / "prepared" / "items.parquet")
    for batch in evaluation_batches(road / "prepared", "test", policy.max_history, 32):
        histories = batch.feedback.histories
        with torch.inference_mode():
            expected = policy.recommend(histories, 10, batch.seen)
        lengths = histories.lengths.tolist()
        columns = {"user_id": batch.feedback.row_ids.numpy(), "blocked": external(items, batch.seen)}
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


def test_export_refuses_an_existing_output_and_caps_k_at_the_catalogue(road, capsys):
    options = ["--run", str(road / "run-0"), "--prepared", str(road / "prepared"), "--out", str(road / "bundle")]
    assert main(["export", *options]) == 1
    assert "exists already" in capsys.readouterr().err
    bundle = Bundle.load(road / "bundle")
    assert bundle.k == min(100, bundle.manifest["num_items"])
    assert bundle.manifest["feedback"]["cutoffs"]
    assert bundle.manifest["origin"]["policy"]["class_path"].endswith("CatalogSoftmaxPolicy")

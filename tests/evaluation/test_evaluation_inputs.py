"""Inputs of evaluate besides the held-out events: item features and training logs."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from recpo.evaluation.beyond_accuracy import ItemFeatures, item_facts
from recpo.evaluation.true_rewards import true_rewards
from recpo.log.prepared import Prepared
from recpo.training.run import training_curves
from tests.refusals import refused


def write(frame, path):
    pd.DataFrame(frame).to_parquet(path)
    return path


@pytest.fixture(scope="module")
def catalog(prepared):
    return pd.read_parquet(prepared / "items.parquet")


def tags_of(facts, item):
    return facts.tags.tags[facts.tags.offsets[item] : facts.tags.offsets[item + 1]].tolist()


def test_tags_are_numbered_once_per_item_and_other_items_are_ignored(prepared, catalog, tmp_path):
    ids = catalog["item_id"].tolist()
    rows = {"id": [ids[2], 10**9, ids[0], ids[1]], "genre": [["a", "b", "b"], ["z"], None, ["b", None]]}
    facts = item_facts(Prepared.open(prepared), ItemFeatures(write(rows, tmp_path / "f.parquet"), "id", tags="genre"))
    assert facts.tags.num_tags == 2
    assert [tags_of(facts, item) for item in range(5)] == [[], [], [1], [0, 1], []]
    assert len(facts.tags.offsets) == len(ids) + 2
    assert facts.train_count[1:].tolist() == catalog["train_count"].tolist()
    assert facts.duration[1:].tolist() == catalog["duration"].tolist()


def test_a_tag_may_be_a_plain_value_and_vectors_are_optional(prepared, catalog, tmp_path):
    ids = catalog["item_id"].tolist()
    rows = {"item_id": ids[:2], "topic": [7, 7], "vector": [[1.0, 0.0], [0.0, 1.0]]}
    file = write(rows, tmp_path / "f.parquet")
    facts = item_facts(Prepared.open(prepared), ItemFeatures(file, tags="topic", vectors="vector"))
    assert [tags_of(facts, item) for item in range(4)] == [[], [0], [0], []]
    assert facts.vectors[:4].tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"item_id": [10**9], "topic": [1]}, ("mismatch", "item_id")),
        ({"item_id": ["x"], "topic": [1]}, ("wrong_type", "item_id")),
        ({"item": [1], "topic": [1]}, ("missing_column", "item_id")),
    ],
)
def test_unusable_features_are_refused(prepared, tmp_path, rows, message):
    file = write(rows, tmp_path / "f.parquet")
    with refused(*message):
        item_facts(Prepared.open(prepared), ItemFeatures(file, tags="topic"))


def test_a_column_name_that_is_not_text_is_refused(prepared, tmp_path):
    file = write({"item_id": [1], "topic": [1], "other": [1]}, tmp_path / "f.parquet")
    file.write_bytes(file.read_bytes().replace(b"other", b"\xffther"))
    with refused("wrong_type", str(file)):
        item_facts(Prepared.open(prepared), ItemFeatures(file, tags="topic"))


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_truth_is_that_of_the_day_on_which_the_period_begins(world, prepared, split):
    data = Prepared.open(prepared)
    truth = true_rewards(world, data, split, [5])
    assert truth.day == truth.truth.day_of(data.manifest["boundaries"][f"{split}_start_ms"])
    rows = torch.tensor([0, 3])
    earned = truth.of_logging_policy(rows)["true_reward@5"]
    user_ids = pd.read_parquet(prepared / "users.parquet")["user_id"].to_numpy()
    assert earned.tolist() == pytest.approx(truth.truth.logging_value(user_ids[[0, 3]], truth.day).tolist())


def test_curves_of_a_resumed_run_continue_and_are_thinned(tmp_path):
    assert training_curves(tmp_path) == {}
    for version, steps in (("version_0", range(5)), ("version_2", range(3, 6)), ("version_10", range(6, 1000))):
        directory = tmp_path / "logs" / version
        directory.mkdir(parents=True)
        lines = [f"{step},{step + int(version[8:])},,9" for step in steps]
        (directory / "metrics.csv").write_text("\n".join(["step,train/loss,val/NDCG@10,other", *lines]) + "\n")
    (tmp_path / "logs" / "version_0" / "metrics.csv").open("a").write("4,nan,0.5,9\n")
    curves = training_curves(tmp_path)
    assert curves.keys() == {"train/loss", "val/NDCG@10"}
    assert curves["val/NDCG@10"] == [[4.0, 0.5]]
    loss = dict(map(tuple, curves["train/loss"]))
    assert loss[0] == 0
    assert loss[5] == 7
    assert loss[999] == 1009
    assert len(loss) <= 201
    assert not any(map(math.isnan, loss.values()))

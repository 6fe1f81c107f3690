"""Runs of policies and reward models that read features and behaviors: trained, moved, evaluated, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.base.features import FeatureSchema
from recpo.base.types import FeedbackBatch, Slates
from recpo.cli.main import main
from recpo.log.prepared import ITEM_FEATURES, Prepared
from recpo.serving.bundle import Bundle
from recpo.training.learned_reward import CALIBRATION, LearnedReward
from recpo.training.run import Run
from recpo.verbs.calibrate import calibrate
from recpo.verbs.train import train
from tests.log.test_features import prepare
from tests.policies.synthetic_features import random_features, random_histories
from tests.refusals import refused

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG, REWARD_CONFIG = CONFIGS / "features_pretrain.yaml", CONFIGS / "features_reward_model.yaml"
SMALL = {
    "data.batch_size": 16,
    "data.layout.init_args.history_length": 12,
    "policy.init_args.dim": 8,
    "policy.init_args.heads": 1,
    "policy.init_args.layers": 1,
    "policy.init_args.max_history": 12,
    "policy.init_args.item_features.hidden": 8,
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 3,
    "trainer.num_sanity_val_steps": 0,
    "trainer.log_every_n_steps": 1,
    "allocator": False,
}


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(prepare(tmp_path_factory.mktemp("featured") / "prepared").root)


@pytest.fixture(scope="module")
def run(featured, tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("run") / "run"
    options = {"config": CONFIG, "data.prepared": featured, "out": out, **SMALL, "allocator": "false"}
    assert main(["train", *(word for key, value in options.items() for word in (f"--{key}", str(value)))]) == 0
    return Run.open(out)


def histories(run: Run) -> pd.DataFrame:
    items = run.items.to_external(np.array([1, 2, 3, 4, 5])).to_pylist()
    return pd.DataFrame({"user_id": [7, 7, 7, 8, 8], "item_id": items, "timestamp": [1, 2, 3, 1, 2]})


def test_a_run_is_whole_wherever_it_lies(run, featured, tmp_path) -> None:
    features = run.policy().item_table.features
    assert features.encoder.output.weight.any()  # the features were learned from
    assert torch.equal(features.trained[1:], torch.from_numpy(Prepared.open(featured).item_counts() > 0))
    moved = Run.open(shutil.copytree(run.root, tmp_path / "moved"))
    pd.testing.assert_frame_equal(recpo.recommend(moved, histories(run)), recpo.recommend(run, histories(run)))
    (tmp_path / "moved" / ITEM_FEATURES).unlink()
    with refused("damaged", "item_features.parquet"):
        Run.open(tmp_path / "moved")


@pytest.mark.slow
def test_a_bundle_has_one_vector_per_item_and_answers_as_the_run(run, tmp_path) -> None:
    bundle = recpo.export(run, out=tmp_path / "bundle", k=5)
    assert bundle.manifest.origin["item_column"] == "item_id"
    expected = recpo.recommend(run, histories(run), 5)
    for engine in ("onnx", "torch"):
        found = Bundle.open(bundle.root, engine=engine).recommend(histories(run), 5)
        pd.testing.assert_frame_equal(found, expected, check_exact=False, atol=1e-4)
    assert not (bundle.root / ITEM_FEATURES).exists()
    assert "item_features" not in bundle.manifest.policy["options"]


@pytest.mark.slow
def test_a_reward_model_reads_everything_and_has_a_head_per_behavior(featured, tmp_path) -> None:
    options = SMALL | {"critic.hidden": 8, "objective.init_args.behaviors": ["share", "like"]}
    model = train(featured, config=REWARD_CONFIG, out=tmp_path / "model", **options)
    calibrate(featured, model, k=3, resamples=10)
    targets = json.loads((model.root / CALIBRATION).read_text())["targets"]
    assert set(targets) == {"positive", "dislike", "share", "like"}
    graded = LearnedReward(model.root)
    policy = graded.model.policy
    batch = rewarded(model, policy)
    predicted = graded.predictions(batch, batch.slates)
    assert predicted.shape == (3, 4, 4)
    weighed = LearnedReward(model.root, behaviors={"like": 2.0})
    torch.testing.assert_close(weighed(batch, batch.slates), graded(batch, batch.slates) + 2.0 * predicted[..., 3])
    with refused("unknown_name", "behaviors"):
        LearnedReward(model.root, behaviors={"follow": 1.0})
    reads = recpo.export(model, out=tmp_path / "bundle", k=3).manifest.reads
    assert reads.timestamps
    assert reads.behaviors
    assert {one.name for one in (*reads.user, *reads.context)} == {"country", "age", "surface", "hour"}


def rewarded(model: Run, policy) -> FeedbackBatch:
    """Items to score after random histories, with features in the widths of the run's schema."""
    schema = json.loads((model.root / "features.json").read_text())
    assert schema["behaviors"] == ["like", "share"]
    of = FeatureSchema.from_json(schema["features"])
    known = random_histories(policy.num_items, 3, 6)._replace(
        user=random_features(of.user, 3), context=random_features(of.context, 3, 7)
    )
    items = torch.arange(1, 13).view(3, 4)
    slates = Slates(items, known.lengths[:, None].expand(3, 4), torch.ones(3, 4, dtype=torch.bool))
    return FeedbackBatch(known, slates, torch.arange(3))


@pytest.mark.slow
def test_what_the_data_does_not_have_is_refused_before_anything_is_written(prepared, featured, tmp_path) -> None:
    with refused("mismatch", "policy.item_features"):
        train(prepared, config=CONFIG, out=tmp_path / "run")
    objective = {"class_path": "PointwiseReward", "init_args": {"behaviors": ["follow"]}}
    with refused("unknown_name", "PointwiseReward.behaviors"):
        train(featured, config=CONFIG, out=tmp_path / "run", objective=objective)
    assert not (tmp_path / "run").exists()

"""The model card: only numbers of the manifests, escaped text, and its own checksum."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import recpo
from recpo.base.features import Category, FeatureSchema, Number
from recpo.base.feedback import FeedbackDefinition
from recpo.serving.export import MODEL_CARD, card_facts, evaluation_facts, model_card
from recpo.serving.manifest import BundleManifest
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
MANIFEST = BundleManifest(
    num_items=12_000,
    max_history=50,
    k=100,
    reads_timestamps=False,
    feedback=FeedbackDefinition(),
    policy={"class": "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy", "options": {}},
    origin={"run": "mpo", "checkpoint": "best", "weights": "a" * 64},
    versions={"recpo": "0.1.0", "torch": "2.13"},
)
DATA = {
    "boundaries": {"first_ms": 1_700_000_000_000, "last_ms": 1_701_000_000_000, "valid_start": "V", "test_start": "T"},
    "splits": {"train": {"targets": 90_000, "users": 800, "positive": 7, "skipped": 6, "disliked": 5}},
    "label": "recpo.log.shaping.WatchQuantiles",
}


def test_what_it_says_comes_from_manifests():
    configuration = {"objective": {"class_path": "recpo.objectives.MPO"}, "seed": 3, "init_from": "/home/me/base"}
    results = {"val/SNIPS": 0.25, "val/nan": None, "train/loss": 1.0}
    run = SimpleNamespace(configuration=configuration, origin={"data": DATA}, results=results, monitor="val/SNIPS")
    card = model_card(MANIFEST, card_facts(run))
    for said in (
        "12,000 items",
        "2023-11-14 to 2023-11-26",
        "validation from V",
        "| train | 90,000 | 800 | 7 | 6 | 5 |",
    ):
        assert said in card
    for said in (
        "`MPO`",
        "| seed | `3` |",
        "| init_from | `base` |",
        "at the end 0.2500",
        "| `val/nan` | - |",
        "a" * 64,
    ):
        assert said in card
    assert "train/loss" not in card
    assert "/home/me" not in card


def test_missing_facts_are_marked_as_missing():
    card = model_card(replace(MANIFEST, origin={}, versions={}), {})
    assert "Period and counts: not recorded" in card
    assert "None: evaluate the run" in card
    assert "exported by recpo not recorded" in card.lower()


def test_names_do_not_break_its_tables():
    hostile = replace(MANIFEST, origin={"run": "a|b`c\nd", "checkpoint": "best"})
    card = model_card(hostile, {"results": {"val/x|y": 1.0}})
    assert card.startswith("# a/b'c d: ")
    assert "| `val/x/y` | 1.0000 |" in card


def test_limits_follow_the_program():
    card = model_card(replace(MANIFEST, item_precision="int8", agreement={"overlap_10": 0.98765}), {})
    assert "Item vectors are int8: 0.988 of the 10 best items" in card
    assert "0.951 of the 10 best items are found" in model_card(replace(MANIFEST, index={"recall_10": 0.951}), {})


def test_the_command_names_what_the_policy_reads_of_users_and_requests():
    assert "_features" not in model_card(MANIFEST, {}).partition("## Serving")[2]
    user = (Category("country", num_codes=4), Number("age", mean=30.0, std=9.0))
    schema = FeatureSchema(user=user, context=(Category("surface", num_codes=3),))
    said = model_card(replace(MANIFEST, features=schema), {}).partition("## Serving")[2]
    assert "--out lists.parquet --user_features users.parquet --context requests.parquet" in said
    assert "`users.parquet` has `user_id` and `country`, `age`, with nulls" in said
    assert "`requests.parquet` has `user_id` and `surface`, with nulls" in said


@pytest.mark.slow
def test_a_bundle_carries_its_card_with_the_metrics_of_an_evaluation(prepared, tmp_path):
    small = {"init_args": {"dim": 8, "heads": 1, "layers": 1, "max_history": 50}}
    config, steps = ROOT / "configs" / "pretrain.yaml", {"max_steps": 1, "enable_progress_bar": False}
    run = recpo.train(prepared, config=config, out=tmp_path / "run", policy=small, trainer=steps)
    result = recpo.evaluate(prepared, [run, "popularity"], out=tmp_path / "evaluation", off_policy=None, segments=False)
    bundle = recpo.export(run, out=tmp_path / "bundle", k=5, evaluation=result)
    card = (bundle.root / MODEL_CARD).read_text()
    found = evaluation_facts(recpo.Evaluation.open(tmp_path / "evaluation").document, "run")
    mean = found["metrics"]["run"]["NDCG@10"]["mean"]
    assert f"{mean:.4f}" in card
    assert "| popularity |" in card
    trained = recpo.load(prepared).manifest["counts"]["splits"]["train"]["targets"]
    assert f"| train | {trained:,} |" in card
    assert MODEL_CARD in json.loads((bundle.root / "manifest.json").read_text())["files"]
    (bundle.root / MODEL_CARD).write_text(card + " ", encoding="utf-8")
    with refused("damaged", "README.md"):
        recpo.Bundle.open(bundle.root)
    with refused("unknown_name", "evaluation"):
        evaluation_facts(result.document, "other")

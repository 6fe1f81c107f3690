"""What was made with one definition of feedback meets no data of another, in any verb."""

from __future__ import annotations

import json

import pandas as pd
import pytest

import recpo
from recpo.base.errors import RecpoError
from recpo.base.feedback import FeedbackRule
from recpo.cli.main import main
from recpo.log.shaping import EveryEvent
from recpo.rewards.rewards import validate_identity
from recpo.training.warm_start import growth_of
from tests.refusals import refused


@pytest.fixture(scope="module")
def factors(road, tmp_path_factory):
    out = tmp_path_factory.mktemp("feedback") / "factors"
    recpo.factorize(road / "prepared", out, method="als", ranks=[2], ridges=[4.0], sweeps=1)
    return out


@pytest.fixture(scope="module")
def others(road, tmp_path_factory):
    """The same log, prepared with another label, with other thresholds, and without its watch times."""
    root, log = tmp_path_factory.mktemp("others"), pd.read_parquet(road / "log" / "log")
    clicks = log.drop(columns=["watch_time", "duration"])
    return {
        "label": recpo.prepare(log, root / "label", label=EveryEvent()),
        "thresholds": recpo.prepare(log, root / "thresholds", feedback=FeedbackRule(0.5, 0.25)),
        "levels": recpo.prepare(clicks, root / "levels", label=EveryEvent()),
    }


@pytest.mark.parametrize(
    ("kind", "fact"),
    [
        ("label", r"label WatchQuantiles\(.*\), not EveryEvent\(\)"),
        ("thresholds", "positive_threshold 0.75, not 0.5"),
        ("levels", "levels from watch times, not labels"),
    ],
)
def test_a_run_meets_no_data_of_another_definition(road, others, kind, fact):
    with pytest.raises(RecpoError, match=fact) as error:
        recpo.load(road / "run-0").validate_data(others[kind])
    assert (error.value.code, error.value.field) == ("mismatch", "feedback")
    assert str(road / "run-0") in str(error.value)
    assert str(others[kind].root) in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        ["evaluate", "--contenders", "run-0", "--prepared", "OTHER"],
        ["evaluate", "--contenders", "bundle", "--prepared", "OTHER"],
        ["evaluate", "--contenders", "FACTORS", "--prepared", "OTHER"],
        ["train", "--config", "CONFIGS/pretrain.yaml", "--init_from", "run-0", "--data.prepared", "OTHER"],
        ["calibrate", "--rewards", "run-0", "--prepared", "OTHER"],
        ["calibrate", "--rewards", "FACTORS", "--prepared", "OTHER"],
        ["tilt", "--run", "run-0", "--factors", "FACTORS", "--prepared", "OTHER"],
    ],
    ids=lambda options: " ".join(options[:3]),
)
def test_every_verb_refuses_data_of_another_definition(road, factors, others, options, request, tmp_path, capsys):
    places = {"OTHER": str(others["label"].root), "FACTORS": str(factors)}
    places |= {name: str(road / name) for name in ("run-0", "bundle")}
    configs = str(request.config.rootpath / "configs")
    words = [places.get(word, word).replace("CONFIGS", configs) for word in options]
    assert main([*words, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "another definition of feedback" in said
    assert str(others["label"].root) in said
    assert "EveryEvent()" in said
    assert list(tmp_path.iterdir()) == []


def test_factors_of_another_definition_tilt_no_run(road, others, factors, tmp_path):
    strange = recpo.load(factors)
    strange = recpo.Factors(**{**vars(strange), "feedback": others["thresholds"].feedback})
    with refused("mismatch", "feedback"):
        recpo.tilt(road / "run-0", strange, out=tmp_path / "out", temperature=0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_reward_that_reads_levels_reads_those_of_its_definition(road, others, factors):
    folded, trained = (recpo.FactorReward(factors, users) for users in ("folded", "trained"))
    validate_identity(folded, "reward", recpo.load(road / "prepared"))
    for reward in (folded, recpo.WeightedSum([trained, folded], [1.0, 1.0])):
        with refused("mismatch", "feedback"):
            validate_identity(reward, "reward", others["label"])
    assert trained.scopes[0].feedback is None


@pytest.mark.slow
def test_an_extension_and_a_longer_log_keep_the_definition(tmp_path, world):
    """An extension keeps the cutoffs of the feedback levels; data that are prepared again have their own."""
    log = pd.read_parquet(world / "log").sort_values("timestamp")
    log = log[log.groupby("item_id")["timestamp"].transform("min") < log["timestamp"].quantile(0.5)]
    early = log["timestamp"] < log["timestamp"].max() - 86_400_000
    first = recpo.prepare(log[early], tmp_path / "first")
    policy = {"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 8, "layers": 1, "heads": 1}}
    run = recpo.train(first, policy=policy, out=tmp_path / "run", trainer={"max_steps": 1})
    extended = recpo.prepare(log[~early], tmp_path / "extended", extends=first)
    again = recpo.prepare(log, tmp_path / "again")
    assert extended.feedback == first.feedback
    assert again.feedback.cutoffs != first.feedback.cutoffs
    for data in (first, extended, again):
        run.validate_data(data)
        assert growth_of(run, data) == (first.num_items, first.num_items)


def test_the_definition_is_kept_with_factors_and_bundles(road, factors):
    expected = recpo.load(road / "prepared").feedback
    assert json.loads((road / "run-0" / "feedback.json").read_text())["label"] == expected.label
    assert recpo.load(road / "run-0").feedback == expected
    assert recpo.load(road / "bundle").feedback == expected
    assert recpo.load(factors).feedback == expected

"""The loop: rounds over simulated users, from the command line and from Python, interrupted and not."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal

import numpy as np
import pandas as pd
import pytest
import yaml

import recpo
from recpo.artifacts.outputs import output_directory
from recpo.base.types import Recommendations
from recpo.cli.main import main
from recpo.evaluation.measures import Recommender
from recpo.lists.exploration import Pool
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward
from recpo.serving.bundle import Bundle
from recpo.verbs.loop import Loop, LoopResult
from recpo.verbs.loop_rounds import (
    BEST,
    NEXT,
    ListValue,
    NextEstimate,
    Round,
    RoundOptions,
    _Slates,
    as_served,
    logged_reward,
)
from recpo.worlds.log import DayReport
from tests.forks import Command
from tests.refusals import refused

WORLD = {"users": 40, "items": 40, "events": 1600, "days": 6}
EXPLORE = recpo.Exploration(temperature=0.5, epsilon=0.1, shortlist=20)
PRETRAIN = {
    "policy": {
        "class_path": "CatalogSoftmaxPolicy",
        "init_args": {"dim": 16, "layers": 1, "heads": 1, "max_history": 40},
    },
    "data": {"batch_size": 32, "layout": {"class_path": "SequenceLayout", "init_args": {"history_length": 20}}},
    "objective": {"class_path": "Likelihood"},
    "trainer": {"max_epochs": 1},
}
VALUE = {
    "data": {
        "batch_size": 64,
        "layout": {"class_path": "ImpressionLayout", "init_args": {"history_length": 40, "slate_length": 20}},
    },
    "objective": {"class_path": "MPO", "init_args": {"base": "reference", "candidates_are_draws": False}},
    "reward": {"class_path": "recpo.FactorReward", "init_args": {"users": "trained"}},
    "rollout": {"candidates": "catalog", "batches": 1, "epochs": 1},
    "old_policy": "snapshot",
    "reference": "frozen",
    "trainer": {"max_epochs": 1},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A loop from Python that nothing interrupts."""
    out = tmp_path_factory.mktemp("loop") / "whole"
    return recpo.loop(out, recipe=[PRETRAIN, VALUE], rounds=1, exploration=EXPLORE, **WORLD)


def value_of(evaluation, name, target, estimator="SNIPS"):
    (one,) = (contender for contender in evaluation.document["contenders"] if contender["name"] == name)
    entries = {(entry["target"], entry["estimator"]): entry for entry in one["off_policy"]}
    return entries[target, estimator]


def made_round(number, **changes):
    day = DayReport(number + 5, 10, 0, 60, 0.5, 0.01, 0.0, 0.3, 0.02, 0.9, 0.4, 0.7, 0.8, 0.1, 0.05)
    lists = ListValue(0.6, 0.01, 0.8, 0.004, None, 0.5)
    estimate = NextEstimate(0.4, 0.3, 0.5, 12.0, ("few rows",))
    made = Round(number, number + 5, day if number else None, 80, number > 0, lists, estimate, 0.35, 0.3)
    return dataclasses.replace(made, **changes)


def made_loop(root, rounds=()):
    """A loop on disk whose rounds were never run."""
    verb = Loop(out=root, recipe=[PRETRAIN], **WORLD)
    with output_directory(root, kind="loop") as working:
        verb.write_resolved(working / "resolved.yaml")
    done = LoopResult(root, verb.recorded(), tuple(rounds))
    done.write()
    return done


@pytest.mark.slow
def test_the_value_of_the_best_items_as_served_is_that_of_the_bundles_lists(road):
    data, bundle = Prepared.open(road / "prepared"), Bundle.open(road / "bundle")
    own = recpo.evaluate(data, [as_served(bundle, data, BEST, 6, [6])], ks=[6], segments=False)
    plain = recpo.evaluate(data, [bundle], ks=[6], segments=False)
    served, listed = value_of(own, NEXT, "policy"), value_of(plain, "bundle", "top_6")
    for name in ("value", "effective_sample_size", "rows"):
        assert served[name] == pytest.approx(listed[name], rel=1e-6)
    assert served["intervals"]["bootstrap"] == pytest.approx(listed["intervals"]["bootstrap"], rel=1e-6)
    assert NextEstimate.of(own.document).value == served["value"]
    assert logged_reward(data, "test", LoggedReward()) == pytest.approx(
        value_of(own, "logging policy", "logging policy", "mean")["value"]
    )


@pytest.mark.slow
def test_probabilities_as_served_are_those_of_drawn_slates(road):
    """As often as the exploration shows an item, for a request whose shortlist is given."""
    import torch

    from recpo.base.types import FeedbackBatch, Histories, Slates

    bundle = Bundle.open(road / "bundle")
    items = torch.arange(11, 31)[None]
    scores = torch.linspace(-1, -6, 20)[None]
    slates = _Slates(Recommender(lambda *_: Recommendations(items, scores)), bundle, EXPLORE, 6)
    past = torch.tensor([[1, 2, 0]])
    slates.recommend(Histories(past, torch.tensor([2])), 6, past)
    everything = torch.arange(1, 81)[None]
    zeros = torch.zeros_like(everything)
    batch = FeedbackBatch(
        Histories(past, torch.tensor([2])), Slates(everything, zeros, everything > 0), torch.tensor([0])
    )
    found = slates.log_prob(batch)[0, :, 0].exp().numpy()
    assert found.sum() == pytest.approx(1)
    assert found[0] == found[1] == 0
    pool, generator = [Pool.of(80, exclude=[1, 2])], np.random.default_rng(0)
    counts, draws = np.zeros(80), 1000
    for _ in range(draws):
        drawn = EXPLORE.sample_batch(items.numpy(), scores.numpy(), 6, generator, pool)
        counts[drawn.items[0] - 1] += 1 / 6
    error = np.sqrt(found * (1 - found) / draws) + 1e-3
    assert (np.abs(counts / draws - found) < 4 * error).all()


def test_an_outcome_takes_back_what_the_labels_moved(tmp_path):
    first, second = made_round(0, earned=0.35), made_round(1, earned=0.5, earned_before=0.3)
    done = made_loop(tmp_path / "loop", [first, second])
    (found,) = done.outcomes
    assert found == (0, 0.4, 0.3, 0.5, pytest.approx(0.5 - (0.3 - 0.35)))
    again = recpo.load(tmp_path / "loop")
    assert again.rounds == done.rounds
    assert again.to_pandas()["value"].tolist()[1] == 0.5
    page = again.report.read_text(encoding="utf-8")
    assert "expected and earned" in page
    assert "loop.json" in page
    assert "few rows" in page
    content = json.loads((tmp_path / "loop" / "loop.json").read_text())
    content["rounds"][1]["earned"] = 0.9
    (tmp_path / "loop" / "loop.json").write_text(json.dumps(content))
    with refused("damaged", "loop.json"):
        recpo.load(tmp_path / "loop")


def test_a_recipe_is_what_its_files_say_without_what_the_loop_says(tmp_path):
    content = {**VALUE, "out": "runs/mpo", "init_from": "runs/pretrain", "data": {**VALUE["data"], "prepared": "x"}}
    (tmp_path / "mpo.yaml").write_text(yaml.safe_dump(content))
    found = RoundOptions(recipe=[PRETRAIN, tmp_path / "mpo.yaml"], warm_epochs=2)
    assert found.configs == (PRETRAIN, VALUE)
    assert found.run_names == ["0-Likelihood", "1-MPO"]
    assert found.needs_factors
    assert not RoundOptions(recipe=[PRETRAIN]).needs_factors
    assert RoundOptions(recipe=[PRETRAIN], tilt=0.05).needs_factors


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"recipe": []}, ("wrong_type", "recipe")),
        ({"recipe": "configs/pretrain.yaml"}, ("wrong_type", "recipe")),
        ({"recipe": ["nowhere.yaml"]}, ("missing_file", "nowhere.yaml")),
        ({"recipe": [PRETRAIN, {**VALUE, "objectve": "MPO"}]}, ("bad_value", "recipe[1]")),
        (
            {"recipe": [{**PRETRAIN, "objective": {"class_path": "Likelihood", "init_args": {"x": 1}}}]},
            ("bad_value", "recipe[0]"),
        ),
        ({"recipe": [{**PRETRAIN, "seed": object()}]}, ("wrong_file",)),
        ({"rounds": 0}, ("out_of_range", "rounds")),
        ({"k": 0}, ("out_of_range", "k")),
        ({"days": 2}, ("out_of_range", "days")),
        ({"world": "strange"}, ("unknown_name", "world")),
        ({"users": 0}, ("out_of_range", "users")),
        ({"tilt": -1.0}, ("out_of_range", "temperature")),
        ({"warm_epochs": 0}, ("out_of_range", "warm_epochs")),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, options, refusal):
    with refused(*refusal):
        recpo.loop(tmp_path / "out", **{"recipe": [PRETRAIN], **WORLD, **options})
    assert not (tmp_path / "out").exists()


def test_a_loop_only_replaces_a_loop_and_continues_with_its_own_options(tmp_path, capsys):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    made_loop(tmp_path / "loop", [made_round(0)])
    before = (tmp_path / "loop" / "loop.json").read_bytes()
    for out, options, refusal in (
        ("loop", {}, ("exists",)),
        ("precious", {"overwrite": True}, ("wrong_file", "loop")),
        ("precious", {"resume": True}, ("exists",)),
        ("loop", {"resume": True, "k": 5, "tilt": 0.1}, ("conflicting_options", "k")),
    ):
        with refused(*refusal):
            recpo.loop(tmp_path / out, **{"recipe": [PRETRAIN], **WORLD, **options})
    assert (tmp_path / "loop" / "loop.json").read_bytes() == before
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(PRETRAIN))
    assert main(["loop", f"--out={tmp_path / 'loop'}", f"--recipe=[{tmp_path / 'one.yaml'}]", "--resume=true"]) == 1
    assert "started with other options: days, events, items, users differ" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_loop_continues_to_the_same_result(whole, tmp_path, capsys):
    """After the first round, which is that of the other loop, it is killed in the second one."""
    for name, content in (("pretrain", PRETRAIN), ("value", VALUE)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    out = tmp_path / "loop"
    words = ["loop", f"--out={out}", "--rounds=1"]
    words += [f"--recipe=[{tmp_path / 'pretrain.yaml'}, {tmp_path / 'value.yaml'}]"]
    words += ["--exploration.temperature=0.5", "--exploration.epsilon=0.1", "--exploration.shortlist=20"]
    words += [f"--{name}={value}" for name, value in WORLD.items()]
    shutil.copytree(whole.root, out)
    shutil.rmtree(out / "rounds" / "01")
    dataclasses.replace(whole, root=out, rounds=whole.rounds[:1]).write()
    command = Command([*words, "--resume=true"], tmp_path)
    command.until((out / "rounds" / "01" / "runs" / "1-MPO" / "checkpoints").is_dir)
    command.send(signal.SIGKILL)
    assert command.ended() == -signal.SIGKILL
    assert recpo.load(out).rounds == whole.rounds[:1]
    assert main([*words, "--resume=true"]) == 0
    printed = capsys.readouterr().out
    assert "round 1: day 6 as served: true value" in printed
    assert "policy of round 0: expected" in printed
    assert (out / "loop.json").read_bytes() == (whole.root / "loop.json").read_bytes()
    for name in ("model.onnx", "policy.safetensors"):
        same = [root / "rounds" / "01" / "bundle" / name for root in (out, whole.root)]
        assert same[0].read_bytes() == same[1].read_bytes()


@pytest.mark.slow
def test_the_numbers_of_a_round_are_those_of_its_parts(whole):
    start, last = whole.rounds
    here = whole.root / "rounds" / "01"
    assert (start.last_day, last.last_day, start.warm_start, last.warm_start) == (5, 6, False, True)
    assert last.served == recpo.load(here / "log").served.days[-1]
    evaluation, data = recpo.load(here / "evaluation"), recpo.load(here / "prepared")
    recorded = value_of(evaluation, NEXT, "policy")
    assert (last.estimate.value, last.estimate.low) == (recorded["value"], recorded["intervals"]["bootstrap"]["low"])
    plain = recpo.evaluate(data, [here / "bundle"], truth=whole.root / "rounds" / "00" / "log", ks=[10], segments=False)
    frame = plain.to_pandas()
    listed = frame[(frame["contender"] == "bundle") & (frame["metric"] == "true_reward@10")]["mean"].item()
    assert last.lists.true_reward == pytest.approx(listed)
    earned = value_of(evaluation, "logging policy", "logging policy", "mean")["value"]
    assert last.earned == pytest.approx(earned)
    # the served day is the test period, with the propensities of the exploration
    day = recpo.load(here / "log").to_pandas()
    shards = pd.concat([data.table(shard["file"]).to_pandas() for shard in data.manifest["shards"]["test"]])
    kept = shards[shards["is_target"]]
    assert kept["propensity"].isin(day["propensity"]).all()
    assert len(kept) > 0.9 * len(day)
    assert whole.bundle.root == here / "bundle"
    run = recpo.load(here / "runs" / "0-Likelihood")
    assert run.configuration["init_from"].endswith("rounds/00/runs/0-Likelihood")


@pytest.mark.slow
def test_without_logged_propensities_nothing_is_estimated(tmp_path):
    options = {"recipe": [PRETRAIN], "log_propensities": False, "tilt": 0.1, "warm_start": False, "repeat_after": 0.5}
    done = recpo.loop(tmp_path / "out", rounds=1, **options, **WORLD)
    assert [one.estimate for one in done.rounds] == [None, None]
    assert done.outcomes[0].value is None
    assert done.outcomes[0].earned is not None
    assert not done.rounds[1].warm_start
    assert done.bundle.manifest.origin["run"] == "tilted"
    assert done.bundle.manifest.repeats
    days = [recpo.load(tmp_path / "out" / "rounds" / one / "log") for one in ("00", "01")]
    assert days[1].served.repeat_after == 0.5
    assert len(days[1].to_pandas().merge(days[0].to_pandas(), on=["user_id", "item_id"])) > 0
    for one in ("00", "01"):
        data = recpo.load(tmp_path / "out" / "rounds" / one / "prepared")
        rows = [
            data.table(shard["file"]).to_pandas() for period in data.manifest["shards"].values() for shard in period
        ]
        assert pd.concat(rows)["propensity"].isna().all()
    assert "the log has no propensities" in done.report.read_text(encoding="utf-8")

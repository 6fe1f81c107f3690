"""The verb ``tilt`` on a small log: its choice of temperature, and a run that needs neither base nor factors."""

from __future__ import annotations

import io
import json
import math
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import get_args

import pandas as pd
import pytest
import torch

import recpo
from recpo.artifacts.outputs import write_json
from recpo.base.feedback import GRADES
from recpo.batches.slates import evaluation_batches
from recpo.cli import show_evaluations
from recpo.cli.main import main
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.evaluation.true_rewards import TrueReward
from recpo.policies.tilted import RerankedPolicy, TiltedPolicy
from recpo.training import tilting
from recpo.verbs import loop_rounds
from recpo.verbs.contenders import served_baseline
from tests.conftest import resealed
from tests.refusals import refused

pytestmark = pytest.mark.slow

TINY = {"data.batch_size": 16, "trainer.accelerator": "cpu", "trainer.max_epochs": 1, "trainer.limit_train_batches": 4}
TINY |= {"data.layout": recpo.SequenceLayout(history_length=10)}
NARROW = {"dim": 8, "heads": 1, "layers": 1, "max_history": 10}
TEMPERATURES = [0.02, 0.1, 1.0]


@pytest.fixture(scope="module")
def road(world, prepared, tmp_path_factory):
    """``base``, ``factors``, the tilted ``run`` made by the verb, and the ``log``."""
    out = tmp_path_factory.mktemp("tilt")
    policy = partial(recpo.CatalogSoftmaxPolicy, **NARROW)
    recpo.train(prepared, policy=policy, out=out / "base", **TINY)
    recpo.factorize(prepared, out / "factors", method="als", ranks=[2], ridges=[4.0], sweeps=2, max_history=30)
    command = ["tilt", "--run", out / "base", "--factors", out / "factors", "--prepared", prepared]
    command += ["--out", out / "run", "--temperatures", json.dumps(TEMPERATURES), "--off_policy.resamples", 20]
    command += ["--criterion", "grade"]
    with redirect_stdout(io.StringIO()) as printed:
        assert main([*map(str, command)]) == 0
    log = pd.read_parquet(world / "log")
    return SimpleNamespace(root=out, log=log, printed=printed.getvalue(), prepared=prepared)


def test_the_verb_shows_every_beta_and_takes_the_nearest_to_the_base_that_is_as_good(road):
    origin = json.loads((road.root / "run" / "origin.json").read_text())
    choice = origin["choice"]
    assert choice["criterion"] == "grade"
    base, *trials = choice["trials"]
    assert base["temperature"] is None
    assert base["kl"] == 0
    assert [trial["temperature"] for trial in trials] == sorted(TEMPERATURES, reverse=True)
    divergence = [trial["kl"] for trial in trials]
    assert divergence == sorted(divergence)
    assert divergence[0] > 0
    best = max(trials, key=lambda trial: trial["value"])
    assert best["loss"] == 0
    for trial in (base, *trials):
        assert trial["loss"] == pytest.approx(best["value"] - trial["value"], abs=1e-9)
    fitting = [trial["temperature"] for trial in trials if trial["loss"] <= trial["loss_error"]]
    assert choice["temperature"] == max(fitting)
    assert recpo.load(road.root / "run").results["tilt/temperature"] == choice["temperature"]
    assert f"{choice['temperature']:g} *" in road.printed
    assert f"tilted with temperature {choice['temperature']:g}, lower bound 0" in road.printed


def test_the_function_says_the_same_and_prints_nothing(road, tmp_path, capfd):
    arguments = (road.root / "base", road.root / "factors", road.prepared)
    found = recpo.tilt(
        *arguments,
        out=tmp_path / "run",
        temperatures=TEMPERATURES,
        criterion="grade",
        off_policy=OffPolicyOptions(resamples=20),
    )
    assert capfd.readouterr() == ("", "")
    frame = found.to_pandas()
    assert frame["temperature"].tolist() == [math.inf, 1.0, 0.1, 0.02]
    written = json.loads((road.root / "run" / "origin.json").read_text())["choice"]
    assert (found.temperature, found.criterion, found.k) == (written["temperature"], "grade", 10)
    assert frame["value"].tolist() == [trial["value"] for trial in written["trials"]]
    for name in ("resolved.yaml", "checkpoints/best.ckpt", "items.parquet", "feedback.json"):
        assert (tmp_path / "run" / name).read_bytes() == (road.root / "run" / name).read_bytes()


def test_a_tilted_run_is_evaluated_beside_its_base(road, tmp_path, capfd):
    runs = f"[{road.root / 'run'},{road.root / 'base'}]"
    options = [
        "--prepared",
        str(road.prepared),
        "--contenders",
        runs,
        "--out",
        str(tmp_path / "evaluation"),
        "--ks",
        "[10]",
    ]
    assert main(["evaluate", *options, "--contenders", "[popularity]"]) == 0
    frame = recpo.load(tmp_path / "evaluation").to_pandas("off_policy")
    value = frame[frame["estimator"] == "SNIPS"].set_index(["contender", "target"])["value"]
    trials = json.loads((road.root / "run" / "origin.json").read_text())["choice"]["trials"]
    assert value["run", "policy"] > 0
    assert ("run", "top_10") in value.index
    on_valid = recpo.evaluate(road.prepared, [road.root / "run"], split="valid", ks=[10]).to_pandas("off_policy")
    on_valid = on_valid[(on_valid["estimator"] == "SNIPS") & (on_valid["contender"] == "run")].set_index("target")[
        "value"
    ]
    chosen = recpo.load(road.root / "run").results
    assert on_valid["top_10"] == pytest.approx(chosen["tilt/top_k"], abs=1e-6)
    assert on_valid["policy"] == pytest.approx(chosen["tilt/policy"], abs=1e-6)
    assert len(trials) == 4


def test_temperatures_are_tried_on_some_users(road, tmp_path):
    how = {"temperatures": [0.1], "criterion": "grade", "off_policy": OffPolicyOptions(resamples=20)}
    data = (road.root / "base", road.root / "factors", road.prepared)
    some = recpo.tilt(*data, out=tmp_path / "some", temperature=0.1, max_users=30, **how)
    every = recpo.tilt(*data, out=tmp_path / "every", temperature=0.1, max_users=None, **how)
    assert some.trials[1].grade != every.trials[1].grade
    on_valid = recpo.evaluate(road.prepared, [tmp_path / "some"], split="valid", ks=[10], max_users=30)
    (found,) = (one for one in on_valid.document["contenders"] if one["name"] == "some")
    assert found["counts"]["users"] == 30
    assert found["metrics"]["NDCG@10"]["mean"] == pytest.approx(some.trials[1].ndcg, abs=1e-6)
    assert found["metrics"]["AUC_mixed"]["mean"] == pytest.approx(some.trials[1].auc_mixed, abs=1e-6)


def test_a_run_may_be_tilted_by_a_lower_bound_of_the_grade(road, tmp_path):
    names = [
        "--run",
        road.root / "base",
        "--factors",
        road.root / "factors",
        "--temperature",
        "0.05",
        "--lower_bound",
        "3.0",
    ]
    assert main(["tilt", *map(str, names), "--out", str(tmp_path / "run")]) == 0
    found = recpo.load(tmp_path / "run")
    policy = found.policy()
    assert policy.factors.options.lower_bound == 3.0
    assert json.loads((tmp_path / "run" / "origin.json").read_text())["choice"]["lower_bound"] == 3.0
    by = tilting.ByFactors(recpo.load(road.root / "factors"), lower_bound=3.0)
    expected = by(recpo.load(road.root / "base").policy(), 0.05)
    assert policy.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(weight, expected.state_dict()[name]) for name, weight in policy.state_dict().items())
    named = {"run": road.root / "base", "factors": road.root / "factors", "temperature": 0.05}
    plain = recpo.tilt(**named, out=tmp_path / "plain")
    assert plain.lower_bound == 0.0
    assert plain.run.policy().factors.options.lower_bound == 0.0
    assert "factors.item_variances" not in plain.run.policy().state_dict()
    assert not recpo.recommend(found, road.log, k=5).equals(recpo.recommend(plain.run, road.log, k=5))


def test_a_moved_run_needs_neither_its_base_nor_the_factors(road, tmp_path, monkeypatch):
    expected = recpo.recommend(road.root / "run", road.log, k=3)
    shutil.copytree(road.root / "run", tmp_path / "elsewhere" / "moved")
    for name in ("base", "factors", "run"):
        (road.root / name).rename(road.root / f"{name}-gone")
    monkeypatch.chdir(tmp_path)
    try:
        moved = recpo.load("elsewhere/moved")
        policy = moved.policy()
        assert isinstance(policy, TiltedPolicy)
        assert policy.max_history == 30
        assert policy.base.max_history == 10
        pd.testing.assert_frame_equal(recpo.recommend(moved, road.log, k=3), expected)
        assert main(["export", "--run", "elsewhere/moved", "--out", "bundle", "--k", "3"]) == 0
        bundle = recpo.load("bundle")
        assert bundle.manifest.max_history == 30
        served = bundle.recommend(road.log, k=3)
        assert served[["user_id", "rank", "item_id"]].equals(expected[["user_id", "rank", "item_id"]])
        assert served["score"].to_numpy() == pytest.approx(expected["score"].to_numpy(), abs=1e-4)
    finally:
        for name in ("base", "factors", "run"):
            (road.root / f"{name}-gone").rename(road.root / name)


def test_a_changed_checkpoint_and_a_foreign_class_are_refused(road, tmp_path):
    copy = shutil.copytree(road.root / "run", tmp_path / "copy")
    weights = copy / "checkpoints" / "best.ckpt"
    weights.write_bytes(weights.read_bytes()[:-1])
    with refused("damaged", "checkpoints/best.ckpt"):
        recpo.load(copy).policy()
    text = (copy / "resolved.yaml").read_text().replace("recpo.CatalogSoftmaxPolicy", "os.path.join")
    assert "os.path.join" in text
    (copy / "resolved.yaml").write_text(text)
    facts = json.loads((copy / "run.json").read_text())
    facts["files"]["resolved.yaml"] = verb_sha256(copy / "resolved.yaml")
    write_json(copy / "run.json", resealed(facts))
    with refused("untrusted", "policy.base"):
        recpo.load(copy)


def verb_sha256(file):
    from recpo.artifacts.checksums import sha256

    return sha256(file)


def test_a_given_beta_needs_no_data(road, tmp_path):
    found = recpo.tilt(road.root / "base", road.root / "factors", out=tmp_path / "run", temperature=1e5)
    assert (found.temperature, found.criterion, found.trials) == (1e5, None, ())
    base = recpo.load(road.root / "base")
    # the base reads the last 10 of the 30 events
    pd.testing.assert_frame_equal(
        recpo.recommend(found.run, road.log, k=3)[["user_id", "item_id"]],
        recpo.recommend(base, road.log, k=3)[["user_id", "item_id"]],
    )


def trial(temperature, value, loss, error):
    numbers = dict.fromkeys(tilting.TiltTrial.__annotations__, math.nan)
    return tilting.TiltTrial(
        **numbers | {"temperature": temperature, "value": value, "loss": loss, "loss_error": error}
    )


def test_the_mixed_criterion_takes_the_best_temperature_that_ranks_exposures_as_well_as_any():
    """In a confounded world the mixed AUC alone takes .1, whose lists are worth .780; those of .0125 .831."""
    numbers = [(math.inf, 0.80), (0.1, 0.84), (0.05, 0.83), (0.0125, 0.835)]
    trials = [trial(temperature, value, 0.0, 0.0) for temperature, value in numbers]
    assert tilting.chosen_temperature(trials, "auc_mixed") == 0.1
    losses = [(0.08, 0.01), (0.012, 0.004), (0.002, 0.003), (0.0, 0.0)]
    trials = [replace(t, auc_loss=loss, auc_loss_error=e) for t, (loss, e) in zip(trials, losses, strict=True)]
    assert [t.keeps_order for t in trials] == [False, False, True, True]
    assert tilting.chosen_temperature(trials, "auc_mixed") == 0.0125


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([(math.inf, 0.5, 0.2, 0.05), (1.0, 0.6, 0.1, 0.05), (0.1, 0.68, 0.02, 0.05), (0.02, 0.7, 0.0, 0.0)], 0.1),
        ([(math.inf, 0.8, -0.1, 0.05), (1.0, 0.7, 0.0, 0.0)], math.inf),
        ([(math.inf, 0.69, 0.01, 0.05), (1.0, 0.7, 0.0, 0.0)], math.inf),
        ([(math.inf, 0.8, -0.1, math.nan), (1.0, 0.7, 0.0, 0.0)], math.inf),
        ([(math.inf, 0.5, 0.2, math.nan), (1.0, math.nan, math.nan, math.nan), (0.1, 0.7, 0.0, 0.0)], 0.1),
        ([(math.inf, math.nan, math.nan, math.nan), (1.0, math.inf, -math.inf, 0.1), (0.1, 0.7, 0.0, 0.0)], 0.1),
    ],
    ids=["one error", "base is better", "base is as good", "of one user", "unknown value", "infinite value"],
)
def test_beta_is_the_largest_known_one_that_is_as_good_as_the_best(trials, expected):
    assert tilting.chosen_temperature([trial(*one) for one in trials]) == expected


def test_nothing_is_written_where_no_beta_is_better_than_the_untilted_policy(road, tmp_path, capsys):
    named = ["--run", road.root / "base", "--factors", road.root / "factors", "--prepared", road.prepared]
    # lists that the factors like are worth less
    factors = {"class_path": "FactorReward", "init_args": {"factors": str(road.root / "factors"), "users": "folded"}}
    worth = {"class_path": "WeightedSum", "init_args": {"rewards": [factors], "weights": [-1.0]}}
    options = ["tilt", *map(str, named), "--out", str(tmp_path / "run"), "--monitor_reward", json.dumps(worth)]
    assert main([*options, "--temperatures", "[0.02, 0.1]"]) == 0
    printed = capsys.readouterr().out
    assert "base *" in printed
    assert "no temperature is better than the untilted policy" in printed
    assert "wrote" not in printed
    assert f"next: recpo evaluate --prepared {road.prepared} --contenders {road.root / 'base'}" in printed
    assert list(tmp_path.iterdir()) == []
    reward = recpo.WeightedSum([recpo.FactorReward(road.root / "factors", "folded")], [-1.0])
    arguments = (road.root / "base", road.root / "factors", road.prepared)
    found = recpo.tilt(*arguments, out=tmp_path / "run", temperatures=[0.02, 0.1], monitor_reward=reward)
    assert (found.run, found.temperature, len(found.trials)) == (None, math.inf, 3)
    assert main([*options, "--temperature", "0.02"]) == 0
    printed = capsys.readouterr().out
    assert "the untilted policy is worth more" in printed
    assert f"wrote {tmp_path / 'run'}" in printed
    assert recpo.load(tmp_path / "run").policy().temperature == 0.02


def test_a_recipe_keeps_its_policy_where_no_beta_is_better(road, tmp_path, monkeypatch):
    base = recpo.load(road.root / "base")
    monkeypatch.setattr(loop_rounds, "tilt", lambda *_, **__: tilting.TiltResult(None, math.inf, 0.0, "grade", 10, ()))
    options = loop_rounds.RoundOptions(recipe=[], tilt="auto")
    data, factors = recpo.load(road.prepared), recpo.load(road.root / "factors")
    assert loop_rounds._tilted(tmp_path / "tilted", base, factors, data, options) is base


def test_the_criterion_is_what_the_log_allows(road, tmp_path, monkeypatch, world):
    options = {"run": road.root / "base", "factors": road.root / "factors", "prepared": road.prepared}
    reward = (
        TrueReward(world / "truth", road.prepared) if (world / "truth").is_dir() else TrueReward(world, road.prepared)
    )
    found = recpo.tilt(**options, out=tmp_path / "monitored", temperatures=TEMPERATURES, monitor_reward=reward)
    assert found.criterion == "monitor_reward"
    assert all(trial.value == trial.monitor_reward for trial in found.trials)
    monkeypatch.setattr(tilting, "propensity_share", lambda data, split: 0.0)
    monkeypatch.setattr(tilting, "has_grades", lambda data: False)
    found = recpo.tilt(**options, out=tmp_path / "auc", temperatures=TEMPERATURES, criterion="auc")
    assert found.criterion == "auc"
    assert all(trial.value == trial.auc for trial in found.trials)
    assert all(math.isnan(trial.top_k) and math.isnan(trial.grade) for trial in found.trials)
    with refused("missing_column", "propensity"):
        recpo.tilt(**options, out=tmp_path / "no", criterion="top_k")
    monkeypatch.setattr("recpo.rewards.graded.GRADES", (float("nan"),) * len(GRADES))
    with refused("empty", str(road.prepared)):
        recpo.tilt(**options, out=tmp_path / "no", criterion="grade")
    assert not (tmp_path / "no").exists()


def test_the_grade_is_that_of_a_factorization_of_the_validation_events_alone(road, tmp_path):
    options = {"run": road.root / "base", "factors": road.root / "factors", "prepared": road.prepared}
    found = recpo.tilt(**options, out=tmp_path / "run", temperatures=TEMPERATURES)
    judge = recpo.factorize(road.prepared, period="valid", uncertainty=False, lower_bound=0.0)
    data = recpo.load(road.prepared)
    untilted, means = recpo.load(road.root / "base").policy(), []
    for batch in evaluation_batches(data.root, "valid", untilted.max_history, 7):
        lists = untilted.recommend(batch.feedback.histories, 10, batch.exclude).item_ids
        for user, items, grades in zip(batch.user_ids, lists, batch.feedback.slates.grade, strict=True):
            if not grades.isnan().all():
                weights = judge.user_factors[user]
                rows = [i for i in items.tolist() if i > 0]
                own = [
                    judge.mean + weights[-1] + judge.item_bias[i - 1] + weights[:-1] @ judge.item_factors[i - 1]
                    for i in rows
                ]
                means.append(sum(map(float, own)) / len(own))
    assert len(means) > 10
    assert found.trials[0].grade == pytest.approx(sum(means) / len(means), abs=1e-5)


@pytest.mark.parametrize("name", ["allrank", "popularity"])
def test_a_baseline_is_tilted(name, road, tmp_path):
    """Its run needs neither the data nor the baseline, and its probabilities are those of both models."""
    data, factors = recpo.load(road.prepared), recpo.load(road.root / "factors")
    cache = tmp_path / "baselines"
    options = {"temperatures": TEMPERATURES, "baseline_cache": cache}
    found = recpo.tilt(name, factors, data, out=tmp_path / "run", temperature=0.05, **options)
    assert found.criterion == "auc_mixed"
    assert {trial.temperature for trial in found.trials} == {math.inf, 0.05}
    assert all(0 < trial.auc_mixed < 1 and trial.value == trial.auc_mixed for trial in found.trials)
    assert min(trial.auc_loss for trial in found.trials) == 0.0
    origin = json.loads((tmp_path / "run" / "origin.json").read_text())
    assert origin["tilted"] == {"baseline": name}
    assert origin["data"]["item_column"] == data.item_column
    policy = recpo.load(tmp_path / "run").policy()
    assert isinstance(policy, TiltedPolicy if name == "allrank" else RerankedPolicy)
    (batch,) = evaluation_batches(data.root, "valid", 200, 512)
    histories = batch.feedback.histories
    listed = policy.recommend(histories, data.num_items)
    base = served_baseline(name, data, cache).policy
    logits = (base.scores(histories) / base.temperature).log_softmax(1)
    logits = logits + factors.scores(factors.fold_in(histories)) / 0.05
    assert listed.scores.allclose(logits.log_softmax(1).gather(1, listed.item_ids - 1), atol=1e-3)


def test_a_run_is_tilted_by_sequential_rules_and_served(road, tmp_path, capfd):
    """Its temperature is the largest whose NDCG is as good as the best; the run and its bundle need nothing else."""
    data, out = recpo.load(road.prepared), tmp_path / "run"
    found = recpo.tilt(road.root / "base", "sequential_rules", data, out=out, temperatures=(0.1, 0.01))
    assert found.criterion == "ndcg"
    assert [trial.temperature for trial in found.trials] == [math.inf, 0.1, 0.01]
    assert all(trial.value == trial.ndcg and math.isnan(trial.auc) for trial in found.trials)
    assert found.temperature == next(t.temperature for t in found.trials if t.loss <= t.loss_error)
    again = recpo.tilt(road.root / "base", "sequential_rules", data, out=out, temperature=0.05, overwrite=True)
    assert again.run.origin["tilted_by"] == {"baseline": "sequential_rules"}
    policy = again.run.policy()
    (batch,) = evaluation_batches(data.root, "valid", 200, 512)
    listed = policy.recommend(batch.feedback.histories, data.num_items)
    base = recpo.load(road.root / "base").policy()
    every = base.recommend(batch.feedback.histories.recent(base.max_history), data.num_items)
    logits = torch.zeros_like(every.scores).scatter(1, every.item_ids - 1, every.scores)
    logits += served_baseline("sequential_rules", data).policy.scores(batch.feedback.histories) / 0.05
    assert listed.scores.allclose(logits.log_softmax(1).gather(1, listed.item_ids - 1), atol=1e-3)
    bundle = recpo.export(again.run, out=tmp_path / "bundle")  # compares every engine with the policy
    log = road.log[road.log["user_id"].isin(road.log["user_id"].unique()[:5])]
    one, other = (recpo.recommend(model, log, k=5) for model in (again.run, bundle))
    pd.testing.assert_frame_equal(one, other, atol=1e-4)
    with refused("unused_option", "lower_bound"):
        recpo.tilt(road.root / "base", "sequential_rules", data, out=tmp_path / "no", lower_bound=1.0)
    with refused("missing_option", "prepared"):
        recpo.tilt(road.root / "base", "sequential_rules", out=tmp_path / "no", temperature=0.1)
    with refused("unsupported", "run"):
        recpo.tilt(out, "sequential_rules", data, out=tmp_path / "no")


def test_a_tilted_baseline_is_served(road, tmp_path):
    run = recpo.tilt("implicit_als", road.root / "factors", road.prepared, out=tmp_path / "run", temperature=0.1).run
    bundle = recpo.export(run, out=tmp_path / "bundle")  # compares every engine with the policy
    log = road.log[road.log["user_id"].isin(road.log["user_id"].unique()[:5])]
    one, other = (recpo.recommend(model, log, k=5) for model in (run, bundle))
    pd.testing.assert_frame_equal(one, other, atol=1e-4)


def test_what_cannot_be_tilted_is_reported_before_anything_is_written(road, tmp_path):
    base, factors, out = road.root / "base", road.root / "factors", tmp_path / "out"
    cases = [
        ({"run": road.root / "run", "temperature": 0.1}, ("unsupported", "run")),
        ({"temperature": 0.0}, ("out_of_range", "temperature")),
        ({"temperature": -1.0}, ("out_of_range", "temperature")),
        ({"temperature": "auto"}, ("missing_option", "prepared")),
        ({"temperature": "auto", "temperatures": [], "prepared": road.prepared}, ("empty", "temperatures")),
        ({"temperature": 0.1, "k": 0}, ("out_of_range", "k")),
        ({"temperature": 0.1, "factors": base}, ("wrong_file", "manifest.json")),
        ({"temperature": 0.1, "run": factors}, ("unsupported", "run")),
        ({"temperature": 0.1, "out": base / "inside"}, ("conflicting_options",)),
        ({"temperature": 0.1, "run": "implicit_als"}, ("missing_option", "prepared")),
        ({"temperature": 0.1, "run": "random", "prepared": road.prepared}, ("unsupported", "run")),
        ({"temperature": 0.1, "run": "factorization", "prepared": road.prepared}, ("unsupported", "run")),
    ]
    for changes, refusal in cases:
        with refused(*refusal):
            recpo.tilt(**{"run": base, "factors": factors, "out": out} | changes)
    assert not out.exists()
    other = recpo.load(factors)
    strange = type(other)(**{**vars(other), "catalog_checksum": "other"})
    with refused("mismatch", "items.parquet"):
        recpo.tilt(base, strange, out=out, temperature=0.1)
    assert not out.exists()
    with refused("unsupported", "init_from"):
        recpo.train(road.prepared, init_from=road.root / "run", out=out)
    assert not out.exists()


@pytest.fixture(scope="module")
def of_codes(road):
    """The run of a policy of semantic ids, whose codes are gone."""
    codes = recpo.tokenize(road.prepared, road.root / "codes", levels=2, codebook_size=8, capacity_slack=None)
    policy = partial(recpo.SemanticIdPolicy, **NARROW, codes=str(codes.root), beam_width=20, decoder_layers=1)
    run = recpo.train(road.prepared, policy=policy, out=road.root / "of_codes", **TINY)
    shutil.rmtree(codes.root)
    return run.root


def test_a_policy_of_semantic_ids_is_reranked(road, of_codes, tmp_path):
    shutil.copytree(of_codes, tmp_path / "base")
    found = recpo.tilt(
        tmp_path / "base",
        road.root / "factors",
        road.prepared,
        out=tmp_path / "run",
        temperatures=TEMPERATURES,
        candidates=30,
    )
    assert found.criterion == "auc_mixed"
    shutil.rmtree(tmp_path / "base")
    run = recpo.load(tmp_path / "run")
    made = run.policy()
    assert isinstance(made, RerankedPolicy)
    assert made.candidates == 30
    assert recpo.recommend(run, road.log, k=3).groupby("user_id").size().max() == 3  # from its own directory alone
    frame = recpo.evaluate(road.prepared, [run], ks=[10]).to_pandas("off_policy")
    assert set(frame[frame["contender"] == "run"]["target"]) == {"top_10"}
    assert torch.isfinite(made.factors.item_factors).all()


def test_a_policy_of_semantic_ids_is_reranked_by_sequential_rules(road, of_codes, tmp_path):
    options = {"temperature": 0.05, "candidates": 30}
    run = recpo.tilt(of_codes, "sequential_rules", road.prepared, out=tmp_path / "run", **options).run
    made, served = run.policy(), served_baseline("sequential_rules", recpo.load(road.prepared)).policy
    assert made.candidates == 30
    (batch,) = evaluation_batches(road.prepared, "valid", 200, 512)
    histories = batch.feedback.histories
    listed, scores = made.recommend(histories, 20), served.scores(histories)
    before = made.base.recommend(histories.recent(10), 30)
    logits = before.scores + scores.gather(1, before.item_ids - 1) / 0.05
    best = logits.log_softmax(1).sort(1, descending=True).values[:, :20]
    torch.testing.assert_close(listed.scores, best, atol=1e-4, rtol=1e-4)
    assert made.kl_from_base(histories).min() >= -1e-5
    bundle = recpo.export(run, out=tmp_path / "bundle", k=10)  # compares every engine with the policy
    one, other = (recpo.recommend(model, road.log, k=3) for model in (run, bundle))
    pd.testing.assert_frame_equal(one, other, atol=1e-4)


def test_every_criterion_has_a_name_for_the_table():
    assert set(show_evaluations._NAMES) == set(get_args(tilting.Criterion))

"""``recpo fit``: from a log to a bundle, a decision and a report; stopped and continued; on logs of positives alone.

The first fit is that of ``recpo demo``, which simulates its log.
"""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import shutil
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.artifacts.documents import as_configuration
from recpo.base.errors import Interrupted, RecpoError
from recpo.base.features import FeatureSchema
from recpo.cli.main import main, parse, run, verb_class
from recpo.evaluation.contenders import FITTED, BaselineOptions
from recpo.evaluation.decision import criterion_of, reward_of
from recpo.evaluation.held_out_pass import HeldOutPass
from recpo.log.inspection import LogCounts, inspect_log
from recpo.log.prepare import Preparation
from recpo.log.prepared import Prepared
from recpo.log.shaping import EveryEvent
from recpo.log.splits import LeaveLastOut, TemporalSplit, TrainOnly
from recpo.rewards.factors import Factors
from recpo.rewards.implicit import AllRankOptions, ImplicitOptions, open_fitted
from recpo.training.fit import parse_arguments
from recpo.training.recipes import POSITIVES, RECIPES, counts_of, recipes_of, sizes_of
from recpo.verbs import fit_search, fit_steps
from recpo.verbs.fit_steps import PLAN, FitSteps, Plan, StepOptions, deciding_split
from recpo.verbs.init import preparation_of, write_configurations
from recpo.verbs.tilt import Tilt
from tests.log.test_features import prepare as featured_log, rich_log
from tests.refusals import refused

MINUTES = 0.01  # what must be done takes longer: training is as short as it gets, and there is no search


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A short demo: its command, what it printed, its log and its fit."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    sizes = {"users": 60, "items": 40, "events": 3000, "minutes": MINUTES}
    command = ["demo", f"--out={out}", *(f"--{name}={size}" for name, size in sizes.items())]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(command) == 0
    return SimpleNamespace(command=command, printed=printed.getvalue(), log=out / "log", fit=out / "fit")


@pytest.fixture(scope="module")
def fitted(demo):
    return demo.fit


@pytest.mark.slow
def test_a_demo_shows_every_step_and_what_ships(demo, capsys):
    for verb in ("simulate", "fit", "prepare", "factorize", "train", "evaluate", "export"):
        assert f"recpo {verb} " in demo.printed
    decision = recpo.load(demo.fit)
    assert f"ship {decision.chosen}" in demo.printed
    assert "recommendations" in demo.printed
    values = {row["name"]: row["test"] for row in decision.facts["leaderboard"]}
    oracle = decision.facts["oracle"]["true_reward@10"]["mean"]
    assert values["popularity"]["true_reward@10"]["mean"] < oracle
    assert main(demo.command) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fit_decides_reports_and_serves(fitted):
    root, decision = fitted, recpo.load(fitted)
    assert isinstance(decision, recpo.Decision)
    table = decision.to_pandas()
    assert decision.chosen in set(table["name"])
    named = {"popularity", "item_rate", "implicit_als", "factorization", "allrank", "factors", "pretrain"}
    assert named <= set(table["name"])
    assert not table.set_index("name")["is_baseline"][["allrank", "factors"]].any()  # a team has neither without recpo
    assert table["value"].dropna().is_monotonic_decreasing
    baselines = table[table["is_baseline"]].set_index("name")
    assert decision.facts["strongest_baseline"] == baselines["reward"].idxmax()
    assert decision.facts["oracle"]["true_reward@10"]["mean"] > 0  # of the simulation that was given
    histories = pd.read_parquet(root / "prepared" / "histories.parquet")
    lists = decision.bundle.recommend(histories, k=5)
    assert lists.groupby("user_id").size().max() == 5
    page = decision.report.read_text(encoding="utf-8")
    assert page.index(f"<strong>{decision.chosen}</strong>") < page.index("<svg") < page.index("<table")
    assert decision.evaluation.document["setting"]["split"] == "test"
    temperatures = dict(zip(table["name"], table["temperature"], strict=True))
    assert temperatures["mpo"] == 0.035
    assert temperatures["pretrain"] != temperatures["pretrain"]  # nan: it follows no reward
    assert all(temperatures[name] > 0 for name in temperatures if name.startswith("tilted-"))
    assert decision.facts["left_out"] == ["gbpo", "value_dpo", "value_dpo_likelihood", "gspo"]
    assert decision.facts["propensity"] == "logged"
    assert (table["reward_half_width"] > 0).all()
    assert table.set_index("name")["reward"]["factors"] > table.set_index("name")["reward"]["popularity"]
    assert "estimated reward" in page
    assert "by logged propensities" in page


@pytest.mark.slow
def test_without_propensities_they_are_estimated(demo, tmp_path):
    log = ds.dataset(demo.log / "log").to_table().drop_columns(["propensity", "is_random"])
    pq.write_table(log, tmp_path / "log.parquet")
    steps = FitSteps(tmp_path / "fit", StepOptions())
    steps.data = recpo.prepare(
        **preparation_of(inspect_log([str(tmp_path / "log.parquet")])), out=tmp_path / "prepared"
    )
    assert steps.propensity == "estimated"
    rewards = {name: reward_of(steps.measure(name), 10) for name in ("popularity", "implicit_als")}
    assert all(0 < half_width < 1 for _, half_width in rewards.values())
    assert rewards["implicit_als"][0] > rewards["popularity"][0]


@pytest.mark.slow
def test_every_command_of_a_fit_parses_and_the_export_can_be_repeated(fitted, tmp_path):
    decision = recpo.load(fitted)
    for command in decision.commands:
        program, verb, *words = shlex.split(command)
        assert program == "recpo"
        parse(verb_class(verb), words)
        assert len(command) < 1_500  # options within an option are those that differ from their defaults
    words = shlex.split(decision.commands[-1])[1:]
    assert words[0] == "export"
    words[words.index("--out") + 1] = str(tmp_path / "bundle")
    run("export", words[1:])
    histories = pd.read_parquet(decision.root / "prepared" / "histories.parquet")
    again = recpo.load(tmp_path / "bundle").recommend(histories, k=5)
    assert again.equals(decision.bundle.recommend(histories, k=5))


@pytest.mark.slow
def test_the_preparation_is_that_of_its_file(fitted, tmp_path):
    root, out = fitted, tmp_path / "prepared"
    assert main(["prepare", "--config", str(root / "prepare.yaml"), "--out", str(out)]) == 0
    assert Prepared.open(out).checksums == Prepared.open(root / "prepared").checksums


@pytest.mark.slow
def test_one_plan_and_one_seed_give_one_decision_also_after_a_stop(demo, tmp_path, capsys):
    root, log, out = demo.fit, demo.log, tmp_path / "fit"

    class StoppedError(Exception):
        pass

    def stop_at(words):
        def stop(text):
            if words in text:
                raise StoppedError

        return stop

    options = {"minutes": MINUTES, "out": out}
    with pytest.raises(StoppedError):
        recpo.fit(str(log), on_step=stop_at("timing"), **options)
    with refused("wrong_file", "decision.json"):
        recpo.load(out)
    plan, whole = Plan.open(out), Plan.open(root)  # what depended on the clock is that of the other fit
    plan.effort, plan.recipes, plan.left_out, plan.trials = whole.effort, whole.recipes, whole.left_out, whole.trials
    plan.save(out)
    with pytest.raises(StoppedError):
        recpo.fit(str(log), resume=True, on_step=stop_at("recpo tilt"), **options)
    trained = (out / "runs" / "pretrain" / "run.json").stat().st_mtime_ns
    with refused("conflicting_options", "seed"):
        recpo.fit(str(log), resume=True, seed=1, **options)
    assert main(["fit", str(log), "--out", str(out), "--resume", "true", "--seed", "1"]) == 1
    assert "seed" in capsys.readouterr().err
    first, said = recpo.load(root), []

    def stop_at_the_decision(text):
        said.append(text.partition("left  ")[2])
        stop_at(first.reason)(text)

    with pytest.raises(StoppedError):  # it has decided the same
        recpo.fit(str(log), resume=True, on_step=stop_at_the_decision, **options)
    assert (out / "runs" / "pretrain" / "run.json").stat().st_mtime_ns == trained
    criterion = first.facts["criterion"]["metric"]
    for row in first.facts["leaderboard"]:
        assert f"{row['name']}: {criterion} {row['value']:.4f} ± {row['half_width']:.4f}" in said
    with refused("exists"):
        recpo.fit(str(log), minutes=MINUTES, out=root)


@pytest.mark.slow
def test_a_frame_of_positives_alone_is_fitted_too(demo, tmp_path, pretrained_alone):
    log = ds.dataset(demo.log / "log").to_table().to_pandas()[["user_id", "item_id", "timestamp"]]
    log = log[log["user_id"].isin(log["user_id"].unique()[::2])]
    decision = recpo.fit(log, tmp_path / "fit", minutes=MINUTES, repeats=False)
    assert decision.facts["criterion"]["metric"] == "NDCG@10"
    assert any("do not repeat items" in said for said in decision.facts["understood"])
    assert {"popularity", "implicit_als", "sequential_rules", "pretrain"} <= set(decision.to_pandas()["name"])
    assert any(f"--run {tmp_path}/fit/runs/pretrain --factors sequential_rules" in one for one in decision.commands)
    assert not (tmp_path / "fit" / "factors").exists()
    assert decision.facts["oracle"] is None
    assert decision.facts["propensity"] is None
    assert decision.to_pandas()["reward"].isna().all()


@pytest.mark.slow
def test_what_people_choose_again_is_listed_again(tmp_path, pretrained_alone):
    draw, rows = np.random.default_rng(0), []
    for user in range(80):
        favorites = draw.choice(60, 4, replace=False)
        for day in range(16):
            item = draw.choice(favorites) if draw.random() < 0.9 else draw.integers(60)
            rows.append((user, int(item), 1_700_000_000_000 + day * 86_400_000 + user))
    log = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])
    decision = recpo.fit(log, tmp_path / "fit", minutes=MINUTES)
    assert any("lists may repeat items" in said for said in decision.facts["understood"])
    ndcg = decision.to_pandas().set_index("name")["value"]
    assert ndcg["personal_popularity"] > ndcg["implicit_als"] > ndcg["popularity"]
    assert not any("sequential_rules --prepared" in one for one in decision.commands if one.startswith("recpo tilt"))
    assert decision.bundle.manifest.repeats
    assert decision.bundle.recommend(log[log.user_id == 5], k=4).item_id.isin(log[log.user_id == 5].item_id).all()
    with refused("conflicting_options", "repeats"):
        recpo.fit(recpo.load(tmp_path / "fit" / "prepared"), tmp_path / "again", minutes=MINUTES, repeats=False)


@pytest.mark.slow
def test_a_small_log_is_decided_on_a_quarter_and_what_ships_is_made_again_on_all_events(fitted):
    decision = recpo.load(fitted)
    first, whole = (Prepared.open(fitted / place / "prepared") for place in (".", "final"))
    assert first.manifest["config"]["split"]["init_args"]["valid_days"] == 3
    assert any("valid_days 3 instead of 1" in text for text in decision.facts["understood"])
    events = sum(one["targets"] for one in first.manifest["counts"]["splits"].values())
    assert whole.manifest["counts"]["splits"]["train"]["targets"] == events == 3000
    assert whole.repeats == first.repeats
    assert f" --prepared {fitted}/final/prepared " in decision.commands[-1]  # of the export
    assert decision.evaluation.document["setting"]["split"] == "test"  # of what was decided on
    tested = {row["name"] for row in decision.facts["leaderboard"] if row["test"]}
    baselines = {row["name"] for row in decision.facts["leaderboard"] if row["is_baseline"]}
    assert tested >= baselines | {decision.chosen}


@pytest.mark.slow
def test_a_policy_is_trained_again_for_as_many_epochs_as_its_best_checkpoint(tmp_path):
    log = rich_log(events=1500)
    first = featured_log(tmp_path / "prepared", log)
    whole = featured_log(tmp_path / "whole", log, split=TrainOnly())
    steps = steps_of(first.root, tmp_path)
    steps.plan.effort = 1 / 32
    steps.factorize()
    steps.measure("popularity")
    names = ("pretrain", "reward_model", "mpo_reward_model")
    assert all(steps.train(name, RECIPES[name]) for name in names)
    assert steps.tilt("pretrain", 0.05)
    assert steps.tilt("allrank", 0.05)
    final = steps.on_all_events(whole)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "no user of the validation period")
        warnings.filterwarnings("error", ".*could not find the monitored key")
        assert all(map(final.remake, (*names, "tilted-pretrain", "tilted-allrank")))
    assert not steps.plan.failed
    shares = [sum(one.feedback_counts["train"].values()) for one in (whole, first)]
    before, after = steps.run_of("pretrain"), final.run_of("pretrain")
    assert after.best_step == math.ceil(before.best_step * shares[0] / shares[1])
    assert after.monitor not in after.results  # nothing was validated
    assert final.run_of("tilted-allrank").results["tilt/temperature"] == 0.05
    assert Factors.open(final.root / "factors").facts["validation_events"] == 0


@pytest.mark.slow
def test_graded_events_without_pairs_of_a_user_are_decided_by_lists_and_tilted_by_rules(demo, tmp_path, monkeypatch):
    found, tilts = inspect_log([str(demo.log / "log")]), []
    options = {**preparation_of(found), "split": LeaveLastOut(), "repeats": False}
    data = recpo.prepare(**options, out=tmp_path / "prepared")
    steps = steps_of(data.root, tmp_path)
    steps.measure("popularity")
    assert steps.criterion == "NDCG@5"
    assert (steps.graded, steps.by_grades) == (True, False)
    monkeypatch.setattr(FitSteps, "run", lambda self, verb: tilts.append(verb))
    assert not steps.tilt("pretrain")
    assert [one.factors for one in tilts] == ["sequential_rules"]


def counts(events, days, by_day=()):
    return LogCounts(events, users=100, items=100, requests=events, events_per_user=9, days=days, by_day=by_day)


@pytest.mark.parametrize(
    ("split", "events", "days", "changed"),
    [
        (TemporalSplit(), 200_000, 14.0, {}),
        (TemporalSplit(), 60_000, 14.0, {"valid_days": 3}),  # 10,000 events
        (TemporalSplit(), 20_000, 14.0, {"valid_days": 4}),  # a quarter
        (TemporalSplit(valid_days=5), 20_000, 14.0, {}),
        (TemporalSplit(), 300, 3.0, {}),
        (LeaveLastOut(), 6_960, None, {}),
        (LeaveLastOut(valid_share=0.1, test_share=0.1), 6_960, None, {"valid_share": 0.25}),
        (LeaveLastOut(valid_share=0.1, test_share=0.1), 60_000, None, {"valid_share": 0.167}),
        (LeaveLastOut(valid_share=0.1, test_share=0.1), 100_000, None, {}),
    ],
)
def test_what_decides_has_enough_events_or_a_quarter_of_the_log(split, events, days, changed):
    assert deciding_split(split, counts(events, days)) == replace(split, **changed)


@pytest.mark.parametrize(
    ("by_day", "valid_days"),
    [
        ((14_000,) * 14, 1),
        ((4_286,) * 14, 3),  # 10,000 events, as where days count alike
        ((1_429,) * 14, 4),  # a quarter of the days
        ((4_000, 4_000, 4_000, *(15_000,) * 6), 3),  # the last days have fewer events
        ((2_600, 2_600, 2_600, *(20_000,) * 4), 2),  # a third day would be more than a quarter
        ((50_000, 100, 100, 100), 1),  # training needs events too
    ],
)
def test_events_of_the_days_before_the_test_are_counted(by_day, valid_days):
    found = deciding_split(TemporalSplit(), counts(sum(by_day), float(len(by_day)), by_day))
    assert found == TemporalSplit(valid_days=valid_days)


def test_what_a_contender_needs_is_made_again_as_it_was_made(prepared, tmp_path, monkeypatch):
    done, factorize, steps = [], FitSteps.factorize, steps_of(prepared, tmp_path)
    factorize(steps)
    monkeypatch.setattr(FitSteps, "_train", lambda self, out, files, options, callbacks=(): done.append((out, options)))
    monkeypatch.setattr(FitSteps, "factorize", lambda self: done.append((self.root / "factors", {})))
    monkeypatch.setattr(FitSteps, "run_of", lambda self, name: SimpleNamespace(best_step=30))
    for name, changed in {"pretrain": {}, "mpo": {}, "mpo-1": {"optimizer.init_args.lr": 0.02}}.items():
        steps.train(name, RECIPES[name.partition("-")[0]], changed)
    done.clear()
    final = steps.on_all_events(Prepared.open(prepared))
    assert final.remake("mpo-1")
    made = {str(out.relative_to(tmp_path)): options for out, options in done}
    assert list(made) == ["final/runs/pretrain", "final/factors", "final/runs/mpo-1"]
    assert made["final/runs/mpo-1"]["optimizer.init_args.lr"] == 0.02
    assert made["final/runs/mpo-1"]["trainer.max_steps"] == 30  # as often as for the best checkpoint, unvalidated
    assert made["final/runs/mpo-1"]["trainer.limit_val_batches"] == 0
    assert made["final/runs/pretrain"]["patience"] is None
    assert made["final/runs/mpo-1"]["init_from"] == tmp_path / "final" / "runs" / "pretrain"
    assert made["final/runs/mpo-1"]["reward.init_args.factors"] == tmp_path / "final" / "factors"
    assert final.remake("popularity")
    for name in FITTED:  # not chosen again: nothing is held out for it
        opened = Factors.open if name == "factorization" else open_fitted
        model = opened(next((tmp_path / "baselines").glob(f"{name}-*")))
        assert len(model.facts["tried"]) > 1
        assert getattr(final.baseline_options, name) == getattr(steps.baseline_options, name).of(model)
    chosen, verbs = Factors.open(tmp_path / "factors").facts["chosen"], []
    monkeypatch.setattr(FitSteps, "run", lambda self, verb, *places: verbs.append(verb))
    factorize(final)
    (verb,) = verbs
    assert (verb.ranks, verb.consumption) == ((chosen["rank"],), (chosen["consumption"],))
    assert (verb.warm_up, verb.item_features) == (chosen["warm_up"], chosen["item_features"])


def test_what_collapses_when_it_is_made_again_is_no_contender_that_is_left_out(prepared, tmp_path, monkeypatch):
    steps = steps_of(prepared, tmp_path)
    monkeypatch.setattr(FitSteps, "_train", lambda self, out, files, options, callbacks=(): None)
    assert steps.train("pretrain", RECIPES["pretrain"])

    def collapse(self, out, files, options, callbacks=()):
        raise RecpoError("the policy has collapsed: entropy fell", code="diverged")

    monkeypatch.setattr(FitSteps, "_train", collapse)
    monkeypatch.setattr(FitSteps, "run_of", lambda self, name: SimpleNamespace(best_step=30))
    assert not steps.on_all_events(Prepared.open(prepared)).remake("pretrain")
    assert steps.plan.failed == {"final/pretrain": "the policy has collapsed: entropy fell"}
    assert Plan.open(tmp_path).failed == steps.plan.failed


def test_the_tables_of_a_simulation_are_read(tmp_path, monkeypatch):
    world = recpo.simulate(tmp_path / "world", world="living", users=30, items=40, events=600)
    given: list[str] = []

    def inspect(log, **how):
        given.extend(log)
        raise RecpoError("enough", code="empty")

    monkeypatch.setattr("recpo.verbs.fit.inspect_log", inspect)
    with refused("empty"):
        recpo.fit(world, tmp_path / "fit")
    assert given == [str(world.log), str(world.items), str(world.users)]


def test_a_log_with_an_open_question_is_refused_and_nothing_is_left(tmp_path):
    frame = pd.DataFrame({"a": range(50), "b": range(50)})
    with refused("missing_option", "user_id"):
        recpo.fit(frame, tmp_path / "fit")
    assert not (tmp_path / "fit").exists()


def test_the_size_of_prepared_data_is_that_of_the_log(prepared):
    counts = counts_of(Prepared.open(prepared))
    assert (counts.events, counts.users, counts.items) == (5000, 80, 60)
    assert 0 < counts.requests <= counts.events
    assert counts.events_per_user >= 5000 / 80 * 0.7


def steps_of(prepared, root, on_step=lambda text: None):
    options = StepOptions(minutes=1.0, k=5, seed=0, device="cpu", progress=False, on_step=on_step)
    steps = FitSteps(root, options)
    steps.data = Prepared.open(prepared)
    return steps


def test_the_first_list_is_that_of_the_best_contender_so_far(prepared, tmp_path):
    said, data = [], Prepared.open(prepared)
    steps = steps_of(prepared, tmp_path, said.append)
    steps.data = data
    contenders = [steps.measure("popularity"), steps.measure("item_rate")]
    steps.show_list()
    best = max(contenders, key=lambda one: one.result.estimate(criterion_of(contenders, 5)).mean).name
    name, user, listed = re.fullmatch(r".* by (\w+), for user (\d+): (.*)", said[-1]).groups()
    assert name == best
    index = data.table("users.parquet", ["user_id"]).column(0).to_pylist().index(int(user))
    events = pd.concat(pd.DataFrame(part) for part in data.train_columns(["user_index", "item_index"]))
    seen = data.item_ids().listed(events[events["user_index"] == index]["item_index"].to_numpy())
    items = [int(item) for item in listed.split(", ")]
    assert len(set(items)) == 5
    assert not {*items} & {*seen}


#: Why a training is left out: no user of its validation need have both a positive and another exposure.
LEFT_OUT = ({"code": "diverged"}, {"code": "empty", "field": "monitor"})


@pytest.mark.parametrize("why", LEFT_OUT)
def test_a_training_that_collapses_is_left_out_and_not_tried_again(prepared, tmp_path, monkeypatch, why):
    calls, said = [], []

    def collapse(self, out, files, options, callbacks=()):
        calls.append(out.name)
        raise RecpoError("the policy has collapsed: entropy fell. Lower the learning rate", **why)

    monkeypatch.setattr(FitSteps, "_train", collapse)
    steps = steps_of(prepared, tmp_path, said.append)
    assert not steps.train("mpo", RECIPES["mpo"])
    assert steps.plan.failed == {"mpo": "the policy has collapsed: entropy fell"}
    assert any("mpo is left out" in text for text in said)
    again = steps_of(prepared, tmp_path)
    assert not again.train("mpo", RECIPES["mpo"])
    assert calls == ["mpo"]
    again.plan.failed["pretrain"] = "diverged"
    assert not again.train("gbpo", RECIPES["gbpo"])  # it would start from what was left out


@pytest.mark.parametrize("why", LEFT_OUT)
def test_steps_are_timed_also_where_the_policy_of_a_few_steps_collapses(prepared, tmp_path, monkeypatch, why):
    def collapse(self, out, files, options, callbacks=()):
        for _ in range(4):
            for one in callbacks:
                one.on_train_batch_end(None, None, None, None, 0)
        if out.name == "mpo":
            raise RecpoError("the policy has collapsed: entropy fell", **why)

    monkeypatch.setattr(FitSteps, "_train", collapse)
    steps = steps_of(prepared, tmp_path)
    steps.decide_effort(recipes_of(["pretrain", "mpo", "gbpo"]))
    assert steps.plan.recipes[:2] == ["pretrain", "mpo"]
    assert not steps.plan.failed


DAY = 86_400_000
N = 400
EVENTS = {
    "user_id": [n % 20 for n in range(N)],
    "item_id": [n * 7 % 50 for n in range(N)],
    "timestamp": [1_700_000_000_000 + n * DAY // 20 for n in range(N)],
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rating": [1 + n % 5 for n in range(N)]},
        {"opinion": [("up", "down")[n % 3 == 0] for n in range(N)]},
        {"watch_time": [1.0 + n % 30 for n in range(N)]},
        {
            "watch_time": [1.0 + n % 30 for n in range(N)],
            "duration": [30.0] * N,
            "dislike": [n % 11 == 0 for n in range(N)],
        },
    ],
    ids=["events", "ratings", "opinions", "watch times", "watch times and durations"],
)
def test_prepare_yaml_and_the_preparation_in_python_are_the_same(more, tmp_path):
    pd.DataFrame({**EVENTS, **more}).to_parquet(tmp_path / "log.parquet")
    found = inspect_log([str(tmp_path / "log.parquet")])
    file = write_configurations(found, tmp_path).written["prepare"]
    options = preparation_of(found)
    parsed = parse(verb_class("prepare"), ["--config", str(file)])
    assert [parsed.log] == [options.pop("log")]
    assert parsed.part(Preparation) == Preparation(**options)


def test_a_search_without_optuna_is_left_out_and_named(prepared, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(fit_search, "_leading_recipe", lambda steps: "mpo")
    steps = steps_of(prepared, tmp_path)
    assert fit_search.search(steps, reserve=0.0) == []
    assert "recpo[search]" in steps.plan.failed["the search"]


def positives(tmp_path):
    """The steps of a fit on a log that says nothing of how good its events were."""
    log = tmp_path / "log.parquet"
    pd.DataFrame(EVENTS).to_parquet(log)
    recpo.prepare(log, tmp_path / "prepared", label=EveryEvent())
    return steps_of(tmp_path / "prepared", tmp_path)


def test_positives_alone_are_also_trained_on_as_the_published_tables_are(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        FitSteps, "_train", lambda self, out, files, options, callbacks=(): asked.append((files, options))
    )
    steps = positives(tmp_path)
    steps.plan.effort = 0.5
    assert steps.train("pretrain_ranking", RECIPES["pretrain_ranking"])
    (((file,), options),) = asked
    assert file.stem == "published_catalog"
    sizes = sizes_of("ranking", counts_of(steps.data))
    assert options["policy.init_args.layers"] == sizes.layers
    assert options["policy.init_args.dropout"] == sizes.dropout
    assert (options["patience"], options["weight_averaging.decay"]) == (sizes.patience, sizes.averaging_decay)
    assert options["trainer.max_steps"] == max(20, sizes.steps // 4)  # half of half: patience ends most trainings
    parse_arguments(shlex.split(steps.plan.steps[-1]["command"])[2:])


@pytest.mark.parametrize("leading", ["pretrain", "pretrain_ranking"])
def test_the_search_begins_at_the_options_that_follow_from_the_log(tmp_path, monkeypatch, leading):
    tried = []
    monkeypatch.setattr(FitSteps, "train", lambda self, name, recipe, changed: not tried.append((name, changed)))
    monkeypatch.setattr(fit_search, "_leading_recipe", lambda steps: leading)
    monkeypatch.setattr(fit_search, "_value", lambda steps, name: 0.5)
    steps = positives(tmp_path)
    steps.plan.trials = 2
    assert fit_search.search(steps, reserve=0.0) == [f"{leading}-1", f"{leading}-2"]
    assert [set(changed) for _, changed in tried] == [{one.option for one in fit_search.SPACES[leading]}] * 2


def test_a_command_has_the_options_within_an_option_that_differ():
    implicit, allrank = ImplicitOptions(ranks=(16,)), AllRankOptions(ridges=(0.1,))
    options = BaselineOptions(implicit_als=implicit, allrank=allrank)
    words = Tilt("allrank", "factors", "data", out="out", baseline_options=options).command()
    changed = json.loads(words[words.index("--baseline_options") + 1])
    assert changed["implicit_als"] == {"ranks": [16]}
    assert changed["allrank"]["init_args"] == {"ridges": [0.1]}
    assert sorted(changed) == ["allrank", "implicit_als"]
    assert as_configuration(parse(Tilt, words[1:]).baseline_options) == as_configuration(options)


def test_gbpo_takes_a_quarter_of_ranks_as_positive_and_else_what_the_log_does(prepared, tmp_path):
    option, recipe = "advantage.init_args.positive_fraction", RECIPES["gbpo"]
    counts = counts_of(Prepared.open(prepared))
    ranked, flagged = (recipe.options(tmp_path, counts, label) for label in ("WatchQuantiles", "BinaryColumn"))
    assert option not in ranked
    assert flagged.pop(option, "") is None
    assert flagged == ranked
    assert option not in RECIPES["mpo"].options(tmp_path, counts, "BinaryColumn")


@pytest.mark.slow
def test_all_that_is_searched_can_be_trained(prepared, tmp_path):
    steps = steps_of(prepared, tmp_path)
    steps.plan.effort = 1 / 32
    steps.factorize()
    assert steps.train("pretrain", RECIPES["pretrain"])
    for name, space in fit_search.SPACES.items():
        changed = {one.option: one.choices[-1] if one.choices else one.high for one in space}
        if RECIPES[name].reward != "reward_model":  # it needs features
            assert steps.train(f"{name}-1", RECIPES[name], changed | {"trainer.max_steps": 2})
        assert all(one.low <= one.default <= one.high or one.default in one.choices for one in space)


def test_a_user_who_had_every_item_has_an_empty_first_list(prepared, tmp_path, monkeypatch):
    said = []
    steps = steps_of(prepared, tmp_path, said.append)
    steps.measure("popularity")
    monkeypatch.setattr(HeldOutPass, "one_list", lambda self, contender, k: (0, []))
    steps.show_list()
    assert said[-1].endswith("empty, as every item is in the past")


def test_a_directory_is_fitted_into_itself(tmp_path):
    pd.DataFrame({**EVENTS, "rating": [1 + n % 5 for n in range(N)]}).to_parquet(tmp_path / "log.parquet")

    class StoppedError(Exception):
        pass

    def stop(text):
        if "label: " in text:
            raise StoppedError

    with pytest.raises(StoppedError):
        recpo.fit(str(tmp_path), tmp_path / "fit", minutes=MINUTES, on_step=stop)
    data = Prepared.open(tmp_path / "fit" / "prepared")
    assert [file.rpartition("/")[2] for file in data.manifest["config"]["log"]] == ["log.parquet"]
    with refused("conflicting_options"):
        recpo.fit(data, data.root / "fit", minutes=MINUTES)


def test_an_interrupted_step_says_how_the_fit_continues(prepared, tmp_path, monkeypatch):
    def stop(self):
        self.save()
        raise Interrupted("the run continues with --resume true", 143)

    monkeypatch.setattr(FitSteps, "factorize", stop)
    with pytest.raises(Interrupted) as stopped:
        recpo.fit(prepared, tmp_path / "fit", minutes=MINUTES)
    assert str(tmp_path / "fit") in str(stopped.value)
    assert stopped.value.status == 143
    assert (tmp_path / "fit" / PLAN).is_file()  # what was done is kept


def test_other_errors_of_a_training_end_the_fit(prepared, tmp_path, monkeypatch):
    def refuse(self, out, files, options, callbacks=()):
        raise RecpoError("no space", code="resources")

    monkeypatch.setattr(FitSteps, "_train", refuse)
    with refused("resources"):
        steps_of(prepared, tmp_path).train("pretrain", RECIPES["pretrain"])


@pytest.mark.parametrize(
    ("costs", "recipes", "effort"),
    [
        ({"pretrain": 5, "mpo": 10, "gbpo": 5, "value_dpo": 5}, ["pretrain", "mpo", "gbpo", "value_dpo"], 1.0),
        ({"pretrain": 10, "mpo": 20, "gbpo": 10, "value_dpo": 20}, ["pretrain", "mpo", "gbpo", "value_dpo"], 0.5),
        ({"pretrain": 10, "mpo": 20, "gbpo": 30, "value_dpo": 90}, ["pretrain", "mpo", "gbpo"], 0.5),
        ({"pretrain": 100, "mpo": 100, "gbpo": 1, "value_dpo": 1}, ["pretrain", "mpo"], 0.125),
        ({"pretrain": 1e5, "mpo": 1e5}, ["pretrain", "mpo"], 1 / 32),
    ],
)
def test_the_budget_decides_what_is_trained_and_how_long(prepared, tmp_path, monkeypatch, costs, recipes, effort):
    steps = steps_of(prepared, tmp_path)
    monkeypatch.setattr(FitSteps, "_costs", lambda self, wanted: costs)
    steps.decide_effort(recipes_of(list(costs)))  # of 60 seconds, 36 are for training
    assert (steps.plan.recipes, steps.plan.effort) == (recipes, effort)
    assert recipes + steps.plan.left_out == list(costs)
    again = steps_of(prepared, tmp_path)
    monkeypatch.setattr(FitSteps, "_costs", lambda self, wanted: pytest.fail("it was decided before"))
    again.decide_effort(recipes_of(list(costs)))
    assert again.plan.effort == effort


@pytest.mark.parametrize(
    ("items", "minutes", "memory", "is_fitted"),
    [
        (3_000, 1, 2**30, True),
        (3_000, 0.1, 2**30, False),
        (12_000, 14, 2**34, True),
        (12_000, 5, 2**34, False),
        (12_000, 14, 2**33, False),
        (16_000, 600, 2**40, False),
    ],
)
def test_ease_is_a_baseline_where_it_fits_the_budget(tmp_path, monkeypatch, items, minutes, memory, is_fitted):
    assert 2**28 < fit_steps._memory() < 2**50
    monkeypatch.setattr(fit_steps, "_memory", lambda: memory)
    steps = FitSteps(tmp_path, StepOptions(minutes=minutes))
    steps.data = SimpleNamespace(
        feature_schema=FeatureSchema(),
        num_items=items,
        repeats=False,
        ends_at_once=True,
        feedback_counts={"train": {"skipped": 0, "disliked": 0}},
    )
    always = ["popularity", "item_rate", "sequential_rules", "implicit_als", "recency"]
    assert steps.baselines == always + ["ease"] * is_fitted


@pytest.mark.slow
def test_what_has_features_gets_a_reward_model_that_reads_them(prepared, tmp_path, monkeypatch):
    trained = {}

    def note(self, out, files, options, callbacks=()):
        trained[out.name] = [file.stem for file in files], options

    monkeypatch.setattr(FitSteps, "_train", note)
    plain, rich = steps_of(prepared, tmp_path / "plain"), steps_of(prepared, tmp_path / "rich")
    rich.data = featured_log(tmp_path / "featured")
    assert (plain.has_features, rich.has_features) == (False, True)
    for steps in (plain, rich):
        steps.root.mkdir()
        steps.train("pretrain", RECIPES["pretrain"])
        assert steps.train("reward_model", RECIPES["reward_model"])
        files, options = trained.pop("pretrain")
        sides = {name: value for name, value in options.items() if name.endswith(("features", "behaviors"))}
        of_model = {name: value for name, value in trained.pop("reward_model")[1].items() if name.startswith("policy")}
        if steps is rich:
            assert files == ["pretrain", "features_pretrain"]
            assert sides == {f"policy.init_args.{name}": "true" for name in rich.sides}
            assert of_model == {}
        else:
            assert (files, sides) == (["pretrain"], {})
            assert of_model.pop("policy.init_args.item_features") is None
            assert of_model == {f"policy.init_args.{name}": "false" for name in plain.sides}
        for step in steps.plan.steps:
            parse_arguments(shlex.split(step["command"])[2:])
    assert rich.train("mpo_reward_model", RECIPES["mpo_reward_model"])
    reward = json.loads(trained["mpo_reward_model"][1]["reward"])
    assert reward["init_args"] == {"run": str(rich.root / "runs" / "reward_model"), "calibrated": False}


@pytest.mark.parametrize(("gspo", "recipes"), [(6.0, ["pretrain", "mpo", "gspo"]), (7.0, ["pretrain", "mpo"])])
def test_what_promises_no_more_is_trained_if_all_fit(prepared, tmp_path, monkeypatch, gspo, recipes):
    steps = steps_of(prepared, tmp_path)
    monkeypatch.setattr(FitSteps, "_costs", lambda self, wanted: {"pretrain": 10.0, "mpo": 20.0 - 0.1, "gspo": gspo})
    steps.decide_effort(recipes_of(["pretrain", "mpo"], ["gspo"]))
    assert (steps.plan.recipes, steps.plan.effort) == (recipes, 1.0)
    assert recipes + steps.plan.left_out == ["pretrain", "mpo", "gspo"]


@pytest.mark.parametrize(
    ("short", "long", "recipes", "effort"),
    [
        (10, 20, ["pretrain_ranking", "pretrain"], 1.0),
        (20, 50, ["pretrain_ranking", "pretrain"], 0.5),
        (30, 60, ["pretrain_ranking"], 0.5),
        (30, 100, ["pretrain"], 1.0),
        (100, 300, ["pretrain"], 0.25),
    ],
)
def test_positives_alone_are_trained_on_for_long_where_half_of_it_fits(
    prepared, tmp_path, monkeypatch, short, long, recipes, effort
):
    steps = steps_of(prepared, tmp_path)
    costs = {"pretrain": short, "pretrain_ranking": long}  # of 60 seconds, 36 are for training
    monkeypatch.setattr(FitSteps, "_costs", lambda self, wanted: costs)
    steps.decide_effort(POSITIVES)
    assert (steps.plan.recipes, steps.plan.effort) == (recipes, effort)
    assert {*recipes, *steps.plan.left_out} == set(costs)


def test_a_plan_survives_its_file(tmp_path):
    plan = Plan(spent=3.5, effort=0.25, recipes=["pretrain"], trials=None, failed={"mpo": "collapsed"})
    plan.save(tmp_path)
    assert Plan.open(tmp_path) == plan
    assert json.loads((tmp_path / PLAN).read_text())["effort"] == 0.25
    shutil.rmtree(tmp_path)

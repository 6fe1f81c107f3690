"""A day of simulated users under a bundle: from the command line and from Python, into the next prepare."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import recpo
from recpo.base.features import Category, FeatureSchema, Number
from recpo.cli.main import main
from recpo.lists.exploration import inclusion_probabilities
from recpo.verbs.simulate import BundleService
from recpo.worlds.truth import Truth
from tests.refusals import refused

pytestmark = pytest.mark.slow

EXPLORE = recpo.Exploration(temperature=0.7, epsilon=0.2, shortlist=20)
FLAGS = ["--exploration.temperature=0.7", "--exploration.epsilon=0.2", "--exploration.shortlist=20"]


@pytest.fixture(scope="module")
def explored(road, tmp_path_factory):
    """The day after the road's log, drawn."""
    out = tmp_path_factory.mktemp("served") / "day"
    options = {"policy": road / "bundle", "after": road / "log", "exploration": EXPLORE}
    return recpo.simulate(out, **options)


def first_slates(road, log):
    """The first request of every user: what the bundle was asked is the world's log alone."""
    first = log.groupby("user_id")["request_id"].transform("min") == log["request_id"]
    return log[first].groupby("user_id"), pd.read_parquet(road / "log" / "log")


def test_without_exploration_a_slate_is_what_the_bundle_recommends(road, tmp_path):
    day = recpo.simulate(tmp_path / "day", policy=road / "bundle", after=recpo.load(road / "log"))
    slates, past = first_slates(road, day.to_pandas())
    bundle = recpo.Bundle.open(road / "bundle")
    for user, slate in slates:
        expected = bundle.recommend(past[past["user_id"] == user], k=len(slate))
        assert slate["item_id"].tolist() == expected["item_id"].tolist()
        np.testing.assert_allclose(slate["propensity"], 1 / len(slate), rtol=1e-6)
    assert not day.to_pandas()["is_random"].any()
    assert day.served.exploration is None
    assert day.served.days[0].explored == 0


def test_propensities_are_those_of_the_exploration(road, explored):
    """The mixture by its formula, from the scores that the bundle answers with."""
    slates, past = first_slates(road, explored.to_pandas())
    bundle = recpo.Bundle.open(road / "bundle")
    catalog = set(bundle.items.to_external(np.arange(1, len(bundle.items) + 1)).to_pylist())
    for user, slate in slates:
        own = past[past["user_id"] == user]
        best = bundle.recommend(own, k=20)
        n, place = len(slate), {item: i for i, item in enumerate(best["item_id"])}
        everything = inclusion_probabilities(best["score"].to_numpy(np.float64)[None] / 0.7, n)[0]
        included = np.array([everything[place[item]] if item in place else 0.0 for item in slate["item_id"]])
        uniform = 1 / len(catalog - set(own["item_id"]))
        np.testing.assert_allclose(slate["propensity"], 0.8 * included / n + 0.2 * uniform, rtol=1e-4)
        assert set(slate["item_id"]) <= catalog - set(own["item_id"])
    assert 0 < explored.to_pandas()["is_random"].mean() < 0.5


def test_command_line_and_python_write_the_same_day_and_the_report_is_printed(road, explored, tmp_path, capsys):
    options = [f"--out={tmp_path / 'day'}", f"--policy={road / 'bundle'}", f"--after={road / 'log'}", *FLAGS]
    assert main(["simulate", *options]) == 0
    printed = capsys.readouterr().out
    assert "day 14: " in printed
    assert f"true value {explored.served.days[0].value:.3f} (logging policy" in printed
    files = sorted(file.relative_to(explored.root) for file in explored.root.rglob("*.*"))
    assert len(files) == 6
    assert all((explored.root / file).read_bytes() == (tmp_path / "day" / file).read_bytes() for file in files)
    assert main(["simulate", *options]) == 1
    assert "exists already" in capsys.readouterr().err
    options[0], options[2] = f"--out={tmp_path / 'next'}", f"--after=[{road / 'log'}, {explored.root}]"
    assert main(["simulate", *options, "--days=2", "--seed=3"]) == 0
    assert "day 16: " in capsys.readouterr().out
    served = recpo.load(tmp_path / "next")
    assert served.days == range(15, 17)
    assert served.to_pandas()["request_id"].min() > explored.to_pandas()["request_id"].max()


def test_prepare_reads_the_union_of_the_logs(road, explored, tmp_path):
    logs = [str(road / "log" / "log"), str(explored.log)]
    assert main(["prepare", f"--log=[{', '.join(logs)}]", f"--out={tmp_path / 'prepared'}"]) == 0
    data = recpo.load(tmp_path / "prepared")
    rows = [data.table(shard["file"]).to_pandas() for period in data.manifest["shards"].values() for shard in period]
    kept = pd.concat(rows)
    served = explored.to_pandas()
    assert kept["propensity"].isin(served["propensity"]).sum() > len(served) / 2
    found = recpo.evaluate(data, ["popularity"], truth=explored.root, ks=[5], segments=False)
    assert "true_reward@5" in str(found.document)
    assert Truth.load(explored.root).preferences.parameters == Truth.load(road / "log").preferences.parameters


def test_what_does_not_fit_is_refused_before_anything_is_written(road, tmp_path, capsys):
    bundle, world = road / "bundle", road / "log"
    other = recpo.simulate(tmp_path / "other", users=60, items=80, events=500, seed=5)
    for options, refusal in (
        ({"policy": bundle, "after": other}, ("mismatch", "items")),
        ({"policy": bundle, "after": tmp_path}, ("wrong_file", "truth/truth.json")),
        ({"policy": bundle, "after": []}, ("empty", "after")),
        ({"policy": bundle}, ("missing_option", "policy")),
        ({"after": world}, ("missing_option", "after")),
        ({"exploration": EXPLORE}, ("missing_option", "exploration")),
        ({"policy": bundle, "after": world, "users": 50}, ("conflicting_options", "users")),
        ({"policy": bundle, "after": world, "days": 0}, ("out_of_range", "days")),
        ({"policy": bundle, "after": world, "seed": 1.5}, ("out_of_range", "seed")),
        ({"policy": bundle, "after": world, "world": "small"}, ("conflicting_options", "world")),
        ({"policy": world, "after": world}, ("wrong_file", "manifest.json")),
    ):
        with refused(*refusal):
            recpo.simulate(tmp_path / "out", **options)
    flags = [f"--out={tmp_path / 'out'}", f"--policy={bundle}", f"--after={world}", "--users=50"]
    assert main(["simulate", *flags]) == 1
    assert "users is 50" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_policy_that_reads_users_serves_a_living_world(tmp_path):
    """Slates are those that the bundle recommends with the world's table of users, and other ones without it."""
    world = recpo.simulate(tmp_path / "world", world="living", users=30, items=60, events=1500, days=6, births=0.1)
    users = pd.read_parquet(world.users)
    data = recpo.prepare(world.log, tmp_path / "data", users=users, threads=1)
    policy = partial(recpo.CatalogSoftmaxPolicy, dim=8, layers=1, heads=1, max_history=20, user_features=True)
    options = {"trainer": {"max_epochs": 1, "logger": False}, "optimizer.init_args.lr": 0.05}
    layout = {"data.layout.class_path": "SequenceLayout", "data.layout.init_args.history_length": 20}
    optimizer = {"optimizer.class_path": "torch.optim.AdamW"}
    run = recpo.train(
        data, policy=policy, objective=recpo.Likelihood(), out=tmp_path / "run", **optimizer, **options, **layout
    )
    bundle = recpo.export(run, out=tmp_path / "bundle")
    day = recpo.simulate(tmp_path / "day", policy=bundle, after=world).to_pandas()
    past, alike = pd.read_parquet(world.log), 0
    first = day[day.groupby("user_id")["request_id"].transform("min") == day["request_id"]]
    for user, slate in first.groupby("user_id"):
        own, size = past[past["user_id"] == user], len(slate)
        expected = bundle.recommend(own, k=size, user_features=users)
        assert slate["item_id"].tolist() == expected["item_id"].tolist()
        other = bundle.recommend(own, k=size, user_features=users.assign(user_id=users["user_id"].to_numpy()[::-1]))
        alike += other["item_id"].tolist() == slate["item_id"].tolist()
    assert alike < first["user_id"].nunique()


def test_features_that_a_simulation_lacks_are_named(road):
    bundle, world = recpo.Bundle.open(road / "bundle"), recpo.load(road / "log")
    features = FeatureSchema(user=(Number("income", mean=0.0, std=1.0),), context=(Category("surface", num_codes=3),))
    reading = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, features=features))
    with refused("unsupported", "policy"):
        BundleService(reading).validate(world.truth)
    only_users = dataclasses.replace(features, context=())
    reading = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, features=only_users))
    with refused("mismatch", "income"):
        BundleService(reading, users=pa.table({"user_id": [1], "age": [2.0]})).validate(world.truth)

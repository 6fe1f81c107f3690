"""A world that replays given rewards: its truth is the matrix, and users with unknown rewards only train."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import chisquare

import recpo
from recpo.cli.main import main
from recpo.worlds.log import Simulation
from recpo.worlds.parameters import WORLDS, SimulationParameters
from recpo.worlds.preferences import LoggingPolicy
from recpo.worlds.replay import RewardMatrix
from recpo.worlds.truth import Truth
from tests.refusals import refused

COMPLETE, USERS, ITEMS = 40, 60, 30


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """The file of a matrix, whose last third of the users has unknown rewards, in no order; and the dense matrix."""
    rng = np.random.default_rng(0)
    rewards = rng.beta(2, 2, (USERS, ITEMS)).round(3)
    rewards[0, :2] = 0.0, 1.0
    rewards[COMPLETE:][rng.random((USERS - COMPLETE, ITEMS)) < 0.5] = np.nan
    rewards[COMPLETE:, 0] = np.nan
    user, item = np.nonzero(~np.isnan(rewards))
    table = pd.DataFrame({"user_id": 10 + 3 * user, "item_id": 900 - 5 * item, "reward": rewards[user, item]})
    file = tmp_path_factory.mktemp("matrix") / "truth.parquet"
    table.sample(frac=1, random_state=0).to_parquet(file, index=False)
    return file, rewards[:, ::-1]  # items in the order of their ids


@pytest.fixture(scope="module")
def world(matrix, tmp_path_factory):
    return recpo.simulate(tmp_path_factory.mktemp("replay") / "out", world="replay", matrix=matrix[0], events=4_000)


def preferences_of(matrix, **options):
    rewards = RewardMatrix.read(matrix[0])
    return rewards.preferences(SimulationParameters(**{**rewards.presets(), **options}))


def test_the_true_reward_is_the_number_in_the_matrix(matrix, world):
    _, rewards = matrix
    for truth in (world.truth, Truth.load(world.root)):
        users, items = truth.user_ids[:COMPLETE], truth.item_ids
        np.testing.assert_array_equal(truth.user_ids, 10 + 3 * np.arange(USERS))
        found = truth.expected_reward(users, np.tile(items, (COMPLETE, 1)), 5.5)
        np.testing.assert_allclose(found, rewards[:COMPLETE], atol=1e-12)
        lists = np.tile(items[[4, 7, 1]], (COMPLETE, 1))
        np.testing.assert_allclose(truth.top_k_value(users, lists, 0), rewards[:COMPLETE, [4, 7, 1]].mean(1))
        np.testing.assert_allclose(truth.uniform_value(users, 3), rewards[:COMPLETE].mean(1))
        best = truth.top_k_value(users, truth.oracle_top_k(users, 10, 0), 0)
        np.testing.assert_allclose(best, np.sort(rewards[:COMPLETE])[:, -10:].mean(1))
        weights = truth.policy_on(0).propensity_of_all(np.arange(COMPLETE))
        np.testing.assert_allclose(truth.logging_value(users, 0), (weights * rewards[:COMPLETE]).sum(1))
    assert world.truth.world == "replay"


@pytest.mark.parametrize(("cost", "base"), [(0.0, 0.05), (2.0, 0.05), (5.0, 0.9)])
def test_the_affinity_grows_with_the_reward_and_dislikes_fall(matrix, cost, base):
    preferences = preferences_of(matrix, dislike_cost=cost, dislike_base=base)
    affinity = preferences.affinity_to_all(np.arange(COMPLETE), 0)
    order = np.argsort(matrix[1][:COMPLETE].ravel())
    assert affinity.min() >= 0
    assert affinity.max() == 1
    assert (np.diff(affinity.ravel()[order]) >= 0).all()
    dislike = preferences.dislike_probability(affinity, preferences.items.clickbait)
    assert (np.diff(dislike.ravel()[order]) <= 0).all()
    rewards = preferences.reward(affinity, preferences.items.clickbait)
    np.testing.assert_allclose(rewards, matrix[1][:COMPLETE], atol=1e-12)


def test_nothing_is_known_about_users_with_unknown_rewards(world):
    truth, users = world.truth, world.truth.user_ids[COMPLETE:]
    items = np.tile(truth.item_ids, (len(users), 1))
    values = (truth.expected_reward(users, items, 0), truth.dislike_probability(users, items, 0))
    assert all(
        np.isnan(value).all() for value in (*values, truth.logging_value(users, 0), truth.uniform_value(users, 0))
    )
    assert np.isfinite(list(world.values().values())).all()


@pytest.mark.parametrize("random_share", [0.0, 0.3, 1.0])
def test_the_logging_policy_shows_known_items_by_its_probabilities(matrix, random_share):
    _, rewards = matrix
    policy = LoggingPolicy.of(preferences_of(matrix, random_share=random_share))
    everything = policy.propensity_of_all(np.arange(USERS))
    np.testing.assert_allclose(everything.sum(1), 1)
    assert (everything[np.isnan(rewards)] == 0).all()
    assert (everything[~np.isnan(rewards)] > 0).all()
    pairs = policy.propensity(np.arange(USERS), np.tile(np.arange(ITEMS), (USERS, 1)))
    np.testing.assert_allclose(pairs, everything)
    rows = np.tile([COMPLETE + 3, 5, COMPLETE + 1], 40_000)
    drawn, is_random = policy.sample(rows, np.random.default_rng(1))
    for user in (COMPLETE + 3, 5):
        known = ~np.isnan(rewards[user])
        counts = np.bincount(drawn[rows == user], minlength=ITEMS)
        assert counts[~known].sum() == 0
        assert chisquare(counts[known], everything[user, known] * counts.sum()).pvalue > 1e-4
        uniform = np.bincount(drawn[(rows == user) & is_random], minlength=ITEMS)[known]
        assert random_share == 0 or chisquare(uniform).pvalue > 1e-4


def test_the_logging_policy_knows_a_part_of_the_tastes(world):
    values = world.values(users=COMPLETE)
    assert values["uniform"] + 0.02 < values["logging policy"] < values["best 10 items"] - 0.05


@pytest.mark.slow
def test_the_log_has_propensities_and_users_with_unknown_rewards_only_train(matrix, world, tmp_path):
    log, truth = world.to_pandas(), world.truth
    assert len(log) == 4_000
    expected = truth.propensity(log["user_id"].to_numpy(), log[["item_id"]].to_numpy())[:, 0]
    np.testing.assert_allclose(log["propensity"], expected, rtol=1e-6)
    users, items = (
        np.searchsorted(*pair) for pair in ((truth.user_ids, log["user_id"]), (truth.item_ids, log["item_id"]))
    )
    shown = matrix[1][users, items]
    assert not np.isnan(shown).any()
    ratio = (log["watch_time"] / log["duration"]).to_numpy()
    assert np.corrcoef(shown, ratio)[0, 1] > 0.2
    data = recpo.prepare(world.log, tmp_path / "prepared")
    early = log["timestamp"] < data.manifest["boundaries"]["valid_start_ms"]
    assert set(log.loc[~early, "user_id"]) <= set(truth.user_ids[:COMPLETE])
    assert set(log["user_id"]) == set(truth.user_ids)


def test_equal_options_give_equal_bytes_and_other_seeds_other_logs(matrix, world, tmp_path):
    options = {"world": "replay", "matrix": matrix[0], "events": 4_000}
    again = recpo.simulate(tmp_path / "again", **options)
    files = sorted(file.relative_to(world.root) for file in world.root.rglob("*.parquet"))
    assert len(files) == 3
    assert all((world.root / file).read_bytes() == (again.root / file).read_bytes() for file in files)
    other = recpo.simulate(tmp_path / "other", seed=1, **options)
    assert not other.to_pandas().equals(world.to_pandas())
    users = world.truth.user_ids[:COMPLETE]
    np.testing.assert_array_equal(other.truth.oracle_top_k(users, 10, 0), world.truth.oracle_top_k(users, 10, 0))


def faulty(matrix, tmp_path, change):
    table = pd.read_parquet(matrix[0])
    file = tmp_path / "faulty.parquet"
    change(table).to_parquet(file, index=False)
    return file


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        (lambda table: table.drop(columns="reward"), "missing_column", "reward"),
        (lambda table: table.iloc[:0], "empty", "matrix"),
        (lambda table: table.assign(user_id=table["user_id"].astype(str)), "wrong_type", "user_id"),
        (lambda table: table.assign(reward=table["reward"].astype(str)), "wrong_type", "reward"),
        (
            lambda table: table.assign(item_id=table["item_id"].astype("Int64").mask(table.index == 7)),
            "missing_value",
            "item_id",
        ),
        (lambda table: table.assign(reward=table["reward"].mask(table.index == 7, 1.01)), "out_of_range", "reward"),
        (lambda table: table.assign(reward=table["reward"].mask(table.index == 7, -np.inf)), "out_of_range", "reward"),
        (lambda table: pd.concat([table, table.iloc[[7]]]), "duplicate", "user_id, item_id"),
        (lambda table: table[table["user_id"] >= 10 + 3 * COMPLETE], "missing_value", "reward"),
    ],
)
def test_a_faulty_matrix_is_refused(matrix, tmp_path, change, code, field):
    with refused(code, field):
        RewardMatrix.read(faulty(matrix, tmp_path, change))


def test_a_refusal_names_the_row_and_the_pair(matrix, tmp_path):
    table = pd.read_parquet(matrix[0])
    file = faulty(matrix, tmp_path, lambda table: table.assign(reward=table["reward"].mask(table.index == 7, np.nan)))
    with pytest.raises(recpo.RecpoError, match="row 8"):  # pandas writes nan as null
        RewardMatrix.read(file)
    file = faulty(matrix, tmp_path, lambda table: pd.concat([table, table.iloc[[7]]]))
    with pytest.raises(recpo.RecpoError, match=f"rows 8 and {len(table) + 1} .* user_id {table['user_id'][7]}"):
        RewardMatrix.read(file)


def test_a_matrix_without_a_complete_row_says_what_its_fullest_users_have_in_common(tmp_path):
    rows = [(user, item, 0.5) for user in range(20) for item in range(6) if item != user % 6]
    file = tmp_path / "holes.parquet"
    pd.DataFrame(rows, columns=["user_id", "item_id", "reward"]).to_parquet(file)
    with pytest.raises(recpo.RecpoError, match=r"6 items \(at most 5\).* 2 users .* know the same 4 items"):
        RewardMatrix.read(file)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"world": "replay"}, "missing_option", "matrix"),
        ({"world": "default", "matrix": True}, "conflicting_options", "matrix"),
        ({"world": "replay", "matrix": True, "users": 50}, "conflicting_options", "users"),
        ({"world": "replay", "matrix": True, "items": 50}, "conflicting_options", "items"),
        ({"world": "replay", "matrix": True, "taste_scale": 2.0}, "conflicting_options", "taste_scale"),
        ({"world": "replay", "matrix": True, "births": 0.01}, "conflicting_options", "births"),
        ({"world": "sparse", "item_table": "items.parquet"}, "conflicting_options", "item_table"),
        ({"world": "replay", "matrix": "missing.parquet"}, "missing_file", "matrix"),
        ({"world": "replay", "matrix": True, "user_table": "missing.parquet"}, "missing_file", "user_table"),
    ],
)
def test_options_that_contradict_the_matrix_are_refused(matrix, tmp_path, options, code, field):
    given = {**options, "matrix": matrix[0]} if options.get("matrix") is True else options
    with refused(code, field):
        recpo.simulate(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_matrix_is_refused(tmp_path):
    (tmp_path / "matrix.parquet").write_text("user_id,item_id,reward\n")
    with refused("wrong_file", "matrix"):
        recpo.simulate(tmp_path / "out", world="replay", matrix=tmp_path / "matrix.parquet")


def test_a_changed_matrix_of_a_simulation_is_refused(matrix, tmp_path):
    out = recpo.simulate(tmp_path / "out", world="replay", matrix=matrix[0], events=200).root
    file = out / "truth" / "users.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with refused("damaged", "users.parquet"):
        Simulation.open(out)


@pytest.mark.slow
def test_from_the_command_line_to_true_values(matrix, tmp_path, capsys):
    items = tmp_path / "items.parquet"
    pd.DataFrame({"item_id": 900 - 5 * np.arange(ITEMS), "genre": ["a", "b"] * (ITEMS // 2)}).to_parquet(items)
    flags = ["--world=replay", f"--matrix={matrix[0]}", f"--item_table={items}", "--events=4000"]
    assert main(["simulate", f"--out={tmp_path / 'world'}", *flags]) == 0
    assert f"{COMPLETE} users have a reward for every item" in capsys.readouterr().out
    world = Simulation.open(tmp_path / "world")
    assert world.items.read_bytes() == items.read_bytes()
    assert world.users is None
    log, prepared, out = tmp_path / "world" / "log", tmp_path / "prepared", tmp_path / "evaluation"
    assert main(["prepare", f"--log={log}", f"--items={world.items}", f"--out={prepared}"]) == 0
    contenders = ["--contenders", "popularity", "item_rate"]
    evaluate = ["evaluate", f"--prepared={prepared}", *contenders, f"--truth={tmp_path / 'world'}", f"--out={out}"]
    assert main([*evaluate, "--segments=false", "--off_policy=null", "--bootstrap_resamples=10"]) == 0
    found = {one["name"]: one for one in json.loads((out / "metrics.json").read_text())["contenders"]}
    values = {name: found[name]["metrics"]["true_reward@10"]["mean"] for name in ("popularity", "oracle")}
    assert 0.3 < values["popularity"] < values["oracle"] < 1


@pytest.mark.slow
def test_the_next_days_are_those_of_complete_users(matrix, tmp_path):
    _, rewards = matrix
    world = recpo.simulate(tmp_path / "world", world="replay", matrix=matrix[0], events=4_000)
    data = recpo.prepare(world.log, tmp_path / "prepared")
    bundle = recpo.export("popularity", prepared=data, out=tmp_path / "bundle")
    day = recpo.simulate(
        tmp_path / "day",
        policy=bundle.root,
        after=world.root,
        exploration=recpo.Exploration(epsilon=0.5),
        repeat_after=None,
    )
    log, report = day.to_pandas(), day.served.days[0]
    assert set(log["user_id"]) <= set(world.truth.user_ids[:COMPLETE])
    users, items = (
        np.searchsorted(world.truth.user_ids, log["user_id"]),
        np.searchsorted(world.truth.item_ids, log["item_id"]),
    )
    slates = pd.Series(rewards[users, items]).groupby(log["request_id"].to_numpy()).mean()
    assert report.value == pytest.approx(slates.mean())
    assert report.value < report.oracle_value
    assert 0 < report.exposures <= 1.05 * 4_000 * COMPLETE / USERS / world.truth.preferences.parameters.days
    other = pd.read_parquet(matrix[0])
    other.assign(reward=1 - other["reward"]).to_parquet(tmp_path / "other.parquet")
    strange = recpo.simulate(tmp_path / "strange", world="replay", matrix=tmp_path / "other.parquet", events=4_000)
    with refused("mismatch", "after"):
        recpo.simulate(tmp_path / "next", policy=bundle.root, after=[strange.root, day.root])


def test_the_defaults_come_from_the_matrix(matrix):
    parameters = preferences_of(matrix).parameters
    assert (parameters.users, parameters.items, parameters.events) == (USERS, ITEMS, 20 * USERS)
    assert parameters.days == WORLDS["replay"]["days"]


@pytest.mark.slow
def test_a_loop_serves_a_replayed_world(matrix, tmp_path):
    recipe = {
        "policy": {
            "class_path": "CatalogSoftmaxPolicy",
            "init_args": {"dim": 16, "layers": 1, "heads": 1, "max_history": 20},
        },
        "data": {"batch_size": 32, "layout": {"class_path": "SequenceLayout", "init_args": {"history_length": 20}}},
        "objective": {"class_path": "Likelihood"},
        "trainer": {"max_epochs": 1},
    }
    options = {"recipe": [recipe], "rounds": 1, "world": "replay"}
    with refused("missing_option", "matrix"):
        recpo.loop(tmp_path / "loop", **options)
    # items may be shown again: a user has seen most of so few
    made = recpo.loop(tmp_path / "loop", matrix=matrix[0], events=3000, repeat_after=1, **options)
    served = made.rounds[1].served
    assert served.day == WORLDS["replay"]["days"]
    assert 0 < served.value < served.oracle_value < 1
    assert 0 < made.rounds[1].lists.true_reward < made.rounds[1].lists.oracle < 1
    assert made.options["matrix"] == str(matrix[0])

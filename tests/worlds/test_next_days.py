"""Days that a policy serves, with a simple policy that the tests can follow."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.lists.exploration import Exploration
from recpo.worlds.log import SCHEMA, ServedDays, Simulation, write_simulation
from recpo.worlds.next_days import Shown, write_next_days
from recpo.worlds.parameters import SimulationParameters
from recpo.worlds.preferences import Preferences
from tests.conftest import resealed
from tests.refusals import refused


class Taste:
    """Draws slates by the true tastes of day 0 from the 12 best items that the histories lack; keeps what it saw."""

    def __init__(self, truth, exploration=None):
        self.truth, self.exploration = truth, exploration or Exploration(temperature=0.2, shortlist=12)
        self.calls = []

    def __call__(self, histories, exclude, user_ids, sizes, generator):
        truth, longest = self.truth, int(sizes.max())
        logp = 3 * truth.preferences.affinity_to_all(np.searchsorted(truth.user_ids, user_ids), 0.0)
        past = exclude.select(["user_id", "item_id"]).to_pandas()
        assert set(past["user_id"]) <= set(user_ids.tolist())
        for row, user in enumerate(user_ids):
            logp[row, np.searchsorted(truth.item_ids, past["item_id"][past["user_id"] == user])] = -np.inf
        shortlist = np.argsort(-logp, axis=1, kind="stable")[:, :12]
        parts = [
            self.exploration.sample_batch(shortlist[[row]] + 1, logp[[row], shortlist[[row]]], int(size), generator)
            for row, size in enumerate(sizes)
        ]
        shown = Shown(
            np.zeros((len(sizes), longest), np.int64),
            np.full((len(sizes), longest), np.nan),
            np.zeros((len(sizes), longest), bool),
            np.concatenate([part.is_random for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )
        for row, part in enumerate(parts):
            places = slice(part.items.shape[1])
            shown.item_ids[row, places] = truth.item_ids[np.maximum(part.items[0] - 1, 0)]
            shown.propensity[row, places], shown.explored[row, places] = part.propensity[0], part.explored[0]
        self.calls.append(SimpleNamespace(histories=histories, exclude=exclude, users=user_ids, shown=shown))
        return shown


def serve(worlds, out, show, days=1, seed=0, repeat_after=None, **options):
    how = ServedDays({"bundle": "taste"}, None, seed, repeat_after=repeat_after)
    return write_next_days(worlds, out, show, how, days=days, **options)


@pytest.fixture(scope="module")
def stands(tmp_path_factory):
    parameters = SimulationParameters(users=40, items=900, events=2400, days=4, drift=0.1)
    return write_simulation(Preferences.draw(parameters), tmp_path_factory.mktemp("world") / "world")


@pytest.fixture(scope="module")
def two_days(stands, tmp_path_factory):
    show = Taste(stands.truth)
    return serve([stands], tmp_path_factory.mktemp("days") / "both", show, days=2), show


def test_the_log_has_the_same_columns_and_continues(stands, two_days):
    world, log = stands.to_pandas(), two_days[0].to_pandas()
    assert pq.read_schema(next(two_days[0].log.iterdir())).equals(SCHEMA)
    assert len(log) == 2 * 600
    assert log["request_id"].min() > world["request_id"].max()
    assert log.groupby("request_id")["user_id"].nunique().max() == 1
    last = world.groupby("user_id")["timestamp"].max()
    step = log.groupby("user_id")["timestamp"].diff()
    first = log.groupby("user_id")["timestamp"].min()
    assert (first > last.reindex(first.index).fillna(0)).all()
    assert (step.dropna() > 0).all()
    assert (step.dropna() >= 1000 * log.groupby("user_id")["watch_time"].shift().dropna() - 1).all()
    day = stands.truth.day_of(log["timestamp"])
    assert day.min() >= 4
    assert day.max() < 7
    assert log["user_id"].is_monotonic_increasing


def test_every_request_sees_all_that_came_before_and_no_item_is_shown_twice(stands, two_days):
    days, show = two_days
    events = pa.concat_tables([pq.read_table(stands.log), pq.read_table(days.log)]).to_pandas()
    requests = 0
    for call in show.calls:
        seen = call.histories.to_pandas().groupby("user_id").size()
        for row, user in enumerate(call.users):
            length, own = call.shown.lengths[row], events[events["user_id"] == user].sort_values("timestamp")
            before = int(seen.get(user, 0))
            assert own["item_id"].iloc[before : before + length].tolist() == call.shown.item_ids[row, :length].tolist()
            np.testing.assert_allclose(
                own["propensity"].iloc[before : before + length], call.shown.propensity[row, :length], rtol=1e-6
            )
            requests += 1
    assert requests == sum(day.requests for day in days.served.days)
    log, past = days.to_pandas(), stands.to_pandas()
    assert not log.duplicated(["user_id", "item_id"]).any()
    assert log.merge(past, on=["user_id", "item_id"]).empty


@pytest.mark.slow
def test_an_item_comes_back_when_the_time_has_passed_and_the_oracle_is_held_to_the_same(stands, tmp_path):
    show, hours = Taste(stands.truth), 12
    days = serve([stands], tmp_path / "days", show, days=2, repeat_after=hours / 24)
    log = pd.concat([stands.to_pandas(), days.to_pandas()])
    log = log.sort_values("timestamp", kind="stable")
    again = log.groupby(["user_id", "item_id"])["timestamp"].diff()
    again = again[log["request_id"] >= days.to_pandas()["request_id"].min()]
    assert again.notna().any()
    assert again.min() >= hours * 3_600_000
    never = serve([stands], tmp_path / "never", Taste(stands.truth), days=2)
    for one, other in zip(days.served.days, never.served.days, strict=True):
        assert one.oracle_value > other.oracle_value
        assert one.value <= one.oracle_value
    assert Simulation.open(days.root).served.repeat_after == hours / 24


@pytest.mark.slow
def test_two_days_at_once_are_one_after_the_other_and_seeds_matter(stands, two_days, tmp_path):
    both = two_days[0]
    first = serve([stands], tmp_path / "first", Taste(stands.truth))
    second = serve([stands, Simulation.open(tmp_path / "first")], tmp_path / "second", Taste(stands.truth))
    apart = pa.concat_tables([pq.read_table(first.log), pq.read_table(second.log)])
    apart = apart.sort_by([("user_id", "ascending"), ("timestamp", "ascending")])
    assert apart.equals(pq.read_table(both.log))
    assert (*first.served.days, *second.served.days) == both.served.days
    assert (first.days, second.days, both.days) == (range(4, 5), range(5, 6), range(4, 6))
    other = serve([stands], tmp_path / "other", Taste(stands.truth), seed=1)
    assert not pq.read_table(other.log).equals(pq.read_table(first.log))


def test_the_report_is_what_loops_over_requests_say(stands, two_days):
    days, truth = two_days[0], stands.truth
    again = Simulation.open(days.root)
    assert again.served == dataclasses.replace(days.served, policy=dict(days.served.policy))
    past = {user: set(items) for user, items in stands.to_pandas().groupby("user_id")["item_id"]}
    log = days.to_pandas()
    found = {4: [], 5: []}
    report = {day.day: day for day in days.served.days}
    order = log.groupby("request_id", sort=True)
    for number, slate in order:  # ids ascend with the days, and with time for each user
        day = 4 if number < log["request_id"].min() + report[4].requests else 5
        user = int(slate["user_id"].iloc[0])
        reward = truth.expected_reward([user], slate["item_id"].to_numpy()[None], day).mean()
        best = truth.oracle_top_k([user], len(truth.item_ids), day)[0]
        best = [item for item in best if item not in past.get(user, set())][: len(slate)]
        dislike = truth.dislike_probability([user], slate["item_id"].to_numpy()[None], day).mean()
        oracle = truth.expected_reward([user], [best], day).mean()
        found[day].append((reward, dislike, truth.logging_value([user], day)[0], oracle))
        past.setdefault(user, set()).update(slate["item_id"])
    for day, rows in found.items():
        one = report[day]
        expected = np.mean(rows, axis=0)
        np.testing.assert_allclose([one.value, one.dislikes, one.logging_value, one.oracle_value], expected, rtol=1e-9)
        assert one.regret == one.oracle_value - one.value > 0
        assert one.value > one.logging_value
        assert one.exposures == 600
        assert 0 < one.coverage < 1
        assert 0 < one.explored < 1


def test_expected_coverage_of_the_logging_policy_is_that_of_its_draws(stands, two_days):
    one = two_days[0].served.days[0]
    truth, log = stands.truth, two_days[0].to_pandas()
    log = log[log["request_id"] < log["request_id"].min() + one.requests]
    users, generator = np.searchsorted(truth.user_ids, log["user_id"]), np.random.default_rng(0)
    drawn = [len(np.unique(truth.policy_on(0).sample(users, generator)[0])) / 900 for _ in range(200)]
    assert one.logging_coverage == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / np.sqrt(200))


def test_snips_of_another_policy_from_the_log_covers_its_true_value(stands, tmp_path):
    """The target: uniform over the twelve items that the policy draws from, from propensities as the log has them."""
    truth, show = stands.truth, Taste(stands.truth, Exploration(temperature=0.15, shortlist=12))
    log = serve([stands], tmp_path / "days", show).to_pandas()
    reward = truth.expected_reward(log["user_id"], log["item_id"].to_numpy()[:, None], 4.0)[:, 0]
    weight = 1 / 12 / log["propensity"].to_numpy(np.float64)
    assert weight.mean() == pytest.approx(1, abs=4 * weight.std() / np.sqrt(len(weight)))
    estimate = (weight * reward).sum() / weight.sum()
    true = []
    for call in show.calls:  # what each request could have been shown, counted once for each of its places
        past = call.histories.to_pandas()
        affinity = truth.preferences.affinity_to_all(np.searchsorted(truth.user_ids, call.users), 0.0)
        for row, user in enumerate(call.users):
            affinity[row, np.searchsorted(truth.item_ids, past["item_id"][past["user_id"] == user])] = -np.inf
            best = truth.item_ids[np.argsort(-affinity[row], kind="stable")[:12]]
            true += [truth.expected_reward([user], best[None], 4.0).mean()] * int(call.shown.lengths[row])
    half = 1.96 * (weight * (reward - estimate)).std() / weight.mean() / np.sqrt(len(log))
    assert abs(estimate - np.mean(true)) < half < 0.05
    assert reward.mean() - np.mean(true) > half, "without weights it is the value of the policy that served"


def test_what_is_not_one_world_day_after_day_is_refused(stands, two_days, tmp_path):
    days = two_days[0]
    other = write_simulation(Preferences.draw(SimulationParameters(users=40, events=500)), tmp_path / "other")
    for worlds, field in (
        ([days], "days"),
        ([stands, days, days], "days"),
        ([stands, other], "after"),
    ):
        with refused("mismatch", field):
            serve(worlds, tmp_path / "out", Taste(stands.truth))
    with refused("exists"):
        serve([stands], days.root, Taste(stands.truth))
    assert not (tmp_path / "out").exists()


def test_a_damaged_report_is_refused(two_days, tmp_path):
    content = json.loads((two_days[0].root / "served.json").read_text())
    for change, refusal in (
        ({"format_version": 9}, ("old_format", "format_version")),
        ({"days": []}, ("damaged", "days")),
        ({"x": 1}, ("damaged", "served.json")),
    ):
        (tmp_path / "served.json").write_text(json.dumps(resealed(content | change)))
        with refused(*refusal):
            type(two_days[0].served).load(tmp_path)

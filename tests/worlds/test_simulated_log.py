from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from recpo.worlds import log as simulated_log
from recpo.worlds.log import Sessions, draw_watch_time, event_times, write_simulation
from recpo.worlds.parameters import MILLISECONDS_PER_DAY, SimulationParameters
from recpo.worlds.preferences import Preferences
from tests.refusals import refused


def small(**options) -> Preferences:
    return Preferences.draw(SimulationParameters(**{"users": 30, "items": 40, "events": 3000, **options}))


def digests(directory: Path) -> dict[str, str]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_log_has_the_standard_columns_and_exactly_the_events(simulated):
    out, truth, log = simulated
    assert pq.read_schema(out / "log" / "part-00000.parquet").equals(simulated_log.SCHEMA)
    assert len(log) == truth.preferences.parameters.events
    assert not log.isna().any().any()
    assert log.user_id.isin(truth.user_ids).all()
    assert log.item_id.isin(truth.item_ids).all()
    assert log.propensity.between(0, 1, inclusive="right").all()


def test_time_runs_forward_within_a_user_and_stays_within_the_days(simulated):
    _, truth, log = simulated
    step = log.groupby("user_id").timestamp.diff().dropna()
    assert (step > 0).all()
    assert log.user_id.is_monotonic_increasing
    day = truth.day_of(log.timestamp)
    assert day.min() >= 0
    assert day.max() < 15
    previous = log.groupby("user_id").watch_time.shift().dropna() * 1000
    assert (step >= previous - 1).all(), "an exposure began before the one before it was watched"


@pytest.mark.slow
def test_requests_are_short_runs_of_one_user(simulated):
    _, _, log = simulated
    requests = log.groupby("request_id")
    assert requests.size().max() == 6
    assert (requests.user_id.nunique() == 1).all()
    assert log.request_id.is_monotonic_increasing
    assert (requests.timestamp.max() - requests.timestamp.min()).max() < MILLISECONDS_PER_DAY


def test_users_differ_come_back_and_see_items_again(simulated):
    _, truth, log = simulated
    events = log.user_id.value_counts()
    assert events.max() > 5 * events.median()
    days = log.assign(day=truth.day_of(log.timestamp) // 1).groupby("user_id").day.nunique()
    assert days.median() >= 3
    assert 0.1 < log.duplicated(["user_id", "item_id"]).mean() < 0.6
    assert not log.duplicated(["user_id", "item_id", "timestamp"]).any()


def test_random_and_dislike_shares(simulated):
    _, _, log = simulated
    assert log.is_random.mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / len(log)))
    assert 0.02 < log.dislike.mean() < 0.05


def test_logged_propensities_are_those_of_the_policy(simulated):
    _, truth, log = simulated
    rows = log.sample(2000, random_state=0)
    expected = truth.propensity(rows.user_id, rows.item_id.to_numpy()[:, None])[:, 0]
    np.testing.assert_allclose(rows.propensity, expected, rtol=1e-6)


def test_dislikes_follow_their_true_probability(simulated):
    _, truth, log = simulated
    probability = truth.dislike_probability(log.user_id, log.item_id.to_numpy()[:, None], truth.day_of(log.timestamp))
    group = pd.qcut(probability[:, 0], 10, labels=False)
    for _, rows in log.assign(probability=probability[:, 0]).groupby(group):
        deviation = np.sqrt(rows.probability.mean() / len(rows))
        assert rows.dislike.mean() == pytest.approx(rows.probability.mean(), abs=4 * deviation + 1e-4)


def test_long_videos_are_watched_to_a_smaller_share(simulated):
    _, _, log = simulated
    ratio = log.watch_time / log.duration
    by_duration = ratio.groupby(np.floor(np.log2(log.duration)).clip(3, 7)).mean()
    assert (np.diff(by_duration) < 0).all()
    assert (ratio > 1).mean() > 0.05
    assert (ratio[log.duration < 15] > 1).mean() > 2 * (ratio[log.duration > 60] > 1).mean()
    assert ratio.between(0, 5.001, inclusive="right").all()


def test_watch_time_tells_affinity_at_equal_duration():
    preferences = small()
    rng = np.random.default_rng(0)
    affinity = rng.random(20_000)
    watch_time = draw_watch_time(preferences, affinity, np.full(20_000, 30.0), rng)
    assert np.corrcoef(affinity, watch_time)[0, 1] > 0.6
    assert (watch_time > 0).all()


@pytest.mark.slow
def test_drift_moves_what_is_watched(simulated):
    _, truth, log = simulated
    day = truth.day_of(log.timestamp)
    late = log[day > 11]
    pairs = late.user_id, late.item_id.to_numpy()[:, None]
    quantile = (late.watch_time / late.duration**0.75).rank()
    now, then = (truth.expected_reward(*pairs, when)[:, 0] for when in (day[day > 11], 0.0))
    assert np.corrcoef(now, quantile)[0, 1] > np.corrcoef(then, quantile)[0, 1] + 0.005


def test_the_log_is_confounded(simulated):
    """What an item earns where it was shown says too much for it: it was shown to those who like its topic."""
    _, truth, log = simulated
    day = truth.day_of(log.timestamp)
    logged = pd.Series(truth.expected_reward(log.user_id, log.item_id.to_numpy()[:, None], day)[:, 0])
    popular = log.item_id.value_counts().index[:100].to_numpy()
    naive = logged.groupby(log.item_id).mean().loc[popular]
    true = truth.expected_reward(truth.user_ids, np.tile(popular, (len(truth.user_ids), 1)), 7.0).mean(axis=0)
    assert (naive - true).mean() > 0.1
    random = logged[log.is_random.to_numpy()].mean()
    assert random == pytest.approx(truth.uniform_value(truth.user_ids, 7.0).mean(), abs=0.03)


def test_event_times_are_those_of_a_queue():
    rng = np.random.default_rng(3)
    opens_user = rng.random(500) < 0.05
    opens_user[0] = True
    opens_session = opens_user | (rng.random(500) < 0.3)
    start = np.repeat(np.sort(rng.integers(0, 400_000, 500)), 1)
    for index in np.flatnonzero(~opens_session):
        start[index] = start[index - 1]
    first = np.flatnonzero(opens_user)
    for begin, end in zip(first, [*first[1:], 500], strict=True):
        start[begin:end] -= start[begin]
    watch_time = rng.uniform(0.1, 30, 500).round(3)
    sessions = Sessions(start, opens_user, opens_session, opens_session)
    times = event_times(sessions, watch_time, np.random.default_rng(0))
    pause = np.random.default_rng(0).integers(200, 2000, 500)
    free = 0
    for j in range(500):
        free = 0 if opens_user[j] else free
        expected = max(free, start[j]) if opens_session[j] else free
        assert times[j] == expected
        free = expected + round(watch_time[j] * 1000) + pause[j]


def test_equal_arguments_give_equal_bytes(tmp_path):
    write_simulation(small(seed=5), tmp_path / "a")
    write_simulation(small(seed=5), tmp_path / "b")
    write_simulation(small(seed=6), tmp_path / "c")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a")["log/part-00000.parquet"] != digests(tmp_path / "c")["log/part-00000.parquet"]


def test_many_blocks_and_files_hold_every_event_once(tmp_path, monkeypatch):
    monkeypatch.setattr(simulated_log, "_EVENTS_PER_BLOCK", 500)
    write_simulation(small(), tmp_path / "whole")
    monkeypatch.setattr(simulated_log, "_EVENTS_PER_FILE", 1000)
    write_simulation(small(), tmp_path / "parts")
    assert len(list((tmp_path / "parts" / "log").iterdir())) > 1
    whole, parts = pd.read_parquet(tmp_path / "whole" / "log"), pd.read_parquet(tmp_path / "parts" / "log")
    pd.testing.assert_frame_equal(whole, parts)
    assert len(whole) == 3000
    assert whole.user_id.is_monotonic_increasing
    assert (whole.request_id.drop_duplicates().diff().dropna() <= 6).all()


@pytest.mark.parametrize("options", [{"users": 1, "events": 1}, {"items": 1}, {"days": 1}, {"random_share": 1.0}])
def test_the_smallest_simulations_work(tmp_path, options):
    truth = write_simulation(small(**options), tmp_path / "out").truth
    assert len(pd.read_parquet(tmp_path / "out" / "log")) == truth.preferences.parameters.events


def test_an_existing_output_is_refused_and_kept(tmp_path):
    write_simulation(small(), tmp_path / "out")
    before = digests(tmp_path / "out")
    with refused("exists"):
        write_simulation(small(seed=1), tmp_path / "out")
    assert digests(tmp_path / "out") == before
    write_simulation(small(seed=1), tmp_path / "out", overwrite=True)
    assert digests(tmp_path / "out") != before


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    draw = simulated_log._draw_block

    def interrupted(truth, user_rows, first_event, rng):
        if first_event > 1000:
            raise KeyboardInterrupt
        return draw(truth, user_rows, first_event, rng)

    monkeypatch.setattr(simulated_log, "_EVENTS_PER_BLOCK", 500)
    monkeypatch.setattr(simulated_log, "_draw_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_simulation(small(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

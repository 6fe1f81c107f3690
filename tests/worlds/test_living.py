"""A living world: births, fading, drift and side information follow its parameters."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.worlds.log import ServedDays, Simulation, write_simulation
from recpo.worlds.next_days import Shown, serve_days, write_next_days
from recpo.worlds.parameters import MILLISECONDS_PER_DAY, WORLDS, SimulationParameters, birth_days
from recpo.worlds.preferences import Preferences, item_table, user_table
from recpo.worlds.truth import Truth
from tests.refusals import refused
from tests.worlds.test_simulated_log import digests

SMALL = {"users": 200, "items": 300, "events": 20_000, "births": 0.05, "birth_days": 20}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Simulation:
    parameters = SimulationParameters(**{**SMALL, "half_life": 3.0})
    return write_simulation(Preferences.draw(parameters), tmp_path_factory.mktemp("living") / "out", world="living")


@pytest.fixture(scope="module")
def log(world) -> pd.DataFrame:
    found = world.to_pandas()
    return found.assign(day=(world.truth.day_of(found.timestamp) // 1).astype(int))


@pytest.fixture(scope="module")
def big() -> Preferences:
    return Preferences.draw(SimulationParameters(**WORLDS["living"], users=4000))


def explained(factors: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Share of the variance of every column of the factors that a linear regression explains, adjusted for its size."""
    observed = np.column_stack([np.ones(len(observed)), observed])
    rest = factors - observed @ np.linalg.lstsq(observed, factors, rcond=None)[0]
    free = len(observed) - observed.shape[1]
    return 1 - rest.var(axis=0) * len(observed) / free / factors.var(axis=0)


def one_hot(column: pa.ChunkedArray) -> np.ndarray:
    codes = pd.factorize(column.to_pandas())[0]
    return np.eye(codes.max() + 1)[codes]


def test_the_catalog_grows_by_the_stated_share_a_day():
    born = birth_days(np.random.default_rng(0).permutation(10_000), 0.05, 13)
    counts = [(born <= day).sum() for day in range(14)]
    np.testing.assert_allclose(counts, 10_000 * 1.05 ** (np.arange(14) - 13.0), atol=1)
    assert counts[-1] == 10_000
    # a loop over places: the first day on which the catalog holds so many
    places = np.arange(40)
    expected = [min(d for d in range(-80, 8) if 40 * 1.1 ** (d - 7) >= place + 1 - 1e-6) for place in places]
    assert birth_days(places, 0.1, 7).tolist() == expected


def test_no_event_comes_before_its_items_birth_and_new_items_are_shown(world, log):
    table = pq.read_table(world.items).to_pandas().set_index("item_id")
    assert (log.timestamp >= log.item_id.map(table.available_from)).all()
    births = (table.available_from - world.truth.preferences.parameters.start_ms) // MILLISECONDS_PER_DAY
    assert set(log.item_id) <= set(table.index)
    assert births.max() == 13, "items that are born after the log are in no table of its days"
    assert len(table) == world.truth.available(13.0).sum() < len(world.truth.item_ids)
    young = log[log.item_id.map(births) == log.day]
    assert len(young) > 300, "what was born today is shown today"


def test_logged_propensities_are_those_of_the_day(world, log):
    rows = log[log.day == 6].sample(300, random_state=0)
    rows = rows[rows.groupby("request_id").day.transform("min") == 6]
    session_day = 6  # requests that run past midnight keep the day of their session
    expected = world.truth.propensity(rows.user_id, rows.item_id.to_numpy()[:, None], session_day)[:, 0]
    close = np.isclose(rows.propensity, expected, rtol=1e-6)
    assert close.mean() > 0.97
    everything = world.truth.policy_on(6).propensity_of_all(np.arange(200))
    np.testing.assert_allclose(everything.sum(axis=1), 1, rtol=1e-12)
    assert ((everything > 0) == world.truth.available(6.0)).all()
    with refused("missing_option", "day"):
        world.truth.propensity(rows.user_id, rows.item_id.to_numpy()[:, None])


def test_draws_of_a_day_follow_its_probabilities(world):
    policy, rng = world.truth.policy_on(2), np.random.default_rng(3)
    drawn, _ = policy.sample(np.zeros(60_000, np.int64), rng)
    expected = 60_000 * policy.propensity_of_all(np.array([0]))[0]
    assert (np.bincount(drawn, minlength=300)[expected == 0] == 0).all()
    shown = expected > 5
    counts = np.bincount(drawn, minlength=300)[shown]
    assert ((counts - expected[shown]) ** 2 / expected[shown]).sum() < 1.5 * shown.sum()


def test_popularity_and_affinity_fade_by_half_lives(world, log):
    born = pd.Series(world.truth.preferences.items.born, index=world.truth.item_ids)
    mine = born[(born >= 0) & (born <= 4)].index
    chosen = log[log.item_id.isin(mine) & ~log.is_random]
    age = chosen.day - chosen.item_id.map(born)
    fresh, later = (age <= 2).sum() / 3, ((age >= 6) & (age <= 8)).sum() / 3
    assert later < 0.6 * fresh
    preferences, item = world.truth.preferences, np.array([[np.flatnonzero(born == 0)[0]]])
    freshness = [preferences.freshness(item, day)[0, 0] for day in (0.0, 3.0, 6.0, 30.0)]
    np.testing.assert_allclose(freshness, [1, 0.5, 0.25, 2**-10])
    logits = [
        np.log(a / (1 - a))
        for a in (preferences._replace(users=still(preferences)).affinity(np.array([0]), item, d) for d in (0.0, 3.0))
    ]
    assert float((logits[0] - logits[1])[0, 0]) == pytest.approx(0.5 * preferences.parameters.fading)


def still(preferences):
    return preferences.users._replace(rate=np.zeros_like(preferences.users.rate))


def test_pairs_and_the_whole_catalog_agree_also_on_separate_days(world):
    preferences, rows = world.truth.preferences, np.arange(40)
    days = np.linspace(0, 19, 40)
    pairs = preferences.affinity(rows, np.tile(np.arange(300), (40, 1)), days)
    np.testing.assert_allclose(pairs, preferences.affinity_to_all(rows, days), rtol=1e-12)


def test_the_truth_covers_births(world):
    truth, users = world.truth, world.truth.user_ids
    for day in (0.0, 13.5, 19.0):
        there, everything = truth.available(day), np.tile(truth.item_ids, (200, 1))
        reward = truth.expected_reward(users, everything, day)
        assert (reward[:, ~there] == 0).all()
        assert (truth.dislike_probability(users, everything, day)[:, ~there] == 0).all()
        best = truth.oracle_top_k(users, 5, day)
        assert there[np.searchsorted(truth.item_ids, best)].all()
        masked = np.where(there, reward, -np.inf)
        expected = -np.sort(-masked, axis=1)[:, :5]
        np.testing.assert_allclose(truth.expected_reward(users, best, day), expected)
        np.testing.assert_allclose(truth.uniform_value(users, day), reward[:, there].mean(axis=1))
        probability = truth.policy_on(day).propensity_of_all(np.arange(200))
        np.testing.assert_allclose(truth.logging_value(users, day), (probability * reward).sum(axis=1))
    with refused("out_of_range", "k"):
        truth.oracle_top_k(users, 300, 0.0)


def test_no_list_of_available_items_is_worth_more_than_the_oracles(world):
    truth, rng = world.truth, np.random.default_rng(0)
    there = truth.item_ids[truth.available(9.0)]
    best = truth.top_k_value(truth.user_ids, truth.oracle_top_k(truth.user_ids, 8, 9.0), 9.0)
    for _ in range(20):
        lists = np.array([rng.choice(there, 8, replace=False) for _ in truth.user_ids])
        assert (truth.top_k_value(truth.user_ids, lists, 9.0) <= best).all()


def test_drift_moves_tastes_and_the_best_items(world):
    preferences = world.truth.preferences
    moved = (preferences.taste(np.arange(200), 0.0) * preferences.taste(np.arange(200), 14.0)).sum(axis=1)
    np.testing.assert_allclose(moved, np.cos(14.0 * preferences.users.rate), atol=1e-6)
    best = [set(world.truth.oracle_top_k(world.truth.user_ids[:1], 20, day)[0]) for day in (13.0, 19.0)]
    assert best[0] != best[1]


def test_content_predicts_the_factors_as_well_as_stated(big):
    table, items = item_table(big, 13), big.items
    content = table["content"].combine_chunks().flatten().to_numpy().reshape(-1, 32)
    latent = explained(items.latent.astype(float), content)
    # the latents of a finite catalog hang together a little, so that more than one of the coordinates tells of each
    assert (latent > 0.78).all()
    assert (latent < 0.86).all()
    assert explained(items.quality[:, None].astype(float), content)[0] == pytest.approx(1 / 3, abs=0.06)


def test_tags_categories_and_authors_tell_what_they_should(big):
    table, items = item_table(big, 13), big.items
    topics = np.array([int(word.split("-")[1]) for word in table["category"].to_pylist()])
    assert (topics == items.topic).mean() == pytest.approx(0.85 + 0.15 / 16, abs=0.03)
    words = table["tags"].to_pylist()
    assert {len(tags) for tags in words} == {0, 1, 2, 3, 4}
    assert all(len(set(tags)) == len(tags) for tags in words)
    several = np.array([len(tags) >= 2 for tags in words])
    hot = np.array([[f"tag-{number:02d}" in tags for number in range(48)] for tags in words], float)
    assert explained(items.latent[several].astype(float), hot[several]).mean() > 0.4
    author = table["author"].to_pandas()
    assert len(table) / author.nunique() == pytest.approx(20, rel=0.35)
    assert (pd.Series(items.topic).groupby(author).nunique() == 1).all()
    within = pd.Series(items.quality).groupby(author).transform("mean")
    assert np.corrcoef(within, items.quality)[0, 1] ** 2 == pytest.approx(0.5, abs=0.12)
    assert abs(np.corrcoef(items.born, items.quality)[0, 1]) < 0.1
    assert table["duration"].to_pylist() == items.duration.tolist()


def test_attributes_of_users_tell_of_their_tastes(big):
    table, taste = user_table(big), big.users.taste.astype(float)
    age = table["age"].to_numpy()[:, None]
    direction = np.linalg.lstsq(np.column_stack([np.ones(len(age)), taste]), age, rcond=None)[0][1:]
    assert explained(taste @ direction, age)[0] == pytest.approx(0.5, abs=0.05)
    assert explained(taste, one_hot(table["segment"])).mean() > 0.1


def test_equal_parameters_give_equal_bytes(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        options = {**SMALL, "users": 20, "items": 60, "events": 400, "seed": seed}
        write_simulation(Preferences.draw(SimulationParameters(**options)), tmp_path / name)
    first = digests(tmp_path / "a")
    assert {"items.parquet", "users.parquet", "truth/items.parquet"} <= set(first)
    assert first == digests(tmp_path / "b")
    assert first["items.parquet"] != digests(tmp_path / "c")["items.parquet"]
    loaded = Truth.load(tmp_path / "a")
    assert loaded.preferences.parameters == SimulationParameters(**{**options, "seed": 5})
    assert loaded.lives


def test_a_standing_world_has_neither_tables_nor_parameters_of_life(tmp_path):
    out = write_simulation(Preferences.draw(SimulationParameters(users=5, items=5, events=5)), tmp_path / "out")
    assert out.items is out.users is None
    assert not (tmp_path / "out" / "items.parquet").exists()
    assert "births" not in (tmp_path / "out" / "truth" / "truth.json").read_text()
    assert "born" not in pq.read_schema(tmp_path / "out" / "truth" / "items.parquet").names


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"fading": 2.0}, ("out_of_range", "fading")),
        ({"births": 0.5, "items": 20}, ("out_of_range", "births")),
        ({"births": 0.05, "content_dim": 8}, ("out_of_range", "content_dim")),
        ({"births": 0.05, "half_life": 0}, ("out_of_range", "half_life")),
    ],
)
def test_parameters_of_life_are_checked(options, refusal):
    with refused(*refusal):
        SimulationParameters(**options)


def best_of(truth, day, unborn=False):
    """Serves the oracle's items, or those that do not exist yet."""

    def show(histories, exclude, user_ids, sizes, generator):
        k = int(sizes.max())
        items = truth.oracle_top_k(user_ids, k, day)
        if unborn:
            items = np.tile(truth.item_ids[~truth.available(day)][:k], (len(user_ids), 1))
        filled = np.zeros(items.shape)
        return Shown(items, filled + 1 / k, filled > 0, np.zeros(len(sizes), bool), sizes)

    return show


def test_a_policy_serves_the_days_on_which_more_items_are_born(world, tmp_path):
    truth = world.truth
    how = ServedDays({"bundle": "oracle"}, None, seed=0)
    served = write_next_days([world], tmp_path / "day", best_of(truth, 14.0), how, days=1)
    report = served.served.days[0]
    assert report.oracle_value >= report.logging_value
    table = pq.read_table(served.items).to_pandas()
    assert len(table) == truth.available(14.0).sum() > len(pq.read_table(world.items))
    events = served.to_pandas().merge(table, on="item_id")
    assert (events.timestamp >= events.available_from).all()
    known = pq.read_table(world.items).to_pandas()
    pd.testing.assert_frame_equal(
        table[table.item_id.isin(known.item_id)].reset_index(drop=True), known, check_dtype=False
    )


def test_a_policy_that_shows_items_of_the_future_is_refused(world):
    past = pq.read_table(world.log)
    with refused("mismatch", "policy"):
        serve_days(world.truth, past, best_of(world.truth, 14.0, unborn=True), ServedDays({}, None, 0), days=[14])

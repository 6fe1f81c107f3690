"""Whether lists may have items of a user's past: what the log says, and what follows from it."""

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.log.prepared import Prepared
from recpo.rewards.counted import personal_popularity
from tests.refusals import refused

DAY = 86_400_000


def log(again, days=12, users=30, items=40, **columns):
    """Every user chooses one item a day: with probability ``again`` one of three favorites, else any other."""
    draw, rows = np.random.default_rng(3), []
    for user in range(users):
        favorites = draw.choice(items, 3, replace=False)
        for day in range(days):
            item = draw.choice(favorites) if draw.random() < again else draw.integers(items)
            rows.append((user, int(item), 1_700_000_000_000 + day * DAY + user))
    return pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"]).assign(**columns)


def prepared(path, frame, **options):
    label = {} if "rating" in frame else {"label": recpo.EveryEvent()}
    split = recpo.TemporalSplit(valid_days=2, test_days=2)
    return recpo.prepare(frame, path / "prepared", split=split, **label, **options)


def counted(data, frame, period):
    """Positives of a period of which the user had the item before, and all positives, by a loop."""
    start = pd.Timestamp(data.manifest["boundaries"][f"{period}_start"]).value // 1_000_000
    end = start + 2 * DAY
    repeated = total = 0
    for _, own in frame.sort_values("timestamp").groupby("user_id"):
        before = set(own[own.timestamp < start].item_id)
        now = own[(own.timestamp >= start) & (own.timestamp < end)]
        now = now[now.item_id.isin(frame[frame.timestamp < data.manifest["boundaries"]["valid_start_ms"]].item_id)]
        repeated, total = repeated + int(now.item_id.isin(before).sum()), total + len(now)
    return repeated, total


@pytest.mark.parametrize("again", [0.0, 0.9])
def test_a_log_of_choices_says_whether_people_choose_again(tmp_path, again):
    frame = log(again)
    data = prepared(tmp_path, frame)
    repeated, total = counted(data, frame, "valid")
    assert data.manifest["counts"]["repeated_positives"] == repeated
    assert data.repeated_share == repeated / total
    assert data.repeats == (again > 0)


@pytest.mark.parametrize("repeats", [True, False])
def test_an_option_decides_for_every_log(tmp_path, repeats):
    assert prepared(tmp_path, log(0.9 * (not repeats)), repeats=repeats).repeats == repeats


@pytest.mark.parametrize(
    ("share", "rate", "rate_of_new", "repeats"),
    [(0.9, 0.6, 0.3, True), (0.9, 0.3, 0.6, False), (0.6, 0.6, 0.15, True), (0.6, 0.6, 0.45, False)],
)
def test_what_is_shown_again_is_chosen_again_if_people_come_back_to_it(tmp_path, share, rate, rate_of_new, repeats):
    frame = log(share, users=600)
    again = frame.duplicated(["user_id", "item_id"]).to_numpy()
    draw = np.random.default_rng(0).random(len(frame))
    frame["rating"] = (draw < np.where(again, rate, rate_of_new)) * 4 + 1
    data = prepared(tmp_path, frame, columns=recpo.Columns(label="rating"), label=recpo.NumericColumn(1, 5))
    assert data.repeated_share > 0.5
    assert data.manifest["counts"]["repeated_targets"] > data.manifest["counts"]["repeated_positives"]
    assert data.repeats == repeats


def test_an_extension_keeps_what_lists_may_repeat(tmp_path):
    frame = log(0.9)
    late = frame.timestamp >= frame.timestamp.min() + 11 * DAY
    data = prepared(tmp_path, frame[~late])
    longer = recpo.prepare(frame[late], tmp_path / "longer", extends=data)
    assert data.repeats
    assert longer.repeats
    assert longer.manifest["counts"]["repeated_positives"] > 0
    with refused("mismatch", "repeats"):
        recpo.prepare(frame[late], tmp_path / "other", extends=data, repeats=False)


def test_only_retired_items_are_excluded_where_lists_may_repeat(tmp_path):
    frame = log(0.9)
    late = frame.timestamp >= frame.timestamp.min() + 11 * DAY
    data = prepared(tmp_path, frame[~late])
    longer = recpo.prepare(frame[late], tmp_path / "longer", extends=data, retire=[3, 7])
    retired = longer.retired_items.tolist()
    for batch in evaluation_batches(longer, "test", 20, 8):
        assert batch.exclude.tolist() == [retired] * len(batch.user_ids)
        assert ((batch.past > 0).sum(1) > 0).any()
    for batch in evaluation_batches(longer, "test", 20, 8, repeats=False):
        past = [sorted({*row, *retired} - {0}) for row in batch.past.tolist()]
        assert [sorted({*row} - {0}) for row in batch.exclude.tolist()] == past


def test_personal_popularity_is_what_a_loop_counts(tmp_path):
    data = prepared(tmp_path, log(0.6))
    loaded = recpo.evaluate(data, ["personal_popularity"], ks=[5], repeats=True, segments=False)
    policy, counts = personal_popularity(data), data.item_counts("train_positives")
    for batch in evaluation_batches(data, "test", policy.max_history, 8):
        found = policy.scores(batch.feedback.histories)
        for row, history in enumerate(batch.feedback.histories.item_ids.tolist()):
            chosen, expected = [item for item in history if item], np.zeros(data.num_items)
            for age, item in enumerate(reversed(chosen)):
                expected[item - 1] += 0.98**age
            expected = np.log1p(expected) + 1e-6 * counts / counts.max()
            torch.testing.assert_close(found[row].double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-8)
    assert loaded.document["setting"]["repeats"]


@pytest.mark.slow
def test_a_run_and_its_bundle_follow_the_data(tmp_path):
    frame = log(0.9)
    data = prepared(tmp_path, frame)
    assert isinstance(data, Prepared)
    for options in ({}, {"repeats": False}):
        bundle = recpo.export(
            "personal_popularity", prepared=data, out=tmp_path / f"bundle{len(options)}", k=5, **options
        )
        one = frame[frame.user_id == 4].tail(3)
        lists = bundle.recommend(one, k=5)
        assert bundle.manifest.repeats == (not options)
        assert lists.item_id.isin(one.item_id).any() == (not options)
    tilted = recpo.tilt("popularity", "personal_popularity", data, out=tmp_path / "run", temperature=0.1)
    again = recpo.export(tilted.run, out=tmp_path / "tilted", k=5)
    assert again.manifest.repeats
    listed = [recpo.recommend(tilted.run, frame, k=5), again.recommend(frame, k=5)]
    assert listed[0].item_id.tolist() == listed[1].item_id.tolist()
    assert len(listed[0].merge(frame[["user_id", "item_id"]].drop_duplicates()))


@pytest.mark.parametrize("again", [0.0, 0.9])
def test_a_baseline_that_is_asked_for_lists_repeats_where_lists_may(tmp_path, again):
    frame = log(again)
    data = prepared(tmp_path, frame)
    lists = recpo.recommend("popularity", frame, k=data.num_items, prepared=data)
    had = lists.merge(frame[["user_id", "item_id"]].drop_duplicates())
    assert (len(had) > 0) == data.repeats == (again > 0)

"""Popularity and rate of the users with one value of a category, against a loop; as contenders and as bundles."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.contenders import segment_baselines
from recpo.log.shaping import BinaryColumn
from recpo.rewards.counted import item_scores, segment_policy, segments_of
from tests.refusals import refused

USERS, ITEMS = 60, 12


def world():
    """Users of a plan click on items of its third of the catalog; the country says nothing."""
    rng = np.random.default_rng(3)
    users = pd.DataFrame({"user_id": np.arange(USERS), "country": [f"c{n % 2}" for n in rng.permutation(USERS)]})
    users["plan"] = np.where(np.arange(USERS) == 7, None, np.array(["free", "team", "firm"])[np.arange(USERS) % 3])
    user, item = rng.integers(0, USERS, 3_000), rng.integers(0, ITEMS, 3_000)
    likes = rng.random(3_000) < np.where(item % 3 == user % 3, 0.7, 0.1)
    times = 1_700_000_000_000 + np.arange(3_000) * 400_000
    frame = pd.DataFrame({"user_id": user, "item_id": item, "timestamp": times, "label": likes.astype(int)})
    return frame, users


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    frame, users = world()
    options = {"columns": recpo.Columns(label="label", time_unit="ms"), "label": BinaryColumn(), "catalog": "log"}
    out = tmp_path_factory.mktemp("segments") / "prepared"
    return recpo.prepare(frame, users=users, out=out, progress=False, min_item_events=1, **options)


@pytest.mark.parametrize("name", ["segment_rate", "segment_popularity"])
def test_segments_are_counted_as_in_a_loop(data, name):
    policy = segment_policy(name, data)
    assert (policy.feature, policy.reads.user) == ("plan", True)
    codes = data.user_features().codes[:, [*segments_of(data)].index("plan")]
    events, positives = np.zeros((2, policy.num_codes, data.num_items))
    for shard in data.train_columns(["user_index", "item_index", "label"]):
        for user, item, label in zip(*(shard[one] for one in ("user_index", "item_index", "label")), strict=True):
            events[codes[user], item - 1] += 1
            positives[codes[user], item - 1] += label
    rate, share = item_scores("item_rate", data), positives.sum(0) / positives.sum()
    for code in range(policy.num_codes):
        expected = (positives[code] + 10 * rate) / (events[code] + 10)
        if name == "segment_popularity":
            expected = (positives[code] + 100 * share) / (positives[code].sum() + 100)
        if code < 2:  # missing, unknown
            expected = rate if name == "segment_rate" else share
        np.testing.assert_allclose(policy.segment_scores[code].exp(), expected, rtol=1e-5, atol=1e-6)


def test_they_beat_what_is_the_same_for_everybody_where_segments_differ(data):
    found = recpo.evaluate(data, ["segment_rate", "item_rate"], ks=[4], segments=False, progress=False)
    of_segments, of_all = (one["metrics"]["AUC_mixed"]["mean"] for one in found.document["contenders"])
    assert of_segments > of_all + 0.1


def test_a_bundle_lists_what_the_segment_of_a_user_likes(data, tmp_path):
    frame, users = world()
    bundle = recpo.export("segment_rate", prepared=data, out=tmp_path / "bundle", k=4)
    assert bundle.manifest.reads.user
    none = frame.head(0)
    asked = pd.DataFrame({"user_id": [500, 501], "country": ["c0", "c9"], "plan": ["team", "firm"]})
    lists = bundle.recommend(none, k=4, users=[500, 501, 502], user_features=asked)
    policy, ids = segment_policy("segment_rate", data), data.item_ids()
    for user, plan in ((500, "team"), (501, "firm"), (502, None)):
        code = 0 if plan is None else 2 + data.vocabulary("user", "plan").to_pylist().index(plan)
        best = ids.to_external(np.sort(policy.segment_scores[code].topk(4)[1].numpy()) + 1)
        assert sorted(lists[lists.user_id == user].item_id) == sorted(best.to_pylist())
    again = recpo.Bundle.open(tmp_path / "bundle", engine="torch")
    listed = [one.recommend(frame, k=4, user_features=users) for one in (bundle, again)]
    pd.testing.assert_frame_equal(*listed, atol=1e-5)


def test_a_text_file_of_users_is_read_as_the_table_of_a_log_is(tmp_path):
    """Ids keep their zeros."""
    frame, users = world()
    frame, users = (one.assign(user_id=[f"{user:03d}" for user in one.user_id]) for one in (frame, users))
    users.to_csv(tmp_path / "users.csv", sep=";", index=False)
    options = {"columns": recpo.Columns(label="label", time_unit="ms"), "label": BinaryColumn(), "catalog": "log"}
    data = recpo.prepare(frame, users=users, out=tmp_path / "data", progress=False, **options)
    bundle = recpo.export("segment_rate", prepared=data, out=tmp_path / "bundle", k=4)
    by_file, by_frame = (
        recpo.recommend(bundle, frame, k=4, user_features=one) for one in (str(tmp_path / "users.csv"), users)
    )
    pd.testing.assert_frame_equal(by_file, by_frame)
    assert len(by_file.groupby("user_id").item_id.agg(frozenset).unique()) > 2
    with (tmp_path / "users.csv").open("a") as file:
        file.write("061;c0\n")
    with refused("wrong_shape", "user_features"):
        recpo.recommend(bundle, frame, k=4, user_features=str(tmp_path / "users.csv"))


@pytest.mark.slow
def test_a_policy_that_is_tilted_reads_the_users_of_its_segments(data, tmp_path):
    _, users = world()
    tilted = recpo.tilt("segment_rate", "item_rate", data, out=tmp_path / "run", temperature=0.5)
    turned = recpo.tilt("item_rate", "segment_rate", data, out=tmp_path / "turned", temperature=0.5)
    for run in (tilted.run, turned.run):
        bundle = recpo.export(run, out=tmp_path / f"{run.root.name}-bundle", k=4)
        assert bundle.manifest.reads.user
        assert len(bundle.recommend(world()[0].head(0), k=4, users=[1, 2], user_features=users)) == 8


def test_segments_need_a_table_of_users(tmp_path):
    frame, users = world()
    options = {"columns": recpo.Columns(label="label", time_unit="ms"), "label": BinaryColumn(), "catalog": "log"}
    without = recpo.prepare(frame, out=tmp_path / "without", progress=False, **options)
    assert (segments_of(without), segment_baselines(without)) == ({}, [])
    with refused("missing_value", "users"):
        recpo.evaluate(without, ["segment_rate"], ks=[4], progress=False)
    policy = segment_policy("segment_rate", recpo.prepare(frame, users=users, out=tmp_path / "with", **options))
    with refused("mismatch", "user_features"):
        policy.set_schema(without.feature_schema)
    histories = next(iter(evaluation_batches(without, "test", 5, 8))).feedback.histories
    with refused("missing_value", "user_features"), torch.no_grad():
        policy.scores(histories)

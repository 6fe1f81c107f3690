"""A log whose slates were drawn by ``recpo.Exploration``, from its columns to the weights of an evaluation."""

import numpy as np
import pandas as pd
import pytest

import recpo
from recpo.lists.exploration import Exploration, Pool
from recpo.worlds.log import draw_watch_time
from recpo.worlds.truth import Truth

K, REQUESTS = 4, 40


@pytest.fixture(scope="module")
def log(world):
    """Every user asks 40 times in ten days; the policy knows tastes, and shows 4 of its 12 best items, or any."""
    preferences = Truth.load(world).preferences
    generator = np.random.default_rng(0)
    users, items = preferences.users, preferences.items
    rows = np.repeat(np.arange(len(users.user_id)), REQUESTS)
    affinity = preferences.affinity_to_all(rows, 0.0)
    logp = 3 * affinity - np.log(np.exp(3 * affinity).sum(1, keepdims=True))
    shortlist = np.argsort(-logp, axis=1)[:, :12]
    slates = Exploration(temperature=1.5, epsilon=0.5, shortlist=12).sample_batch(
        shortlist + 1, np.take_along_axis(logp, shortlist, 1), K, generator, [Pool.of(len(items.item_id))] * len(rows)
    )
    item = (slates.items - 1).ravel()
    request = np.repeat(np.arange(len(rows)), K)
    begin = preferences.parameters.start_ms + np.sort(generator.integers(0, 10 * 86_400_000, len(rows)))
    begin = begin.reshape(REQUESTS, -1).T.ravel()  # every user's own, ascending
    seen = affinity[request, item]
    return pd.DataFrame(
        {
            "user_id": users.user_id[rows[request]],
            "item_id": items.item_id[item],
            "timestamp": begin[request] + 1000 * np.tile(np.arange(K), len(rows)),
            "watch_time": draw_watch_time(preferences, seen, items.duration[item], generator).astype(np.float32),
            "duration": items.duration[item],
            "dislike": generator.random(len(item)) < preferences.dislike_probability(seen, items.clickbait[item]),
            "propensity": slates.propensity.ravel().astype(np.float32),
            "is_random": np.repeat(slates.is_random, K),
            "request_id": request,
        }
    )


@pytest.mark.slow
def test_prepare_keeps_the_propensities_and_weights_have_the_mean_1(log, tmp_path):
    data = recpo.prepare(log, out=tmp_path / "prepared")
    columns = ["propensity", "is_random"]
    kept = data.columns("train", 0, columns)
    assert data.num_shards("train") == 1
    assert np.isin(kept["propensity"], log["propensity"].to_numpy()).all()
    assert 0.4 < kept["is_random"].mean() < 0.6
    assert log.groupby("request_id")["is_random"].nunique().max() == 1
    found = recpo.evaluate(data, ["popularity", "random"], ks=[20], repeats=True, segments=False)
    for contender in found.document["contenders"][:2]:
        entries = {one["estimator"]: one for one in contender["off_policy"] if one["target"] == "top_20"}
        low, high = (entries["SNIPS"]["diagnostics"]["mean_weight_interval"][end] for end in ("low", "high"))
        assert low < 1 < high < low + 0.4
        assert entries["SNIPS"]["value"] == pytest.approx(entries["IPS"]["value"], abs=0.1)
        assert not [line for line in entries["SNIPS"]["warnings"] if "mean" in line]

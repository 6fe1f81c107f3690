"""The guard: bad variants end, sound ones rarely do, and one worker decides for all."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pandas as pd
import pytest

from recpo.cli.main import parse
from recpo.server.impressions import JOURNAL, settle
from recpo.server.options import ServerOptions
from recpo.server.variants import ENDED, EndedVariants, Guard, Watch, assigned
from recpo.verbs.serve import Serve
from tests.refusals import refused
from tests.server.conftest import answers, request

VARIANTS = ["A=x:0.5", "B=y:0.5"]


def publish(root, number, *, dislikes=0.1, gain=0.0, requests=200, experiment="1", users=1000):
    """A file of one hour: B is liked more by ``gain``, and disliked at the rate."""
    generator = np.random.default_rng(number)
    user = generator.integers(0, users, requests)
    b = user % 2 == 1
    frame = pd.DataFrame(
        {
            "user_id": user,
            "timestamp": 1_700_000_000_000 + number,
            "label": np.clip(0.5 + gain * b + 0.3 * generator.standard_normal(requests), 0, 1),
            "dislike": generator.random(requests) < np.where(b, dislikes, 0.1),
            "request_id": [f"{experiment}-{number}-{one}" for one in range(requests)],
            "experiment": experiment,
            "variant": np.where(b, "B", "A"),
        }
    )
    frame.to_parquet(root / f"{number:04d}.parquet")


@pytest.fixture
def root(tmp_path):
    (tmp_path / JOURNAL).mkdir()
    return tmp_path


def watch(root, **bounds):
    return Watch(Guard(**bounds), ["A", "B"], EndedVariants(root, "1"))


def test_a_variant_that_is_disliked_ends_once(root):
    watching = watch(root, dislikes=0.2)
    ended = []
    for hour in range(20):
        publish(root, hour, dislikes=0.4)
        ended += [(hour, name) for name in watching.look()]
    assert [name for _, name in ended] == ["B"]
    assert 1 <= ended[0][0] < 15
    said = json.loads((root / ENDED).read_text())["1"]["B"]
    assert (said["because"], said["bound"]) == ("dislikes", 0.2)
    assert 0.2 < said["low"] < 0.4


def test_a_variant_of_less_value_ends_and_a_better_one_does_not(root):
    for hour in range(20):
        publish(root, hour, gain=-0.2)
    worse = watch(root, value=-0.05, tightest=200)
    assert worse.look() == ["B"]
    assert worse.look() == []
    worse.close()
    (root / ENDED).unlink()
    assert watch(root, value=-0.3).look() == []
    for hour in range(20):
        publish(root, hour, gain=0.2)
    assert watch(root, value=0.0, dislikes=0.5).look() == []


def test_one_worker_watches_and_another_takes_over(root):
    first, second = watch(root, dislikes=0.2), watch(root, dislikes=0.2)
    assert first.look() == []
    for hour in range(20):
        publish(root, hour, dislikes=0.5)
    assert second.look() == []  # the first one has the lock
    first.close()
    assert second.look() == ["B"]


def test_rows_of_other_experiments_and_of_no_variant_do_not_count(root):
    for hour in range(20):
        publish(root, hour, dislikes=0.5, experiment="0")
    pd.DataFrame({"user_id": [1], "item_id": [1]}).to_parquet(root / "plain.parquet")
    assert watch(root, dislikes=0.2, value=0.0).look() == []


def test_a_variant_at_its_bounds_rarely_ends(root):
    """80 experiments at both bounds, 20 looks each: at most alpha of them end."""
    ended = 0
    for seed in range(80):
        generator = np.random.default_rng(seed)
        watching = watch(root, dislikes=0.1, value=0.0, tightest=500)
        for _ in range(20):
            user = generator.integers(0, 400, 100)
            for name, own in (("A", user[user % 2 == 0]), ("B", user[user % 2 == 1])):
                watching._values[name].add(own, generator.random(len(own)))
                watching._dislikes[name].update((generator.random(len(own)) < 0.1).astype(float))
            if next(watching._reasons("B"), None):
                ended += 1
                break
        watching.close()
    assert ended / 80 <= 0.05


def test_a_served_variant_ends_by_its_published_outcomes(bundles, tmp_path):
    options = {
        "variant": [f"{name}={path}:0.5" for name, path in zip("AB", bundles, strict=True)],
        "log": tmp_path,
        "sync": False,
        "guard": Guard(dislikes=0.3),
    }

    async def calls(server):
        for user in range(120):
            answer = (await server.client.post("/v1/recommend", json=request(user))).json()
            outcome = {"item_id": answer["items"][0]["item_id"], "dislike": answer["variant"] == "B"}
            body = {"request_id": answer["request_id"], "outcomes": [outcome]}
            await server.client.post("/v1/feedback", json=body)
        server.service.log._writer.close()
        await asyncio.to_thread(settle, tmp_path)
        ended = server.service._watch.look()
        variants = server.service.variants
        user = next(user for user in range(120) if assigned(user, "1", variants) == "B")
        return ended, server.service._variant(user)

    assert answers(None, calls, **options) == (["B"], "A")


def test_guards_that_have_nothing_to_watch_are_refused(tmp_path):
    with refused("missing_option", "guard"):
        Guard()
    with refused("out_of_range", "guard.value"):
        Guard(value=float("nan"))
    guard = Guard(dislikes=0.1)
    with refused("missing_option", "variant"):
        ServerOptions(guard=guard, log=tmp_path)
    with refused("missing_option", "log"):
        ServerOptions(guard=guard, variant=VARIANTS)
    with refused("conflicting_options", "guard"):
        ServerOptions(guard=guard, variant=VARIANTS, log=tmp_path, interleave="team_draft")
    words = ["--variant", VARIANTS[0], "--variant", VARIANTS[1], "--log", str(tmp_path)]
    verb = parse(Serve, [*words, "--guard.dislikes", "0.1", "--guard.value", "-0.05"])
    assert (verb.guard, verb.variant) == (Guard(dislikes=0.1, value=-0.05), VARIANTS)

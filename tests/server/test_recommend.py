"""POST /v1/recommend: the bundle's lists, independent of other requests at the same time."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time

import numpy as np
import pandas as pd
import pytest

from recpo.artifacts.checksums import sha256
from recpo.base.errors import RecpoError
from recpo.lists.exploration import Exploration
from recpo.log.id_map import IdMap
from recpo.log.schema import ALWAYS, NEVER
from recpo.server.bundles import LoadedBundle
from recpo.server.ranking import Query, Ranker
from tests.refusals import refused
from tests.server.conftest import answers, event, request, serving


async def recommended(server):
    return (await server.client.post("/v1/recommend", json=request())).json()


def listed(answer):
    return [(item["item_id"], item["score"]) for item in answer["items"]]


def test_an_answer_is_the_bundles_own_list(bundle):
    asked = [request(user, range(user, 3 * user), exclude=["item-50", "item-51"], k=7) for user in range(1, 9)]
    asked.append(request(9, []))

    async def calls(server):
        return [(await server.client.post("/v1/recommend", json=body)).json() for body in asked]

    frame = pd.DataFrame([{"user_id": body["user_id"], **past} for body in asked for past in body["history"]])
    excluded = pd.DataFrame(
        [{"user_id": body["user_id"], "item_id": item} for body in asked for item in body.get("exclude", [])]
    )
    users = [body["user_id"] for body in asked]
    expected = bundle.recommend(frame, 7, exclude=excluded, users=users)
    for body, answer in zip(asked, answers(bundle.root, calls), strict=True):
        own = expected[(expected["user_id"] == body["user_id"]) & (expected["rank"] <= body["k"])]
        assert listed(answer) == list(zip(own["item_id"], own["score"], strict=True))


def test_an_item_is_listed_from_the_time_on_at_which_it_is_available(bundle, tmp_path, monkeypatch):
    root = shutil.copytree(bundle.root, tmp_path / "bundle")
    size, late = len(bundle.items), int(2e12)
    times = np.stack([np.full(size, ALWAYS), np.full(size, NEVER)])
    best = listed(answers(root, recommended))[0][0]
    times[0, bundle.items.to_internal([best]) - 1] = late
    IdMap(bundle.items.to_external(range(1, size + 1)), None, times).save(root / "items.parquet")
    bundle.manifest.write(root)

    async def calls(server):
        found = []
        for now in (late - 1, late, late - 1):
            monkeypatch.setattr(time, "time", lambda now=now: now / 1000)
            found.append(listed(await recommended(server))[0][0] == best)
        return found

    explore = Exploration(temperature=0.0, epsilon=0.0, shortlist=5)
    assert answers(root, calls) == answers(root, calls, exploration=explore) == [False, True, False]


def test_an_answer_says_who_gave_it(bundle):
    async def calls(server):
        return (await server.client.post("/v1/recommend", json=request())).json()

    answer = answers(bundle.root, calls, name="films")
    assert answer["bundle"] == "films"
    assert answer["checksum"] == sha256(bundle.root / "manifest.json")
    assert answer["version"] == answer["checksum"][:12]
    assert answer["request_id"] is None  # no log, no feedback
    assert {item["explored"] for item in answer["items"]} == {False}
    assert sum(item["propensity"] for item in answer["items"]) == pytest.approx(1)


def test_the_batch_never_changes_a_score(bundle):
    """The same bits alone and among 31 others, of other lengths and with other items to exclude."""
    asked = [request(user, range(user % 11), exclude=[f"item-{n}" for n in range(user % 5)]) for user in range(32)]

    async def one_by_one(server):
        return [(await server.client.post("/v1/recommend", json=body)).json() for body in asked]

    async def together(server):
        found = await asyncio.gather(*(server.client.post("/v1/recommend", json=body) for body in asked))
        return [answer.json() for answer in found]

    alone = answers(bundle.root, one_by_one)
    for company in (3, 32):
        assert answers(bundle.root, together, max_batch=company, max_wait_ms=20) == alone


def test_a_fault_in_one_history_stays_with_its_client(bundle):
    loaded = LoadedBundle.load(bundle.root, "bundle")
    good, seconds = Query([event(3)], k=4), Query([{"item_id": "item-3", "timestamp": 1_700_000_000}], k=4)
    counted = []
    found = Ranker(on_counts=counted.append).rank(loaded, [good, seconds, good, Query([], k=21)])
    assert [isinstance(answer, RecpoError) for answer in found] == [False, True, False, True]
    assert (found[1].code, found[1].field) == ("out_of_range", "timestamp")
    assert (found[3].code, found[3].field) == ("out_of_range", "k")
    assert found[0].items == found[2].items == [item for item, _ in bundle.recommend_one([event(3)], 4)]
    assert sum(counts.users for counts in counted) == 2


def test_unknown_items_are_skipped_and_counted_and_short_lists_too(bundle):
    unknown = request(items=(3, 5), exclude=[f"item-{number}" for number in range(1, 118)], k=20)
    unknown["history"].append(event(1000))

    async def calls(server):
        answer = (await server.client.post("/v1/recommend", json=unknown)).json()
        return answer, (await server.client.get("/metrics")).text

    answer, metrics = answers(bundle.root, calls)
    assert sorted(item["item_id"] for item in answer["items"]) == ["item-118", "item-119", "item-120"]
    assert 'recpo_histories_left_out_total{what="unknown_items"} 1.0' in metrics
    assert "recpo_short_lists_total 1.0" in metrics
    assert "recpo_batch_size_count 1.0" in metrics
    assert f'checksum="{sha256(bundle.root / "manifest.json")}"' in metrics


WRONG = {
    "no user": ({"history": []}, "user_id: Field required"),
    "a boolean user": (request(user=True), "user_id"),
    "k of 0": (request(k=0), "k: Input should be greater"),
    "k beyond the bundle's": (request(k=21), "k must be 1 to 20"),
    "k as text": (request(k="5"), "k"),
    "an unknown key": (request(blocked=[]), "blocked: Extra inputs"),
    "an unknown key of an event": (request() | {"history": [event(3, liked=1)]}, "liked: Extra inputs"),
    "no time": ({"user_id": 1, "history": [{"item_id": "item-3"}]}, "history.0.timestamp: Field required"),
    "seconds": (request() | {"history": [event(3) | {"timestamp": 1_700_000_000}]}, "expected milliseconds"),
    "nanoseconds": (request() | {"history": [event(3) | {"timestamp": 1_700_000_000_000_000_000}]}, "timestamp"),
    "ids of the wrong type": (request() | {"history": [event(3) | {"item_id": 3}]}, "are strings, got 3"),
    "an id beyond 64 bits": (request(user=2**63), "user_id"),
    "a watch time as text": (request() | {"history": [event(3, watch_time="5")]}, "watch_time"),
    "a label of 2": (request() | {"history": [event(3, label=2)]}, "label"),
    "to explore": (request(explore=True), "does not explore"),
    "too many events": (request(items=range(1, 42)), "history must have at most 40 entries"),
    "too much to exclude": (request(exclude=["item-1"] * 31), "exclude must have at most 30 entries"),
    "a list": ([1, 2], "body"),
    "null": (None, "body"),
}


@pytest.fixture(scope="module")
def refusals(bundle):
    async def calls(server):
        found = {}
        for name, (body, _) in WRONG.items():
            found[name] = await server.client.post("/v1/recommend", json=body)
        return found

    return answers(bundle.root, calls, max_events=40, max_exclude=30)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(refusals, name):
    answer = refusals[name]
    assert answer.status_code == 422, answer.text
    assert WRONG[name][1] in answer.json()["detail"]
    assert answer.json()["x_request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"NaN", b'{"user_id": NaN}', b"[" * 100_000, b"9" * 10_000, b'{"user_id": "\\ud800"}'],
)
def test_a_body_that_is_not_json_is_refused(bundle, body):
    async def calls(server):
        return await server.client.post("/v1/recommend", content=body, headers={"content-type": "application/json"})

    answer = answers(bundle.root, calls)
    assert answer.status_code in (400, 422), answer.text
    json.loads(answer.text)


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(bundle):
    async def in_parts():
        for _ in range(30):
            yield b" " * 100

    async def calls(server):
        large = await server.client.post("/v1/recommend", json=request(items=range(1, 100)))
        chunked = await server.client.post("/v1/recommend", content=in_parts())
        return large, chunked

    for answer in answers(bundle.root, calls, max_body_kb=1):
        assert answer.status_code == 413
        assert "1,024 bytes" in answer.json()["detail"]


def test_a_full_queue_and_a_long_wait_have_their_own_status(bundle):
    async def run():
        async with serving(bundle.root, max_queue=2, max_batch=1, timeout_s=0.2) as server:
            free, begun = asyncio.Event(), asyncio.Event()
            rank_now, loop = server.service._batcher._work, asyncio.get_running_loop()

            def slowly(queries):
                loop.call_soon_threadsafe(begun.set)
                asyncio.run_coroutine_threadsafe(free.wait(), loop).result()
                return rank_now(queries)

            server.service._batcher._work = slowly
            pending = [asyncio.create_task(server.client.post("/v1/recommend", json=request()))]
            await begun.wait()  # one is being ranked, two may wait
            pending += [asyncio.create_task(server.client.post("/v1/recommend", json=request())) for _ in range(4)]
            found = await asyncio.gather(*pending)
            free.set()
            server.service._batcher._work = rank_now
            return found, await server.client.post("/v1/recommend", json=request())

    found, later = asyncio.run(run())
    assert sorted(answer.status_code for answer in found) == [429, 429, 504, 504, 504]
    refused = next(answer for answer in found if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert later.status_code == 200  # those that gave up are not ranked, and nobody waits behind them


def test_keys_open_what_they_should(bundle, tmp_path):
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("# of the app\n0123456789abcdef\n\nfedcba9876543210\n")
    admins.write_text("the-key-of-an-operator\n")

    async def calls(server):
        def status(method, path, key=None, **more):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return server.client.request(method, path, headers=headers, **more)

        async def statuses(method, path, **more):
            offered = (None, "wrong-key-wrong-key", "fedcba9876543210", "the-key-of-an-operator", "schlüssel".encode())
            return [(await status(method, path, key, **more)).status_code for key in offered[:4]]

        return {
            "recommend": await statuses("POST", "/v1/recommend", json=request()),
            "versions": await statuses("GET", "/v1/admin/versions"),
            "nowhere": await statuses("GET", "/nowhere"),
            **{
                path: await statuses("GET", path)
                for path in ("/v2/health/live", "/v2/health/ready", "/metrics", "/docs")
            },
        }

    found = answers(bundle.root, calls, api_keys=keys, admin_keys=admins)
    assert found.pop("recommend") == [401, 401, 200, 401]
    assert found.pop("versions") == [401, 401, 401, 200]
    assert found.pop("nowhere") == [401, 401, 404, 401]
    assert set(map(tuple, found.values())) == {(200,) * 4}


@pytest.mark.parametrize(("text", "code"), [("# none\n", "empty"), ("short\n", "bad_value")])
def test_a_file_of_keys_that_protects_nothing_is_refused(bundle, tmp_path, text, code):
    (tmp_path / "keys").write_text(text)
    with refused(code, str(tmp_path / "keys")):
        answers(bundle.root, None, api_keys=tmp_path / "keys")


def test_request_ids_come_back_or_are_made(bundle):
    async def calls(server):
        given = [None, "trace-7", "no id\twith blanks", "x" * 200]
        headers = [{} if one is None else {"X-Request-ID": one} for one in given]
        return [(await server.client.get("/v2", headers=one)).headers["x-request-id"] for one in headers]

    made, own, blank, long = answers(bundle.root, calls)
    assert own == "trace-7"
    assert len({made, blank, long}) == 3
    assert {len(one) for one in (made, blank, long)} == {16}


def test_the_open_inference_protocol(bundle):
    async def calls(server):
        paths = (
            "/v2",
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/films",
            "/v2/models/films/ready",
            "/v2/models/x",
        )
        found = [await server.client.get(path) for path in paths]
        server.service.draining = True
        return [*found, await server.client.get("/v2/health/ready"), await server.client.get("/v2/health/live")]

    server, live, ready, model, model_ready, other, draining, alive = answers(bundle.root, calls, name="films")
    assert server.json()["name"] == "recpo"
    assert {answer.status_code for answer in (live, ready, model_ready, alive)} == {200}
    assert (other.status_code, draining.status_code) == (404, 503)
    metadata = model.json()
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["item_ids", "feedback", "exclude"]
    assert metadata["outputs"][1] == {"name": "scores", "datatype": "FP32", "shape": [-1, 20]}


def test_scores_are_log_probabilities(bundle):
    async def calls(server):
        return (await server.client.post("/v1/recommend", json={"user_id": 1})).json()

    answer = answers(bundle.root, calls)
    assert len(answer["items"]) == 20
    assert 0 < sum(math.exp(item["score"]) for item in answer["items"]) < 1

"""Golden requests, swap and rollback: only verified bundles serve, and no request is lost."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from recpo.artifacts.outputs import write_json
from recpo.server.bundles import LoadedBundle, Versions
from recpo.serving import bundle as bundles
from recpo.serving.bundle import GOLDEN, Bundle, check_golden
from recpo.serving.histories import Request
from recpo.serving.manifest import MANIFEST, BundleManifest
from tests.cutoffs import LEVELS
from tests.refusals import refused
from tests.server.conftest import answers, request, serving

KEY = {"Authorization": "Bearer the-key-of-an-operator"}


@pytest.fixture
def admins(tmp_path):
    (tmp_path / "admins").write_text("the-key-of-an-operator\n")
    return tmp_path / "admins"


def with_golden(bundle, change):
    """Alters the golden requests of a bundle, and its checksums with them."""
    content = json.loads((bundle / GOLDEN).read_text())
    change(content)
    (bundle / GOLDEN).write_text(json.dumps(content))
    manifest = BundleManifest._parsed(json.loads((bundle / MANIFEST).read_text()), bundle / MANIFEST)
    (bundle / MANIFEST).unlink()
    manifest.write(bundle)


def test_an_export_has_golden_requests_that_it_answers(bundle):
    assert check_golden(bundle) == 8
    asked = json.loads((bundle.root / GOLDEN).read_text())["requests"]
    assert asked[0]["history"] == []
    assert len(asked[-1]["history"]) > bundle.manifest.max_history
    assert all(len(request["answer"]) == 10 for request in asked)
    levels = [
        level for past in asked for level in bundle.reader.read_request(Request(past["history"])).feedback.ravel()
    ]
    assert set(levels) == {0, 1, *LEVELS}


def score(content):
    content["requests"][3]["answer"][2][1] += 0.01


def item(content):
    answer = content["requests"][3]["answer"]
    answer[0][0], answer[9][0] = answer[9][0], answer[0][0]


def shorter(content):
    content["requests"][3]["answer"].pop()


def damaged(content):
    del content["requests"][3]["answer"]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (score, ("mismatch", "scores")),
        (item, ("mismatch", "items")),
        (shorter, ("mismatch", "scores")),
        (damaged, ("damaged", "golden.json")),
    ],
    ids=["score", "item", "shorter", "damaged"],
)
def test_a_bundle_that_answers_otherwise_does_not_serve(versions, change, refusal):
    with_golden(versions / "10", change)
    with refused(*refusal):
        Versions(versions)
    (versions / "10").rename(versions / "8")
    served = Versions(versions)
    with refused(*refusal):
        served.swap("8")
    assert served.current.version == "9"
    assert not (versions / "active.json").exists()


def test_items_of_equal_score_may_swap_places():
    bundles.compare_lists([("a", -1.0), ("b", -1.00005)], [("b", -1.0), ("a", -1.00005)], "request 0")
    bundles.compare_lists(
        [("a", -1.0), ("b", -1.00005)], [("a", -1.0), ("c", -1.00005)], "request 0"
    )  # at the end of a list
    with refused("mismatch", "items"):
        bundles.compare_lists([("a", -1.0), ("b", -1.01)], [("b", -1.0), ("a", -1.01)], "request 0")


def test_an_older_bundle_without_golden_requests_serves(versions):
    manifest = BundleManifest.open(versions / "10")
    (versions / "10" / GOLDEN).unlink()
    manifest.write(versions / "10")
    assert LoadedBundle.load(versions / "10", "films").golden == 0


def test_the_newest_version_serves_until_somebody_swaps(versions):
    first, second = Versions(versions), Versions(versions)
    assert (first.name, first.current.version, first.names) == ("versions", "10", ["9", "10"])
    shutil.copytree(versions / "9", versions / "11")
    assert first.follow().version == "10"  # it may have been half copied: nobody has asked for it
    assert first.swap("9").version == "9"
    assert second.current.version == "10"
    assert second.follow().version == "9"
    assert first.swap().version == "11"
    assert first.previous == ["10", "9"]
    assert second.rollback().version == "9"
    assert [served.follow().version for served in (first, second)] == ["9", "9"]
    assert first.rollback().version == "10"
    with refused("empty", "previous"):
        first.rollback()
    assert Versions(versions).current.version == "10"  # after a restart as well


def test_a_version_that_is_not_there_or_not_alike_is_refused(versions, bundles):
    served = Versions(versions)
    for wrong in ("12", "../versions/9", ".", ""):
        with refused("unknown_name", "version"):
            served.swap(wrong)
    manifest = BundleManifest.open(versions / "9")
    content = json.loads((versions / "9" / MANIFEST).read_text())
    content["feedback"]["cutoffs"] = {}
    (versions / "9" / GOLDEN).unlink()
    type(manifest)._parsed(content, versions).write(versions / "9")
    with refused("mismatch", "version"):
        served.swap("9")
    assert served.current.version == "10"
    with refused("wrong_file", str(bundles[0])):
        Versions(bundles[0]).swap("10")


def test_a_bundle_that_stands_alone_is_loaded_again(bundles, tmp_path):
    place = tmp_path / "bundle"
    shutil.copytree(bundles[0], place)
    served = Versions(place)
    before = served.current
    shutil.rmtree(place)
    shutil.copytree(bundles[1], place)
    assert served.follow() is before
    assert served.swap().checksum != before.checksum
    assert served.names == [served.current.version]


@pytest.mark.parametrize(
    "content", [{"active": "../9", "previous": []}, {"active": "9"}, {"active": 9, "previous": []}]
)
def test_a_damaged_state_is_refused_and_does_not_stop_who_serves(versions, content):
    served = Versions(versions)
    write_json(versions / "active.json", content)
    assert served.follow().version == "10"
    with refused("damaged", "active.json"):
        Versions(versions)


def test_a_version_that_cannot_serve_is_not_tried_again_and_again(versions):
    tried = []
    served = Versions(versions, load=lambda *rest: tried.append(rest) or LoadedBundle.load(*rest))
    write_json(versions / "active.json", {"active": "7", "previous": []})
    assert [served.follow().version for _ in range(3)] == ["10"] * 3
    assert [version for _, _, version in tried] == ["10", "7"]


def test_a_missing_bundle_is_reported_before_anything_starts(tmp_path):
    with refused("missing_file", str(tmp_path / "absent")):
        Versions(tmp_path / "absent")
    with refused("empty", str(tmp_path)):
        Versions(tmp_path)


def test_operations_over_http(versions, admins):
    async def calls(server):
        client = server.client
        found = [await client.get("/v1/admin/versions", headers=KEY)]
        found.append(await client.post("/v1/admin/swap", json={"version": "9"}, headers=KEY))
        found.append(await client.post("/v1/admin/rollback", headers=KEY))
        found.append(await client.post("/v1/admin/rollback", headers=KEY))
        found.append(await client.post("/v1/admin/swap", json={"version": "12"}, headers=KEY))
        metrics = (await client.get("/metrics")).text
        return found, metrics

    found, metrics = answers(versions, calls, admin_keys=admins)
    assert [answer.status_code for answer in found] == [200, 200, 200, 422, 422]
    assert [answer.json()["version"] for answer in found[:3]] == ["10", "9", "10"]
    assert found[1].json()["previous"] == ["10"]
    assert found[1].json()["golden_requests"] == 8
    assert 'version="9"} 0.0' in metrics
    assert 'version="10"} 1.0' in metrics
    assert "recpo_bundle_swaps_total 3.0" in metrics


def test_without_admin_keys_no_swap_is_allowed(versions):
    async def calls(server):
        return [
            await server.client.post("/v1/admin/swap", json={}),
            await server.client.get("/v1/admin/versions", headers=KEY),
        ]

    for answer in answers(versions, calls):
        assert answer.status_code == 403
        assert "--admin_keys" in answer.json()["detail"]


@pytest.mark.slow
def test_swaps_and_a_rollback_under_load_lose_nothing(versions, bundles):
    """Every answer is a whole list of the version that it names."""
    body, expected = request(), {}
    for path, version in zip(bundles, ("9", "10"), strict=True):
        expected[version] = Bundle.open(path).recommend_one(body["history"], 5)
    assert expected["9"] != expected["10"]

    async def run():
        async with serving(versions, max_batch=4) as server:
            found, done = [], asyncio.Event()

            async def client():
                while not done.is_set():
                    found.append(await server.client.post("/v1/recommend", json=body))

            clients = [asyncio.create_task(client()) for _ in range(8)]
            for number in range(10):
                await asyncio.to_thread(server.service.versions.swap, ("9", "10")[number % 2])
            await asyncio.to_thread(server.service.versions.rollback)
            done.set()
            await asyncio.gather(*clients)
            return found

    found = asyncio.run(run())
    assert {answer.status_code for answer in found} == {200}
    served = [answer.json() for answer in found]
    assert {answer["version"] for answer in served} == {"9", "10"}
    for answer in served:
        assert [(item["item_id"], item["score"]) for item in answer["items"]] == expected[answer["version"]]

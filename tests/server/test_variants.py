"""Several policies at once: who gets which, what is logged, and interleaved lists."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import chi2_contingency, chisquare

from recpo.lists.exploration import Exploration
from recpo.server.impressions import HEADER, Impression, LogLayout, settle
from recpo.server.options import ServerOptions
from recpo.server.variants import ENDED, EndedVariants, assigned, parse_variants
from recpo.verbs.serve import Serve
from tests.refusals import refused
from tests.server.conftest import answers, post, process, request

THREE = parse_variants(["old=a:0.7", "new=b:0.2", "other=c:0.1"])


def two(bundles, shares=(":0.5", ":0.5")):
    return [f"{name}={path}{share}" for name, path, share in zip("AB", bundles, shares, strict=True)]


def test_shares_are_those_that_were_asked_for():
    for users in (range(20_000), [f"user-{number}" for number in range(20_000)]):
        counts = Counter(assigned(user, "1", THREE) for user in users)
        found = [counts[one.name] for one in THREE]
        assert chisquare(found, [20_000 * one.share for one in THREE]).pvalue > 1e-3


def test_experiments_assign_independently():
    table = np.zeros((3, 3))
    names = [one.name for one in THREE]
    for user in range(20_000):
        table[names.index(assigned(user, "spring", THREE)), names.index(assigned(user, "summer", THREE))] += 1
    assert chi2_contingency(table).pvalue > 1e-3


@pytest.mark.slow
def test_the_assignment_is_the_documented_one_and_stays():
    def documented(user, experiment):
        text = json.dumps([experiment, user], ensure_ascii=False, separators=(",", ":")).encode()
        place = (int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 11) / 2**53
        return "old" if place < 0.7 else "new" if place < 0.7 + 0.2 else "other"

    users = [*range(300), *map(str, range(300)), "é", -(2**63)]
    assert [assigned(user, "1", THREE) for user in users] == [documented(user, "1") for user in users]
    held = "".join(assigned(user, "1", THREE)[2] for user in [*range(30), *map(str, range(10))])
    assert held == HELD
    program = "from recpo.server.variants import *; v = parse_variants(['old=a:0.7', 'new=b:0.2', 'other=c:0.1'])"
    program += "; print(''.join(assigned(user, '1', v)[2] for user in [*range(30), *map(str, range(10))]))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == HELD  # in a process with another seed of Python's own hash


HELD = "whwwddddwhddwddwhhwhwddddddwwdddwwddwdww"


@pytest.mark.parametrize(
    ("texts", "refusal"),
    [
        (["A"], ("bad_value", "variant")),
        (["A=x:0.5"], ("missing_option", "variant")),
        (["A=x:0.5", "A=y:0.5"], ("duplicate", "variant")),
        (["A=x:0.5", "B=y"], ("missing_value", "variant")),
        (["A=x:0.5", "B=y:0.4"], ("out_of_range", "variant")),
        (["A=x:1", "B=y:0"], ("out_of_range", "variant")),
        (["a b=x", "B=y"], ("bad_value", "variant")),
    ],
)
def test_variants_that_cannot_share_the_users_are_refused(texts, refusal):
    with refused(*refusal):
        ServerOptions(variant=texts)


def test_variants_are_read_as_they_are_spelled():
    assert [tuple(map(str, one)) for one in parse_variants(["A=/x:y/b", "B=c"])] == [
        ("A", "/x:y/b", "0.5"),
        ("B", "c", "0.5"),
    ]
    with refused("missing_option", "bundle"):
        Serve().execute()
    with refused("conflicting_options", "bundle"):
        Serve("x", variant=["A=x", "B=y"]).execute()
    with refused("missing_option", "variant"):
        ServerOptions(interleave="team_draft")
    with refused("conflicting_options", "interleave"):
        ServerOptions(interleave="team_draft", variant=["A=x:0.9", "B=y:0.1"])
    with refused("conflicting_options", "exploration"):
        ServerOptions(interleave="team_draft", variant=["A=x", "B=y"], exploration=Exploration())


def test_every_user_gets_the_list_of_one_variant(bundles, tmp_path):
    async def calls(server):
        found = {}
        for user in range(30):
            answer = (await server.client.post("/v1/recommend", json=request(user))).json()
            found[user] = answer
            outcome = {"item_id": answer["items"][0]["item_id"], "watch_time": 5.0, "duration": 10.0}
            body = {"request_id": answer["request_id"], "outcomes": [outcome]}
            assert (await server.client.post("/v1/feedback", json=body)).status_code == 200
        return found, (await server.client.get("/metrics")).text, server.service.variants

    found, metrics, variants = answers(None, calls, variant=two(bundles), log=tmp_path, sync=False)
    plain = [answers(path, lambda one: one.client.post("/v1/recommend", json=request(0))).json() for path in bundles]
    lists = {name: [item["item_id"] for item in one["items"]] for name, one in zip("AB", plain, strict=True)}
    assert lists["A"] != lists["B"]
    expected = {user: assigned(user, "1", variants) for user in range(30)}
    assert {user: answer["variant"] for user, answer in found.items()} == expected
    for user, answer in found.items():
        assert [item["item_id"] for item in answer["items"]] == lists[expected[user]]
    number = sum(name == "B" for name in expected.values())
    assert 0 < number < 30
    assert f'recpo_variant_answers_total{{variant="B"}} {number}.0' in metrics
    assert 'recpo_variant_ended{variant="B"} 0.0' in metrics
    settle(tmp_path)
    rows = pq.read_table(tmp_path).to_pylist()
    assert {row["user_id"]: row["variant"] for row in rows} == expected
    assert {row["experiment"] for row in rows} == {"1"}
    assert sum(row["watch_time"] == 5.0 for row in rows) == 30


def test_an_ended_variant_gives_its_users_to_the_control_in_every_worker(bundles, tmp_path):
    async def calls(server):
        first = [(await server.client.post("/v1/recommend", json=request(user))).json() for user in range(20)]
        other = EndedVariants(tmp_path, "1")  # of another worker
        other.end("B", {"because": "dislikes"})
        server.service._follow_ended()
        second = [(await server.client.post("/v1/recommend", json=request(user))).json() for user in range(20)]
        text = (await server.client.get("/metrics")).text
        return [answer["variant"] for answer in first], [answer["variant"] for answer in second], text

    options = {"variant": two(bundles), "log": tmp_path, "sync": False}
    first, second, metrics = answers(None, calls, **options)
    assert (set(first), set(second)) == ({"A", "B"}, {"A"})
    assert 'recpo_variant_ended{variant="B"} 1.0' in metrics
    again = answers(None, lambda server: server.client.post("/v1/recommend", json=request(first.index("B"))), **options)
    assert again.json()["variant"] == "A"  # after a restart
    assert EndedVariants(tmp_path, "2").names == frozenset()
    said = json.loads((tmp_path / ENDED).read_text())["1"]["B"]
    assert said["because"] == "dislikes"
    assert said["ended_at"] > 1.7e12
    (tmp_path / ENDED).write_text("[]")
    with refused("damaged", ...):
        EndedVariants(tmp_path, "1")


def test_each_variant_has_versions_of_its_own(versions, bundles, tmp_path):
    (tmp_path / "admins").write_text("the-key-of-an-operator\n")
    key = {"Authorization": "Bearer the-key-of-an-operator"}

    async def calls(server):
        body, path = {"version": "9"}, "/v1/admin/swap"
        swapped = await server.client.post(path, params={"variant": "B"}, json=body, headers=key)
        control = await server.client.get("/v1/admin/versions", headers=key)
        strange = await server.client.get("/v1/admin/versions", params={"variant": "C"}, headers=key)
        return swapped.json()["version"], control.json()["version"], strange.status_code

    variant = [f"A={bundles[0]}:0.5", f"B={versions}:0.5"]
    swapped, control, strange = answers(None, calls, variant=variant, admin_keys=tmp_path / "admins")
    assert (swapped, control != "9", strange) == ("9", True, 404)


@pytest.mark.parametrize("method", ["team_draft", "probabilistic"])
def test_interleaved_lists_name_the_team_of_every_item(bundles, tmp_path, method):
    async def calls(server):
        return [(await server.client.post("/v1/recommend", json=request(user))).json() for user in range(40)]

    found = answers(None, calls, variant=two(bundles, ("", "")), interleave=method, log=tmp_path, sync=False)
    plain = [answers(path, lambda one: one.client.post("/v1/recommend", json=request(0))).json() for path in bundles]
    lists = {name: [item["item_id"] for item in one["items"]] for name, one in zip("AB", plain, strict=True)}
    for answer in found:
        assert answer["variant"] is None
        assert len({item["item_id"] for item in answer["items"]}) == 5
        assert all(item["item_id"] in lists[item["team"]] for item in answer["items"])
    assert len({tuple(item["item_id"] for item in answer["items"]) for answer in found}) > 5
    settle(tmp_path)
    rows = pq.read_table(tmp_path).to_pylist()
    assert {row["variant"] for row in rows} == {None}
    assert {row["team"] for row in rows} == {"A", "B"}
    if method == "team_draft":
        assert {row["credit"] for row in rows} == {-1.0, 1.0}
        assert all((row["credit"] > 0) == (row["team"] == "B") for row in rows)
        assert sum(row["propensity"] for row in rows[:5]) <= 1
    else:
        assert {row["propensity"] for row in rows} == {None}
        assert max(abs(row["credit"]) for row in rows) <= 1


def test_a_log_without_variants_has_the_bytes_that_it_had():
    plain = LogLayout("integer", "string")
    assert json.loads(plain.header()[1:]).keys() == {"user_id", "item_id", "graded", "behaviors", "context"}
    assert LogLayout.from_header(plain.header()) == plain
    full = LogLayout("integer", "string", experiment="1", interleaving="team_draft")
    assert LogLayout.from_header(full.header()) == full
    assert full.schema.names[-4:] == ["experiment", "variant", "team", "credit"]
    with refused("old_format", ...):
        LogLayout.from_header(HEADER + b'{"user_id": "integer"}')
    old = Impression("n", 1, 2, ["a"], [1.0], [False])
    assert old.payload() == b'i["n", 1, 2, ["a"], [1.0], [false], null]'
    new = old._replace(variant="A")
    assert (Impression.from_payload(old.payload()), Impression.from_payload(new.payload())) == (old, new)


@pytest.mark.slow
def test_two_workers_agree_on_variants_and_on_their_end(bundles, tmp_path):
    variant = two(bundles)
    expected = [assigned(user, "1", parse_variants(variant)) for user in range(12)]
    flags = ["--variant", variant[0], "--variant", variant[1], "--log", tmp_path, "--guard.dislikes", 0.5]
    with process(None, *flags, "--workers", 2) as server:

        def served():
            answers = [post(f"{server.url}/v1/recommend", json=request(user)).json() for user in range(12)]
            return [answer["variant"] for answer in answers]  # every request has a connection, so both workers answer

        assert [served() for _ in range(3)] == [expected] * 3
        EndedVariants(tmp_path, "1").end("B", {"because": "a person"})
        until = time.monotonic() + 60
        while {name for _ in range(3) for name in served()} != {"A"}:
            assert time.monotonic() < until


def test_variants_of_another_kind_are_refused(bundles, tmp_path, monkeypatch):
    kinds = iter("ab")
    monkeypatch.setattr("recpo.server.variants.log_kind", lambda _: next(kinds))
    with refused("mismatch", "variant"):
        answers(None, None, variant=two(bundles))
    with refused("conflicting_options", "log"):
        answers(None, None, variant=two(bundles), log=bundles[1] / "log")

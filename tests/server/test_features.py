"""User features, request features and behaviors in the server's JSON, and in its log."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

import recpo
from recpo.base.features import Category, Number, Reads
from recpo.base.feedback import FeedbackDefinition
from recpo.log.feature_columns import FeatureColumns
from recpo.log.shaping import NumericColumn
from recpo.server.bundles import Versions
from recpo.server.impressions import settle
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from tests.refusals import refused
from tests.server.conftest import answers, request
from tests.serving.test_feature_bundles import ITEM_IDS, KNOWN, OPTIONS, policy_of

pytestmark = pytest.mark.slow

FIRST_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def featured(tmp_path_factory):
    out = tmp_path_factory.mktemp("served") / "bundle"
    export_bundle(
        policy_of(),
        ITEM_IDS,
        PolicyFacts(FeedbackDefinition(), features=KNOWN, options=OPTIONS),
        out,
        BundleOptions(k=10),
    )
    return Bundle.open(out)


def event(number, **more):
    return {"item_id": f"i{number}", "timestamp": FIRST_MS + number, "label": 0.5, **more}


ASKED = {
    "user_id": 5,
    "k": 4,
    "history": [
        event(3, behaviors={"like": True, "share": False}, context={"surface": "home", "hour": 3}),
        event(4, context={"surface": None}),
        event(6, behaviors=None, context=None),
    ],
    "user": {"country": "us", "hobbies": [3, 9], "age": 33, "taste": [1, 0.5, 0.0]},
    "context": {"surface": "search", "hour": 12.5},
}


def test_an_answer_is_that_of_the_bundle(featured):
    plain = [
        event(3, like=True, share=False, surface="home", hour=3.0),
        event(4, surface=None),
        event(6),
    ]
    user = {"land": "us", "hobbies": [3, 9], "age": 33.0, "taste": [1.0, 0.5, 0.0]}
    expected = featured.recommend_one(plain, 4, user=user, context=ASKED["context"])
    bare = {"user_id": 6, "history": [event(3)], "k": 4}

    async def calls(server):
        return [(await server.client.post("/v1/recommend", json=body)).json() for body in (ASKED, bare)]

    found, without = answers(featured.root, calls)
    assert [(item["item_id"], item["score"]) for item in found["items"]] == [
        (item, pytest.approx(score, abs=1e-5)) for item, score in expected
    ]
    assert [item["item_id"] for item in without["items"]] == [i for i, _ in featured.recommend_one([event(3)], 4)]


WRONG = {
    "user.color: this bundle reads the features country, hobbies, age, taste": {"user": {"color": 1}},
    "user.country: expected a string": {"user": {"country": 3}},
    "user.age: expected a number": {"user": {"age": "old"}},
    "user.hobbies: expected a list": {"user": {"hobbies": 3}},
    "user.hobbies: expected an integer": {"user": {"hobbies": ["x"]}},
    "user.taste: expected a list of 3 numbers": {"user": {"taste": [1.0]}},
    "context.page: this bundle reads the features surface, hour": {"context": {"page": "x"}},
    "history.0.behaviors.comment: this bundle reads the behaviors like": {
        "history": [event(1, behaviors={"comment": True})]
    },
    "history.0.context.hour: expected a number": {"history": [event(1, context={"hour": "noon"})]},
    "behaviors.like: Input should be a valid boolean": {"history": [event(1, behaviors={"like": 1})]},
}


def test_what_a_bundle_does_not_read_names_its_field(featured, bundle):
    async def calls(server):
        found = [await server.client.post("/v1/recommend", json={"user_id": 1, **body}) for body in WRONG.values()]
        return [(answer.status_code, answer.json()["detail"]) for answer in found]

    for (status, detail), expected in zip(answers(featured.root, calls), WRONG, strict=True):
        assert status == 422
        assert expected in detail

    async def to_a_bundle_of_ids(server):
        bodies = [request() | {name: {"a": 1}} for name in ("user", "context")]
        return [(await server.client.post("/v1/recommend", json=body)).json()["detail"] for body in bodies]

    for name, detail in zip(("user", "context"), answers(bundle.root, to_a_bundle_of_ids), strict=True):
        assert detail == f"{name}.a: this bundle reads no such features"


def test_the_log_has_behaviors_and_context_as_prepare_reads_them(featured, tmp_path):
    async def calls(server):
        shown = (await server.client.post("/v1/recommend", json=ASKED)).json()
        outcomes = [
            {"item_id": shown["items"][0]["item_id"], "label": 0.75, "behaviors": {"like": True, "follow": False}},
            {"item_id": shown["items"][1]["item_id"], "behaviors": {"share": True}},
        ]
        body = {"request_id": shown["request_id"], "outcomes": outcomes}
        first = await server.client.post("/v1/feedback", json=body)
        body["outcomes"] = [{"item_id": outcomes[0]["item_id"], "behaviors": {"follow": True}}]
        await server.client.post("/v1/feedback", json=body)
        body["outcomes"] = [{"item_id": outcomes[0]["item_id"], "behaviors": {"comment": True}}]
        wrong = await server.client.post("/v1/feedback", json=body)
        return first.json(), (wrong.status_code, wrong.json()["detail"])

    accepted, wrong = answers(featured.root, calls, log=tmp_path / "log")
    assert accepted == {"accepted": 2}
    assert wrong == (422, "comment: outcomes of this log are label, dislike, like, follow, share")
    settle(tmp_path / "log")
    (file,) = (tmp_path / "log").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [(row["surface"], row["hour"]) for row in rows] == [("search", 12.5)] * 4
    assert [row["like"] for row in rows] == [True, None, None, None]
    assert (rows[0]["follow"], rows[0]["label"], rows[1]["share"]) == (True, 0.75, True)


def test_prepare_reads_them_with_the_mapping_by_name(featured, tmp_path):
    async def calls(server):
        for user in range(8):
            for hour in range(4):
                body = {"user_id": user, "k": 3, "context": {"surface": "home", "hour": hour}}
                shown = (await server.client.post("/v1/recommend", json=body)).json()
                outcomes = [
                    {"item_id": item["item_id"], "label": 0.5, "behaviors": {"like": place == 0}}
                    for place, item in enumerate(shown["items"])
                ]
                feedback = {"request_id": shown["request_id"], "outcomes": outcomes}
                await server.client.post("/v1/feedback", json=feedback)

    answers(featured.root, calls, log=tmp_path / "log", sync=False)
    settle(tmp_path / "log")
    data = recpo.prepare(
        tmp_path / "log",
        tmp_path / "prepared",
        split=recpo.LeaveLastOut(),
        label=NumericColumn(0, 1),
        features=FeatureColumns(context=(Category("surface"), Number("hour"))),
        behaviors={name: name for name in KNOWN.behaviors},
    )
    assert [one.name for one in data.feature_schema.context] == ["surface", "hour"]
    assert data.behaviors == KNOWN.behaviors
    events = data.load("train", 0, Reads(behaviors=True, context=True))
    assert (events.context.codes == 2).all()
    assert set(events.behaviors.tolist()) == {0, 1}


def test_a_version_that_reads_something_else_is_refused(featured, tmp_path):
    for name, behaviors in (("1", KNOWN.behaviors), ("2", ("like", "follow", "comment"))):
        shutil.copytree(featured.root, tmp_path / name)
        (tmp_path / name / "golden.json").unlink()
        replace(featured.manifest, behaviors=behaviors).write(tmp_path / name)
    versions = Versions(tmp_path)
    with refused("mismatch", "version"):
        versions.swap("1")
    assert versions.current.version == "2"

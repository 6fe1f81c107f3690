"""No request, however malformed, causes a server error."""

from __future__ import annotations

import asyncio
import json

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from tests.server.conftest import event, request, serving

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
PATHS = ["/v1/recommend", "/v1/feedback", "/v1/admin/swap", "/v1/admin/rollback"]


@st.composite
def bodies(draw):
    """A request of which some parts are something else, or are missing."""
    body = request(user=draw(st.integers() | VALUES), items=(3, 7))
    for key in ("user_id", "history", "k", "exclude", "explore"):
        if draw(st.integers(0, 3)) == 0:
            body[key] = draw(VALUES)
    if isinstance(body.get("history"), list) and draw(st.booleans()):
        past = event(5)
        for key in (*past, "label", "dislike"):
            if draw(st.integers(0, 3)) == 0:
                past[key] = draw(VALUES | st.integers(-(2**70), 2**70))
        body["history"].append(past)
    if draw(st.booleans()):
        body |= {"request_id": draw(st.text("0123456789abcdef", min_size=44, max_size=44)), "outcomes": []}
    if draw(st.booleans()):
        body |= draw(st.dictionaries(st.text(max_size=8), VALUES, max_size=2))
    return body


async def statuses(path, asked, log):
    async with serving(path, log=log, sync=False, admin_keys=None) as server:
        for target, content in asked:
            answer = await server.client.post(target, content=content, headers={"content-type": "application/json"})
            yield answer, content


def ask(path, asked, log):
    async def run():
        return [(answer.status_code, content) async for answer, content in statuses(path, asked, log)]

    return asyncio.run(run())


def contents(count):
    """JSON of ``count`` drawn bodies and where they are sent, and bytes that are none."""
    made = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @given(st.sampled_from(PATHS), bodies() | VALUES, st.binary(max_size=30), st.integers(0, 9))
    def draw(target, body, noise, kind):
        content = json.dumps(body).encode()
        made.append((target, noise if kind == 0 else content[: len(content) // 2] if kind == 1 else content))

    draw()
    return made


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_no_malformed_request_is_a_fault_of_the_server(bundle, tmp_path, count):
    # Which kinds are drawn depends on the version of Hypothesis and on the constants of the modules that are loaded.
    known = [
        ("/v1/recommend", json.dumps(request()).encode()),
        ("/v1/recommend", b"{"),
        ("/v1/recommend", json.dumps(request(k="many")).encode()),
        ("/v1/admin/rollback", b"{}"),
    ]
    found = ask(bundle.root, contents(count) + known, tmp_path)
    assert len(found) >= count + len(known)
    assert [(status, content) for status, content in found if status >= 500] == []
    assert [status for status, _ in found[-len(known) :]] == [200, 422, 422, 403]


def cases(description, count):
    """Some requests for every operation of the page, good and bad."""
    made = []
    for found in description.get_all_operations():
        strategies = [found.ok().as_strategy(generation_mode=mode) for mode in GenerationMode]

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.one_of(*strategies))
        def collect(case):
            made.append(case)

        collect()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_schemathesis_finds_no_server_error_and_no_answer_beside_the_page(bundle, tmp_path, count):
    """Requests generated from the OpenAPI page; every answer is one that the page promises."""

    async def run():
        async with serving(bundle.root, log=tmp_path, sync=False) as server:
            description = schemathesis.openapi.from_dict(server.app.app.openapi())
            asked = cases(description, count)
            for case in asked:
                arguments = case.as_transport_kwargs(base_url="http://server")
                kept = ("method", "url", "headers", "cookies", "params", "json", "data")
                arguments = {key: value for key, value in arguments.items() if key in kept}
                case.validate_response(await server.client.request(**arguments), checks=CHECKS)
            return len(asked)

    assert asyncio.run(run()) >= 4 * count

"""The log: every acknowledged impression and outcome is in a file that prepare reads, once."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

import recpo
from recpo.server import write_ahead
from recpo.server.impressions import JOURNAL, Impression, ImpressionLog, LogLayout, Outcome, joined_rows, settle
from recpo.server.options import ServerOptions
from recpo.server.service import Service
from recpo.server.write_ahead import COMPLETE, DONE, MAGIC, OPEN, Address, SegmentWriter, Slot, read_records
from recpo.serving.bundle import Bundle
from recpo.serving.manifest import BundleManifest
from recpo.worlds.log import SCHEMA
from tests.refusals import refused
from tests.server.conftest import answers, event, request

LAYOUT = LogLayout("integer", "string")


def open_log(root, **options):
    return ImpressionLog(root, LAYOUT, **{"outcome_window_s": 100.0, "sync": False} | options)


def add(log, user, items=("a", "b")):
    identifier, written = log.add(user, list(items), [1 / len(items)] * len(items), [False] * len(items))
    written.result(5)
    return identifier


def report(log, identifier, item="a", **values):
    address, _ = log.find(identifier)
    log.add_outcomes(address, {item: values}).result(5)
    return log.still_open(address)


def rows(root):
    return pq.read_table(root).to_pylist()


def test_the_columns_are_those_of_a_log():
    assert LAYOUT.schema.names == SCHEMA.names
    assert LogLayout("string", "integer", graded=True).schema.names == [
        *("user_id", "item_id", "timestamp", "label", "dislike", "propensity", "is_random", "request_id")
    ]
    assert LogLayout.from_header(LAYOUT.header()) == LAYOUT
    with refused("old_format", "_journal"):
        LogLayout.from_header(b'h{"user_id": "integer", "item_id": "integer"}')


def test_outcomes_join_their_impression(tmp_path):
    log = open_log(tmp_path)
    first, second = add(log, 1), add(log, 2)
    assert report(log, first, "b", watch_time=3.0, duration=9.0)
    assert report(log, first, "b", watch_time=4.0)  # a later value replaces an earlier one
    assert report(log, first, "b", dislike=True)
    log.close()
    assert settle(tmp_path).rows == 4
    found = {(row["user_id"], row["item_id"]): row for row in rows(tmp_path)}
    one = found[1, "b"]
    assert (one["watch_time"], one["duration"], one["dislike"]) == (4.0, 9.0, True)
    assert (one["propensity"], one["is_random"]) == (0.5, False)
    assert [found[2, "a"][name] for name in LAYOUT.outcomes] == [None] * 3  # shown, and nothing is known
    assert found[1, "a"]["request_id"] == one["request_id"] != found[2, "a"]["request_id"]
    assert abs(one["timestamp"] - time.time() * 1000) < 60_000
    assert first != second


def test_an_outcome_may_come_through_another_worker_and_after_a_restart(tmp_path):
    log, other = open_log(tmp_path), open_log(tmp_path)
    first, second = add(log, 1), add(log, 2)
    assert report(other, first, watch_time=1.0)
    log.close()
    log = open_log(tmp_path)
    assert report(log, second, watch_time=2.0)
    log.close()
    other.close()
    settle(tmp_path)
    assert {row["watch_time"] for row in rows(tmp_path) if row["item_id"] == "a"} == {1.0, 2.0}
    assert not list((tmp_path / JOURNAL).glob("slot-*/*"))


def test_outcomes_of_impressions_that_are_not_open_are_refused(tmp_path):
    log = open_log(tmp_path, outcome_window_s=0.2)
    identifier = add(log, 1)
    altered = identifier[:-1] + ("0" if identifier[-1] != "0" else "1")
    assert log.find(altered) is None
    assert log.find("0" * 44) is None
    assert log.find("f" * 44) is None
    for offset in (0, 1, 17, 2**32, 2**63, 2**64 - 1):  # no begin of a record, and beyond any file
        assert log.find(f"{identifier[:20]}{offset:016x}{identifier[36:]}") is None
    assert log.find(identifier) is not None
    time.sleep(0.25)
    assert log.find(identifier) is None
    log.close()
    settle(tmp_path)
    assert log.find(identifier) is None


def test_an_outcome_that_comes_too_late_is_not_acknowledged(tmp_path):
    """The segment closes between the look and the write."""
    log, other = open_log(tmp_path), open_log(tmp_path)
    address, _ = other.find(add(log, 1))
    log.close()
    settle(tmp_path)
    other.add_outcomes(address, {"a": {"watch_time": 1.0}}).result(5)
    assert not other.still_open(address)
    other.close()


def test_segments_wait_for_their_outcomes(tmp_path):
    log = open_log(tmp_path)
    add(log, 1)
    assert settle(tmp_path).rows == 0  # being written
    log.close()
    assert settle(tmp_path, 100.0).rows == 0  # outcomes may come
    assert settle(tmp_path, 0.0).rows == 2
    assert settle(tmp_path, 0.0).rows == 0


def test_a_segment_ends_by_size_and_by_age(tmp_path):
    log = open_log(tmp_path, max_bytes=400)
    for user in range(6):
        add(log, user)
    assert len(list((tmp_path / JOURNAL).glob(f"slot-000/*{COMPLETE}"))) >= 1
    log.close()
    log = open_log(tmp_path, max_age_s=0.1)
    add(log, 6)
    until = time.monotonic() + 60
    while list((tmp_path / JOURNAL).glob(f"slot-000/*{OPEN}")):  # without any further request
        assert time.monotonic() < until
        time.sleep(0.05)
    assert settle(tmp_path).rows == 14
    add(log, 7)
    log.close()
    settle(tmp_path)
    assert sorted({row["user_id"] for row in rows(tmp_path)}) == list(range(8))


def test_published_segments_stay_while_they_hold_outcomes_of_others(tmp_path):
    log, other = open_log(tmp_path), open_log(tmp_path)
    identifier = add(log, 1)
    add(other, 2)
    report(other, identifier, watch_time=5.0)
    other.close()
    assert settle(tmp_path).rows == 2
    assert len(list((tmp_path / JOURNAL).glob(f"slot-001/*{DONE}"))) == 1
    log.close()
    settle(tmp_path)
    assert 5.0 in {row["watch_time"] for row in rows(tmp_path)}
    assert not list((tmp_path / JOURNAL).glob("slot-*/*"))


def test_a_pass_that_was_killed_is_made_again_and_writes_no_row_twice(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    identifier = add(log, 1)
    report(log, identifier, watch_time=5.0)
    log.close()
    rename = Path.rename

    def killed(path, target):
        if str(target).endswith(DONE):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        settle(tmp_path)
    (before,) = tmp_path.glob("*.parquet")
    content = before.read_bytes()
    monkeypatch.undo()
    settle(tmp_path)
    assert list(tmp_path.glob("*.parquet")) == [before]
    assert before.read_bytes() == content
    assert len(rows(tmp_path)) == 2


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """A slot as a killed process leaves it, and where its records end."""
    root = tmp_path_factory.mktemp("crashed")
    log = open_log(root)
    for user in range(5):
        add(log, user)
    (path,) = (root / JOURNAL).glob(f"slot-000/*{OPEN}")
    copy = tmp_path_factory.mktemp("copy") / path.name
    shutil.copy(path, copy)
    log.close()
    ends = [offset for offset, _ in read_records(copy)][1:]
    return copy, [*ends, copy.stat().st_size]


@given(st.data())
def test_a_cut_or_damaged_record_is_dropped_and_all_others_are_kept(crashed, data):
    path, ends = crashed
    content = path.read_bytes()
    cut, is_cut = data.draw(st.integers(0, len(content))), data.draw(st.booleans())
    if is_cut:
        altered = content[:cut]
    else:
        cut = min(cut, len(content) - 1)
        altered = content[:cut] + bytes([content[cut] ^ data.draw(st.integers(1, 255))]) + content[cut + 1 :]
    place = path.with_name("altered.open")
    place.write_bytes(altered)
    whole = list(read_records(path))
    kept = list(read_records(place))
    begins = [len(MAGIC), *ends[:-1]]
    if cut < len(MAGIC):
        expected = []
    elif is_cut:
        expected = [record for record, end in zip(whole, ends, strict=True) if end <= cut]
    else:
        zipped = zip(whole, begins, ends, strict=True)
        expected = [record for record, begin, end in zipped if not begin <= cut < end]
    assert kept == expected


def test_records_behind_a_damaged_sector_are_published(crashed, tmp_path):
    slot = tmp_path / JOURNAL / "slot-003"
    slot.mkdir(parents=True)
    content, (_, second, third, *_) = bytearray(crashed[0].read_bytes()), crashed[1]
    content[second + 9 : third + 30] = bytes(third + 30 - second - 9)  # two of the five impressions
    (slot / crashed[0].name).write_bytes(content)
    settled = settle(tmp_path)
    assert settled.rows == 6
    assert settled.lost_bytes > third - second
    assert {row["user_id"] for row in rows(tmp_path)} < {0, 1, 2, 3, 4}


def test_a_segment_whose_begin_is_damaged_is_kept(crashed, tmp_path):
    slot = tmp_path / JOURNAL / "slot-003"
    slot.mkdir(parents=True)
    content = bytearray(crashed[0].read_bytes())
    content[len(MAGIC) + 12] ^= 1
    (slot / crashed[0].name).write_bytes(content)
    assert settle(tmp_path).rows == 0
    (kept,) = slot.iterdir()
    assert (kept.suffix, kept.read_bytes()) == (".damaged", bytes(content))


def test_a_slot_of_a_process_that_died_is_published(crashed, tmp_path):
    slot = tmp_path / JOURNAL / "slot-003"
    slot.mkdir(parents=True)
    content = crashed[0].read_bytes()
    (slot / crashed[0].name).write_bytes(content[:-3])
    settled = settle(tmp_path)
    assert settled.rows == 8
    assert settled.lost_bytes > 0
    assert {row["user_id"] for row in rows(tmp_path)} == {0, 1, 2, 3}


def test_two_processes_never_share_a_slot(tmp_path):
    slots = [Slot.claim(tmp_path) for _ in range(3)]
    assert [slot.number for slot in slots] == [0, 1, 2]
    slots[1].release()
    assert Slot.claim(tmp_path).number == 1
    assert Slot.try_claim(tmp_path, 0) is None


def test_a_full_disk_acknowledges_nothing_and_loses_nothing(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    add(log, 1)
    write = os.write

    def half(handle, content):
        if len(content) > 60:
            return write(handle, bytes(content[:40]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write_ahead.os, "write", half)
    with refused("failed", "log"):
        add(log, 2)
    assert not log.writable
    monkeypatch.undo()
    third = add(log, 3)
    assert log.writable
    assert report(log, third, watch_time=1.0)
    log.close()
    settle(tmp_path)
    assert sorted({row["user_id"] for row in rows(tmp_path)}) == [1, 3]


def test_many_threads_append_at_once(tmp_path):
    slot = Slot.claim(tmp_path)
    writer = SegmentWriter(slot, b"h", max_bytes=2000, max_age_s=100, sync=False)
    futures = [writer.append(b"%d" % number) for number in range(500)]
    for _, written in futures:
        written.result(5)
    for number, (address, _) in enumerate(futures):
        assert write_ahead.read_record(tmp_path, address) == b"%d" % number
    writer.close()
    slot.release()


def test_the_later_value_counts_for_any_order_of_the_files():
    late = Outcome((0, 0, 0), 5, "a", {"watch_time": 1.0})
    early = Outcome((0, 0, 0), 3, "a", {"watch_time": 2.0, "dislike": True})
    shown = Impression("n", 1, 9, ["a"], [1.0], [True])
    (row,) = joined_rows(Address(0, 0, 0), shown, [late, early], LAYOUT)
    assert (row["watch_time"], row["dislike"], row["is_random"]) == (1.0, True, True)


def test_feedback_over_http(bundle, tmp_path):
    async def calls(server):
        post = server.client.post
        shown = (await post("/v1/recommend", json=request(7))).json()
        items = [item["item_id"] for item in shown["items"]]
        identifier = shown["request_id"]

        def feedback(*outcomes, identifier=identifier):
            return post("/v1/feedback", json={"request_id": identifier, "outcomes": list(outcomes)})

        good = {"item_id": items[0], "watch_time": 8.5, "duration": 10.0}
        found = [
            await feedback(good, {"item_id": items[1], "dislike": True}),
            await feedback({"item_id": "item-3", "watch_time": 1.0}),
            await feedback({"item_id": items[0], "label": 0.5}),
            await feedback({"item_id": items[0], "watch_time": -1.0}),
            await feedback(good, identifier="0" * 44),
            await feedback(good, identifier="nothing"),
            await feedback(),
        ]
        return items, found, (await server.client.get("/metrics")).text

    items, found, metrics = answers(bundle.root, calls, log=tmp_path)
    assert [answer.status_code for answer in found] == [200, 422, 422, 422, 404, 422, 422]
    assert found[0].json() == {"accepted": 2}
    assert "was not in this recommendation" in found[1].json()["detail"]
    assert "outcomes of this log are watch_time, duration, dislike" in found[2].json()["detail"]
    assert "recpo_impressions_total 1.0" in metrics
    assert "recpo_outcomes_total 2.0" in metrics
    settle(tmp_path)
    table = rows(tmp_path)
    assert [row["item_id"] for row in table] == items
    assert [row["watch_time"] for row in table] == [8.5, None, None, None, None]
    assert [row["dislike"] for row in table] == [None, True, None, None, None]
    assert {row["user_id"] for row in table} == {7}


def test_answers_impressions_and_outcomes_join_by_request_id(bundle, tmp_path):
    async def calls(server):
        shown, outcomes = [], []
        for user in range(4):
            answer = (await server.client.post("/v1/recommend", json=request(user))).json()
            shown += [{"request_id": answer["request_id"], **item} for item in answer["items"]]
            outcome = {"item_id": answer["items"][user]["item_id"], "watch_time": float(user), "duration": 10.0}
            feedback = {"request_id": answer["request_id"], "outcomes": [outcome]}
            assert (await server.client.post("/v1/feedback", json=feedback)).status_code == 200
            outcomes.append({"request_id": answer["request_id"], **outcome})
        return pd.DataFrame(shown), pd.DataFrame(outcomes)

    shown, outcomes = answers(bundle.root, calls, log=tmp_path)
    settle(tmp_path)
    log, by = pq.read_table(tmp_path).to_pandas(), ["request_id", "item_id"]
    assert log["request_id"].nunique() == 4
    both = shown.merge(log, on=by, suffixes=("_answered", ""), validate="one_to_one")
    assert len(both) == len(log) == len(shown) == 20
    assert (both["propensity_answered"] == both["propensity"]).all()
    reported = log.dropna(subset="watch_time").merge(outcomes, on=by, suffixes=("", "_sent"), validate="one_to_one")
    assert reported["watch_time_sent"].tolist() == reported["watch_time"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_only_a_new_or_empty_directory_or_a_log_becomes_a_log(bundle, tmp_path):
    root = shutil.copytree(bundle.root, tmp_path / "bundle")
    foreign, empty, old = (tmp_path / name for name in ("foreign", "empty", "old"))
    (foreign / "deep").mkdir(parents=True)
    (foreign / "deep" / "photo.jpg").write_bytes(b"1")
    (old / JOURNAL / "slot-000").mkdir(parents=True)
    (old / JOURNAL / "slot-000" / f"01{COMPLETE}").write_bytes(b"1")
    empty.mkdir()
    before = sorted(tmp_path.rglob("*"))
    for log, code in (
        (root, "conflicting_options"),
        (root / "log", "conflicting_options"),
        (foreign, "wrong_file"),
        (old, "wrong_file"),
    ):
        with refused(code, "log"):
            Service(root, ServerOptions(log=log))
    with refused("failed"):
        Service(root, ServerOptions(log=foreign / "deep" / "photo.jpg"))
    with refused("conflicting_options", "log"):
        Service(tmp_path, ServerOptions(log=tmp_path / "log"))
    assert sorted(tmp_path.rglob("*")) == before
    for log in (empty, tmp_path / "new" / "log", empty):  # and again, as a log
        Service(root, ServerOptions(log=log)).log.close()
    Bundle.open(root)


def test_user_ids_have_the_type_of_the_log(bundle, tmp_path):
    async def calls(server):
        return await server.client.post("/v1/recommend", json=request("ann"))

    refused = answers(bundle.root, calls, log=tmp_path / "whole")
    assert refused.status_code == 422
    assert "--user_ids" in refused.json()["detail"]
    assert answers(bundle.root, calls, log=tmp_path / "text", user_ids="string").status_code == 200
    settle(tmp_path / "text")
    assert {row["user_id"] for row in rows(tmp_path / "text")} == {"ann"}
    assert answers(bundle.root, calls).status_code == 200  # nothing is logged


def test_user_ids_have_the_type_of_the_training_data(bundle, tmp_path):
    async def calls(server):
        return [await server.client.post("/v1/recommend", json=request(user)) for user in ("ann", 7)]

    root = shutil.copytree(bundle.root, tmp_path / "bundle")
    manifest = BundleManifest.open(root)
    replace(manifest, origin={**manifest.origin, "user_ids": "string"}).write(root)
    assert [answer.status_code for answer in answers(root, calls, log=tmp_path / "log")] == [200, 422]


def test_a_failing_disk_is_reported_and_the_server_is_not_ready(bundle, tmp_path, monkeypatch, caplog):
    def full(handle, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def calls(server):
        monkeypatch.setattr(write_ahead.os, "write", full)
        failed = await server.client.post("/v1/recommend", json=request())
        ready = await server.client.get("/v2/health/ready")
        monkeypatch.undo()
        return failed, ready, await server.client.post("/v1/recommend", json=request())

    failed, ready, later = answers(bundle.root, calls, log=tmp_path)
    assert [answer.status_code for answer in (failed, ready, later)] == [503, 503, 200]
    assert "nothing is acknowledged" in failed.json()["detail"]
    assert str(tmp_path) not in failed.text
    assert "disk is full" in caplog.text


@pytest.mark.slow
def test_prepare_reads_what_was_served(bundle, tmp_path):
    """A hundred simulated requests, prepared: every row arrives with its feedback and its propensity."""
    generator = np.random.default_rng(0)

    async def calls(server):
        post = server.client.post
        for user in range(20):
            history = []
            for _ in range(5):
                shown = (await post("/v1/recommend", json={"user_id": user, "history": history, "k": 3})).json()
                outcomes = []
                for item in shown["items"][:2]:  # of the third nothing is known
                    watched = round(float(generator.uniform(0, 10)), 2)
                    outcomes.append({"item_id": item["item_id"], "watch_time": watched, "duration": 10.0})
                    history.append(event(1, watch_time=watched) | {"item_id": item["item_id"]})
                feedback = {"request_id": shown["request_id"], "outcomes": outcomes}
                assert (await post("/v1/feedback", json=feedback)).status_code == 200

    answers(bundle.root, calls, log=tmp_path / "log", sync=False)
    settle(tmp_path / "log")
    data = recpo.prepare(tmp_path / "log", tmp_path / "prepared", split=recpo.LeaveLastOut())
    counts = data.manifest["counts"]
    assert counts["read"] == 20 * 5 * 3
    assert counts["neutralized"]["watch_time: missing"] == 20 * 5
    assert not any("propensity" in reason for reason in counts["neutralized"])
    log = pq.read_table(tmp_path / "log").to_pandas()
    assert log.groupby("request_id").size().tolist() == [3] * 100
    np.testing.assert_allclose(log["propensity"], 1 / 3)

"""The server as a process: started, queried, swapped, stopped and killed."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.cli.main import main
from recpo.server.impressions import settle
from recpo.server.processes import begin_no_connections
from recpo.serving.bundle import Bundle
from tests.refusals import refused
from tests.server.conftest import post, process, request


def acknowledged(url, stop, found, client_id):
    """Asks until the server is gone; keeps what was answered."""
    with httpx.Client(base_url=url, timeout=60, verify=False) as client:
        while not stop.is_set():
            try:
                answer = client.post("/v1/recommend", json=request(client_id))
            except httpx.TransportError:
                return
            found.append(answer)


def load(url, clients=4):
    """Clients in threads, what they were answered, and how to stop them."""
    stop, found = threading.Event(), []
    threads = [threading.Thread(target=acknowledged, args=(url, stop, found, one)) for one in range(clients)]
    for thread in threads:
        thread.start()

    def ended():
        stop.set()
        for thread in threads:
            thread.join(60)
        return found

    return found, ended


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_a_server_answers_logs_swaps_and_stops(versions, bundles, tmp_path):
    """One process from its start to its end: SIGHUP swaps, SIGTERM ends with what was asked answered and published."""
    log, keys = tmp_path / "log", tmp_path / "keys"
    keys.write_text("the-key-of-an-operator\n")
    flags = ["--log", log, "--publish_on_stop", "true", "--admin_keys", keys, "--name", "films"]
    with process(versions, *flags) as server:
        shown = post(f"{server.url}/v1/recommend", json=request()).json()
        assert (shown["bundle"], shown["version"]) == ("films", "10")
        items = [(item["item_id"], item["score"]) for item in shown["items"]]
        assert items == Bundle.open(bundles[1]).recommend_one(request()["history"], 5)
        outcome = {"item_id": items[0][0], "watch_time": 6.0, "duration": 9.0}
        feedback = {"request_id": shown["request_id"], "outcomes": [outcome]}
        assert post(f"{server.url}/v1/feedback", json=feedback).json() == {"accepted": 1}
        found, ended = load(server.url, 3)
        operator = {"Authorization": "Bearer the-key-of-an-operator"}
        swap = post(f"{server.url}/v1/admin/swap", json={"version": "9"}, headers=operator)
        assert swap.json()["version"] == "9"
        wait_for(lambda: any(answer.json().get("version") == "9" for answer in list(found)))
        server.process.send_signal(signal.SIGHUP)  # the newest again
        count = len(found)
        wait_for(lambda: any(answer.json().get("version") == "10" for answer in list(found)[count:]))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        answered = ended()
    assert {answer.status_code for answer in answered} == {200}
    rows = pq.read_table(log).to_pylist()
    logged = {row["request_id"] for row in rows}
    assert len(logged) == len(answered) + 1
    assert [row["watch_time"] for row in rows if row["watch_time"] is not None] == [6.0]
    assert [line["message"] for line in server.lines if line["level"] == "error"] == []
    requests = [line for line in server.lines if line["message"] == "request"]
    assert {"x_request_id", "method", "path", "status", "ms"} <= set(requests[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_connections_that_began_arrive_and_no_others_begin():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as early,
    ):
        begin_no_connections(listening)
        with pytest.raises(TimeoutError):
            socket.create_connection(listening.getsockname(), timeout=0.3)
        early.sendall(b"asked")
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(9) == b"asked"
            accepted.sendall(b"answered")
        assert early.recv(9) == b"answered"


@pytest.mark.slow
def test_faults_of_the_start_are_one_message(bundles, tmp_path, capsys):
    def message(*flags):
        assert main(["serve", *map(str, flags)]) == 1  # a traceback would be an exception here
        return capsys.readouterr().err

    assert "no such directory" in message("--bundle", tmp_path / "absent")
    assert "port must be at most 65535" in message("--bundle", bundles[0], "--port", 70000)


def test_python_says_what_is_missing(bundles, monkeypatch):
    from recpo.verbs import serve

    monkeypatch.setattr(serve, "_NEEDED", ("fastapi", "a_package_that_nobody_has"))
    with refused("not_installed", "a_package_that_nobody_has"):
        recpo.serve(bundles[0])
    with refused("out_of_range", "max_batch"):
        recpo.serve(bundles[0], max_batch=0)


def test_the_options_need_no_package_of_the_server(bundles):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('fastapi', 'uvicorn', 'prometheus_client', 'torch')))\n"
        "from recpo.cli.main import main; sys.exit(main(['serve', '--help']))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_server_process_does_not_import_torch(bundles):
    code = (
        "import sys; from pathlib import Path; from recpo.server.app import create_app\n"
        "from recpo.server.service import Service; from recpo.server.options import ServerOptions\n"
        f"create_app(Service(Path({str(bundles[0])!r}), ServerOptions()))\n"
        "print({'torch', 'lightning', 'ibis'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "answers"), [(1, 90), (2, 125)])
def test_every_acknowledged_impression_survives_a_kill(bundles, tmp_path, workers, answers):
    log = tmp_path / "log"
    with process(bundles[0], "--log", log, "--workers", workers, "--rotate_mb", 0.01) as server:
        found, ended = load(server.url)
        wait_for(lambda: len(found) > answers)
        parent = server.process.pid
        children = subprocess.run(
            ["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False
        ).stdout.split()
        for pid in (parent, *map(int, children)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        server.process.wait()
        answered = ended()
    time.sleep(0.2)
    settle(log)
    rows = pq.read_table(log).to_pylist()
    items = {}
    for row in rows:
        items.setdefault((row["user_id"], row["request_id"]), []).append(row["item_id"])
    assert len({request_id for _, request_id in items}) == len(items)
    shown = [[item["item_id"] for item in answer.json()["items"]] for answer in answered if answer.status_code == 200]
    assert len(shown) >= 50
    assert len(items) >= len(shown)
    assert len(items) <= len(shown) + 4  # at most one that was not acknowledged for each client
    assert all(len(listed) == 5 for listed in items.values())  # whole slates
    recpo.prepare(log, tmp_path / "prepared", split=recpo.LeaveLastOut())


@pytest.mark.slow
def test_six_swaps_and_a_rollback_with_two_workers_lose_nothing(versions, bundles, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("the-key-of-an-operator\n")
    body, expected = request(), {}
    for path, version in zip(bundles, ("9", "10"), strict=True):
        expected[version] = [item for item, _ in Bundle.open(path).recommend_one(body["history"], 5)]
    with process(versions, "--workers", 2, "--admin_keys", keys, "--log", tmp_path / "log") as server:
        found, ended = load(server.url, 2)
        operator = {"Authorization": "Bearer the-key-of-an-operator"}
        for number in range(6):
            wanted = {"version": ("9", "10")[number % 2]}
            answer = post(f"{server.url}/v1/admin/swap", json=wanted, headers=operator)
            assert answer.status_code == 200, answer.text
            count = len(found)
            wait_for(lambda more=count + 20: len(found) > more)
        assert post(f"{server.url}/v1/admin/rollback", headers=operator).json()["version"] == "9"

        def late():
            asked = (post(f"{server.url}/v1/recommend", json=body) for _ in range(20))
            return {answer.json()["version"] for answer in asked}

        wait_for(lambda: late() == {"9"})  # both workers follow
        answered = ended()
    assert {answer.status_code for answer in answered} == {200}
    served = [answer.json() for answer in answered]
    assert {answer["version"] for answer in served} == {"9", "10"}
    assert all([i["item_id"] for i in answer["items"]] == expected[answer["version"]] for answer in served)


@pytest.mark.slow
def test_a_dead_worker_is_replaced_and_the_others_continue(bundles, tmp_path):
    with process(bundles[0], "--workers", 2, "--log", tmp_path / "log") as server:
        wait_for(lambda: sum(line["message"] == "serving" for line in server.lines) == 2)  # the victim among them
        children = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True)
        victim = next(
            int(pid) for pid in children.stdout.split() if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: any("another one takes its place" in line["message"] for line in server.lines))
        wait_for(lambda: sum(line["message"] == "serving" for line in server.lines) == 3)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            url = f"{server.url}/v1/recommend"
            asked = [pool.submit(post, url, json=request()) for _ in range(40)]
            assert {answer.result().status_code for answer in asked} == {200}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    settle(tmp_path / "log")
    assert len(pq.read_table(tmp_path / "log")) == 200


def until_refused(url, keeps_its_connection, found):
    """Asks 500 times, or until nobody listens any more. Keeps statuses and faults."""
    with httpx.Client(base_url=url, timeout=60, verify=False) as client:
        for _ in range(500):
            headers = {} if keeps_its_connection else {"Connection": "close"}
            try:
                found.append(client.post("/v1/recommend", json=request(), headers=headers).status_code)
            except httpx.ConnectError:  # refused, or reset in the queue of the last process: nothing was sent
                return
            except httpx.TransportError as error:
                found.append(repr(error))
                return
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_stopping_resets_no_connection(bundles, tmp_path, workers):
    """Whatever was accepted is answered and logged; then connections are refused."""
    found = []
    log = tmp_path / "log"
    with process(bundles[0], "--workers", workers, "--log", log, "--publish_on_stop", "true") as server:
        wait_for(lambda: sum(line["message"] == "serving" for line in server.lines) == workers)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for number in range(8):
                pool.submit(until_refused, server.url, number % 2, found)
            wait_for(lambda: len(found) >= 70)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
    assert set(found) == {200}
    assert len(pq.read_table(log)) == 5 * len(found)


@pytest.mark.slow
def test_draining_answers_what_arrives_until_it_is_over(bundles):
    with process(bundles[0], "--drain_s", 8) as server:
        with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get("/v2/health/ready").status_code == 503)
            assert client.get("/v2/health/live").status_code == 200
            answer = client.post("/v1/recommend", json=request())
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")  # the next one goes elsewhere
        assert server.process.wait(60) == 0

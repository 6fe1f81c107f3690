"""Latency of ``recpo serve`` under load, against a plain FastAPI handler, the eager policy and LitServe, in one run.

Every contender answers the same requests (raw events of 50 items, k = 10) over HTTP on this machine, in a process of
its own; the clients run in another one, each on a connection of its own, the next request as soon as the answer comes.

- ``recpo``: ``recpo serve``, one worker; ``recpo, logging`` also writes every impression to disk before it answers.
- ``plain``: the shortest FastAPI handler over the same program in ONNX Runtime: a dictionary of ids, the cutoffs of the
  feedback, no validation, no batches, no metrics, no log.
- ``one by one``: a FastAPI handler that calls ``Bundle.recommend_one``.
- ``eager``: the handler of ``one by one`` over the torch engine, the policy itself.
- ``litserve``: LitServe with batches of the same size over the same function as ``recpo``, where it is installed.

Prints a JSON line for each number of items, contender and number of clients: p50 and p99 in milliseconds, requests per
second, ``cpu_ms`` (processor time of the server for a request, all its processes; it says the most on a machine that
others use as well), ``cpu_of_plain`` (that divided by the one of ``plain``), and a line for each number of items
with what one request costs below HTTP: reading the history, the session alone, and one pass over the item table at the
machine's bandwidth (a product of table and vector).

    python benchmarks/serving.py                      10^4 and 10^5 items; some ten minutes
    python benchmarks/serving.py --items 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np

HISTORY, K, DIM, MAX_BATCH, BODIES = 50, 10, 64, 32, 64
CLIENTS = (1, 16, 128)
CONTENDERS = ("recpo", "recpo, logging", "plain", "one by one", "eager", "litserve")
LITSERVE = Path(__file__).parent / "peers" / "litserve_server.py"
FIRST_MS = 1_700_000_000_000


def make_bundle(items: int, out: Path) -> None:
    """A bundle of an untrained policy: what it lists is meaningless, what it costs is not."""
    import pyarrow as pa
    import torch

    from recpo.base.feedback import FeedbackDefinition
    from recpo.log.id_map import IdMap
    from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
    from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle

    torch.manual_seed(0)
    options = {"dim": DIM, "max_history": HISTORY}
    feedback = FeedbackDefinition(cutoffs={3: tuple(np.linspace(0.5, 7.5, 15))})
    ids = IdMap(pa.array(np.arange(items, dtype=np.int64) + 10**6))
    export_bundle(
        CatalogSoftmaxPolicy(items, **options), ids, PolicyFacts(feedback, options=options), out, BundleOptions(k=100)
    )


def bodies(items: int) -> list[bytes]:
    generator = np.random.default_rng(0)
    made = []
    for user in range(BODIES):
        chosen = generator.integers(0, items, HISTORY) + 10**6
        watched = generator.uniform(0, 8, HISTORY).round(2)
        history = [
            {"item_id": int(item), "timestamp": FIRST_MS + place * 1000, "watch_time": float(w), "duration": 10.0}
            for place, (item, w) in enumerate(zip(chosen, watched, strict=True))
        ]
        made.append(json.dumps({"user_id": user, "history": history, "k": K}).encode())
    return made


# --- servers ---------------------------------------------------------------------------------------------------------


def serve_plain(bundle: str, port: int) -> None:
    """What a team writes in an hour: nothing of recpo, nothing is checked."""
    import math

    import onnxruntime
    import pyarrow.parquet as pq

    root = Path(bundle)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1  # as recpo for a small program; the default costs twice the processor time
    session = onnxruntime.InferenceSession(str(root / "model.onnx"), settings, providers=["CPUExecutionProvider"])
    external = pq.read_table(root / "items.parquet")["item_id"].to_pylist()
    internal = {item: place for place, item in enumerate(external, 1)}
    manifest = json.loads((root / "manifest.json").read_text())
    cutoffs = {int(bucket): limits for bucket, limits in manifest["feedback"]["cutoffs"].items()}

    def level(event: dict) -> int:
        if event.get("dislike"):
            return 1
        limits = cutoffs.get(math.floor(math.log2(event["duration"] + 1e-6)))
        return 0 if limits is None else 2 + sum(event["watch_time"] > limit for limit in limits)

    def recommend(body: dict) -> dict:
        events = sorted(body["history"], key=lambda event: event["timestamp"])[-HISTORY:]
        item_ids, feedback = np.zeros((1, HISTORY), np.int64), np.zeros((1, HISTORY), np.int64)
        item_ids[0, : len(events)] = [internal[event["item_id"]] for event in events]
        feedback[0, : len(events)] = [level(event) for event in events]
        inputs = {"item_ids": item_ids, "feedback": feedback, "exclude": np.zeros((1, 1), np.int64)}
        top_items, scores = session.run(["top_items", "scores"], inputs)
        listed = zip(top_items[0, : body["k"]].tolist(), scores[0].tolist(), strict=False)
        return {"items": [{"item_id": external[item - 1], "score": score} for item, score in listed]}

    serve(recommend, port)


def serve_one_by_one(bundle: str, engine: str, port: int) -> None:
    from recpo.serving.bundle import Bundle

    loaded = Bundle.open(bundle, engine)  # type: ignore[arg-type]

    def recommend(body: dict) -> dict:
        listed = loaded.recommend_one(body["history"], body["k"])
        return {"items": [{"item_id": item, "score": score} for item, score in listed]}

    serve(recommend, port)


def serve(recommend: Callable[[dict], dict], port: int) -> None:
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()

    @app.get("/v2/health/ready")
    def ready() -> dict:
        return {}

    @app.post("/v1/recommend")
    async def answer(body: dict) -> dict:
        return recommend(body)

    uvicorn.run(app, port=port, log_level="error", access_log=False)


def command(contender: str, bundle: Path, port: int, work: Path) -> list[str]:
    if contender.startswith("recpo"):
        log = ["--log", str(work / f"log-{port}")] if "logging" in contender else []
        verb = [sys.executable, "-m", "recpo.cli.main", "serve", "--bundle", str(bundle)]
        return [*verb, "--port", str(port), "--max_batch", str(MAX_BATCH), *log]
    if contender == "litserve":
        return [sys.executable, str(LITSERVE), str(bundle), str(port), str(MAX_BATCH)]
    return [sys.executable, __file__, "--serve", contender, "--bundle", str(bundle), "--port", str(port)]


@contextmanager
def server(contender: str, bundle: Path, work: Path):
    """The port and the process group of a contender that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = work / "errors.txt"
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            command(contender, bundle, port, work), stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            until = time.monotonic() + 300
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{contender} did not start: {errors.read_text()[-2000:]}")
                time.sleep(0.1)
            yield port, process.pid
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def cpu_seconds(group: int) -> float:
    """Processor time of all processes of a group so far."""
    ticks = 0
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(200)
    except OSError:
        return False


# --- clients ---------------------------------------------------------------------------------------------------------


async def client(
    port: int, requests: list[bytes], times: tuple[float, float], latencies: list[tuple[float, float]], first: int
) -> int:
    """Asks until the second of two times, and at least once after the first; the number of answers that are not 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    failed, place, begun = 0, first, -math.inf
    while begun < times[0] or time.perf_counter() < times[1]:
        begun = time.perf_counter()
        writer.write(requests[place % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        latencies.append((begun, time.perf_counter() - begun))
        failed += not head.startswith(b"HTTP/1.1 200")
        place += 1
    writer.close()
    return failed


async def load(port: int, clients: int, seconds: float, warm: float, contents: list[bytes]) -> dict[str, float]:
    head = "POST /v1/recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    requests = [f"{head}{len(content)}\r\n\r\n".encode() + content for content in contents]
    latencies: list[tuple[float, float]] = []
    begun = time.perf_counter()
    times = begun + warm, begun + warm + seconds
    failed = sum(await asyncio.gather(*(client(port, requests, times, latencies, i) for i in range(clients))))
    counted = np.array([latency for start, latency in latencies if start >= begun + warm]) * 1000
    p50, p99 = np.percentile(counted, (50, 99))
    measured = time.perf_counter() - begun - warm
    return {
        "asked": len(latencies),
        "requests": len(counted),
        "failed": failed,
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "per_s": round(len(counted) / measured, 1),
    }


def loaded(port: int, clients: int, seconds: float, warm: float, items: int) -> dict[str, float]:
    """``load`` in a process of its own."""
    flags = {"--load": port, "--clients": clients, "--seconds": seconds, "--warm": warm, "--items": items}
    arguments = [str(text) for pair in flags.items() for text in pair]
    result = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr)
    found: dict[str, float] = json.loads(result.stdout)
    return found


# --- below HTTP ------------------------------------------------------------------------------------------------------


def below_http(items: int, bundle: Path, repeats: int) -> dict[str, float]:
    from recpo.serving.bundle import Bundle
    from recpo.serving.histories import Request

    opened = Bundle.open(bundle)
    request = json.loads(bodies(items)[0])
    past = Request(request["history"])
    inputs = opened.reader.read_request(past)
    table, vector = np.ones((items, DIM), np.float32), np.ones(DIM, np.float32)
    parts = {
        "read_ms": lambda: opened.reader.read_request(past),
        "session_ms": lambda: opened.runtime.recommend(inputs, K),
        "table_pass_ms": lambda: table @ vector,
    }
    found = {}
    for name, part in parts.items():
        part()
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            part()
            times.append(time.perf_counter() - begun)
        found[name] = round(float(np.median(times)) * 1000, 3)
    return found


def measure(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    sizes = arguments.items or ([1000] if quick else [10**4, 10**5])
    seconds, warm = (0.5, 0.2) if quick else (arguments.seconds, arguments.warm)
    clients = (2,) if quick else CLIENTS
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for items in sizes:
            bundle = work / f"bundle-{items}"
            make_bundle(items, bundle)
            print(json.dumps({"items": items, **below_http(items, bundle, 5 if quick else 30)}), flush=True)
            found: dict[tuple[str, int], dict[str, float]] = {}
            for contender in arguments.contenders:
                if contender == "litserve" and importlib.util.find_spec("litserve") is None:
                    print(json.dumps({"items": items, "contender": contender, "skipped": "not installed"}), flush=True)
                    continue
                with server(contender, bundle, work) as (port, group):
                    for number in clients:
                        before = cpu_seconds(group)
                        line = loaded(port, number, seconds, warm, items)
                        line["cpu_ms"] = round((cpu_seconds(group) - before) / line.pop("asked") * 1000, 2)
                        found[contender, number] = line
            for (contender, number), line in found.items():
                entry = {"items": items, "contender": contender, "clients": number, **line}
                if ("plain", number) in found:
                    entry["cpu_of_plain"] = round(line["cpu_ms"] / found["plain", number]["cpu_ms"], 2)
                print(json.dumps(entry), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--items", type=int, nargs="*")
    parser.add_argument("--contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm", type=float, default=1.5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--bundle", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve == "plain":
        serve_plain(arguments.bundle, arguments.port)
    elif arguments.serve:
        serve_one_by_one(arguments.bundle, "torch" if arguments.serve == "eager" else "onnx", arguments.port)
    elif arguments.load:
        contents = bodies(arguments.items[0])
        found = asyncio.run(load(arguments.load, arguments.clients, arguments.seconds, arguments.warm, contents))
        print(json.dumps(found))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()

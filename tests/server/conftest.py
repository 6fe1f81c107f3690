from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from recpo.log.id_map import IdMap
from recpo.server.app import create_app
from recpo.server.options import ServerOptions
from recpo.server.service import Service
from recpo.serving.bundle import Bundle, write_golden
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.manifest import ITEMS, BundleManifest
from tests.serving.conftest import FEEDBACK, NUM_ITEMS, K, item_ids, make_policy

FIRST_MS = 1_700_000_000_000
#: A new connection each, without certificates: no server of the tests has one, and reading the system's takes 50 ms.
get, post = (partial(call, timeout=60, verify=False) for call in (httpx.get, httpx.post))


@pytest.fixture(scope="session")
def bundles(tmp_path_factory):
    """Two bundles of one catalog that rank it differently."""
    root = tmp_path_factory.mktemp("bundles")
    policy, options = make_policy("sasrec")
    export_bundle(policy, item_ids(), PolicyFacts(FEEDBACK, options=options), root / "v1", BundleOptions(k=K))
    shutil.copytree(root / "v1", root / "v2")
    manifest = BundleManifest.open(root / "v2")
    IdMap(item_ids().to_external(range(NUM_ITEMS, 0, -1))).save(root / "v2" / ITEMS)  # the same program, other items
    reverse = Bundle(root / "v2", manifest, IdMap.load(root / "v2" / ITEMS), Bundle.open(root / "v1").runtime)
    write_golden(reverse)
    manifest.write(root / "v2")
    return root / "v1", root / "v2"


@pytest.fixture(scope="session")
def bundle(bundles):
    return Bundle.open(bundles[0])


@pytest.fixture
def versions(bundles, tmp_path):
    """A directory of versions: 9 and 10 (the newest)."""
    root = tmp_path / "versions"
    for path, name in zip(bundles, ("9", "10"), strict=True):
        shutil.copytree(path, root / name)
    return root


@asynccontextmanager
async def serving(path, **options):
    """A worker without a process: ``client`` and ``service``. Requests do not time out on a busy machine."""
    service = Service(path, ServerOptions(**{"timeout_s": 60.0} | options))
    app = create_app(service)
    service.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield SimpleNamespace(client=client, service=service, app=app)
    await service.stop()


def answers(path, calls, **options):
    """Runs ``await calls(server)`` against a worker of its own."""

    async def run():
        async with serving(path, **options) as server:
            return await calls(server)

    return asyncio.run(run())


def event(number, *, watch_time=5.0, **more):
    return {
        "item_id": f"item-{number}",
        "timestamp": FIRST_MS + number * 60_000,
        "watch_time": watch_time,
        "duration": 10.0,
        **more,
    }


def request(user=1, items=(3, 7, 30), **more):
    return {"user_id": user, "history": [event(item) for item in items], "k": 5, **more}


@contextmanager
def process(bundle, *flags, program=(sys.executable, "-m", "recpo.cli.main"), environment=None):
    """A server in a process of its own: ``url``, ``process``, ``lines`` of its log."""
    command = [
        *map(str, program),
        "serve",
        *([] if bundle is None else ["--bundle", str(bundle)]),
        "--port",
        "0",
        *([] if "--timeout_s" in flags else ["--timeout_s", "60"]),
        *map(str, flags),
    ]
    environment = (os.environ if environment is None else environment) | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    found = SimpleNamespace(process=server, lines=[], url=None)

    def read():
        for line in server.stderr:
            found.lines.append(json.loads(line) if line.startswith("{") else {"message": line})

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        until = time.monotonic() + 60
        while found.url is None:
            found.url = next((line["address"] for line in found.lines if "address" in line), None)
            assert server.poll() is None, found.lines
            assert time.monotonic() < until, found.lines
            time.sleep(0.02)
        while True:
            try:
                if get(f"{found.url}/v2/health/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.02)
        yield found
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        reader.join(5)

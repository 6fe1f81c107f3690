"""Shared settings of the tests."""

import gc
import json
import os
import re
import signal
import time
from copy import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from threadpoolctl import threadpool_limits

from recpo.artifacts.checksums import seal
from tests.sharding.ranks import Ranks

ROOT = Path(__file__).parents[1]
# The same examples in every run: a change fails for what it changed. `--hypothesis-profile drawn` draws others.
settings.register_profile("recpo", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("drawn", deadline=None, max_examples=400)
settings.load_profile("recpo")
# the suite runs on shared two-core machines: more threads than cores per worker only get in each other's way
THREADS = max(1, (os.cpu_count() or 1) // max(1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
torch.set_num_threads(THREADS)
threadpool_limits(THREADS, "blas")  # of NumPy and SciPy
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the processes that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell did that: what tests start would, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def resealed(content):
    """A sealed document that a test has changed, with the checksum of its values."""
    return seal({name: value for name, value in content.items() if name != "sha256"})


def example_program(environment, name):
    """A program of an environment of the examples. ``EXAMPLES_WITHIN``: seconds that it may still take to be made."""
    root, until = ROOT / f".venv-{environment}", time.monotonic() + float(os.environ.get("EXAMPLES_WITHIN", "0"))
    while not (root / ".installed").is_file():
        if time.monotonic() >= until:
            pytest.skip(f"{environment} is not installed (make examples)")
        time.sleep(1)
    return root / "bin" / name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file with a fixture for all its tests runs in one process, which makes it once; other tests where it fits."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFixture(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if has_fixture(config.rootpath / file) else nodeid

    return ByFixture(config, log)


@cache
def has_fixture(file):
    return re.search(r'scope="module"|def test_\w+\([^)]*\btwo\b', file.read_text(encoding="utf-8")) is not None


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not a keyword: the checkout may lie in a folder of that name
            item.add_marker(skip)


def pytest_collection_finish():
    gc.freeze()  # what was imported stays: no collection of garbage needs to look through it again


def pytest_unconfigure():
    gc.unfreeze()  # or extensions report leaks at the end


@pytest.fixture(scope="session", autouse=True)
def registry_of_onnx():
    """Copies of one registry for all exports to ONNX: torch makes a new one for each, an eighth of the time of it."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = cache(ONNXRegistry.from_torchlib)

    def copied(**options):
        one = copy(made(**options))
        one.functions = {name: [*translations] for name, translations in one.functions.items()}
        return one

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield


@pytest.fixture(scope="session", autouse=True)
def types_of_onnx():
    """Torch's search for mixed types of numbers takes what a trace computed instead of computing it again.

    The same nodes are changed; computing the others again is a third of an export. Processes that tests start do that.
    """
    from torch.onnx._internal.fx.passes import type_promotion

    interpreter = type_promotion._TypePromotionInterpreter
    run_node = interpreter.run_node

    def known(self, node):
        if node.op != "call_function" or "val" not in node.meta:
            return run_node(self, node)
        with self._set_current_node(node):
            if rule := type_promotion.get_type_promotion_rule(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        return node.meta["val"]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "run_node", known)
        yield


@pytest.fixture
def pretrained_alone(monkeypatch):
    """Fits train one policy."""
    from recpo.training.recipes import recipes_of
    from recpo.verbs.fit import Fit

    monkeypatch.setattr(Fit, "_recipes", staticmethod(lambda road: recipes_of(["pretrain"])))


@pytest.fixture(scope="module")
def two():
    """Two ranks. Not for the whole session: every group that a test makes in them wakes up a hundred times a second."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A small simulated log: ``log/`` and ``truth/``."""
    from recpo.verbs.simulate import simulate

    out = tmp_path_factory.mktemp("world") / "simulated"
    simulate(out, users=80, items=60, events=5000, days=10)
    return out


@pytest.fixture(scope="session")
def prepared(world, tmp_path_factory):
    """The small log, prepared."""
    from recpo.verbs.prepare import prepare

    out = tmp_path_factory.mktemp("prepared") / "prepared"
    prepare(str(world / "log"), out)
    return out


@pytest.fixture(scope="session")
def data(prepared):
    """The prepared small log, opened."""
    from recpo.log.prepared import Prepared

    return Prepared.open(prepared)


@pytest.fixture(scope="session")
def factors(data):
    """A factor model of the small log."""
    from recpo.rewards.graded import FactorOptions
    from recpo.rewards.selection import fit_factors

    return fit_factors(data, FactorOptions(method="als", ranks=(3,), ridges=(2.0,), sweeps=3))


@pytest.fixture(scope="session")
def rewritten():
    """A function that makes the manifest of a prepared directory, whose files a test has changed, fit them again."""
    from recpo.log.prepared import MANIFEST
    from recpo.log.writing import write_manifest

    def rewrite(prepared, **changes):
        manifest = json.loads((prepared / MANIFEST).read_text()) | changes
        del manifest["sha256"]
        for shard in (shard for period in manifest["shards"].values() for shard in period):
            del shard["sha256"]
        write_manifest(prepared, manifest)

    return rewrite

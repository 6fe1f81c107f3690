"""``recpo doctor``: reports which libraries are installed and whether they work."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rich.table import Table

from recpo import __version__
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_doctor
from recpo.errors import RecpoError

_TIMEOUT_SECONDS = 120


class _Part(NamedTuple):
    """A library: the distributions that may provide it, a program that fails unless it works, whether it is needed."""

    name: str
    distributions: tuple[str, ...]
    program: str
    is_core: bool


class _Finding(NamedTuple):
    part: _Part
    version: str | None
    works: bool
    words: str


_ONNX_PROGRAM = """
import onnxruntime
print(", ".join(name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()))
"""
_IBIS_PROGRAM = "import ibis; ibis.duckdb.connect().raw_sql('select 1')"
_FBGEMM_PROGRAM = "import torch, fbgemm_gpu; torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2).long())"
_SPARK_PROGRAM = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
assert spark.range(3).count() == 3
print("Java", spark._jvm.System.getProperty("java.version"))
"""
_CUDA_PROGRAM = """
import torch
assert torch.cuda.is_available(), "no device: everything runs on the CPU"
print(", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))
"""
_PARTS = (
    _Part("torch", ("torch",), "import torch; torch.ones(2).sum()", True),
    _Part("lightning", ("lightning",), "import lightning.pytorch", True),
    _Part("ibis", ("ibis-framework",), _IBIS_PROGRAM, True),
    _Part("duckdb", ("duckdb",), "import duckdb; duckdb.sql('select 1').fetchall()", True),
    _Part("onnxruntime", ("onnxruntime", "onnxruntime-gpu"), _ONNX_PROGRAM, True),
    _Part("fbgemm", ("fbgemm-gpu-cpu", "fbgemm-gpu"), _FBGEMM_PROGRAM, False),
    _Part("torchrec", ("torchrec",), "import torchrec", False),
    _Part("spark", ("pyspark",), _SPARK_PROGRAM, False),
    _Part("CUDA", (), _CUDA_PROGRAM, False),
)


def doctor() -> VerbResult:
    """Prints versions and checks that torch, lightning, DuckDB, ONNX Runtime, torchrec, fbgemm, Spark and CUDA load.

    Each library is tried in a separate process, because a broken library may crash its process. The exit status is 0
    unless a required library is broken.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        findings = list(pool.map(_examine, _PARTS))
    table = Table(title=f"recpo {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for heading in ("library", "version", "state"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        state = "works" if finding.works else ("BROKEN" if finding.part.is_core else "not usable")
        table.add_row(
            finding.part.name, finding.version or "-", f"{state}: {finding.words}" if finding.words else state
        )
    console().print(table)
    print(advice(findings))
    broken = [finding.part.name for finding in findings if finding.part.is_core and not finding.works]
    if broken:
        raise RecpoError(f"{', '.join(broken)} must work: remove .venv and install again with `make setup`")
    return after_doctor({one.part.name: {"version": one.version, "works": one.works} for one in findings})


def advice(findings: list[_Finding]) -> str:
    """Advice for optional libraries that do not work."""
    by_name = {finding.part.name: finding for finding in findings}
    fbgemm, torchrec = by_name["fbgemm"], by_name["torchrec"]
    if fbgemm.works and torchrec.works:
        return "Sharded embedding tables (torchrec) can be used."
    if fbgemm.version is None and torchrec.version is None:
        return "torchrec is not installed: only sharded embedding tables need it (requirements/cpu.lock or gpu.lock)."
    words = fbgemm.words + torchrec.words
    if "libnvidia-ml" in words or "libcuda" in words or "Could not load this library" in words:
        return (
            "fbgemm is a CUDA build and this machine has no NVIDIA driver: torchrec cannot be imported. Fix it with\n"
            "    pip uninstall fbgemm-gpu fbgemm-gpu-cpu\n"
            "    pip install ./requirements/shim-fbgemm-gpu -r requirements/cpu.lock\n"
            "Everything else in recpo works without it."
        )
    return (
        "torchrec or fbgemm does not load. fbgemm is built for one torch version: install the three together from\n"
        "requirements/cpu.lock or requirements/gpu.lock. Everything else in recpo works without them."
    )


def _examine(part: _Part) -> _Finding:
    version = _version(part)
    if part.distributions and version is None:
        return _Finding(part, None, False, "not installed")
    command = [sys.executable, "-W", "ignore", "-c", part.program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return _Finding(part, version, False, f"no answer within {_TIMEOUT_SECONDS} s")
    if done.returncode == 0:
        return _Finding(part, version, True, done.stdout.strip())
    reason = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    return _Finding(part, version, False, reason.removeprefix("AssertionError: "))


def _version(part: _Part) -> str | None:
    for distribution in part.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

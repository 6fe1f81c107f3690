"""The verb ``doctor``: reports which libraries are installed and whether they work."""

import importlib.metadata
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from recpo.verbs.verb import Verb

_TIMEOUT_SECONDS = 120


class Part(NamedTuple):
    """A library: the distributions that may provide it, a program that fails unless it works, whether it is needed."""

    name: str
    distributions: tuple[str, ...]
    program: str
    is_core: bool


class Finding(NamedTuple):
    """A library as it is here: its version, whether it works, and what it said."""

    part: Part
    version: str | None
    works: bool
    words: str


_TORCH_PROGRAM = """
import os, torch
torch.ones(2).sum()
waiting = "waiting passively" if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" else "spinning as they wait"
print(f"threads: {torch.get_num_threads()}, {waiting}")
"""
_ONNX_PROGRAM = """
import onnxruntime
print(", ".join(name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()))
"""
_IBIS_PROGRAM = "import ibis; ibis.duckdb.connect().raw_sql('select 1')"
_FBGEMM_PROGRAM = "import torch, fbgemm_gpu; torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2).long())"
_SPARK_PROGRAM = """
import os
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")  # it ends before more would pay
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
# Runs programs one after the other; what each said, or its error, is a line of a file. The alarm ends the process.
_RUN_ALL = """
import contextlib, io, json, signal, sys
file, seconds, programs = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
for program in programs:
    signal.alarm(seconds)
    said, works = io.StringIO(), False
    try:
        with contextlib.redirect_stdout(said):
            exec(program, {})
        works = True
    except BaseException as error:
        said = io.StringIO(str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}")
    with open(file, "a") as lines:
        lines.write(json.dumps([works, said.getvalue()]) + "\\n")
signal.alarm(0)
"""
PARTS = (
    Part("torch", ("torch",), _TORCH_PROGRAM, True),
    Part("lightning", ("lightning",), "import lightning.pytorch", True),
    Part("ibis", ("ibis-framework",), _IBIS_PROGRAM, True),
    Part("duckdb", ("duckdb",), "import duckdb; duckdb.sql('select 1').fetchall()", True),
    Part("onnxruntime", ("onnxruntime", "onnxruntime-gpu"), _ONNX_PROGRAM, True),
    Part("fbgemm", ("fbgemm-gpu-cpu", "fbgemm-gpu"), _FBGEMM_PROGRAM, False),
    Part("torchrec", ("torchrec",), "import torchrec", False),
    Part("spark", ("pyspark",), _SPARK_PROGRAM, False),
    Part("mlflow", ("mlflow", "mlflow-skinny"), "import mlflow.tracking", False),
    Part("wandb", ("wandb",), "import wandb", False),
    Part("CUDA", (), _CUDA_PROGRAM, False),
)


@dataclass(frozen=True)
class Doctor(Verb[list[Finding]]):
    """Reports versions and whether torch, lightning, DuckDB, ONNX Runtime, torchrec, fbgemm, Spark and CUDA work.

    The libraries are tried in a process of their own, because a broken one may crash it; the others are then tried in a
    new one. The exit status is 0 unless a required library is broken.
    """

    is_tracked: ClassVar = False

    def execute(self) -> list[Finding]:
        """Tries every library."""
        versions = {part.name: _version(part) for part in PARTS}
        tried = [part for part in PARTS if not part.distributions or versions[part.name] is not None]
        results: list[tuple[bool, str]] = []
        while len(results) < len(tried):
            results += _tried([part.program for part in tried[len(results) :]])
        found = dict(zip([part.name for part in tried], results, strict=True))
        missing = (False, "not installed")
        return [Finding(part, versions[part.name], *found.get(part.name, missing)) for part in PARTS]


def advice(findings: list[Finding]) -> str:
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


def _tried(programs: Sequence[str]) -> list[tuple[bool, str]]:
    """Whether each program works and what it said, up to one that ends the process."""
    with tempfile.TemporaryDirectory(prefix="recpo-doctor-") as folder:
        file = Path(folder) / "results.jsonl"
        arguments = [str(file), str(_TIMEOUT_SECONDS), json.dumps(programs)]
        command = [sys.executable, "-W", "ignore", "-c", _RUN_ALL, *arguments]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    results = [(works, _last_line(said)) for works, said in map(json.loads, lines)]
    if len(results) < len(programs):
        alarmed = done.returncode == -signal.SIGALRM
        died = _last_line(done.stderr) or f"ended with status {done.returncode}"
        results.append((False, f"no answer within {_TIMEOUT_SECONDS} s" if alarmed else died))
    return results


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _version(part: Part) -> str | None:
    for distribution in part.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

"""Kills every verb, or fills its disk, at its n-th file-system operation, and checks what is left.

::

    python -m tests.robustness.crashes --kills 200            # seed, verbs and so on: --help
    python -m tests.robustness.crashes --faults 100           # a full disk, a read-only one, an error of the device

A process that has imported everything forks a child for every trial. In it ``faults.c`` (built with the C compiler,
loaded with LD_PRELOAD, so that it sees the calls of Arrow, DuckDB, torch and Rust as well) counts the operations below
one directory and ends the process at one of them, of a write after half of its bytes.

After a kill:

- what stands under the name of the output is nothing, the whole old output or the whole new one; of
  ``train`` a run that every reader refuses as unfinished, and that goes on;
- inputs are as they were;
- the same command succeeds, its output is that of a command that was not killed, and nothing else is left beside it.

After a fault the command ended by itself with status 1 and one message, and what stood there before stands there still.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("faults.c")
KILL, NO_ROOM, READ_ONLY, TRACE = 1, 2, 3, 9
#: what is no part of an output's value: curves with times in them
_VOLATILE_FILES = ("logs/",)
_VOLATILE_KEYS = ("_per_second", "seconds")
_SECONDS = 900  # the tests run on shared machines: only what really hangs takes so long
SMALL = ["--policy.init_args.dim", "8", "--policy.init_args.layers", "1", "--policy.init_args.max_history", "12"]
SMALL += ["--data.layout.init_args.history_length", "12", "--data.max_validation_users", "16"]
SMALL += ["--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--trainer.num_sanity_val_steps", "0"]
SMALL += ["--trainer.enable_progress_bar", "false", "--data.batch_size", "32", "--allocator", "false"]


class Verb(NamedTuple):
    """A command to end: what it writes, and what makes another output that stands there before."""

    command: list[str]
    other: list[str]  # options that make the old output
    out: str = "out"
    overwrite: tuple[str, ...] = ("--overwrite", "true")
    resume: tuple[str, ...] = ()


def verbs(base: Path, place: Path, configs: Path) -> dict[str, Verb]:
    """Every verb that writes, on the tiny inputs of ``base``; outputs go to ``place``."""
    prepared, run, bundle = str(base / "prepared"), str(base / "run"), str(base / "bundle")
    out = ["--out", str(place / "out")]
    sizes = ["--users", "30", "--items", "40", "--events", "1500"]
    train = ["train", "--config", str(configs / "pretrain.yaml"), "--data.prepared", prepared, *out, *SMALL]
    ranked = ["--segments", "false", "--off_policy", "null", "--bootstrap_resamples", "5"]
    tilt = [
        "tilt",
        "--run",
        run,
        "--factors",
        str(base / "factors"),
        *out,
        "--prepared",
        prepared,
        "--temperature",
        ".5",
    ]
    return {
        "simulate": Verb(["simulate", *out, *sizes], ["--seed", "1"]),
        "prepare": Verb(
            ["prepare", "--log", str(base / "log" / "log"), *out, "--rows_per_shard", "800", "--progress", "false"],
            ["--min_user_events", "7"],
        ),
        "tokenize": Verb(["tokenize", "--prepared", prepared, *out, "--codebook_size", "8"], ["--seed", "1"]),
        "factorize": Verb(["factorize", "--prepared", prepared, *out, "--ranks", "[4]"], ["--seed", "1"]),
        "train": Verb([*train, "--checkpoint_every", "3"], ["--seed", "1"], resume=("--resume", "true")),
        "tilt": Verb(tilt, ["--temperature", "2"]),
        "calibrate": Verb(
            ["calibrate", "--rewards", str(place / "reward"), "--prepared", prepared, *out, "--resamples", "5"],
            ["--seed", "1"],
            overwrite=(),
        ),
        "evaluate": Verb(["evaluate", "--prepared", prepared, "--contenders", run, *out, *ranked], ["--ks", "[4]"]),
        "export": Verb(["export", "--run", run, *out], ["--k", "7"]),
        "recommend": Verb(
            ["recommend", "--source", bundle, "--histories", f"{prepared}/histories.parquet", *out],
            ["--k", "3"],
            overwrite=(),
        ),
        "compare": Verb(
            ["compare", "--old", bundle, "--new", bundle, "--prepared", prepared, *out, "--off_policy", "null"],
            ["--k", "3"],
        ),
    }


def build(directory: Path) -> Path:
    """The library of ``faults.c``."""
    library = directory / "faults.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


#: what the verbs read beside the log and what was prepared of it
_READS: dict[str, set[str]] = {name: set() for name in ("simulate", "prepare", "tokenize", "factorize", "train")}
_READS |= {"tilt": {"run", "factors"}, "calibrate": {"run", "reward"}, "evaluate": {"run"}, "export": {"run"}}
_READS |= {"recommend": {"bundle"}, "compare": {"bundle"}}


def make_inputs(base: Path, configs: Path, names: Sequence[str] | None = None) -> None:
    """Everything that the verbs ``names`` read; None = all of them."""
    needed = set().union(*_READS.values()) if names is None else {part for name in names for part in _READS[name]}
    log, prepared = str(base / "log"), str(base / "prepared")
    train = ["--data.prepared", prepared, *SMALL]
    _must(["simulate", "--out", log, "--users", "40", "--items", "50", "--events", "1500"])
    _must(["prepare", "--log", f"{log}/log", "--out", prepared])
    if "factors" in needed:
        _must(["factorize", "--prepared", prepared, "--out", str(base / "factors"), "--ranks", "[4]"])
    if needed & {"run", "reward", "bundle"}:
        _must(["train", "--config", str(configs / "pretrain.yaml"), *train, "--out", str(base / "run")])
    if "reward" in needed:
        reward = ["train", "--config", str(configs / "reward_model.yaml"), *train, "--out", str(base / "reward")]
        _must([*reward, "--init_from", str(base / "run")])
    if "bundle" in needed:
        _must(["export", "--run", str(base / "run"), "--out", str(base / "bundle")])


def _must(arguments: list[str]) -> None:
    if Path(arguments[arguments.index("--out") + 1]).exists():  # of an earlier campaign in the same directory
        return
    ended = run_verb(arguments)
    assert ended.status == 0, (arguments, ended.said)


class Ended(NamedTuple):
    """How a verb ended: exit status (negative: the signal), what it said, operations, and where it was hit."""

    status: int
    said: str
    operations: int
    hit: str


def run_verb(arguments: Sequence[str], root: Path | None = None, what: int = 0, at: int = 0, error: int = 0) -> Ended:
    """Runs a verb in a child of this process, armed where ``root`` is given."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as facts:
        child = os.fork()
        if not child:
            _in_child(arguments, root, (what, at, error), said.fileno(), facts.fileno())
        status = _waited(child, f"{' '.join(arguments)} (hit {at})")
        said.seek(0)
        facts.seek(0)
        lines = facts.read().decode(errors="replace").splitlines()
        counts = [int(line.split()[1]) for line in lines if line.startswith("operations ")]
        hits = [line for line in lines if not line.startswith("operations ")]
        text = said.read().decode(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), text, counts[0] if counts else 0, "\n".join(hits))


def _waited(child: int, shown: str) -> int:
    deadline = time.monotonic() + _SECONDS
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"{shown} hangs")
        time.sleep(0.005)


def _in_child(arguments: Sequence[str], root: Path | None, fault: tuple[int, int, int], said: int, facts: int) -> None:
    status = 70
    try:
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(n, "wb", 0), write_through=True) for n in (1, 2))
        from recpo.cli.main import main

        if root is None:
            status = main(list(arguments))
            return
        library, (what, at, error) = ctypes.CDLL(None), fault
        library.recpo_count.restype = ctypes.c_long
        library.recpo_arm(os.fsencode(root), what, ctypes.c_long(at), error, facts)
        status = main(list(arguments))
        os.write(facts, b"operations %d\n" % library.recpo_count())
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def value(path: Path) -> dict[str, str]:
    """What stands at a path, by file, without what differs between equal outputs (times, paths of temporary names)."""
    if path.is_file():
        return {".": _digest(path)}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    named = {file.relative_to(path).as_posix(): file for file in files}
    return {name: _digest(file) for name, file in named.items() if not name.startswith(_VOLATILE_FILES)}


def _digest(file: Path) -> str:
    if file.suffix == ".ckpt":
        import torch

        weights = torch.load(file, weights_only=True)["state_dict"]
        content = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in sorted(weights.items()))
    elif file.name == "run.json":
        facts = {name: part for name, part in json.loads(file.read_bytes()).items() if name not in ("files", "sha256")}
        facts["results"] = {n: v for n, v in facts["results"].items() if not n.startswith(("train/", "throughput/"))}
        content = json.dumps(facts, sort_keys=True).encode()
    else:
        content = file.read_bytes()
    if file.name == "resolved.yaml":  # it says whether the old output was to be replaced
        content = b"\n".join(line for line in content.splitlines() if not line.startswith(b"overwrite:"))
    return hashlib.sha256(content).hexdigest()


class Trial:
    """A verb at a place of its own.

    Args:
        name: of the verb.
        root: directory with ``base`` (inputs) and ``place``.
        configs: directory of the YAML files.
    """

    def __init__(self, name: str, root: Path, configs: Path) -> None:
        self.name, self.base, self.place = name, root / "base", root / "place"
        self.verb = verbs(self.base, self.place, configs)[name]
        self.out = self.place / self.verb.out
        self._old: Path | None = None
        self.reset()
        whole = run_verb(self.verb.command, self.place, what=KILL, at=1 << 40)
        assert whole.status == 0, (name, whole.said)
        self.operations, self.new = whole.operations, value(self.out)
        self.reset()
        self.inputs = value(self.base)

    def reset(self, old: bool = False) -> None:
        """Empties the place; with ``old`` an output with other options stands there."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        if self.name == "calibrate":
            shutil.copytree(self.base / "reward", self.place / "reward")
        if old:
            if self._old is None:
                made = run_verb([*self.verb.command, *self.verb.other])
                assert made.status == 0, made.said
                self._old = self.place.with_name(f"old-{self.name}")
                shutil.rmtree(self._old, ignore_errors=True)
                (shutil.copytree if self.out.is_dir() else shutil.copy2)(self.out, self._old)
            elif self._old.is_dir():
                shutil.copytree(self._old, self.out)
            else:
                shutil.copy2(self._old, self.out)

    def kill(self, at: int, old: bool) -> str:
        """Kills the verb at its ``at``-th operation; returns where that was, and raises where anything is wrong."""
        self.reset(old)
        before = value(self.out) if old else {}
        command = [*self.verb.command, *(self.verb.overwrite if old else ())]
        ended = run_verb(command, self.place, what=KILL, at=at)
        if ended.status == 0:
            return "finished before"
        assert ended.status == -signal.SIGKILL, ended
        self._check_left(before, ended)
        resumes = self.verb.resume and (self.out / "resolved.yaml").is_file() and not (self.out / "run.json").is_file()
        exists = self.out.exists() and bool(self.verb.overwrite)
        again = self.verb.resume if resumes else self.verb.overwrite if old or exists else ()
        finished = run_verb([*self.verb.command, *again])
        assert finished.status == 0, (ended.hit, "second run", finished.said)
        assert value(self.out) == self.new, (ended.hit, "second run differs", _changed(value(self.out), self.new))
        self._check_alone(ended)
        return ended.hit

    def _check_left(self, before: dict[str, str], ended: Ended) -> None:
        left = value(self.out) if self.out.exists() else {}
        unfinished = self.name == "train" and bool(left) and "run.json" not in left
        assert unfinished or left in ({}, before, self.new), (ended.hit, "half an output", _changed(left, self.new))
        if self.name == "train" and before and left != before and "run.json" not in left:
            aside = [value(path) for path in self.place.iterdir() if path != self.out]
            # the old run is kept until the new one has taken a step
            assert before in aside or (self.out / "checkpoints").exists() or _stepped(self.out), (ended.hit, "lost")
        assert value(self.base) == self.inputs, (ended.hit, "inputs have changed")

    def _check_alone(self, ended: Ended) -> None:
        expected = {self.out.name} | ({"reward"} if self.name == "calibrate" else set())
        if self.name in ("calibrate", "recommend"):
            expected |= {f"{self.out.stem}.resolved.yaml"}
        beside = {path.name for path in self.place.iterdir()} - expected
        assert not beside, (ended.hit, "left behind", beside)
        hidden = [path for path in self.place.rglob("*") if ".recpo-" in path.name or path.name.endswith(".partial")]
        assert not hidden, (ended.hit, "left behind", hidden)

    def fault(self, at: int, what: int, error: int, old: bool) -> str:
        """Lets the verb's operations fail from the ``at``-th one on."""
        self.reset(old)
        before, files = value(self.place), {path.name for path in self.place.iterdir()}
        command = [*self.verb.command, *(self.verb.overwrite if old else ())]
        ended = run_verb(command, self.place, what=what, at=at, error=error)
        if ended.status == 0 and not ended.hit:
            return "finished before"
        where = f"{errno.errorcode[error]} {ended.hit}"
        if ended.status == 0:  # what failed was not needed (logs, a directory that cannot be flushed)
            assert value(self.out) == self.new, (where, "succeeded with another output")
            return where
        assert ended.status == 1, (where, ended.status, ended.said[-3000:])
        lines = [line for line in ended.said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, (where, ended.said[-2000:])
        assert "Traceback" not in ended.said, (where, ended.said[-3000:])
        assert str(self.place) in lines[0] or str(self.out) in lines[0], (where, lines)
        if what == NO_ROOM and "resolved.yaml" not in value(self.out):
            assert {path.name for path in self.place.iterdir()} == files, (where, "left behind", lines)
            # of the two outputs of calibrate the first one may be there already
            changed = set(_changed(value(self.place), before)) - {"reward/calibration.json"}
            assert not changed, (where, "changed", changed, lines)
        return where + "  ->  " + lines[0]


def _stepped(out: Path) -> bool:
    """Whether a run has logged anything: then its first step is done."""
    return any((out / "logs").rglob("*")) if (out / "logs").exists() else False


def _changed(left: dict[str, str], right: dict[str, str]) -> list[str]:
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def _points(operations: int, number: int, choose: random.Random) -> list[int]:
    """Different operations of a verb, all of them where there are no more."""
    if number >= operations:
        return list(range(1, operations + 1))
    return sorted(choose.sample(range(1, operations + 1), number))


def campaign(trials: Sequence[Trial], number: int, seed: int, faults: bool) -> int:
    """Runs ``number`` trials over the verbs; prints every one and returns how many failed."""
    choose, failed, done = random.Random(seed), 0, Counter[str]()
    weights = {trial.name: _SHARES.get(trial.name, 20) for trial in trials}
    turn = int(faults)
    for trial in trials:
        name = trial.name
        share = max(1, round(number * weights[name] / sum(weights.values())))
        for at in _points(trial.operations, share, choose):
            old, turn = bool(turn % 2), turn + 1
            what, error = choose.choice(FAULTS)
            attempt: Callable[[], str] = (
                (lambda t=trial, a=at, w=what, e=error, o=old: t.fault(a, w, e, o))  # type: ignore[misc]
                if faults
                else (lambda t=trial, a=at, o=old: t.kill(a, o))  # type: ignore[misc]
            )
            try:
                print(
                    f"{name:9} {'over an old one' if old else '':15} {at}/{trial.operations}: {attempt()}", flush=True
                )
                done[name] += 1
            except AssertionError as fault:
                failed += 1
                print(f"{name} {at} FAILED (old={old}): {fault}", flush=True)
    print(f"{sum(done.values())} trials passed, {failed} failed: {dict(done)}")
    return failed


#: trials of a verb in 200 or so; others cost more time
_SHARES = {"simulate": 30, "prepare": 30, "tokenize": 25, "factorize": 25, "export": 4, "evaluate": 12, "compare": 12}
FAULTS = [(NO_ROOM, errno.ENOSPC), (NO_ROOM, errno.ENOSPC), (READ_ONLY, errno.EROFS), (NO_ROOM, errno.EACCES)]
FAULTS += [(READ_ONLY, errno.EIO), (NO_ROOM, errno.EDQUOT)]


def main() -> int:
    """Parses the options and runs a campaign; starts itself again with the library loaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--verbs", nargs="*", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="directory of the trials; kept and used again")
    given = parser.parse_args()
    configs = Path(__file__).parents[2] / "configs"
    with tempfile.TemporaryDirectory(prefix="recpo-crashes-") as temporary:
        root = Path(temporary) if given.work is None else given.work
        root = Path(os.path.realpath(root))
        root.mkdir(parents=True, exist_ok=True)
        if "RECPO_FAULTS" not in os.environ:
            environment = os.environ | {"LD_PRELOAD": str(build(root)), "RECPO_FAULTS": "1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.robustness.crashes", *sys.argv[1:]]
            return subprocess.run(command, env=environment, check=False).returncode
        import_everything()
        names = given.verbs or list(verbs(root, root, configs))
        (root / "base").mkdir(parents=True, exist_ok=True)
        make_inputs(root / "base", configs, names)
        trials = [Trial(name, root, configs) for name in names]
        failed = 0
        if given.kills:
            failed += campaign(trials, given.kills, given.seed, faults=False)
        if given.faults:
            failed += campaign(trials, given.faults, given.seed, faults=True)
    return int(failed > 0)


def import_everything() -> None:
    import importlib

    import lightning  # noqa: F401
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import torch

    from recpo.cli.main import VERBS, printer

    torch.set_num_threads(1)
    for verb in VERBS:
        if verb != "serve":
            importlib.import_module(f"recpo.verbs.{verb}")
            printer(verb, "show")


if __name__ == "__main__":
    sys.exit(main())

"""The result of a verb: the files that it wrote, its numbers, and the usual next command.

One small function for each verb; ``recpo.cli.main`` prints what they return, in words or as JSON.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recpo.verbs.verb import configurations


@dataclass(frozen=True)
class VerbResult:
    """The end of a verb.

    Attributes:
        wrote: files and directories.
        following: the usual next command; None = there is none.
        result: the main numbers, for machines.
    """

    wrote: tuple[str, ...] = ()
    following: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The last lines on a terminal."""
        wrote = [f"wrote {', '.join(self.wrote)}"] if self.wrote else []
        return wrote + ([f"next: {self.following}"] if self.following is not None else [])

    def document(self, verb: str) -> str:
        """One JSON document with the same content; nan and infinity are null."""
        content = {"verb": verb, "status": 0, "wrote": list(self.wrote), "next": self.following, **self.result}
        return json.dumps(_plain(content), ensure_ascii=False, allow_nan=False)


def failed(verb: str, status: int, message: str) -> str:
    """The JSON document of a verb that ended with an error."""
    return json.dumps({"verb": verb, "status": status, "error": message}, ensure_ascii=False)


def command(verb: str, *words: object) -> str:
    """A command line of recpo."""
    return shlex.join(["recpo", verb, *map(str, words)])


def path_of(given: object) -> str:
    """The path of an input: a directory that recpo wrote, or its path."""
    return str(getattr(given, "root", given))


def configuration(name: str, here: Path = Path()) -> str:
    """Path of an objective's configuration: the one that ``recpo init`` wrote for the log, or recpo's own."""
    return name if (here / name).is_file() else str(configurations(here) / name)


def after_simulate(root: Path, result: Mapping[str, Any]) -> VerbResult:
    """A log was simulated."""
    return VerbResult((str(root),), command("prepare", "--log", root / "log", "--out", "prepared"), result)


def after_prepare(root: object, result: Mapping[str, Any]) -> VerbResult:
    """A log was prepared."""
    config = configuration("pretrain.yaml")
    words = ("--config", config, "--data.prepared", root, "--out", "runs/pretrain")
    return VerbResult((str(root),), command("train", *words), result)


def after_extend(root: object, result: Mapping[str, Any]) -> VerbResult:
    """Prepared data was extended: the previous run continues on the newest days (docs/growth.md)."""
    newest = ("--data.segments", "newest", "--data.replay", "1.0", "--trainer.max_epochs", "2")
    words = ("--init_from", "runs/pretrain", "--data.prepared", root, *newest, "--out", "runs/extended")
    return VerbResult((str(root),), command("train", *words), result)


def after_tokenize(codes: Path, prepared: str, result: Mapping[str, Any]) -> VerbResult:
    """Items have codes."""
    config = configuration("semantic_pretrain.yaml")
    words = ("--config", config, "--data.prepared", prepared, "--policy.init_args.codes", codes)
    return VerbResult((str(codes),), command("train", *words, "--out", "runs/semantic_pretrain"), result)


def after_factorize(factors: Path, prepared: str, result: Mapping[str, Any]) -> VerbResult:
    """A factorization was fitted: the reward of MPO."""
    words = ("--config", configuration("mpo.yaml"), "--data.prepared", prepared, "--reward.init_args.factors", factors)
    return VerbResult(
        (str(factors),), command("train", *words, "--init_from", "runs/pretrain", "--out", "runs/mpo"), result
    )


def after_train(run: Path, prepared: str, result: Mapping[str, Any]) -> VerbResult:
    """A policy was trained."""
    return VerbResult((str(run),), evaluation_of(run, prepared), result)


def after_tilt(base: Path, tilted: Path | None, prepared: str, result: Mapping[str, Any]) -> VerbResult:
    """A policy was tilted; ``tilted`` is None if the untilted policy ``base`` is kept."""
    wrote = () if tilted is None else (str(tilted),)
    return VerbResult(wrote, evaluation_of(base if tilted is None else tilted, prepared), result)


def evaluation_of(run: object, prepared: str) -> str:
    """The command that evaluates a run."""
    return command("evaluate", "--prepared", prepared, "--contenders", run, "--out", "runs/evaluation")


def after_reward_model(run: Path, prepared: str, result: Mapping[str, Any]) -> VerbResult:
    """A reward model was trained."""
    return VerbResult((str(run),), command("calibrate", "--prepared", prepared, "--run", run), result)


def after_calibrate(runs: Sequence[Path], out: Path | None, prepared: str, result: Mapping[str, Any]) -> VerbResult:
    """Rewards were calibrated and compared; ``runs`` are those of learned rewards."""
    following = None
    if runs:
        reward = ("--reward", "LearnedReward", "--reward.init_args.run", runs[0])
        words = ("--config", configuration("mpo.yaml"), "--data.prepared", prepared, *reward)
        following = command("train", *words, "--init_from", "runs/pretrain", "--out", "runs/mpo")
    return VerbResult(() if out is None else (str(out),), following, result)


def after_evaluate(out: Path, best: Path | None, result: Mapping[str, Any]) -> VerbResult:
    """Contenders were evaluated; the run with the best value is exported next."""
    following = None if best is None else command("export", "--run", best, "--out", "runs/bundle")
    return VerbResult((str(out), str(out / "report.html")), following, result)


def after_export(out: Path, triton: Path | None, result: Mapping[str, Any]) -> VerbResult:
    """A bundle was written."""
    wrote = (str(out),) if triton is None else (str(out), str(triton))
    return VerbResult(wrote, command("serve", "--bundle", out), result)


def after_recommend(out: Path, bundle: Path | None, run: Path | None, result: Mapping[str, Any]) -> VerbResult:
    """Lists were written."""
    following = None  # factors and baselines are not served
    if bundle is not None:
        following = command("serve", "--bundle", bundle)
    elif run is not None:
        following = command("export", "--run", run, "--out", "runs/bundle")
    return VerbResult((str(out),), following, result)


def after_compare(new: Path, out: Path | None, result: Mapping[str, Any]) -> VerbResult:
    """The new bundle passes."""
    return VerbResult(() if out is None else (str(out),), command("serve", "--bundle", new), result)


def after_loop(out: Path, bundle: Path, result: Mapping[str, Any]) -> VerbResult:
    """The last round of a loop has ended."""
    return VerbResult((str(out), str(out / "report.html")), command("serve", "--bundle", bundle), result)


def after_plan(out: Path | None, result: Mapping[str, Any]) -> VerbResult:
    """A run was planned."""
    words = ("--config", configuration("sharded_pretrain.yaml"), "--data.prepared", "prepared", "--out", "runs/sharded")
    return VerbResult(() if out is None else (str(out),), command("train", *words), result)


def after_demo(out: Path, result: Mapping[str, Any]) -> VerbResult:
    """The demo has ended; next comes the user's own log."""
    return VerbResult((str(out),), command("init", "YOUR_LOG"), result)


def after_doctor(result: Mapping[str, Any]) -> VerbResult:
    """What is installed works."""
    return VerbResult((), command("demo"), result)


def after_init(written: Sequence[Path], commands: Sequence[str], result: Mapping[str, Any]) -> VerbResult:
    """Configurations were written."""
    return VerbResult(tuple(map(str, written)), next(iter(commands), None), result)


def _plain(value: Any) -> Any:
    """A value for JSON: paths as text, tuples as lists, nan and infinity as null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else _number(value)


def _number(value: Any) -> Any:
    """NumPy scalars become numbers; everything else becomes text."""
    return _plain(value.item()) if hasattr(value, "item") and callable(value.item) else str(value)

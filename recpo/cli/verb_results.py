"""The result of a verb: the files that it wrote, its numbers, and the usual next command.

One small function for each verb; ``recpo.cli.main`` prints what they return, in words or as JSON.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
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
    return str(given if isinstance(given, str | PathLike) else getattr(given, "root", given))


def configuration(name: str, here: Path = Path()) -> str:
    """Path of an objective's configuration: the one that ``recpo init`` wrote for the log, or recpo's own."""
    return name if (here / name).is_file() else str(configurations(here) / name)


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


def evaluation_of(run: object, prepared: str) -> str:
    """The command that evaluates a run."""
    return command("evaluate", "--prepared", prepared, "--contenders", run, "--out", "runs/evaluation")


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

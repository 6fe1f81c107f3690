"""The command line: a verb is a typed function; flags, YAML keys, types, defaults and help come from its signature.

Only the module of the verb that was asked for is imported.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from recpo import __version__
from recpo.cli.config import RESOLVED
from recpo.errors import RecpoError

VERBS = {
    "simulate": "make an interaction log whose true preferences are known",
    "prepare": "turn an interaction log into training, validation and test shards",
    "tokenize": "give every item a tuple of codes, for policies that generate items code by code",
    "train": "train or align a policy on prepared data",
    "calibrate": "turn the scores of a reward model into probabilities and judge them on later data",
    "evaluate": "rank the full catalog for held-out users and report metrics",
    "export": "write a trained policy as a bundle for serving",
    "recommend": "run a bundle over a Parquet file of histories",
    "plan": "say what training needs: memory and exchange per rank, and which rank holds what",
    "demo": "the whole road on a simulated log",
    "doctor": "say what is installed and whether it works",
}

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status (0 done, 1 the user must fix something, 2 unknown verb or option)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        print(f"recpo {__version__}   (recpo doctor: versions of everything else)")
        return 0
    verb, *options = arguments
    if verb not in VERBS:
        print(f"error: unknown verb {verb!r}\n\n{_overview()}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        run(_function(verb), options)
    except ArgumentError as error:
        print(f"error: {error}\nsee: recpo {verb} --help", file=sys.stderr)
        return 2
    except RecpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def run(function: Callable[..., None], options: Sequence[str]) -> None:
    """Parses ``options`` (flags and ``--config FILE.yaml``) for ``function`` and calls it."""
    parser = parser_of(function)
    configuration = parser.parse_args(list(options))
    configuration.pop("config", None)
    _refuse_addresses(configuration)
    token = RESOLVED.set(parser.dump(configuration, skip_unset=False))
    try:
        function(**_instantiated(parser, configuration))
    finally:
        RESOLVED.reset(token)


def _refuse_addresses(configuration: Namespace) -> None:
    """A path option that was given ``s3://...`` would make a local directory of that name."""
    for name, value in vars(configuration.as_flat()).items():
        if isinstance(value, Path) and _ADDRESS.match(str(value)):
            raise RecpoError(
                f"--{name} {value}: a local path is expected; in an object store may lie the log, what prepare writes, "
                "and the prepared directory that the other verbs read"
            )


def _instantiated(parser: ArgumentParser, configuration: Namespace) -> dict[str, Any]:
    try:
        arguments: dict[str, Any] = parser.instantiate(configuration).as_dict()
    except ValueError as error:
        if isinstance(error.__cause__, RecpoError):  # of options that may be null, the parser says why as the cause
            raise error.__cause__ from error
        raise
    return arguments


def parser_of(function: Callable[..., Any]) -> ArgumentParser:
    """The parser that a verb's signature and docstring define; abbreviations and unknown keys are refused."""
    parser = ArgumentParser(
        prog=f"recpo {function.__name__}", description=_summary(function), allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the options below.")
    parser.add_function_arguments(function, as_positional=False)
    return parser


def _function(verb: str) -> Callable[..., None]:
    function: Callable[..., None] = getattr(importlib.import_module(f"recpo.cli.{verb}"), verb)
    return function


def _summary(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").split("\n\n    Args:")[0]


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<10} {text}" for verb, text in VERBS.items())
    return (
        f"recpo {__version__}: preference optimization for recommender systems\n\n"
        f"usage: recpo VERB [options]      recpo VERB --help      recpo --version\n\n{verbs}"
    )


if __name__ == "__main__":
    sys.exit(main())

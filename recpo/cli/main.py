"""The command line. A verb is a dataclass; flags, YAML keys, types, defaults and help are made from its fields.

Only the modules of the requested verb are imported.
"""

import difflib
import functools
import importlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from recpo import __version__
from recpo.artifacts.documents import describe_os_error, validate_configuration_files
from recpo.base.errors import GateClosedError, RecpoError, first_line, range_error
from recpo.cli.output import TerminalOptions, VerbResult, printing, terminal_options
from recpo.cli.spelling import check_spelling, index
from recpo.verbs.tracking import is_first_process, run_tracked, tracked
from recpo.verbs.verb import UNRECORDED, Verb

set_parsing_settings(docstring_parse_attribute_docstrings=True)

VERBS = {
    "init": "inspect a log and write configurations for it",
    "fit": "find the policy that should ship, from a log, within a budget of time",
    "simulate": "simulate an interaction log with known preferences",
    "prepare": "turn an interaction log into training, validation and test shards",
    "tokenize": "give every item a tuple of codes, for policies that generate items code by code",
    "factorize": "fit a matrix factorization of graded feedback, as a reward and as a baseline",
    "train": "train or align a policy on prepared data",
    "calibrate": "calibrate reward models and compare rewards on later data",
    "tilt": "tilt a trained policy toward the grades that a factor model predicts",
    "evaluate": "rank the full catalog for held-out users and report metrics",
    "export": "write a trained policy as a bundle for serving",
    "recommend": "list the best items for every user of a Parquet file of histories",
    "explore": "look at users, items and the lists of policies side by side",
    "compare": "compare a new bundle with the old one on logged requests, before a swap",
    "serve": "answer HTTP requests from a bundle, and log impressions and outcomes",
    "loop": "repeat serving and training on simulated users",
    "plan": "compute the memory, communication and table placement of training",
    "demo": "run every step on a simulated log",
    "doctor": "report which libraries are installed and whether they work",
}

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
#: The verbs that ``recpo.cli.show_evaluations`` prints; ``recpo.cli.show_outputs`` prints the others.
_MEASURING: Final = ("evaluate", "compare", "calibrate", "tilt", "fit", "demo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status.

    0: done. 1: the user must fix something; one message says what. 2: unknown verb or option. 3: the new bundle
    violates a limit of ``recpo compare``. 130 and 143: ended by SIGINT (Ctrl-C) or SIGTERM; unfinished output has been
    removed, or can be resumed as the message says.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _print_any_text()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        print(f"recpo {__version__}   (recpo doctor: versions of everything else)")
        return 0
    verb, *words = arguments
    if verb not in VERBS:
        similar = difflib.get_close_matches(verb, VERBS, 1)
        meant = f"; did you mean {similar[0]}?" if similar else ""
        print(f"error: unknown verb {verb!r}{meant}\n\n{_overview()}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    terminal, options = terminal_options(words)
    if not {"-h", "--help"}.isdisjoint(options):
        _print_help(verb, options)
        return 0
    try:
        with _sigterm_raises():
            validate_configuration_files(options)
            check_spelling(verb, options)  # before the verb's module is imported, with torch and all
            with printing(terminal), nullcontext() if terminal.track is None else tracked(terminal.track):
                result = run(verb, options)
            _print_result(result, verb, terminal)
            sys.stdout.flush()  # a closed pipe raises here instead of at the end of the process
    except ArgumentError as error:
        return _failed(verb, 2, f"error: {_in_words(error)}\nsee: recpo {verb} --help", terminal)
    except BaseException as error:
        status, message = _outcome(error)
        if status is None:
            raise
        return _failed(verb, status, message, terminal)
    return 0


def _in_words(error: ArgumentError) -> str:
    """The parser's message about an option, in a user's words."""
    raw = str(error)
    refused = range_error(raw)
    return str(refused) if refused else re.sub(r'Parser key "([^"]+)"(, element \d+)?:\s*', r"\1: ", raw)


def _print_result(result: VerbResult, verb: str, terminal: TerminalOptions) -> None:
    """Prints the last lines of a verb, or its JSON document; only the first of several training processes prints."""
    if not is_first_process():
        return
    if terminal.as_json:
        print(result.document(verb))
    elif not terminal.quiet:
        for line in result.lines():
            print(line)


def _failed(verb: str, status: int, message: str, terminal: TerminalOptions) -> int:
    if message:
        print(message, file=sys.stderr)
        if terminal.as_json and is_first_process():
            print(json.dumps({"verb": verb, "status": status, "error": message}, ensure_ascii=False))
    return status


class _Terminated(BaseException):
    """SIGTERM arrived: unwinds like KeyboardInterrupt, so that unfinished outputs are removed."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM raises ``_Terminated`` in this process; its forked children end as they would without recpo."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def terminate(signum: int, _: object) -> None:
        if os.getpid() == owner and signal.getsignal(signum) is not terminate:
            return  # Lightning wraps this handler and stops after the batch
        signal.signal(signum, signal.SIG_DFL)  # a second SIGTERM ends the process immediately
        if os.getpid() != owner:
            os.kill(os.getpid(), signum)
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _outcome(error: BaseException) -> tuple[int | None, str]:
    """Exit status and message for an error that ended a verb. No status = a bug in recpo, which needs a traceback."""
    if isinstance(error, GateClosedError):
        return 3, f"swap refused: {error}"
    if isinstance(error, RecpoError):
        return 1, f"error: {error}"
    stop = error.__context__ if isinstance(error, SystemExit) else error  # Lightning exits with 1 after Ctrl-C
    if isinstance(stop, KeyboardInterrupt):
        return int(getattr(stop, "status", 130)), str(stop) or "interrupted"
    if isinstance(error, _Terminated) or type(error).__name__ == "SIGTERMException":  # Lightning's SystemExit
        return 143, "terminated"
    if isinstance(error, BrokenPipeError):  # `recpo ... | head` closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1, ""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return 1, f"error: out of memory ({first_line(error)}): use smaller batches or a machine with more memory"
    if type(error).__module__.partition(".")[0] == "pyarrow":
        return 1, f"error: a file or a column cannot be read or written: {first_line(error)}"
    if isinstance(error, OSError):
        return 1, f"error: {describe_os_error(error)}"
    return None, ""


def _print_any_text() -> None:
    """Prints characters that the terminal's encoding lacks as escapes, so that an id cannot end a verb."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run(verb: str, options: Sequence[str]) -> VerbResult:
    """Runs a verb with the ``options`` of a command line, and prints its result."""
    with without_help(options):
        made = parse(verb_class(verb), options)
        if watch := printer(verb, "watch"):  # prints what happens meanwhile
            made = replace(made, **watch(made))
        result: VerbResult = printer(verb, "show")(made, run_tracked(made))
    return result


def printer(verb: str, prefix: str) -> Any:
    """The function that prints the result of a verb (``show``), or what happens meanwhile (``watch``); None = none."""
    module = "show_evaluations" if verb in _MEASURING else "show_outputs"
    return getattr(importlib.import_module(f"recpo.cli.{module}"), f"{prefix}_{verb}", None)


def _print_help(verb: str, options: Sequence[str]) -> None:
    """The options of the first day, or with ``--help all`` every option."""
    if "all" in options:
        print(parser_of(verb_class(verb)).format_help() + f"\n{TerminalOptions.HELP}")
    else:
        print(_short_help(verb) + f"\n{TerminalOptions.HELP}")


_COLUMN: Final = 20  # where the help of an option begins


def _short_help(verb: str) -> str:
    """The options of the first day with the first sentence of their help, and the names of the others."""
    width = min(100, shutil.get_terminal_size().columns)
    options = index()["verbs"][verb]["options"]
    explained = index()["verbs"][verb]["first_day"] or list(options)
    lines = [f"recpo {verb}: {VERBS[verb]}", ""]
    for name in explained:
        is_required = "required" in options[name] and verb != "train"  # a file gives most of these
        plain = options[name]["help"].replace("``", "")
        text = re.split(r"(?<=[^.\d])\. |; ", plain)[0].rstrip(".") + " (required)" * is_required
        first, *rest = textwrap.wrap(text, width - _COLUMN) or [""]
        lines += [f"  --{name:<{_COLUMN - 5}} {first}", *(" " * _COLUMN + line for line in rest)]
    if others := [f"--{name}" for name in options if name not in explained and name != "config"]:
        lines += ["", *textwrap.wrap("also: " + ", ".join(others), width, break_on_hyphens=False)]
    lines += ["", f"--config FILE.yaml reads options from a file; recpo {verb} --help all explains every option."]
    return "\n".join(lines)


def _overview() -> str:
    verbs = "\n".join(f"  {verb:<10} {text}" for verb, text in VERBS.items())
    return (
        f"recpo {__version__}: preference optimization for recommender systems\n\n"
        f"usage: recpo VERB [options]      recpo VERB --help      recpo --version\n\n{verbs}\n\n{TerminalOptions.HELP}"
    )


def verb_class(name: str) -> type[Verb[Any]]:
    """The dataclass of a verb, ``recpo.verbs.NAME.Name``."""
    found: type[Verb[Any]] = getattr(importlib.import_module(f"recpo.verbs.{name}"), name.capitalize())
    return found


@contextmanager
def without_help(words: Sequence[str]) -> Iterator[None]:
    """Parsers made inside read no help from source files, unless ``words`` ask for that of a class.

    It takes longer than the parsing, for every training and every policy that is built.
    """
    asked = any(word.partition("=")[0].endswith(".help") for word in words)
    set_parsing_settings(docstring_parse_attribute_docstrings=asked)
    try:
        yield
    finally:
        set_parsing_settings(docstring_parse_attribute_docstrings=True)


def parser_of(verb: type[Verb[Any]]) -> ArgumentParser:
    """The parser of a verb. Rejects abbreviations and unknown keys; shows progress unless told otherwise."""
    if own := getattr(verb, "parser", None):
        parser: ArgumentParser = own()
        return parser
    parser = ArgumentParser(
        prog=f"recpo {verb.__name__.lower()}",
        description=(verb.__doc__ or "").partition("\n\n    Raises:")[0],
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the options below.")
    hints, helps = typing.get_type_hints(verb), documentation(verb)
    for one in sorted(fields(verb), key=lambda one: one.name in UNRECORDED):
        if not one.metadata.get("python_only"):
            parser.add_argument(f"--{one.name}", type=hints[one.name], help=helps.get(one.name, ""), **_default(one))
    return parser


@functools.cache
def documentation(declared: type) -> Mapping[str, str]:
    """Option -> its help: docstrings of fields, and entries of ``Args`` and ``Attributes``, inherited ones too."""
    found: dict[str, str] = {}
    for base in reversed(declared.__mro__):
        if base.__module__.startswith("recpo."):
            found |= {one.arg_name: " ".join((one.description or "").split()) for one in parse_from_object(base).params}
    return found


def _default(option: Field[Any]) -> dict[str, Any]:
    if option.name == "progress":
        return {"default": True}  # a terminal shows it unless told otherwise; Python does not
    if option.default is not MISSING:
        return {"default": option.default}
    if option.default_factory is not MISSING:
        return {"default": option.default_factory()}
    return {"required": True}


def parse(verb: type[Verb[Any]], words: Sequence[str]) -> Verb[Any]:
    """The verb that a command line describes: flags, and ``--config FILE.yaml``.

    Raises:
        ArgumentError: an unknown option, or a value of a wrong type.
        RecpoError: a value is refused.
    """
    if own := getattr(verb, "parse", None):
        made: Verb[Any] = own(words)
        return made
    words = joined_lists(verb, words)
    parser = parser_of(verb)
    given = parser.parse_args(words, defaults=False)
    parser.set_defaults(dict(verb.presets(given.as_dict())))
    configuration = parser.parse_args(words)
    configuration.pop("config", None)
    _validate_local_paths(configuration)
    try:
        return verb(**parser.instantiate(configuration).as_dict())
    except ValueError as error:
        if isinstance(error.__cause__, RecpoError):  # the reason, for options that may be null
            raise error.__cause__ from error
        raise


def joined_lists(verb: type[Verb[Any]], words: Sequence[str]) -> list[str]:
    """A command line in which every list is one word of JSON, and the first option has its name.

    ``logs/*.csv`` at the beginning is the value of the verb's first option. ``--ks 10 50`` and ``--ks 10 --ks 50`` are
    ``--ks [10, 50]``.
    """
    hints = typing.get_type_hints(verb)
    options = [one.name for one in fields(verb)]
    takes_list = {f"--{name}" for name in options if _takes_list(hints[name], any)}
    takes_nothing_else = {f"--{name}" for name in options if _takes_list(hints[name], all)}
    rest, others = list(words), list[str]()
    lists: dict[str, list[str]] = {}
    if rest and not rest[0].startswith("-"):
        first = next((one.name for one in fields(verb) if not one.kw_only), None)
        rest = rest if first is None else [f"--{first}", *rest]
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in takes_list:
            others.append(flag + equals + value)
            continue
        values = [value] if equals else list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
        del rest[: 0 if equals else len(values)]
        lists.setdefault(flag, []).extend(values)
    for flag, values in lists.items():
        is_whole = len(values) == 1 and (flag not in takes_nothing_else or values[0][:1] == "[" or values[0] == "null")
        others += [flag, values[0] if is_whole else _as_list(values)]
    return others


def _as_list(values: Sequence[str]) -> str:
    """Values of a command line, some of them lists themselves, as one list."""
    entries: list[str] = []
    for value in values:
        if value.startswith("["):
            entries += [json.dumps(one) for one in yaml.safe_load(value)]
        else:
            entries.append(value if _is_yaml(value) else json.dumps(value))
    return "[" + ", ".join(entries) + "]"


def _takes_list(hint: Any, quantifier: Callable[[Iterable[bool]], bool]) -> bool:
    """Whether any, or all, of the types of an option are lists; null does not count."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return quantifier(_takes_list(part, quantifier) for part in typing.get_args(hint) if part is not NoneType)
    return typing.get_origin(hint) in (list, tuple, Sequence)


def _is_yaml(text: str) -> bool:
    """A mapping, a list, or a number as it would be written again; an id such as 007 is text."""
    return text[:1] in ("{", "[") or re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text) is not None


def _validate_local_paths(configuration: Namespace) -> None:
    """Rejects ``s3://...`` for local path options, which would otherwise become a local directory of that name."""
    for name, value in vars(configuration.as_flat()).items():
        if isinstance(value, Path) and _ADDRESS.match(str(value)):
            raise RecpoError(
                f"--{name} {value}: a local path is expected; only the log, the output of prepare, and the "
                "prepared directory that other verbs read can be in an object store",
                code="not_local",
                field=name,
            )


if __name__ == "__main__":
    sys.exit(main())

"""The command line. A verb is a typed function; flags, YAML keys, types, defaults and help come from its signature.

Only the modules of the requested verb are imported.
"""

import difflib
import importlib
import io
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

from jsonargparse import ArgumentError

from recpo import __version__
from recpo.artifacts.documents import describe_os_error, validate_configuration_files
from recpo.base.errors import GateClosedError, RecpoError, first_line, range_error
from recpo.cli.output import TerminalOptions, VerbResult, printing, terminal_options
from recpo.cli.spelling import check_spelling, index
from recpo.verbs.tracking import is_first_process, run_tracked, tracked

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
    # imported here so that a misspelled word is reported at once
    from recpo.cli.parser import parse, verb_class, without_help

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
        from recpo.cli.parser import parser_of, verb_class

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


if __name__ == "__main__":
    sys.exit(main())

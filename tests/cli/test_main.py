"""Common behavior of all verbs: exit statuses, one message instead of a traceback, and literal text."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

import recpo
import recpo.cli.main as command_line
from recpo.base.errors import RecpoError
from recpo.cli.main import main
from recpo.cli.output import console

ROOT = Path(__file__).parents[2]
HOSTILE = ["[/x]", "[bold]", "[red]a[/red]", ":smile:", "😀", "שלום", "a b", "50%", "{x}", "\\[/x]"]
SMALL = ["--policy.init_args.dim", "16", "--policy.init_args.layers", "1", "--policy.init_args.max_history", "20"]
SMALL += ["--data.layout.init_args.history_length", "20", "--trainer.max_epochs", "1"]


def _start(*arguments, **options):
    command = [sys.executable, "-m", "recpo.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (15, 143, "terminated")])
def test_a_signal_ends_a_verb_with_its_status_and_leaves_nothing_unfinished(tmp_path, number, status, word):
    process = _start("simulate", "--out", tmp_path / "deep" / "out", "--users", 20_000, "--events", 20_000_000)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("deep/*/log/*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == status, err
    assert word in err
    assert "Traceback" not in err
    assert list(tmp_path.glob("deep/*")) == []


def _raises(error):
    def run(verb, options):
        raise error

    return run


class OutOfMemoryError(RuntimeError):
    """Called as torch's."""


class SIGTERMException(SystemExit):
    """Called as Lightning's."""


def _exit_after_ctrl_c():
    error = SystemExit(1)
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RecpoError("column a is missing"), 1, "error: column a is missing"),
        (OSError(28, "No space left on device", "/data/x"), 1, "/data/x: "),
        (PermissionError(13, "Permission denied", "/data/x"), 1, "/data/x: "),
        (pa.ArrowInvalid("Parquet magic bytes not found\nmore"), 1, "Parquet magic bytes not found"),
        (pa.ArrowKeyError("no such column"), 1, "no such column"),
        (MemoryError(), 1, "out of memory"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "Tried to allocate"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (_exit_after_ctrl_c(), 130, "interrupted"),
        (SIGTERMException(1), 143, "terminated"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_verb_may_end_with_becomes_one_message_and_a_status(monkeypatch, capsys, error, status, message):
    monkeypatch.setattr(command_line, "run", _raises(error))
    assert main(["doctor"]) == status
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1


def test_a_fault_of_recpo_itself_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(command_line, "run", _raises(IndexError("a bug")))
    with pytest.raises(IndexError, match="a bug"):
        main(["doctor"])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_a_reader_that_goes_away_gives_no_traceback(tmp_path):
    process = _start("simulate", "--out", tmp_path / "out", "--users", 20, "--items", 20, "--events", 100)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=300)
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


@pytest.mark.slow
def test_a_terminal_without_the_letters_of_a_name_prints_escapes(tmp_path):
    out, environment = tmp_path / "😀 שלום", os.environ | {"PYTHONIOENCODING": "ascii"}
    process = _start("simulate", "--out", out, "--users", 20, "--items", 20, "--events", 100, env=environment)
    printed, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "\\U0001f600" in printed


@pytest.mark.slow
def test_nothing_prints_through_a_console_that_reads_markup():
    """Under a console that reads none, escaped text would show its backslashes."""
    for file in (ROOT / "recpo").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert "rich.console" not in modules or file.name == "output.py", f"{file}: use recpo.cli.output.console()"
        assert "rich.markup" not in modules, f"{file}: nothing is to be escaped, or marked up"


def test_the_console_prints_what_it_is_given(capsys):
    console().print("[/x] [bold] :smile:", soft_wrap=True)
    assert capsys.readouterr().out == "[/x] [bold] :smile:\n"


@pytest.mark.slow
def test_the_road_with_ids_and_paths_that_look_like_markup(tmp_path, capsys):
    users, items = ([f"{name}{copy}" for name in HOSTILE for copy in range(number)] for number in (3, 4))
    rows = [
        {
            "user_id": user,
            "item_id": items[(place + event) % len(items)],
            "timestamp": 1_767_571_200_000 + 43_200_000 * event + place,
        }
        | {"watch_time": float(1 + (place * event) % 7), "duration": 8.0, "dislike": (place + event) % 5 == 0}
        for place, user in enumerate(users)
        for event in range(14)
    ]
    root = tmp_path / "[" / "x] :smile:שלום 😀"
    root.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(root / "[bold].parquet")
    prepared, run, bundle, lists = root / "prepared", root / "[red]", root / "bundle", root / "lists.parquet"

    def verb(*words):
        assert main([*map(str, words)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    verb("prepare", "--log", root / "[[]bold].parquet", "--out", prepared, "--columns.time_unit", "ms")
    codes = ["--levels", 2, "--codebook_size", 8, "--capacity_slack", "null"]
    verb("tokenize", "--prepared", prepared, "--out", root / "codes", *codes)
    config = ["--config", ROOT / "configs" / "pretrain.yaml"]
    verb("train", *config, "--data.prepared", prepared, "--out", run, *SMALL)
    assert "[red]" in verb("evaluate", "--prepared", prepared, "--contenders", run, "--out", root / "[/x] evaluation")
    verb("export", "--run", run, "--out", bundle, "--k", 5)
    histories = ["--histories", prepared / "histories.parquet", "--out", lists]
    printed = verb("recommend", "--source", bundle, *histories, "--k", 3, "--show", len(users))
    for name in HOSTILE:
        assert f" {name}" in printed, name
    assert set(pd.read_parquet(lists)["item_id"]) <= set(items)


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "recpo", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith(f"recpo {recpo.__version__}")

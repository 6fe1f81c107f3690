"""Tables of the verbs: no number is ever cut, whatever the width."""

import io
import re

import pytest
from rich import table as rich_table

from recpo.cli.output import console, show_tables
from recpo.evaluation.html_report.parts import Cell, Row, Table

NUMBERS = [f"{0.7712 + n:.4f} ± 0.0012" for n in range(12)]


def table(**options):
    made = rich_table.Table(title="test period", title_justify="left")
    made.add_column("policy", **options)
    for place in range(len(NUMBERS)):
        made.add_column(f"expected reward {place}", justify="right", **options)
    made.add_row("a/long/name/of/a/run " * 8, *NUMBERS)
    return made


@pytest.mark.parametrize("options", [{}, {"no_wrap": True}], ids=str)
def test_a_table_in_a_file_is_as_wide_as_it_needs(monkeypatch, capsys, options):
    monkeypatch.setenv("COLUMNS", "40")
    console().print(table(**options))
    printed = capsys.readouterr().out
    assert "…" not in printed
    (row,) = [line for line in printed.splitlines() if NUMBERS[0] in line]
    assert all(number in row for number in NUMBERS)
    assert "a/long/name/of/a/run " * 8 in row


@pytest.mark.parametrize("options", [{}, {"no_wrap": True}], ids=str)
def test_a_narrow_terminal_folds_names_and_no_numbers(monkeypatch, options):
    terminal = console()
    terminal.file, terminal._force_terminal, terminal.width = io.StringIO(), True, 40
    terminal.print(table(**options), "more")
    printed = re.sub(r"\x1b\[[0-9;]*m", "", terminal.file.getvalue())
    assert "…" not in printed
    (row,) = [line for line in printed.splitlines() if NUMBERS[0] in line]
    assert all(number in row for number in NUMBERS)
    assert terminal.width == 40
    small = rich_table.Table()
    small.add_column("policy")
    small.add_column("value", justify="right")
    small.add_row("a run with a long name " * 5, "0.7712")
    terminal.file = io.StringIO()
    terminal.print(small)
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", terminal.file.getvalue()).splitlines())) <= 40


def test_a_narrow_terminal_has_the_notes_of_a_report_below_its_numbers(monkeypatch, capsys):
    """Bold is what the report marks; the caption has the width of the terminal."""
    cells = [Cell("0.7712", "±0.0012", "best"), Cell("+0.0100 *", "±0.0034", "survives"), Cell("-")]
    reported = Table("what the numbers say", ["policy", "true_reward", "AUC", "rows"], [Row("a", cells)])
    show_tables("test period", reported)
    assert "0.7712 ±0.0012" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    show_tables("test period", reported)
    printed = capsys.readouterr().out
    assert re.findall(r"\x1b\[1m *([^ \x1b]+)", printed)[-4:] == ["0.7712", "+0.0100", "±0.0012", "±0.0034"]
    printed = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    assert max(map(len, printed.splitlines())) <= 40
    assert printed.splitlines()[-1] == "what the numbers say"


def test_long_headings_take_no_place_from_numbers(monkeypatch, capsys):
    heads = ["contender", "AUC_mixed, validation", "behind the best", "lost", *["disliked@10, test"] * 6]
    rows = [Row("tilted-pretrain (ships)", [Cell(f"0.{place}712", "± 0.0012") for place in range(9)])]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    show_tables("leaderboard", Table("", heads, rows))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert re.findall(r"0\.\d712", printed) == [f"0.{place}712" for place in range(9)]
    assert printed.count("± 0.0012") == 9

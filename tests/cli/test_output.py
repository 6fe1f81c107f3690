"""Tables of the verbs: no number is ever cut, whatever the width."""

import io
import re

import pytest
from rich.table import Table

from recpo.cli.output import console

NUMBERS = [f"{0.7712 + n:.4f} ± 0.0012" for n in range(12)]


def table(**options):
    made = Table(title="test period", title_justify="left")
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
    small = Table()
    small.add_column("policy")
    small.add_column("value", justify="right")
    small.add_row("a run with a long name " * 5, "0.7712")
    terminal.file = io.StringIO()
    terminal.print(small)
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", terminal.file.getvalue()).splitlines())) <= 40

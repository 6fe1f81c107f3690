"""``recpo doctor``: reports which libraries are installed and whether they work."""

from __future__ import annotations

import platform

from rich.table import Table

from recpo import __version__
from recpo.base.errors import RecpoError
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command
from recpo.verbs.doctor import Doctor, Finding, advice


def show(verb: Doctor, findings: list[Finding]) -> VerbResult:
    """Prints the table and what to do about libraries that do not work.

    Raises:
        RecpoError: a required library is broken.
    """
    table = Table(title=f"recpo {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for heading in ("library", "version", "state"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        state = "works" if finding.works else ("BROKEN" if finding.part.is_core else "not usable")
        table.add_row(
            finding.part.name, finding.version or "-", f"{state}: {finding.words}" if finding.words else state
        )
    console().print(table)
    print(advice(findings))
    broken = [finding.part.name for finding in findings if finding.part.is_core and not finding.works]
    if broken:
        raise RecpoError(
            f"{', '.join(broken)} must work: remove .venv and install again with `make setup`", code="not_installed"
        )
    facts = {one.part.name: {"version": one.version, "works": one.works} for one in findings}
    return VerbResult((), command("demo"), facts)

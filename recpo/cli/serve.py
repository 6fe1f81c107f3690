"""``recpo serve``: answers HTTP requests from a bundle."""

from __future__ import annotations

from recpo.cli.verb_results import VerbResult
from recpo.verbs.serve import Serve


def show(verb: Serve, result: None) -> VerbResult:
    """The server has stopped; it has logged what it did."""
    return VerbResult()

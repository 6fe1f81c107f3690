"""The report of the variants of a served log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recpo.evaluation.html_report.parts import Cell, Row, Table, render
from recpo.evaluation.reading import Document


def variants_report(document: Document) -> str:
    """The whole page of variants of a served log.

    Args:
        document: see ``recpo.evaluation.variants.variants_document``.
    """
    interval = "± half of the 95 % interval over users; [low, high]: 95 % at all times together"
    head = ("variant", "users", "impressions", "value", "dislikes", "difference of value", "difference of dislikes")
    names = ("value", "dislikes", "difference", "dislikes_difference")
    rows = [
        Row(one["variant"], [Cell(f"{one[n]:,}") for n in head[1:3]] + [_of_variant(one.get(n)) for n in names])
        for one in document["variants"]
    ]
    return render(
        "variants.html.jinja",
        title=f"Variants of experiment {document['experiment']}",
        subtitle="impressions of a server's log; a value is the sum of the grades of a list less its dislikes",
        version=document["recpo_version"],
        numbers="metrics.json",
        document=document,
        table=Table(f"per impression, {interval}", head, rows),
    )


def _of_variant(value: Mapping[str, Any] | None) -> Cell:
    if value is None:
        return Cell("")
    low, high = value["sequence"] or (None, None)
    sequence = "" if low is None else f" [{low:.4f}, {high:.4f}]"
    half = "" if value["half_width"] is None else f" ± {value['half_width']:.4f}"
    return Cell(f"{value['mean']:.4f}{half}{sequence}" if value["mean"] is not None else "")

"""The report section on candidates and new items (cold start)."""

from __future__ import annotations

from datetime import UTC, datetime

from recpo.evaluation.html_report import tables
from recpo.evaluation.html_report.blocks import Block, Text
from recpo.evaluation.reading import Document
from recpo.evaluation.segments import NEW_METRICS


def new_item_blocks(document: Document) -> list[Block]:
    """The candidates, and every contender's metrics on new items. Empty if neither is known."""
    found: list[Block] = []
    if document["candidates"] is not None:
        found.append(Text(candidates_sentence(document)))
    new = document["new_items"]
    if not new["items"]:
        return [*found, Text("No candidate is new: each has events in training.")] if found else []
    remark = "" if new["remark"] is None else f" There are {new['remark']}."
    found.append(
        Text(
            f"{new['items']:,} candidates are new: they have no event in training. new_share is their share of the "
            "lists; new_NDCG, new_Recall and new_HitRate are of held-out positives that are new; new_true_reward is "
            f"the true reward of the best new items as a contender ranks them, whatever it lists above them.{remark}"
        )
    )
    return found + [
        tables.metrics_table(document, names, f"new items, lists of {k}")
        for k in document["setting"]["ks"]
        if (names := tables.metrics_at(document, NEW_METRICS, k))
    ]


def candidates_sentence(document: Document) -> str:
    """The candidates, the source of their times, and the number of removed events."""
    known, counts = document["candidates"], tables.ranked(document)[0][1]["counts"]
    begin = known["begin"]
    if not isinstance(begin, str):
        begin = datetime.fromtimestamp(begin / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    removed = " and ".join(
        f"{counts[f'{kind}_events_unavailable']:,} of {counts[f'{kind}_events']:,} {kind}"
        for kind in ("positive", "disliked")
    )
    return (
        f"{known['items']:,} items were candidates at {begin}, {known['items_left_out']:,} were not "
        f"({known['source']}). Removed from the targets: {removed} events."
    )

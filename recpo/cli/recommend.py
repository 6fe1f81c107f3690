"""``recpo recommend``: lists of a bundle, a run, factors or a baseline for a Parquet file of histories."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd
import pyarrow.dataset as ds
from rich.table import Table

from recpo.artifacts import kind_of
from recpo.base.errors import RecpoError
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command
from recpo.serving.encoded_histories import ServingCounts
from recpo.verbs.recommend import LIST_LENGTH, Recommend

_EVENTS_SHOWN_FROM = 1 << 16


def watch(verb: Recommend) -> dict[str, object]:
    """Lists of the command line go to a file."""
    if verb.out is None:
        raise RecpoError("recommend: name the Parquet file to write with --out", field="out", code="missing_option")
    return {}


def show(verb: Recommend, counts: ServingCounts) -> VerbResult:
    """Prints some lists and what was left out; a bundle is served next, a run exported."""
    k = LIST_LENGTH if verb.k is None else verb.k
    if verb.show:
        console().print(_lists(str(verb.histories), str(verb.out), verb.show))
    _print(counts, str(verb.out), k)
    following, kind = None, kind_of(str(verb.source))
    if kind == "bundle":
        following = command("serve", "--bundle", verb.source)
    elif kind == "run":
        following = command("export", "--run", verb.source, "--out", "runs/bundle")
    return VerbResult((str(verb.out),), following, {"k": k, **asdict(counts)})


def _lists(histories: str, lists: str, users: int) -> Table:
    served = ds.dataset(lists).head(_EVENTS_SHOWN_FROM, columns=["user_id", "item_id"]).to_pandas()
    events = ds.dataset(histories).head(_EVENTS_SHOWN_FROM, columns=["user_id", "item_id", "timestamp"]).to_pandas()
    return lists_table(events, served, users)


def lists_table(events: pd.DataFrame, served: pd.DataFrame, users: int) -> Table:
    """The most recent items of the ``events`` and the lists of the first ``users`` that were ``served``."""
    table = Table(title="recommendations", title_justify="left")
    for heading in ("user", "most recent items", "recommended"):
        table.add_column(heading, overflow="fold")
    events = events.sort_values("timestamp", kind="stable")
    for user in served["user_id"].unique()[:users]:
        recent = events["item_id"][events["user_id"] == user].tail(5)
        listed = served["item_id"][served["user_id"] == user].head(10)
        shown = (" ".join(map(str, items)) for items in (recent, listed))
        table.add_row(*(text or "(none)" for text in (str(user), *shown)))
    return table


def _print(counts: ServingCounts, out: str, k: int) -> None:
    left_out = {
        "empty histories": counts.empty_histories,
        "unknown items skipped": counts.unknown_items,
        "events without feedback": counts.events_without_feedback,
        "impossible watch times and durations": counts.impossible_values,
        "unknown items to exclude": counts.unknown_excluded,
        "users whose history was cut to its most recent events": counts.truncated_histories,
        f"lists shorter than {k}": counts.short_lists,
    }
    listed = "; ".join(f"{what}: {number:,}" for what, number in left_out.items() if number)
    print(f"{out}: {counts.users:,} users, up to {k} items each" + (f"; {listed}" if listed else ""))

"""``recpo recommend``: a bundle over a Parquet file of histories."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow.dataset as ds
from rich.table import Table
from tqdm import tqdm

from recpo.cli.config import save_resolved
from recpo.cli.output import console
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ServingCounts
from recpo.workflows.recommend import write_recommendations

_EVENTS_SHOWN_FROM = 1 << 16


def recommend(
    bundle: Path,
    histories: Path,
    out: Path,
    k: int | None = None,
    exclude: Path | None = None,
    users: Path | None = None,
    engine: Literal["onnx", "torch"] = "onnx",
    batch_size: int = 256,
    show: int = 0,
) -> None:
    """Recommends for every user of a Parquet file of histories; neither lightning nor torchrec is needed.

    Items of the history and those to exclude are never recommended. Unknown items are skipped and counted, and a user
    without events gets what the policy recommends when nothing is known.

    Args:
        bundle: directory written by ``recpo export``.
        histories: Parquet file or directory of events, the rows of a user together: user_id, item_id, timestamp (times,
            or milliseconds since 1970) and, as the log had them, watch_time and duration (seconds), dislike, label.
        out: Parquet file to write: user_id, rank, item_id, score; an existing one is replaced.
        k: list length; null = the longest that the bundle serves.
        exclude: Parquet file of user_id and item_id: what must not be listed.
        users: Parquet file with user_id: who is served, new users among them; null = the users of the histories.
        engine: onnx (ONNX Runtime, without torch) or torch.
        batch_size: users ranked at once.
        show: print the lists of the first so many users.
    """
    loaded = Bundle.load(bundle, engine)
    with tqdm(desc="recommend", unit="event", disable=None, leave=False) as bar:
        counts = write_recommendations(
            loaded, histories, out, k, exclude=exclude, users=users, batch_size=batch_size, progress=bar.update
        )
    save_resolved(out)
    if show > 0:
        console().print(_lists(histories, out, show))
    _print(counts, out, loaded.k if k is None else k)


def _lists(histories: Path, lists: Path, users: int) -> Table:
    """The most recent items and the lists of the first users that were served."""
    table = Table(title="recommendations", title_justify="left")
    for heading in ("user", "most recent items", "recommended"):
        table.add_column(heading, overflow="fold")
    served = ds.dataset(lists).head(_EVENTS_SHOWN_FROM, columns=["user_id", "item_id"]).to_pandas()
    events = ds.dataset(histories).head(_EVENTS_SHOWN_FROM, columns=["user_id", "item_id", "timestamp"]).to_pandas()
    events = events.sort_values("timestamp", kind="stable")
    for user in served["user_id"].unique()[:users]:
        recent = events["item_id"][events["user_id"] == user].tail(5)
        listed = served["item_id"][served["user_id"] == user].head(10)
        shown = (" ".join(map(str, items)) for items in (recent, listed))
        table.add_row(*(text or "(none)" for text in (str(user), *shown)))
    return table


def _print(counts: ServingCounts, out: Path, k: int) -> None:
    left_out = {
        "empty histories": counts.empty_histories,
        "unknown items skipped": counts.unknown_items,
        "events without feedback": counts.events_without_feedback,
        "impossible watch times and durations": counts.impossible_values,
        "unknown items to exclude": counts.unknown_excluded,
        "histories cut to the most recent events": counts.truncated_histories,
        f"lists shorter than {k}": counts.short_lists,
    }
    listed = "; ".join(f"{what}: {number:,}" for what, number in left_out.items() if number)
    print(f"{out}: {counts.users:,} users, up to {k} items each" + (f"; {listed}" if listed else ""))

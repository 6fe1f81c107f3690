"""``recpo recommend``: runs a bundle over a Parquet file of histories."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow.dataset as ds
from rich.table import Table
from tqdm import tqdm

from recpo.cli.config import save_resolved
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_recommend
from recpo.errors import RecpoError
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ServingCounts
from recpo.workflows.recommend import write_recommendations

if TYPE_CHECKING:
    from recpo.training.run import Run

_EVENTS_SHOWN_FROM = 1 << 16
_K_OF_A_RUN = 10


def recommend(
    histories: Path,
    out: Path,
    bundle: Path | None = None,
    run: Path | None = None,
    k: int | None = None,
    exclude: Path | None = None,
    users: Path | None = None,
    user_features: Path | None = None,
    context: Path | None = None,
    allow: dict[str, list[int | str]] | None = None,
    deny: dict[str, list[int | str]] | None = None,
    at: str | None = None,
    engine: Literal["onnx", "torch"] = "onnx",
    provider: str = "CPUExecutionProvider",
    batch_size: int = 256,
    show: int = 0,
    trust: list[str] = [],  # noqa: B006  jsonargparse prints it
) -> VerbResult:
    """Recommends for every user of a Parquet file of histories; a bundle needs neither lightning nor torchrec.

    Items of the history and excluded items are never recommended. Unknown items are skipped and counted. A user without
    events gets the policy's recommendations for an empty history.

    Args:
        histories: Parquet file or directory of events, with adjacent rows for each user: user_id, item_id, timestamp
            (times, or milliseconds since 1970) and, if the log had them, watch_time and duration (seconds), dislike,
            label.
        out: Parquet file to write: user_id, rank, item_id, score; an existing one is replaced.
        bundle: directory written by ``recpo export``.
        run: instead of a bundle, a run directory written by ``recpo train``; its best checkpoint is used.
        k: list length; null = the longest that the bundle serves; for a run 10, at most the size of the catalog.
        exclude: Parquet file of user_id and item_id: items that must not be listed.
        users: Parquet file with user_id: the users to serve, including new users; null = the users of the histories.
        user_features: Parquet file of user_id and the features as in the prepared user table; only if the policy reads
            them.
        context: Parquet file of user_id and features of the current requests; only if the policy reads them.
        allow: attribute -> values, for a bundle with attributes: list only items that have one of the values of every
            attribute, such as {"category": ["film"]}.
        deny: attribute -> values: list no item that has one of these values.
        at: when the lists are made, an ISO time or date such as 2026-11-23 (UTC without a zone): items that are not
            available then (available_from, available_until) are left out. null = now.
        engine: onnx (ONNX Runtime, without torch) or torch.
        provider: execution provider of ONNX Runtime; it must be in ``onnxruntime.get_available_providers()``.
        batch_size: number of users ranked at once.
        show: number of users whose lists are printed.
        trust: packages, in addition to recpo, whose classes the configuration of ``run`` may name.
    """
    if (bundle is None) == (run is None):
        raise RecpoError("recommend takes one of --bundle and --run")
    source = Bundle.load(bundle, engine, provider=provider) if bundle is not None else _open_run(run, trust)
    k = k if k is not None else source.k if isinstance(source, Bundle) else min(_K_OF_A_RUN, source.num_items)
    with tqdm(desc="recommend", unit="event", disable=None, leave=False) as bar:
        counts = write_recommendations(
            source,
            histories,
            out,
            k,
            exclude=exclude,
            users=users,
            user_features=user_features,
            context=context,
            allow=allow,
            deny=deny,
            at=at,
            batch_size=batch_size,
            progress=bar.update,
        )
    save_resolved(out)
    if show > 0:
        console().print(_lists(histories, out, show))
    _print(counts, out, k)
    return after_recommend(out, bundle, run, {"k": k, **asdict(counts)})


def _open_run(run: Path | None, trust: list[str]) -> Run:
    from recpo.training.run import Run  # a bundle can be served without torch and lightning

    return Run.open(run or "", trust)


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
        "users whose history was cut to its most recent events": counts.truncated_histories,
        f"lists shorter than {k}": counts.short_lists,
    }
    listed = "; ".join(f"{what}: {number:,}" for what, number in left_out.items() if number)
    print(f"{out}: {counts.users:,} users, up to {k} items each" + (f"; {listed}" if listed else ""))

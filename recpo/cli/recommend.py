"""``recpo recommend``: lists of a bundle, a run, factors or a baseline for a Parquet file of histories."""

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
from recpo.workflows.recommend import LIST_LENGTH, Source, write_recommendations

if TYPE_CHECKING:
    from recpo.data.prepared import Prepared

_EVENTS_SHOWN_FROM = 1 << 16


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
    factors: Path | None = None,
    baseline: str | None = None,
    prepared: str | None = None,
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
        k: list length; null = 10, or fewer if the catalog or the bundle has no more.
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
        factors: instead of a bundle, a directory written by ``recpo factorize``; with ``prepared``.
        baseline: instead of a bundle, a baseline of ``recpo evaluate`` with its default options, such as popularity or
            cooccurrence; with ``prepared``, on whose training events it is fitted.
        prepared: prepared directory with the items of ``factors`` or ``baseline``.
    """
    given = [one for one in (bundle, run, factors, baseline) if one is not None]
    if len(given) != 1:
        raise RecpoError("recommend takes one of --bundle, --run, --factors and --baseline")
    if (prepared is None) == (bundle is None and run is None):
        raise RecpoError("recommend takes --prepared with --factors or --baseline, and only with these")
    data = None if prepared is None else _open_prepared(prepared)
    source, longest = _opened(bundle, run, factors, baseline, data, engine, provider, trust)
    k = min(LIST_LENGTH, longest) if k is None else k
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
            prepared=data,
        )
    save_resolved(out)
    if show > 0:
        console().print(_lists(histories, out, show))
    _print(counts, out, k)
    return after_recommend(out, bundle, run, {"k": k, **asdict(counts)})


def _opened(
    bundle: Path | None,
    run: Path | None,
    factors: Path | None,
    baseline: str | None,
    data: Prepared | None,
    engine: Literal["onnx", "torch"],
    provider: str,
    trust: list[str],
) -> tuple[Source, int]:
    """The one source that was given, and the length of its longest list."""
    if bundle is not None:
        loaded = Bundle.load(bundle, engine, provider=provider)
        return loaded, loaded.k
    if run is not None:
        from recpo.training.run import Run  # a bundle can be served without torch and lightning

        opened = Run.open(run, trust)
        return opened, opened.num_items
    assert data is not None
    if factors is not None:
        from recpo.factorization.factors import Factors

        return Factors.open(factors), data.num_items
    return str(baseline), data.num_items


def _open_prepared(prepared: str) -> Prepared:
    from recpo.data.prepared import Prepared

    return Prepared.open(prepared)


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

"""``recpo recommend``: a bundle over a Parquet file of histories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from rich.table import Table
from tqdm import tqdm

from recpo.artifacts import output_file
from recpo.cli.config import save_resolved
from recpo.cli.output import console
from recpo.errors import RecpoError
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ServingCounts, check_columns

_COLUMNS = ("user_id", "item_ids", "feedback", "timestamps", "blocked")


def recommend(
    bundle: Path,
    histories: Path,
    out: Path,
    k: int | None = None,
    engine: Literal["onnx", "torch"] = "onnx",
    batch_size: int = 256,
    show: int = 0,
) -> None:
    """Recommends for every user of a Parquet file of histories; neither lightning nor torchrec is needed.

    Items of the history and blocked items are never recommended. Unknown items are skipped and counted, and an empty
    history gets what the policy recommends when nothing is known.

    Args:
        bundle: directory written by ``recpo export``.
        histories: Parquet file or directory: user_id, item_ids (lists of item ids, oldest first), optionally feedback
            (lists of levels), timestamps and blocked (lists of item ids that must not be shown).
        out: Parquet file to write: user_id, rank, item_id, score; an existing one is replaced.
        k: list length; null = the longest that the bundle serves.
        engine: onnx (ONNX Runtime, without torch) or torch.
        batch_size: users scored at once.
        show: print the lists of the first so many users.
    """
    if batch_size < 1:
        raise RecpoError(f"batch_size is {batch_size}, expected at least 1")
    loaded = Bundle.load(bundle, engine)
    source = _open(histories)
    counts, writer, shown = ServingCounts(), None, None
    with output_file(out, inputs=[bundle, histories]) as partial:
        try:
            for table in _tables(source, batch_size, histories):
                served = loaded.recommend(table, k)
                counts.add(served.counts)
                writer = writer or pq.ParquetWriter(partial, served.table.schema)
                shown = shown or (table, served.table)
                writer.write_table(served.table)
        finally:
            if writer is not None:
                writer.close()
    save_resolved(out)
    if show and shown:
        console().print(_lists(*shown, show))
    _print(counts, out, loaded.k if k is None else k)


def _open(histories: Path) -> ds.Dataset:
    if not histories.exists():
        raise RecpoError(f"{histories} does not exist; expected a Parquet file of histories")
    try:
        source = ds.dataset(histories, format="parquet")
    except (pa.ArrowException, OSError) as error:
        raise RecpoError(f"{histories} cannot be read as Parquet: {error}") from error
    check_columns(source.schema)
    return source


def _tables(source: ds.Dataset, batch_size: int, histories: Path) -> Iterator[pa.Table]:
    """The histories in batches; where there is no user one empty table, so that the output has its columns."""
    columns = [name for name in _COLUMNS if name in source.schema.names]
    try:
        users = source.count_rows()
        with tqdm(total=users, desc="recommend", unit="user", disable=None, leave=False) as bar:
            for batch in source.to_batches(columns=columns, batch_size=batch_size):
                if batch.num_rows:
                    yield pa.Table.from_batches([batch])
                    bar.update(batch.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise RecpoError(f"{histories} cannot be read as Parquet: {error}") from error
    if not users:
        yield source.schema.empty_table().select(columns)


def _lists(histories: pa.Table, recommendations: pa.Table, users: int) -> Table:
    table = Table(title="recommendations", title_justify="left")
    for heading in ("user", "most recent items", "recommended"):
        table.add_column(heading, overflow="fold")
    by_user: dict[object, list[str]] = {}
    users_items = (recommendations.column(name).to_pylist() for name in ("user_id", "item_id"))
    for user, item in zip(*users_items, strict=True):
        by_user.setdefault(user, []).append(str(item))
    for row in histories.slice(0, users).to_pylist():
        recent = [str(item) for item in (row["item_ids"] or [])[-5:]]
        table.add_row(str(row["user_id"]), " ".join(recent) or "(none)", " ".join(by_user.get(row["user_id"], [])[:10]))
    return table


def _print(counts: ServingCounts, out: Path, k: int) -> None:
    left_out = {
        "empty histories": counts.empty_histories,
        "unknown items skipped": counts.unknown_items,
        "unknown blocked items skipped": counts.unknown_blocked,
        "histories cut to the most recent events": counts.truncated_histories,
        f"lists shorter than {k}": counts.short_lists,
    }
    listed = "; ".join(f"{what}: {number:,}" for what, number in left_out.items() if number)
    print(f"{out}: {counts.users:,} users, up to {k} items each" + (f"; {listed}" if listed else ""))

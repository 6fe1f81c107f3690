"""The verb ``recommend``: lists of a bundle, run, factors or baseline, for a frame or a Parquet file of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, Union

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from recpo.artifacts import kind_of, output_file
from recpo.errors import RecpoError
from recpo.frames import Frame, FrameOrPath, id_column, read_frame, require_columns, to_arrow
from recpo.serving.attributes import ItemFilters, Wanted, filtered
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ITEM_ID, TIMESTAMP, USER_ID, HistoryReader, ServingCounts
from recpo.serving.recommending import BATCH_SIZE, Moment, milliseconds, recommend_lists, validate_k
from recpo.serving.runtimes import CPU_PROVIDER, EngineName, Runtime

if TYPE_CHECKING:
    from recpo.data.prepared import Prepared
    from recpo.factorization.factors import Factors
    from recpo.training.run import Run

_ROWS_AT_ONCE = 1 << 16


#: A bundle, a run, factors, or the directory of one; or the name of a baseline.
Source = Union[Bundle, "Run", "Factors", str, PathLike[str]]

#: Length of lists, where neither a bundle nor the catalog limits it.
LIST_LENGTH: Final = 10


class Server(NamedTuple):
    """A runtime with the reader of its histories and the attributes for filters."""

    runtime: Runtime
    reader: HistoryReader
    filters: ItemFilters | None = None


def recommend(
    source: Source,
    histories: FrameOrPath,
    k: int | None = None,
    *,
    exclude: FrameOrPath | None = None,
    users: Iterable[Any] | None = None,
    user_features: FrameOrPath | None = None,
    context: FrameOrPath | None = None,
    allow: Wanted | None = None,
    deny: Wanted | None = None,
    at: Moment | None = None,
    engine: EngineName = "onnx",
    provider: str = CPU_PROVIDER,
    batch_size: int = BATCH_SIZE,
    trust: Sequence[str] = (),
    prepared: Prepared | str | PathLike[str] | None = None,
) -> pd.DataFrame:
    """The best items of every user, as a frame; see ``Bundle.recommend``.

    Args:
        source: a bundle, a run, factors, or the directory of one; or the name of a baseline of ``recpo.evaluate``. The
            best checkpoint of a run is used.
        histories: events in long format: a frame, or a Parquet file or directory that fits into memory.
        k: list length; None = 10, or fewer if the catalog or the bundle has no more.
        exclude: ``user_id`` and ``item_id`` pairs that must not be listed.
        users: the users to serve, in this order, including new users; None = the users of ``histories``.
        user_features: ``user_id`` and the columns of the prepared user table, if the policy reads user features.
        context: ``user_id`` and the features of the current requests, if the policy reads them.
        allow: attribute -> values, for a bundle with attributes: list only items that have one of the values of every
            attribute.
        deny: attribute -> values: list no item that has one of these values.
        at: when the lists are made: items that are not available then are left out; see ``Bundle.recommend``.
        engine: engine that runs a bundle given by its directory.
        provider: execution provider of ONNX Runtime for such a bundle.
        batch_size: users ranked at once.
        trust: packages, in addition to recpo, whose classes the configuration of a run may name.
        prepared: for factors and baselines, the prepared data with their items: that on which factors were fitted; a
            baseline is fitted on its training events, with default options.

    Raises:
        RecpoError: see ``Bundle.load`` and ``HistoryReader.read``.
    """
    server = _server(source, engine, provider, trust, prepared)
    k = _list_length(k, server.runtime)
    excluded = None if exclude is None else read_frame(exclude, "exclude")
    events = read_frame(histories, "histories")
    more = _features(user_features, context)
    served = recommend_lists(
        server.runtime,
        server.reader,
        events,
        k=k,
        exclude=excluded,
        users=users,
        allowed=filtered(server.filters, allow, deny),
        at=at,
        batch_size=batch_size,
        **more,
    )
    return served.to_pandas()


def write_recommendations(
    source: Source,
    histories: str | PathLike[str],
    out: str | PathLike[str],
    k: int | None = None,
    *,
    exclude: FrameOrPath | None = None,
    users: FrameOrPath | None = None,
    user_features: FrameOrPath | None = None,
    context: FrameOrPath | None = None,
    allow: Wanted | None = None,
    deny: Wanted | None = None,
    at: Moment | None = None,
    engine: EngineName = "onnx",
    provider: str = CPU_PROVIDER,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[int], object] | None = None,
    trust: Sequence[str] = (),
    prepared: Prepared | str | PathLike[str] | None = None,
) -> ServingCounts:
    """Writes the lists of all users of a Parquet file to another one, in bounded memory.

    Args:
        source: a bundle, a run, factors, or the directory of one; or the name of a baseline of ``recpo.evaluate``. The
            best checkpoint of a run is used.
        histories: Parquet file or directory of events in long format; the rows of a user must be adjacent.
        out: Parquet file to write: ``user_id``, ``rank``, ``item_id``, ``score``; an existing one is replaced.
        k: list length; None = 10, or fewer if the catalog or the bundle has no more.
        exclude: ``user_id`` and ``item_id`` pairs that must not be listed; held in memory.
        users: frame or Parquet file with ``user_id``: the users to serve; those with events come first, in the order of
            the histories. None = the users of ``histories``.
        user_features: ``user_id`` and the columns of the prepared user table, if the policy reads user features; held
            in memory, like ``context``.
        context: ``user_id`` and the features of the current requests, if the policy reads them.
        allow: attribute -> values, for a bundle with attributes: list only items that have one of the values of every
            attribute.
        deny: attribute -> values: list no item that has one of these values.
        at: when the lists are made: items that are not available then are left out; see ``Bundle.recommend``.
        engine: engine that runs a bundle given by its directory.
        provider: execution provider of ONNX Runtime for such a bundle.
        batch_size: users ranked at once.
        progress: called with the number of events read.
        trust: packages, in addition to recpo, whose classes the configuration of a run may name.
        prepared: for factors and baselines, the prepared data with their items: that on which factors were fitted; a
            baseline is fitted on its training events, with default options.

    Returns:
        Counts of served users and of skipped events.

    Raises:
        RecpoError: see ``Bundle.load`` and ``HistoryReader.read``; a user's rows are not adjacent.
    """
    server = _server(source, engine, provider, trust, prepared)
    k = _list_length(k, server.runtime)
    excluded = None if exclude is None else read_frame(exclude, "exclude")
    asked = None if users is None else id_column(read_frame(users, "users"), USER_ID, "users")
    events = _open(Path(histories))
    more, allowed = _features(user_features, context), filtered(server.filters, allow, deny)
    at = milliseconds(at)  # one time for all blocks
    counts, writer = ServingCounts(), None
    given = [source if isinstance(source, str | PathLike) else getattr(source, "root", None), histories, exclude, users]
    given += [user_features, context, prepared]
    inputs = [Path(path) for path in given if isinstance(path, str | PathLike)]
    with output_file(Path(out), inputs=inputs) as partial:
        try:
            for block, served in _blocks(events, asked, Path(histories), server.reader.columns, progress):
                answer = recommend_lists(
                    server.runtime,
                    server.reader,
                    block,
                    k=k,
                    exclude=excluded,
                    users=served,
                    allowed=allowed,
                    at=at,
                    batch_size=batch_size,
                    **more,
                )
                counts += answer.counts
                writer = writer or pq.ParquetWriter(partial, answer.table.schema, compression="zstd")
                writer.write_table(answer.table)
        finally:
            if writer is not None:
                writer.close()
    return counts


class _Features(TypedDict):
    user_features: Frame | None
    context: Frame | None


def _features(user_features: FrameOrPath | None, context: FrameOrPath | None) -> _Features:
    given = {"user_features": user_features, "context": context}
    read = {name: None if source is None else read_frame(source, name) for name, source in given.items()}
    return {"user_features": read["user_features"], "context": read["context"]}


def _server(
    source: Source,
    engine: EngineName,
    provider: str,
    trust: Sequence[str],
    prepared: Prepared | str | PathLike[str] | None,
) -> Server:
    if prepared is not None:
        return _contender(source, prepared)
    kind = kind_of(Path(source)) if isinstance(source, str | PathLike) else None
    if isinstance(source, str | PathLike) and kind not in ("run", "factors"):
        source = Bundle.load(Path(source), engine, provider=provider)
    if isinstance(source, Bundle):
        return Server(source.runtime, source.reader, source.filters)

    from recpo.training.run import Run  # a bundle can be served without torch and lightning

    if kind == "run" and isinstance(source, str | PathLike):
        source = Run.open(Path(source), trust)
    if not isinstance(source, Run):
        raise RecpoError("factors hold no item ids: name the prepared data that they were fitted on (prepared)")
    return Server(source.runtime, source.reader)


def _contender(source: Source, prepared: Prepared | str | PathLike[str]) -> Server:
    """The server of factors or a baseline."""
    from recpo.data.prepared import Prepared  # bundles and runs are served without the libraries of prepare
    from recpo.factorization.factors import Factors
    from recpo.workflows.contender_runtime import ContenderRuntime

    if not isinstance(source, str | PathLike | Factors):
        raise RecpoError("prepared is for factors and baselines: leave it out for a run or a bundle")
    runtime = ContenderRuntime(source, prepared if isinstance(prepared, Prepared) else Prepared.open(str(prepared)))
    return Server(runtime, runtime.reader)


def _list_length(k: int | None, runtime: Runtime) -> int:
    return validate_k(min(LIST_LENGTH, runtime.k) if k is None else k, runtime.k)


def _open(histories: Path) -> ds.Dataset:
    if not histories.exists():
        raise RecpoError(f"{histories} does not exist; expected a Parquet file of histories")
    if kind_of(histories) == "prepared":
        raise RecpoError(f"{histories} is prepared data, expected histories: name {histories / 'histories.parquet'}")
    try:
        source = ds.dataset(histories, format="parquet")
    except (pa.ArrowException, OSError) as error:
        remedy = "name a Parquet file, or pass a data frame in Python"
        raise RecpoError(f"{histories} cannot be read as Parquet ({error}): {remedy}") from error
    require_columns(source.schema, [USER_ID, ITEM_ID, TIMESTAMP], str(histories))
    id_column(_no_events(source, histories), USER_ID, str(histories))
    return source


def _no_events(source: ds.Dataset, path: Path, read: Sequence[str] = (USER_ID, ITEM_ID, TIMESTAMP)) -> pa.Table:
    names = [name for name in read if name in source.schema.names]
    return to_arrow(source.schema.empty_table().select(names), str(path))


def _blocks(
    source: ds.Dataset,
    asked: pa.Array | None,
    path: Path,
    read: Sequence[str],
    progress: Callable[[int], object] | None,
) -> Iterator[tuple[pa.Table, pa.Array]]:
    """Events of whole users, with the users to serve from them; finally, the requested users without events."""
    served: set[Any] = set()
    for block in _whole_users(_batches(source, path, read, progress)):
        users = id_column(block, USER_ID, str(path)).unique()
        if again := served.intersection(users.to_pylist()):
            raise RecpoError(
                f"{path}: the rows of user_id {min(again)!r} are not adjacent ({len(again)} such users): sort the "
                "file by user_id, or pass a frame in memory"
            )
        served.update(users.to_pylist())
        yield block, users if asked is None else users.filter(pc.is_in(users, value_set=asked.cast(users.type)))
    nobody = _no_events(source, path, read)
    rest = nobody[USER_ID].combine_chunks() if asked is None else asked
    if asked is not None:
        rest = rest.filter(pa.array(np.array([user not in served for user in asked.to_pylist()], bool)))
    if len(rest) or not served:
        yield nobody, rest


def _batches(
    source: ds.Dataset, path: Path, read: Sequence[str], progress: Callable[[int], object] | None
) -> Iterator[pa.Table]:
    columns = [name for name in read if name in source.schema.names]
    try:
        for batch in source.to_batches(columns=columns, batch_size=_ROWS_AT_ONCE):
            if batch.num_rows:
                yield to_arrow(batch, str(path))
                if progress is not None:
                    progress(batch.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise RecpoError(f"{path} cannot be read as Parquet: {error}") from error


def _whole_users(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, cut where the user changes. One table and the events of one user are in memory."""
    held: list[pa.Table] = []
    for table in tables:
        users = table[USER_ID].combine_chunks()
        changes = np.flatnonzero(_changes(users))
        if held and len(held[0]) and held[0][USER_ID][0] != users[0]:
            changes = np.concatenate([[0], changes])
        if len(changes):
            if whole := [*held, *([table.slice(0, int(changes[-1]))] if changes[-1] else [])]:
                yield pa.concat_tables(whole)
            held, table = [], table.slice(int(changes[-1]))
        held.append(table)
    if held:
        yield pa.concat_tables(held)


def _changes(users: pa.Array) -> np.ndarray:
    """True at rows whose user differs from that of the previous row; False at the first row."""
    if len(users) < 2:
        return np.zeros(len(users), bool)
    other = pc.not_equal(users.slice(1), users.slice(0, len(users) - 1)).fill_null(True)
    return np.concatenate([[False], other.to_numpy(zero_copy_only=False)])

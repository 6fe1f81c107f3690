"""The verb ``recommend``: lists of a bundle, run, factors or baseline, for a frame or a Parquet file of any size."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from tqdm import tqdm

from recpo.artifacts.checksums import kind_of
from recpo.artifacts.outputs import output_file
from recpo.base.errors import NonNegativeInt, PositiveInt, RecpoError, reading
from recpo.base.frames import Frame, id_column, read_frame, require_columns, to_arrow
from recpo.log.csv_files import first_rows, is_text_file, table_format
from recpo.serving import recommending
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ITEM_ID, TIMESTAMP, USER_ID, HistoryReader, ServingCounts
from recpo.serving.runtimes import CPU_PROVIDER, EngineName, Runtime
from recpo.verbs.verb import Verb, function_of

if TYPE_CHECKING:
    from recpo.log.prepared import Prepared
    from recpo.rewards.factors import Factors
    from recpo.training.run import Run

    #: A bundle, a run, factors, or the directory of one; or the name of a baseline.
    Source = Bundle | Run | Factors | str | Path
    PreparedData = Prepared | str | Path
else:  # a bundle is served without the libraries that runs and prepared data need
    Source = Bundle | str | Path
    PreparedData = str | Path

_ROWS_AT_ONCE = 1 << 16
_FAULTS: Final = (pa.ArrowException, OSError)
_REMEDY: Final = "name a Parquet file, or pass a data frame in Python"

#: Length of lists, where neither a bundle nor the catalog limits it.
LIST_LENGTH: Final = 10


class Server(NamedTuple):
    """A runtime with the reader of its histories and the attributes for filters."""

    runtime: Runtime
    reader: HistoryReader
    filters: recommending.ItemFilters = recommending.ItemFilters()


@dataclass(frozen=True)
class Recommend(Verb["pd.DataFrame | ServingCounts"]):
    """Recommends for every user of a file of histories; a bundle needs neither lightning nor torchrec.

    Items of the history and excluded items are never recommended. Unknown items are skipped and counted. A user without
    events gets the policy's recommendations for an empty history. With ``out``, the lists of a file of any size are
    written in bounded memory, and the counts of what was skipped returned; without it, the lists are a frame in memory
    (``user_id``, ``rank``, ``item_id``, ``score``), see ``Bundle.recommend``.

    Raises:
        RecpoError: see ``Bundle.open`` and ``HistoryReader.read``; a user's rows are not adjacent in a file.
    """

    first_day: ClassVar = ("source", "histories", "out", "k", "show", "exclude", "users", "prepared")

    source: Source
    """a bundle, a run or factors, or the directory of one; or a baseline of ``recpo export`` with its default
    options, such as popularity. Of a run, the best checkpoint is used"""
    histories: Frame | str | Path
    """events, one per row: a Parquet file or directory with adjacent rows for each user, or a frame: user_id, item_id,
    timestamp (times, or milliseconds since 1970) and, if the log had them, watch_time and duration (seconds), dislike,
    label"""
    k: PositiveInt | None = None
    """list length; null = 10, or fewer if the catalog or the bundle has no more"""
    _: KW_ONLY
    out: str | Path | None = None
    """Parquet file to write: user_id, rank, item_id, score; an existing one is replaced"""
    exclude: Frame | str | Path | None = None
    """user_id and item_id, a frame, Parquet or text file: items that must not be listed"""
    users: Frame | str | Path | Sequence[Any] | None = None
    """user_id, a frame, Parquet or text file, or the ids: the users to serve, including new users; null = the users of
    the histories"""
    user_features: Frame | str | Path | None = None
    """user_id and the features as in the prepared user table, as a frame, Parquet or text file; only if the policy
    reads them"""
    context: Frame | str | Path | None = None
    """user_id and features of the current requests; only if the policy reads them"""
    allow: Mapping[str, Sequence[int | str]] | None = None
    """attribute -> values, for a bundle with attributes: list only items that have one of the values of every
    attribute, such as {"category": ["film"]}"""
    deny: Mapping[str, Sequence[int | str]] | None = None
    """attribute -> values: list no item that has one of these values"""
    at: recommending.Moment | None = None
    """when the lists are made, an ISO time or date such as 2026-11-23 (UTC without a zone): items that are not
    available then (available_from, available_until) are left out. null = now; if no item is available any more, the
    time of the newest event, with a warning"""
    prepared: PreparedData | None = None
    """for factors and baselines, the prepared data with their items: that on which factors were fitted; a baseline is
    fitted on its training events"""
    engine: EngineName = "onnx"
    """onnx (ONNX Runtime, without torch) or torch"""
    provider: str = CPU_PROVIDER
    """execution provider of ONNX Runtime; it must be in ``onnxruntime.get_available_providers()``"""
    batch_size: PositiveInt = recommending.BATCH_SIZE
    """number of users ranked at once"""
    trust: Sequence[str] = ()
    """packages, in addition to recpo, whose classes the configuration of a run may name"""
    show: NonNegativeInt = 0
    """number of users whose lists the command line prints"""
    progress: bool = False
    """show a progress bar on a terminal"""

    def execute(self) -> pd.DataFrame | ServingCounts:
        """Ranks for all users."""
        server = self._server()
        given = {"exclude": self.exclude, "user_features": self.user_features, "context": self.context}
        asked = {name: None if one is None else _table(one, name) for name, one in given.items()}
        at = recommending.moment_of_lists(self.at, server.reader.items, self._events)  # one time for all pieces
        lists = partial(self._lists, server, {**asked, "at": at})
        if self.out is None:
            return lists(read_frame(self.histories, "histories"), _ids(self.users)).to_pandas()
        if not isinstance(self.histories, str | PathLike):
            raise RecpoError(
                "recommend: histories are a frame, expected a file where out is given: leave out out, and write the "
                "frame that you get",
                field="histories",
                code="unused_option",
            )
        counts = self._write(lists, server.reader.columns, Path(self.histories), Path(self.out))
        self.write_resolved(Path(self.out).with_suffix(".resolved.yaml"))
        return counts

    def _events(self) -> Frame:
        """The times of all events of the histories."""
        if not isinstance(self.histories, str | PathLike):
            return self.histories
        return _open(Path(self.histories)).to_table([TIMESTAMP])

    def _server(self) -> Server:
        source = self.source
        if self.prepared is not None:
            return _baseline(source, self.prepared)
        kind = kind_of(Path(source)) if isinstance(source, str | PathLike) else None
        if isinstance(source, Bundle) or (isinstance(source, str | PathLike) and kind not in ("run", "factors")):
            bundle = Bundle.open(source, self.engine, provider=self.provider)
            return Server(bundle.runtime, bundle.reader, bundle.filters)
        from recpo.rewards.factors import Factors  # a bundle can be served without torch and lightning
        from recpo.training.run import Run

        if isinstance(source, Factors) or kind == "factors":
            raise RecpoError(
                "factors hold no item ids: name the prepared data that they were fitted on (prepared)",
                code="missing_option",
                field="prepared",
            )
        return Server(*recommending.runtime_of(Run.open(source, self.trust)))

    def _lists(self, server: Server, asked: Mapping[str, Any], events: Any, users: Any) -> recommending.Served:
        """The lists of some users, from all of their events and what else is ``asked`` of the reader."""
        k = recommending.validate_k(min(LIST_LENGTH, server.runtime.k) if self.k is None else self.k, server.runtime.k)
        allowed = server.filters.allowed(self.allow, self.deny)
        read = server.reader.read(events, users=users, **asked)
        return recommending.recommend_lists(
            server.runtime, server.reader.items, read, k=k, allowed=allowed, batch_size=self.batch_size
        )

    def _write(
        self, lists: Callable[[Any, Any], recommending.Served], columns: Sequence[str], histories: Path, out: Path
    ) -> ServingCounts:
        """Writes the lists of a file in pieces of whole users; the other inputs are in memory."""
        asked: Any = _ids(self.users)
        inputs = [self.source, histories, self.exclude, self.users, self.prepared, self.user_features, self.context]
        counts, writer = ServingCounts(), None
        bar = tqdm(desc="recommend", unit="event", disable=None if self.progress else True, leave=False)
        with bar, output_file(out, inputs=inputs) as partial:
            try:
                for block, served in _blocks(_open(histories), asked, histories, columns, bar.update):
                    answer = lists(block, served)
                    counts += answer.counts
                    writer = writer or pq.ParquetWriter(partial, answer.table.schema, compression="zstd")
                    writer.write_table(answer.table)
            finally:
                if writer is not None:
                    writer.close()
        return counts


def _table(source: Frame | str | PathLike[str], name: str) -> pa.Table:
    """A frame or a file; a text file is read as tables of a log are."""
    if not isinstance(source, str | PathLike) or not is_text_file(Path(source)):
        return read_frame(source, name)
    with reading(str(source), *_FAULTS, remedy=_REMEDY, field=name):
        table, ragged, _ = first_rows(Path(source), table_format(Path(source)), sys.maxsize)
    if ragged:
        raise RecpoError(
            f"{source}: {ragged:,} rows have another number of values than the first line: fix these rows, or quote "
            "values that contain commas",
            code="wrong_shape",
            field=name,
        )
    return table


def _ids(users: Frame | str | Path | Sequence[Any] | None) -> pa.Array | Sequence[Any] | None:
    """The ids of users, of a frame or a file if they are in one."""
    if users is None or isinstance(users, list | tuple | pa.Array | np.ndarray):
        return users
    frame: Any = users
    return id_column(_table(frame, "users"), USER_ID, "users")


recommend = function_of(Recommend)


def _baseline(source: Source, prepared: PreparedData) -> Server:
    """The server of factors or a baseline."""
    from recpo.log.prepared import Prepared  # bundles and runs are served without the libraries of prepare
    from recpo.rewards.factors import Factors
    from recpo.verbs.contenders import SERVED, is_baseline, served_baseline

    if not isinstance(source, str | PathLike | Factors) or not is_baseline(source):
        raise RecpoError(
            f"{source} is neither factors nor a baseline ({', '.join(SERVED)}): name one of them, or leave prepared "
            "out for a run or a bundle",
            code="wrong_file",
            field=str(source),
        )
    data = Prepared.open(prepared)
    served = served_baseline(Path(source) if isinstance(source, PathLike) else source, data)
    return Server(*served.runtime(data))


def _open(histories: Path) -> ds.Dataset:
    if not histories.exists():
        raise RecpoError(
            f"{histories} does not exist; expected a Parquet file of histories", code="missing_file", field="histories"
        )
    if kind_of(histories) == "prepared":
        raise RecpoError(
            f"{histories} is prepared data, expected histories: name {histories / 'histories.parquet'}",
            code="wrong_file",
            field="histories",
        )
    with reading(histories, *_FAULTS, remedy=_REMEDY, field="histories"):
        source = ds.dataset(histories, format="parquet")
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
    progress: Callable[[int], object],
) -> Iterator[tuple[pa.Table, pa.Array]]:
    """Events of whole users, with the users to serve from them; finally, the requested users without events."""
    served: set[Any] = set()
    for block in _whole_users(_batches(source, path, read, progress)):
        users = id_column(block, USER_ID, str(path)).unique()
        if again := served.intersection(users.to_pylist()):
            raise RecpoError(
                f"{path}: the rows of user_id {min(again)!r} are not adjacent ({len(again)} such users): sort the "
                "file by user_id, or pass a frame in memory",
                code="bad_value",
                field="user_id",
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
    source: ds.Dataset, path: Path, read: Sequence[str], progress: Callable[[int], object]
) -> Iterator[pa.Table]:
    columns = [name for name in read if name in source.schema.names]
    with reading(path, *_FAULTS, remedy=_REMEDY, field="histories"):
        for batch in source.to_batches(columns=columns, batch_size=_ROWS_AT_ONCE):
            if batch.num_rows:
                yield to_arrow(batch, str(path))
                progress(batch.num_rows)


def _whole_users(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, cut where the user changes. One table and the events of one user are in memory."""
    rest: pa.Table | None = None
    for table in tables:
        rest = table if rest is None else pa.concat_tables([rest, table])
        users = rest[USER_ID].combine_chunks()
        changes = pc.not_equal(users.slice(1), users.slice(0, len(users) - 1)).fill_null(True)
        places = np.flatnonzero(changes.to_numpy(zero_copy_only=False))
        if len(places):
            whole = int(places[-1]) + 1
            yield rest.slice(0, whole)
            rest = rest.slice(whole)
    if rest is not None:
        yield rest

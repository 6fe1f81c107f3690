"""Writes and publishes prepared shards: whole users, bounded memory, the same bytes every time."""

from __future__ import annotations

import re
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from recpo.artifacts.checksums import MARKER, marker, sha256
from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.feedback import FEEDBACK_KINDS, FeedbackDefinition, FeedbackRule
from recpo.log.engine import Engine, EngineOptions, start_engine
from recpo.log.feature_columns import CONTEXT, ENCODED, TableSide
from recpo.log.files import find_files
from recpo.log.locations import Location, Place, locate, remove_directory, writable
from recpo.log.prepared import MANIFEST, Prepared, run_change, run_offsets
from recpo.log.schema import EVENT_SCHEMA, PAST_SCHEMA, PERIODS, Derived, LogColumns

_ROW_GROUP: Final = 1 << 16
_LEVEL_ROWS: Final = 1 << 14  # the computed sum stays in the cache
_REPEATED: Final = (Derived.USER_INDEX, Derived.ITEM_INDEX)
_REPEATING: Final = (Derived.USER_INDEX, Derived.ITEM_INDEX, Derived.FEEDBACK, LogColumns.DURATION, Derived.BEHAVIORS)


def user_blocks(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Regroups rows sorted by ``user_index`` into tables of whole users.

    A block ends at the first change of user after ``rows`` rows, so its size does not depend on the engine's batches.
    At most one block and one batch are in memory.
    """
    pending: list[pa.RecordBatch] = []
    held = 0
    last_user = -1
    for batch in batches:
        while batch.num_rows:
            users = batch.column(Derived.USER_INDEX).to_numpy()
            changes = np.flatnonzero(np.diff(users, prepend=last_user))
            cuts = changes[changes + held >= rows]
            take = int(cuts[0]) if len(cuts) else batch.num_rows
            if take:
                pending.append(batch.slice(0, take))
                held += take
                last_user = int(users[take - 1])
            if len(cuts):
                yield pa.Table.from_batches(pending)
                pending, held = [], 0
            batch = batch.slice(take)
    if pending:
        yield pa.Table.from_batches(pending)


def write_parquet(table: pa.Table, file: Path) -> None:
    """All files use the same writer settings, so that equal tables give equal bytes."""
    with _writer(file, table.schema) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)


def write_rows(
    batches: Iterable[pa.RecordBatch | pa.Table], schema: pa.Schema, file: Path, repeating: Sequence[str] = ()
) -> int:
    """Writes a table one row group at a time, so that it need not fit in memory, and returns its number of rows.

    Args:
        batches: rows with the columns of ``schema``.
        schema: names and types of the columns.
        file: the file to write.
        repeating: columns with few distinct values, in addition to the columns that always have few.
    """
    rows, held, pending = 0, 0, list[pa.Table]()
    with _writer(file, schema, repeating) as writer:
        for batch in batches:
            pending.append(pa.table(batch).select(schema.names).cast(schema))
            held += batch.num_rows
            if held >= _ROW_GROUP:
                table = pa.concat_tables(pending).combine_chunks()
                whole = held // _ROW_GROUP * _ROW_GROUP
                writer.write_table(table.slice(0, whole), row_group_size=_ROW_GROUP)
                rows, held, pending = rows + whole, held - whole, [table.slice(whole)]
        if held or not rows:
            writer.write_table(pa.concat_tables([*pending, schema.empty_table()]).combine_chunks())
    return rows + held


def without_repeats(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows that differ from the previous row: the distinct rows, if they are sorted."""
    last: list[Any] | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        columns = [column.to_numpy() for column in batch.columns]
        is_new = run_change(*columns)
        is_new[0] = last is None or any(column[0] != before for column, before in zip(columns, last, strict=True))
        last = [column[-1] for column in columns]
        kept = batch.filter(pa.array(is_new))
        if kept.num_rows:
            yield kept


def _writer(file: Path, schema: pa.Schema, more: Sequence[str] = ()) -> pq.ParquetWriter:
    # A dictionary of values that rarely repeat costs time and space.
    repeating = [name for name in schema.names if name in (*_REPEATING, *more) or name.startswith(CONTEXT)]
    return pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=repeating)


@dataclass(frozen=True)
class Encoding:
    """How the columns of a shard are derived from those of the events.

    Attributes:
        feedback: defines the levels, and which events are positive, skipped, disliked and unknown.
        behaviors: names of the bits in ``behaviors``.
        context: request features, plain in the events and encoded in shards.
    """

    feedback: FeedbackDefinition
    behaviors: tuple[str, ...] = ()
    context: FittedFeatures | None = None


def write_shards(
    batches: Iterable[pa.RecordBatch],
    directory: Path,
    rows_per_shard: int,
    encoding: Encoding,
    progress: Callable[[int], object],
    threads: int = 1,
    first: int = 0,
) -> list[dict[str, Any]]:
    """Writes ``00000.parquet``, ``00001.parquet`` and so on, with at most ``threads + 1`` shards in memory.

    Args:
        batches: rows with the columns of ``EVENT_SCHEMA`` except the feedback level, sorted by user and time.
        directory: created, unless ``first`` is above 0.
        rows_per_shard: a shard ends at the first change of user after this many rows.
        encoding: how the columns of a shard are derived.
        progress: called with the number of rows written.
        threads: number of shards that are encoded at the same time.
        first: number of the first shard; ``directory`` already has the earlier ones.

    Returns:
        For each shard: its file (relative to the directory's parent), number of rows, users and targets, number of
        targets of each of ``FEEDBACK_KINDS`` and with each behavior, and SHA-256.
    """
    directory.mkdir(exist_ok=first > 0)
    shards: list[dict[str, Any]] = []
    pending: deque[Future[dict[str, Any]]] = deque()

    def finish_one() -> None:
        shards.append(pending.popleft().result())
        progress(shards[-1]["rows"])

    with ThreadPoolExecutor(threads) as pool:
        for number, block in enumerate(user_blocks(batches, rows_per_shard), start=first):
            if len(pending) == threads:
                finish_one()
            pending.append(pool.submit(_write_shard, block, directory / f"{number:05d}.parquet", encoding))
        while pending:
            finish_one()
    return shards


def totals(shards: dict[str, list[dict[str, Any]]], behaviors: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """The numbers of rows, targets and users, and of each kind of feedback and behavior, per period over all shards."""
    keys = ("rows", "targets", "users", *FEEDBACK_KINDS)
    found: dict[str, dict[str, Any]] = {
        period: {key: sum(shard[key] for shard in own) for key in keys} for period, own in shards.items()
    }
    if behaviors:
        for period, own in shards.items():
            did = [shard[Derived.BEHAVIORS] for shard in own]
            found[period][Derived.BEHAVIORS] = {name: sum(one[b] for one in did) for b, name in enumerate(behaviors)}
    return found


def write_past(batches: Iterable[pa.RecordBatch], shards: list[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    """Writes the items that the users of each held-out shard had before the period, one row group at a time.

    Args:
        batches: sorted rows of ``PAST_SCHEMA`` of the users of ``shards``; repeats are dropped.
        shards: the result of ``write_shards``, at least one.
        root: the directory that the file names are relative to.

    Returns:
        The shards, each with the name of its file as ``past``.
    """
    last_users = [shard["last_user"] for shard in shards]

    def pieces() -> Iterator[tuple[int, pa.RecordBatch]]:
        for batch in without_repeats(batches):
            numbers = np.searchsorted(last_users, batch.column(Derived.USER_INDEX).to_numpy())
            for start, stop in pairwise(run_offsets(numbers)):
                yield int(numbers[start]), batch.slice(start, stop - start)

    # outside the directory of shards, so that this directory can be read as one table of events
    files = [shard["file"].replace("/", "_past/") for shard in shards]
    (root / files[0]).parent.mkdir()
    without = set(range(len(shards)))
    for number, group in groupby(pieces(), key=lambda piece: piece[0]):
        write_rows((batch for _, batch in group), PAST_SCHEMA, root / files[number])
        without.discard(number)
    for number in without:
        write_rows([], PAST_SCHEMA, root / files[number])
    return [{**shard, "past": file} for shard, file in zip(shards, files, strict=True)]


def repeated(shards: Sequence[Mapping[str, Any]], root: Path, rule: FeedbackRule) -> dict[str, int]:
    """Events of a held-out period whose items the users had before it; one shard in memory at once.

    Args:
        shards: the result of ``write_past``.
        root: the directory that the file names are relative to.
        rule: says which events are positive.

    Returns:
        Numbers of ``repeated_targets``, and of ``repeated_positives`` among them.
    """
    names, targets, positives = (*_REPEATED, Derived.LABEL, LogColumns.DISLIKE, Derived.IS_TARGET), 0, 0
    for shard in shards:
        table, before = pq.read_table(root / shard["file"], columns=list(names)), pq.read_table(root / shard["past"])
        *pairs, label, dislike, is_target = (table[name].to_numpy() for name in names)
        user, item, *past = (one.astype(np.int64) for one in (*pairs, *(before[name].to_numpy() for name in _REPEATED)))
        again = np.isin(user << 32 | item, past[0] << 32 | past[1]) & is_target
        targets += int(again.sum())
        positives += int((again & rule.positive(label, dislike)).sum())
    return {"repeated_targets": targets, "repeated_positives": positives}


def _write_shard(block: pa.Table, file: Path, encoding: Encoding) -> dict[str, Any]:
    feedback, behaviors, context = encoding.feedback, encoding.behaviors, encoding.context
    names = (LogColumns.WATCH_TIME, LogColumns.DURATION, LogColumns.DISLIKE, Derived.LABEL, Derived.IS_TARGET)
    watch_time, duration, dislike, label, is_target = (block[name].to_numpy() for name in names)
    columns = (watch_time, duration, dislike, label)
    parts = (slice(start, start + _LEVEL_ROWS) for start in range(0, len(label), _LEVEL_ROWS))
    levels = np.concatenate([feedback.levels(*(column[part] for column in columns)) for part in parts])
    table = block.append_column(Derived.FEEDBACK, pa.array(levels))
    schema = EVENT_SCHEMA if not behaviors else EVENT_SCHEMA.append(pa.field(Derived.BEHAVIORS, pa.int32()))
    table = table.select(schema.names).cast(schema)
    if context is not None:
        table = _with_context(table, block, context)
    table = table.combine_chunks()
    write_parquet(table, file)
    users = table[Derived.USER_INDEX].to_numpy()
    did = table[Derived.BEHAVIORS].to_numpy()[is_target] if behaviors else np.zeros(0, np.int32)
    return {
        "file": f"{file.parent.name}/{file.name}",
        "rows": table.num_rows,
        "users": int(np.count_nonzero(run_change(users))),
        "last_user": int(users[-1]),
        "targets": int(np.count_nonzero(is_target)),
        **feedback.rule.counts(label[is_target], dislike[is_target]),
        **(
            {Derived.BEHAVIORS: [int(np.count_nonzero(did >> b & 1)) for b in range(len(behaviors))]}
            if behaviors
            else {}
        ),
        "sha256": sha256(file),
    }


def _with_context(table: pa.Table, block: pa.Table, context: FittedFeatures) -> pa.Table:
    """The columns ``context_<name>`` of a shard. Events that were prepared before are already encoded."""
    names = [feature.name for feature in context.features]
    encoded = context.encode(block.select([CONTEXT + name for name in names]).rename_columns(names))
    for name in names:
        values, before = encoded[name], ENCODED + CONTEXT + name
        if before in block.column_names:
            values = pc.coalesce(block[before].cast(values.type), values)
        table = table.append_column(CONTEXT + name, values)
    return table


_SHARD: Final = re.compile(rf"({'|'.join(PERIODS)})/\d+\.parquet")
_UPLOADS: Final = 8  # parallel uploads, with 4 MB of memory each


@contextmanager
def prepared_directory(target: Place, work: Place | None, overwrite: bool, inputs: Sequence[Place]) -> Iterator[Path]:
    """Yields an empty local directory that becomes ``target`` when the block ends without an error.

    An object store has no rename, so all files are uploaded, the manifest last: without a manifest, nothing counts as a
    prepared directory. When a directory is replaced, its old manifest is removed first, and its other old files after
    the new manifest is written.

    Args:
        target: the output directory.
        work: local directory for files before they are uploaded; None = the system's directory for temporary files.
        overwrite: replace an existing ``target``, which must be a prepared directory.
        inputs: files and directories of the log.

    Raises:
        RecpoError: ``target`` exists and ``overwrite`` is False; it is not a prepared directory; it is, contains or
            lies in one of ``inputs``; or the store is not writable.
    """
    local = [place for place in inputs if isinstance(place, Path)]
    if isinstance(target, Path):
        with output_directory(target, kind="prepared", overwrite=overwrite, inputs=local) as partial:
            yield partial
        return
    _check_store(target, overwrite)
    near = work if isinstance(work, Path) else None
    if near is not None:
        near.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recpo-prepare-", dir=near) as folder:
        (Path(folder) / MARKER).write_text(marker("prepared"), encoding="utf-8")
        yield Path(folder)
        _upload(Path(folder), target)


def _check_store(target: Location, overwrite: bool) -> None:
    there = _inside(target)
    if there and (MARKER not in there or (target / MARKER).read_bytes() != marker("prepared").encode()):
        raise RecpoError(
            f"{target} contains files that recpo did not write as prepared data: choose another output",
            code="wrong_file",
            field="out",
        )
    if MANIFEST in there and not overwrite:
        raise RecpoError(
            f"{target} exists already: choose another output, remove it, or pass --overwrite true",
            code="exists",
            field="out",
        )
    target.check_writable()


def _inside(target: Location) -> set[str]:
    return {Path(inside).relative_to(target.inside).as_posix() for inside in target.sizes()}


def _upload(folder: Path, target: Location) -> None:
    shards = {file for file in _inside(target) if _SHARD.fullmatch(file)}
    (target / MANIFEST).unlink()
    (target / MARKER).upload(folder / MARKER)  # first, so that the leftovers of an interrupted upload may be replaced
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files.remove(MANIFEST)
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(lambda file: (target / file).upload(folder / file), files))
    (target / MANIFEST).upload(folder / MANIFEST)
    for file in shards - set(files):
        (target / file).unlink()


@contextmanager
def work_directory(work: Place | None, partial: Path) -> Iterator[Place]:
    """Yields a new directory for temporary files, which is removed at the end.

    Args:
        work: parent directory; None = ``partial``.
        partial: the directory that is being prepared.
    """
    place = partial / ".work" if work is None else work / f"recpo-work-{uuid.uuid4().hex[:12]}"
    if isinstance(place, Path):
        place.mkdir(parents=True)
    try:
        yield place
    finally:
        remove_directory(place)


Source: TypeAlias = str | Sequence[str] | pa.Table


@dataclass(frozen=True)
class Sources:
    """What a prepared directory is made from: names of files, directories and patterns, or tables of rows.

    Attributes:
        log: the events.
        items: item table; None = there is none.
        users: user table; None = there is none.
    """

    log: Source
    items: Source | None = None
    users: Source | None = None

    @property
    def tables(self) -> dict[TableSide, bool]:
        """Whether there is a table of items and of users."""
        return {"item": self.items is not None, "user": self.users is not None}


@dataclass(frozen=True)
class Output:
    """Where a prepared directory is written, and with which engine.

    Attributes:
        out: the directory, local or in an object store.
        engine: what runs the expressions.
        work: directory for temporary files; None = beside ``out``.
        overwrite: replace ``out``, if it is a prepared directory.
        progress: show a bar on a terminal.
    """

    out: str | Path
    engine: EngineOptions = EngineOptions()  # noqa: RUF009  frozen
    work: str | Path | None = None
    overwrite: bool = False
    progress: bool = True


@dataclass(frozen=True)
class Workplace:
    """What a run that writes a prepared directory works with.

    Attributes:
        engine: runs the expressions.
        writers: number of threads that encode shards.
        directory: the unfinished directory.
        work: directory for temporary files.
        bar: the progress bar, one step per stage.
        log: files of the log.
        tables: files of the item and of the user table; empty = there is none.
    """

    engine: Engine
    writers: int
    directory: Path
    work: Place
    bar: tqdm[Any]
    log: Sequence[Place]
    tables: Mapping[TableSide, Sequence[Place]]


@contextmanager
def workplace(sources: Sources, output: Output, stages: int, inputs: Sequence[Place] = ()) -> Iterator[Workplace]:
    """Starts the engine in a directory that becomes ``output.out`` when the block ends without an error.

    Args:
        sources: what is read; a frame is first written to a file in the directory for temporary files.
        output: where the directory is written, and with which engine.
        stages: number of steps of the progress bar.
        inputs: further inputs besides the sources, which must lie outside of the output.
    """
    given = {what: source for what, source in vars(sources).items() if source is not None}
    files = {what: source for what, source in given.items() if not isinstance(source, pa.Table)}
    names = {what: [source] if isinstance(source, str) else list(source) for what, source in files.items()}
    found = {what: find_files(listed, what) for what, listed in names.items()}
    work, engine = None if output.work is None else locate(output.work), output.engine
    read = [path for paths in found.values() for path in paths]
    read += [*(locate(name) for listed in names.values() for name in listed), *inputs]
    with (
        prepared_directory(locate(output.out), work, output.overwrite, read) as directory,
        work_directory(work, directory) as temporary,
        start_engine(engine, temporary) as started,
        tqdm(total=stages, desc="prepare", unit="stage", disable=None if output.progress else True) as bar,
    ):
        for what, source in given.items():
            if isinstance(source, pa.Table):
                found[what] = [temporary / ("frame.parquet" if what == "log" else f"{what}-frame.parquet")]
                with writable(found[what][0]) as sink:
                    pq.write_table(source, sink)
        tables: dict[TableSide, Sequence[Place]] = {"item": found.get("items", []), "user": found.get("users", [])}
        yield Workplace(started, engine.writers, directory, temporary, bar, found["log"], tables)


def write_manifest(root: Path, content: dict[str, Any], known: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Completes a prepared directory: adds the size of every shard, missing checksums, and the manifest's own checksum.

    Args:
        root: a directory with all files that ``content`` names.
        content: ``shards`` by period, each with ``file``; ``files``, names of the other files; and any further values.
        known: checksums of files that were not written now.

    Returns:
        The manifest, as ``Prepared.open`` reads it.
    """
    shards = {period: [_completed(root, shard) for shard in listed] for period, listed in content["shards"].items()}
    files = {name: (known or {}).get(name) or sha256(root / name) for name in content["files"]}
    manifest = {**content, "shards": shards, "files": files}
    Prepared.write_facts(root, manifest)
    return manifest


def _completed(root: Path, shard: dict[str, Any]) -> dict[str, Any]:
    file = root / shard["file"]
    return {"sha256": shard.get("sha256") or sha256(file), **shard, "bytes": file.stat().st_size}

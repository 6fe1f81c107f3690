"""From a prepared directory and the files of the days after it to the next prepared directory.

Nothing that was prepared is read again or rewritten: of yesterday's directory an extension reads the tables of items
and users, the histories, the shards of the held-out periods with the standard events that they were made of
(``held_out.parquet``), and of the pairs (user, item) of the train period (``train_past/``) the row groups of users who
are held out today. Train shards are linked. So the cost depends on the new files, the held-out periods, the catalog and
the users, and not on the length of the past log; only the past items of today's held-out users are as many as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from recpo import __version__
from recpo.data import shaping, splits
from recpo.data.catalog import count_dropped, item_indices, item_table, name_requests, user_indices
from recpo.data.engine import Engine, EngineOptions
from recpo.data.events import time_order
from recpo.data.feature_columns import EventColumns
from recpo.data.feature_tables import TableSide
from recpo.data.files import Log, find_files, wider_type, write_frame
from recpo.data.id_map import IdMap
from recpo.data.locations import Place, locate
from recpo.data.prepare import Preparation, PrepareRun, Source, describe, start_engine, tie_warnings, totals
from recpo.data.prepared import FORMAT_VERSION, HELD_OUT, TRAIN_PAST, Prepared, write_manifest
from recpo.data.publishing import prepared_directory, work_directory
from recpo.data.schema import (
    PAST_SCHEMA,
    PERIODS,
    RETIRED,
    TIE_RULE,
    TRAIN,
    Columns,
    Derived,
    LogColumns,
    history_schema,
    item_schema,
    user_schema,
)
from recpo.data.splits import TemporalSplit, held_out_events, past_items, period_rows, recent_events, train_items
from recpo.data.writing import write_parquet, write_rows, write_shards
from recpo.errors import RecpoError
from recpo.feedback import FeedbackDefinition, FeedbackRule

_STAGES: Final = 8
_NO_PLAIN_OPTIONS: Final = ("columns", "preset", "strict", "features", "behaviors", "csv")
_CONTEXT: Final = -1  # period of events before the held-out ones: they are read, and are in a train shard already
_BEFORE, _KEPT, _IS_KEPT, _OWN_PERIOD, _PLACE = "before", "kept_label", "is_kept", "own_period", "place"
_ITEMS, _USERS, _HISTORIES, _QUANTILES = "items.parquet", "users.parquet", "histories.parquet", "quantiles.parquet"


@dataclass(frozen=True)
class _Kept(Preparation):
    """The options of a prepared directory; its columns are exactly those that it has."""

    @property
    def mapping(self) -> Columns:
        """No preset adds a column."""
        return self.columns

    @property
    def more(self) -> EventColumns:
        """No preset adds a behavior."""
        return EventColumns()


def kept_preparation(data: Prepared, asked: Preparation) -> Preparation:
    """The options that ``data`` was made with, which its extensions keep.

    Args:
        data: the directory to extend.
        asked: what the caller gave; an option that has its default asks for nothing.

    Raises:
        RecpoError: another option is asked for, or one that cannot be extended.
    """
    config, default = data.manifest["config"], Preparation()
    others = [
        name
        for name in (field.name for field in fields(Preparation) if field.name not in _NO_PLAIN_OPTIONS)
        if getattr(asked, name) != getattr(default, name) and _plain(getattr(asked, name)) != config[name]
    ]
    others += [name for name in ("features", "behaviors") if getattr(asked, name) != getattr(default, name)]
    if (asked.preset, asked.columns) != (default.preset, default.columns) and asdict(asked.mapping) != config[
        "columns"
    ]:
        others.append("columns")
    if others:
        raise RecpoError(
            f"{data.root} was prepared with other options: {', '.join(others)} differ. An extension keeps those of the "
            "directory that it extends: leave them out, or prepare the whole log again"
        )
    found = {column: name for column, name in data.manifest["columns"].items() if name is not None}
    units = {name: config["columns"][name] for name in ("time_unit", "watch_time_unit", "duration_unit")}
    plain = ("preset", "max_context", "rows_per_shard", "min_user_events", "min_item_events", "catalog")
    kept = _Kept(
        columns=Columns(**found, **units),
        split=_made(config["split"], splits, asked.split),
        label=_made(config["label"], shaping, asked.label),
        feedback=FeedbackRule(**config["feedback"]),
        max_watch_time=config["max_watch_time"],
        strict=asked.strict,
        csv=asked.csv,
        **{name: config[name] for name in plain},
    )
    _validate_split(kept, data)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, FeedbackRule):
        return asdict(value)
    return value if isinstance(value, str | int | float | bool) else describe(value)


def _made(entry: Mapping[str, Any], module: Any, asked: Any) -> Any:
    """A label or a split as the manifest describes it: one of recpo's own, or the one that the caller gave."""
    if describe(asked) == entry:
        return asked
    own = getattr(module, entry["class_path"].rpartition(".")[2], None)
    if own is None or entry["class_path"] != f"{own.__module__}.{own.__qualname__}":
        raise RecpoError(f"extends: {entry['class_path']} is none of recpo's own: give it with its options")
    return own(**entry["init_args"])


def _validate_split(kept: Preparation, data: Prepared) -> None:
    split = kept.split
    if not isinstance(split, TemporalSplit) or split.valid_start is not None or split.test_start is not None:
        raise RecpoError(
            f"{data.root} was prepared with {split}: only the periods of TemporalSplit with valid_days and test_days "
            "roll forward; prepare the whole log again, with such a split"
        )


def extend(
    data: Prepared,
    asked: Preparation,
    log: str | Sequence[str] | pa.Table,
    out: str | Path,
    *,
    engine: EngineOptions = EngineOptions(),  # noqa: B008  frozen
    items: Source | None = None,
    users: Source | None = None,
    retire: Sequence[Any] | pa.Array = (),
    work: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Writes the prepared directory ``out``: that of ``data`` and the days of ``log`` after it.

    The periods roll forward by the same split: test is the last days of ``log``, valid the days before them, and
    everything before is train. So events that ``data`` held out and that lie before the new valid period become train,
    and so do events of ``log`` before it. They stand in new train shards, each user's after the last ``max_context``
    earlier events as context rows (``is_target`` False), as in the shards of the held-out periods: every train event is
    a target in one shard. Items and users keep their numbers; new ones are appended, by the rules of the catalog.

    What was fitted is kept: the cutoffs of the feedback levels, the quantile table, and the label of every event that
    has one. ``WatchQuantiles`` compares a new event with the watch times of its user that are at hand (the context and
    the new train events), and with the kept table where those are too few. The duration of an item that had one stays.

    An extension equals ``prepare`` of the whole log, up to the order of the appended items and users, in the events of
    each period, their feedback levels, requests, held-out contexts and past items, the serving histories and all
    counts, where ``min_item_events`` is at most 1 and ``min_user_events`` 0, what is fitted is the same, and no request
    goes on after the last event of ``data``. Requests with their last ``max_context`` events before them are the same
    training examples.

    Args:
        data: the directory to extend.
        asked: options, which must be those of ``data`` or the defaults.
        log: the new files; all their events lie after those of ``data``.
        out: directory to make.
        engine: what runs the expressions.
        items: table with features of items; refused for now.
        users: table with features of users; refused for now.
        retire: external ids of items that are no candidates from now on, beside those that are none already. They keep
            their numbers and stay in histories and in training.
        work: where temporary files go; None = inside ``out``.
        overwrite: replace ``out``, if it is a prepared directory.
        progress: show a bar on a terminal.

    Returns:
        The manifest of ``out``.

    Raises:
        RecpoError: other options, events before the end of ``data``, faults of the log, or ``out`` exists.
    """
    choice = kept_preparation(data, asked)
    root = _local(data.root, "extends")
    carried = [name for name in ("features", "feature_tables", "behaviors") if name in data.manifest]
    if carried or items is not None or users is not None:
        raise RecpoError(
            f"{root}: features and behaviors are not carried along by an extension; prepare the whole log again, or "
            "extend a directory without them"
        )
    if HELD_OUT not in data.manifest["files"]:
        raise RecpoError(f"{root} lacks {HELD_OUT}: prepare the whole log again with this recpo, then extend that")
    if engine.engine != "duckdb":
        raise RecpoError("engine: an extension runs on duckdb; the new files of a few days fit on one machine")
    names = [] if isinstance(log, pa.Table) else [log] if isinstance(log, str) else log
    paths = find_files(names)
    place = None if work is None else locate(work)
    inputs = [*paths, *map(locate, names), root]
    with prepared_directory(_local(locate(out), "out"), place, overwrite=overwrite, inputs=inputs) as partial:
        with (
            work_directory(place, partial) as temporary,
            start_engine(engine, temporary) as started,
            tqdm(total=_STAGES, desc="prepare", unit="stage", disable=None if progress else True) as bar,
        ):
            if isinstance(log, pa.Table):
                paths = [write_frame(log, temporary)]
            run = _ExtensionRun(data, root, retire, choice, started, engine.writers, partial, temporary, bar)
            manifest = run.manifest(paths)
        known = {name: data.checksums[name] for name in manifest["files"] if name in run.linked}
        return write_manifest(partial, manifest, known)


def _local(place: Place, name: str) -> Path:
    if isinstance(place, Path):
        return place
    raise RecpoError(f"{name} {place}: an extension links files, which an object store cannot; use a local directory")


class _ExtensionRun(PrepareRun):
    """One pass from yesterday's directory and the new files to today's."""

    def __init__(self, data: Prepared, root: Path, retire: Sequence[Any] | pa.Array, *rest: Any) -> None:
        super().__init__(*rest)
        self.data, self.root, self.retire = data, root, retire
        self.linked: set[str] = set()
        self.bytes_read = 0
        self.start_ms: int = data.manifest["boundaries"]["valid_start_ms"]

    def manifest(
        self, paths: Sequence[Place], tables: Mapping[TableSide, Sequence[Place]] = MappingProxyType({})
    ) -> dict[str, Any]:
        """See ``PrepareRun.manifest``."""
        old = self.data.manifest
        held_out = [shard["file"] for period in PERIODS[1:] for shard in old["shards"][period]]
        read = [HELD_OUT, _ITEMS, _USERS, _HISTORIES, _QUANTILES, *held_out]
        self.data.verify(read)
        self.bytes_read = sum((self.root / name).stat().st_size for name in read)
        self._stage()
        log, new = self._read(paths, {})
        log = self._with_kept_types(log)
        self._stage()
        events, boundaries = self._assign(new, log)
        items, users, placed = self._place(events, log)
        self._stage()
        shaped = self._shaped(placed, items, users)
        self._past_pairs = self._earlier_pairs(shaped)
        feedback = self.data.feedback
        sizes = self._write_catalog(log, items, users, shaped)
        shards = {PERIODS[TRAIN]: self._write_train(shaped, feedback)}
        shards |= {name: self._write_period(shaped, number, feedback) for number, name in enumerate(PERIODS) if number}
        self._write_kept_histories(log, items, users, shaped)
        later = self._write_later(log, events, shaped, items, users)
        self._link(_QUANTILES)
        past = [shard["past"] for listed in shards.values() for shard in listed if "past" in shard]
        fresh = len(shards["train"]) - len(old["shards"]["train"])
        return {
            **{name: old[name] for name in ("columns", "max_context", "label", "feedback")},
            "format_version": FORMAT_VERSION,
            "recpo_version": __version__,
            "config": {**old["config"], "log": [*old["config"]["log"], *sorted(file.shown for file in log.files)]},
            "boundaries": boundaries,
            "counts": self._counts(shards),
            "warnings": tie_warnings(self.choice.label, old["counts"]["watch_time_ties"]),
            "shards": shards,
            "segments": [*self.data.segments, *([fresh] if fresh else [])],
            "extends": {"items": self.data.num_items, "users": old["num_users"], "bytes_read": self.bytes_read},
            "files": (_ITEMS, _USERS, _QUANTILES, _HISTORIES, *past, *later),
            **sizes,
        }

    def _with_kept_types(self, log: Log) -> Log:
        """Ids in a type that holds those of yesterday and of the new files."""
        kept = pq.read_schema(self.root / HELD_OUT)
        types = dict(log.types)
        for column in (LogColumns.USER_ID, LogColumns.ITEM_ID, LogColumns.REQUEST_ID):
            if column not in types:
                continue
            before, now = kept.field(column).type, types[column]
            if pa.types.is_integer(before) != pa.types.is_integer(now):
                raise RecpoError(
                    f"{log.name}, column {log.columns[column]}: type {now}, {self.root} has {before}: cast the column"
                )
            types[column] = wider_type(before, now)
        return replace(log, types=types)

    def _assign(self, new: ir.Table, log: Log) -> tuple[ir.Table, dict[str, Any]]:
        """The standard events at hand, with their periods: those that were held out, and the new ones."""
        kept, time = self.data.manifest["boundaries"], new[LogColumns.TIMESTAMP]
        ends = self.engine.row(new.aggregate(first=time.min(), last=time.max()))
        if ends["first"] <= kept["last_ms"]:
            raise RecpoError(
                f"{log.name}: an event at {ends['first']} ms lies before the end of {self.root}, whose last event is "
                f"at {kept['last_ms']} ms: give the files of later days only, each once"
            )
        boundaries = self.choice.split.boundaries(kept["first_ms"], ends["last"], True)
        schema = self._held_out_schema(log)
        unknown = {Derived.LABEL: ibis.null("float64"), Derived.REQUEST: ibis.null("int64")}
        columns = dict(ibis.Schema.from_pyarrow(schema).items())
        fresh = new.mutate(**unknown, **{Derived.IS_PLACED: ibis.literal(False)}).select(schema.names).cast(columns)
        held = self._table(HELD_OUT).select(schema.names).cast(columns)
        events = self.choice.split.assign(held.union(fresh), boundaries)
        events = self.engine.materialize("events", events)
        return events, {"first_ms": kept["first_ms"], "last_ms": ends["last"], **boundaries}

    def _place(self, events: ir.Table, log: Log) -> tuple[ir.Table, ir.Table, ir.Table]:
        """All items and users, new ones appended, and the events of these with positions and requests."""
        choice, engine, user, item = self.choice, self.engine, Derived.USER_INDEX, Derived.ITEM_INDEX
        types = {name: ibis.dtype(log.types[name]) for name in (LogColumns.ITEM_ID, LogColumns.USER_ID)}
        old = self._table(_ITEMS).select(LogColumns.ITEM_ID, item).cast({LogColumns.ITEM_ID: types[LogColumns.ITEM_ID]})
        fresh = item_indices(events.anti_join(old, LogColumns.ITEM_ID), choice.catalog, choice.min_item_events)
        fresh = fresh.mutate(**{item: (fresh[item] + self.data.num_items).cast("int32")})
        items = engine.materialize("items", old.union(fresh))
        known = events.semi_join(items, LogColumns.ITEM_ID)
        old = self._table(_USERS).cast({LogColumns.USER_ID: types[LogColumns.USER_ID]})
        old = old.select(LogColumns.USER_ID, user, **{_BEFORE: old.train_count})
        fresh = user_indices(known.anti_join(old, LogColumns.USER_ID), choice.min_user_events)
        number = (fresh[user] + self.data.manifest["num_users"]).cast("int32")
        fresh = fresh.select(LogColumns.USER_ID, **{user: number, _BEFORE: ibis.literal(0, "int64")})
        users = engine.materialize("users", old.union(fresh))
        self.dropped |= count_dropped(engine, events, known, "item outside the catalog")
        if choice.min_user_events:
            active = known.semi_join(users, LogColumns.USER_ID)
            self.dropped |= count_dropped(engine, known, active, "user below min_user_events")
        placed = known.inner_join(items, LogColumns.ITEM_ID).inner_join(users, LogColumns.USER_ID)
        return items, users, _with_positions(placed.select(*events.columns, item, user, _BEFORE))

    def _shaped(self, placed: ir.Table, items: ir.Table, users: ir.Table) -> ir.Table:
        """The placed events and the context before them, labeled."""
        request_id = placed[LogColumns.REQUEST_ID].type()
        placed = self.engine.materialize("placed", placed)
        names = [
            *(name for name in TIE_RULE if name not in (LogColumns.ITEM_ID, LogColumns.REQUEST_ID)),
            *(
                Derived.USER_INDEX,
                Derived.ITEM_INDEX,
                Derived.POSITION,
                Derived.REQUEST,
                Derived.PERIOD,
                _KEPT,
                _IS_KEPT,
            ),
        ]
        given = placed.rename({_KEPT: Derived.LABEL, _IS_KEPT: Derived.IS_PLACED})
        context = self._context(placed, items, users).mutate(**{LogColumns.REQUEST_ID: ibis.null(request_id)})
        names.append(LogColumns.REQUEST_ID)
        rows = given.select(names).union(context.select(names).cast(dict(given.select(names).schema().items())))
        # of a user's own watch times those of the context count: their events are of the train period
        rows = rows.mutate(
            **{
                _OWN_PERIOD: rows[Derived.PERIOD],
                Derived.PERIOD: ibis.ifelse(rows[Derived.PERIOD] == _CONTEXT, TRAIN, rows[Derived.PERIOD]).cast("int8"),
            }
        )
        labeled = self.choice.label.extend(self.engine.materialize("rows", rows), self._table(_QUANTILES))
        label = ibis.ifelse(labeled[_IS_KEPT], labeled[_KEPT], labeled[Derived.LABEL])
        shaped = labeled.mutate(**{Derived.LABEL: label, Derived.PERIOD: labeled[_OWN_PERIOD]})
        shaped = self.engine.materialize("shaped", shaped.drop(_KEPT, _IS_KEPT, _OWN_PERIOD))
        self.engine.drop("placed", "rows")
        return shaped

    def _context(self, placed: ir.Table, items: ir.Table, users: ir.Table) -> ir.Table:
        """The last ``max_context`` train events of yesterday of the users of ``placed``, with their positions.

        Held-out users have them as context rows of their shard, the others in the histories.
        """
        user = Derived.USER_INDEX
        valid, test = (self._shard_rows(period) for period in PERIODS[1:])
        contexts = [
            valid.filter(~valid[Derived.IS_TARGET]),
            test.filter(~test[Derived.IS_TARGET], test[LogColumns.TIMESTAMP] < self.start_ms).anti_join(valid, user),
        ]
        found = contexts[0].union(contexts[1]).drop(Derived.IS_TARGET)
        rows = self._table(_HISTORIES, keep_place=True)
        rows = rows.inner_join(items.select(LogColumns.ITEM_ID, Derived.ITEM_INDEX), LogColumns.ITEM_ID)
        rows = rows.inner_join(users.select(LogColumns.USER_ID, user), LogColumns.USER_ID)
        rows = rows.semi_join(placed, user).anti_join(valid, user).anti_join(test, user)
        rows = rows.mutate(
            **{
                LogColumns.PROPENSITY: ibis.null("float64"),
                LogColumns.IS_RANDOM: ibis.literal(False),
                Derived.REQUEST: ibis.null("int64"),
            }
        )
        names = found.columns
        found = found.union(_in_milliseconds(rows).select(names).cast(dict(found.schema().items())))
        found = found.inner_join(users.select(user, _BEFORE), user)
        place = ibis.row_number().over(group_by=found[user], order_by=found[_PLACE])
        last = found[_BEFORE] - found.count().over(group_by=found[user])
        found = found.mutate(**{Derived.POSITION: (place + last).cast("int64")})
        alone = found[user].cast("int64") * (1 << 32) + found[Derived.POSITION]
        return found.mutate(
            **{
                Derived.REQUEST: found[Derived.REQUEST].coalesce(alone).cast("int64"),
                Derived.PERIOD: ibis.literal(_CONTEXT, "int8"),
                Derived.VALUE: ibis.null("float64"),
                _IS_KEPT: ibis.literal(True),
            }
        )

    def _shard_rows(self, period: str) -> ir.Table:
        """The rows of the shards of a held-out period of yesterday, as they are in an extension."""
        files = [self.root / shard["file"] for shard in self.data.manifest["shards"][period]]
        rows = self.engine.read_parquet(files, [])
        rows = rows.mutate(
            **{
                _PLACE: rows[Engine.ROW].cast("int64"),
                LogColumns.PROPENSITY: _known(rows[LogColumns.PROPENSITY]),
            }
        )
        kept = [Derived.USER_INDEX, Derived.ITEM_INDEX, LogColumns.TIMESTAMP, LogColumns.DISLIKE, LogColumns.IS_RANDOM]
        kept += [LogColumns.PROPENSITY, Derived.REQUEST, Derived.IS_TARGET, _PLACE]
        return _in_milliseconds(rows).select(*kept, Derived.WATCH_MS, Derived.DURATION_MS, _KEPT)

    def _earlier_pairs(self, shaped: ir.Table) -> ir.Table:
        """The pairs of yesterday's train period of the users who are held out today."""
        held_out = shaped.filter(shaped[Derived.PERIOD] > TRAIN).select(Derived.USER_INDEX).distinct()
        users = np.sort(self.engine.table(held_out).column(0).to_numpy())
        assert isinstance(self.work, Path)
        write_rows(self._pairs(users), PAST_SCHEMA, self.work / "pairs.parquet")
        return self.engine.read_parquet([self.work / "pairs.parquet"], []).drop(Engine.FILE, Engine.ROW)

    def _pairs(self, users: np.ndarray) -> Iterator[pa.RecordBatch]:
        """The row groups of ``train_past/`` that may hold some of ``users``, with the pairs of these."""
        for name in self._train_past():
            with pq.ParquetFile(self.root / name) as file:
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    extent = group.column(0).statistics
                    first = 0 if extent is None else int(np.searchsorted(users, extent.min))
                    if extent is not None and (first == len(users) or users[first] > extent.max):
                        continue
                    self.bytes_read += sum(group.column(column).total_compressed_size for column in range(2))
                    table = file.read_row_group(number)
                    kept = table.filter(pc.is_in(table.column(0), pa.array(users, pa.int32())))
                    yield from kept.to_batches()

    def _train_past(self) -> list[str]:
        return sorted(name for name in self.data.manifest["files"] if name.startswith(f"{TRAIN_PAST}/"))

    def _past(self, events: ir.Table, period: int) -> ir.Table:
        return past_items(events, period, self._past_pairs)

    def _write_catalog(self, log: Log, items: ir.Table, users: ir.Table, shaped: ir.Table) -> dict[str, int]:
        schema = item_schema(log.types[LogColumns.ITEM_ID])
        fresh = self.engine.table(item_table(items, shaped, self.choice.feedback)).cast(schema)
        table = _appended(self.data.table(_ITEMS), fresh)
        if len(retired := self._retired(table[LogColumns.ITEM_ID].combine_chunks())):
            table = table.append_column(RETIRED, pa.array(np.isin(table[Derived.ITEM_INDEX].to_numpy(), retired)))
        write_parquet(table, self.partial / _ITEMS)
        train = shaped.filter(shaped[Derived.PERIOD] == TRAIN)
        counts = train.group_by(Derived.USER_INDEX).aggregate(fresh=train.count())
        rows = users.left_join(counts, Derived.USER_INDEX).drop(f"{Derived.USER_INDEX}_right")
        rows = rows.mutate(train_count=rows[_BEFORE] + rows.fresh.fill_null(0)).order_by(Derived.USER_INDEX)
        self.trained = int(self.engine.row(rows.aggregate(users=(rows.train_count > 0).sum()))["users"])
        number = self._write_rows(rows, user_schema(log.types[LogColumns.USER_ID]), _USERS)
        return {"num_items": len(fresh), "num_users": number}

    def _retired(self, item_ids: pa.Array) -> np.ndarray:
        """Internal ids of yesterday's retired items and of those that are retired now.

        Raises:
            RecpoError: an item to retire is not in the catalog.
        """
        found = IdMap(item_ids).to_internal(self.retire)
        unknown = np.flatnonzero(found == 0)
        if len(unknown):
            raise RecpoError(
                f"retire: {len(unknown)} of {len(found)} items are not in the catalog, the first is "
                f"{self.retire[int(unknown[0])]!r}: leave them out"
            )
        return np.union1d(self.data.retired_items, found)

    def _write_train(self, shaped: ir.Table, feedback: FeedbackDefinition) -> list[dict[str, Any]]:
        """Yesterday's train shards, linked, and those of the events that are train from today on."""
        self._stage()
        kept: list[dict[str, Any]] = self.data.manifest["shards"]["train"]
        for shard in kept:
            self._link(shard["file"])
        rows = period_rows(shaped, TRAIN, self.choice.max_context, has_context=True)
        fresh = write_shards(
            self.engine.stream(rows),
            self.partial / PERIODS[TRAIN],
            self.choice.rows_per_shard,
            feedback,
            self._written,
            self.writers,
            first=len(kept),
        )
        return [*kept, *fresh]

    def _write_kept_histories(self, log: Log, items: ir.Table, users: ir.Table, shaped: ir.Table) -> None:
        """The histories of users with events at hand, and those of the others as they are."""
        self._stage()
        schema = history_schema(log.types[LogColumns.USER_ID], log.types[LogColumns.ITEM_ID])
        fresh = recent_events(shaped, items, users.drop(_BEFORE), self.choice.max_context)
        kept = self._table(_HISTORIES, keep_place=True).rename({Derived.POSITION: _PLACE})
        kept = kept.inner_join(users.select(LogColumns.USER_ID, Derived.USER_INDEX), LogColumns.USER_ID)
        kept = kept.anti_join(shaped, Derived.USER_INDEX).select(fresh.columns)
        rows = fresh.union(kept.cast(dict(fresh.schema().items())))
        rows = rows.order_by([rows[Derived.USER_INDEX], rows[Derived.POSITION]])
        self._written(self._write_rows(rows, schema, _HISTORIES))
        self.bar.update()

    def _write_later(self, log: Log, events: ir.Table, shaped: ir.Table, items: ir.Table, users: ir.Table) -> list[str]:
        """What the next extension reads: the pairs of the events that became train, and the held-out events."""
        kept = self._train_past()
        for name in kept:
            self._link(name)
        past = f"{TRAIN_PAST}/{len(kept):05d}.parquet"
        self._write_rows(train_items(shaped), PAST_SCHEMA, past)
        rows = held_out_events(events, shaped, items, users.drop(_BEFORE))
        self._write_rows(rows, self._held_out_schema(log), HELD_OUT)
        return [HELD_OUT, *kept, past]

    def _counts(self, shards: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """The counts of the whole log; what is dropped from the held-out periods is counted anew."""
        old, now = self.data.manifest["counts"], self.counts
        lost = {reason: count for reason, count in old["dropped"].items() if not reason.endswith(("(valid)", "(test)"))}
        periods = totals(shards)
        periods["train"]["users"] = self.trained
        return {
            "read": old["read"] + now["read"],
            "empty_files": old["empty_files"] + now["empty_files"],
            "neutralized": _sums(old["neutralized"], now["neutralized"]),
            "watch_time_ties": old["watch_time_ties"],
            "dropped": _sums(lost, self.dropped),
            "splits": periods,
        }

    def _table(self, file: str, keep_place: bool = False) -> ir.Table:
        rows = self.engine.read_parquet([self.root / file], [])
        rows = rows.mutate(**{_PLACE: rows[Engine.ROW].cast("int64")}) if keep_place else rows
        return rows.drop(Engine.FILE, Engine.ROW)

    def _link(self, name: str) -> None:
        """The file of yesterday under today's directory; copied where the file system has no links."""
        target = self.partial / name
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(self.root / name, target)
        except OSError:
            shutil.copy2(self.root / name, target)
        self.linked.add(name)


def _with_positions(placed: ir.Table) -> ir.Table:
    """Adds ``position``, going on from the user's train events, and names requests as ``add_positions`` does.

    A request that began in the train period keeps its name.
    """
    user = placed[Derived.USER_INDEX]
    place = ibis.row_number().over(group_by=user, order_by=time_order(placed))
    placed = placed.mutate(**{Derived.POSITION: (place + placed[_BEFORE]).cast("int64")})
    group = [placed[Derived.USER_INDEX], placed[LogColumns.REQUEST_ID]]
    began = placed[Derived.REQUEST] % (1 << 32)
    began = ibis.ifelse(began < placed[_BEFORE], began, ibis.null("int64"))
    first = began.min().over(group_by=group).coalesce(placed[Derived.POSITION].min().over(group_by=group))
    return name_requests(placed, first).drop(_BEFORE)


def _in_milliseconds(rows: ir.Table) -> ir.Table:
    """Adds ``watch_ms``, ``duration_ms`` and the kept label to rows in seconds; nan becomes null."""
    return rows.mutate(
        **{
            Derived.WATCH_MS: (_known(rows[LogColumns.WATCH_TIME]) * 1000.0).round().cast("int64"),
            Derived.DURATION_MS: (_known(rows[LogColumns.DURATION]) * 1000.0).round().cast("int64"),
            _KEPT: _known(rows[Derived.LABEL]),
        }
    )


def _known(values: ir.FloatingColumn) -> ir.FloatingColumn:
    return ibis.ifelse(values.isnan(), ibis.null("float64"), values.cast("float64"))


def _appended(kept: pa.Table, fresh: pa.Table) -> pa.Table:
    """``items.parquet`` of all items: counts add up, a known duration stays.

    Args:
        kept: yesterday's, of the first items.
        fresh: of all items, with the counts of the events that became train.
    """
    more = len(fresh) - len(kept)
    columns = {name: fresh[name] for name in fresh.column_names}
    for name in ("train_count", "train_positives"):
        before = np.append(kept[name].to_numpy(), np.zeros(more, np.int64))
        columns[name] = pa.array(before + fresh[name].to_numpy())
    duration = kept[LogColumns.DURATION].combine_chunks()
    before = pa.concat_arrays([duration, pa.nulls(more, duration.type)])
    columns[LogColumns.DURATION] = pc.coalesce(before, fresh[LogColumns.DURATION].combine_chunks())
    return pa.table(columns, schema=fresh.schema).combine_chunks()


def _sums(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: before.get(name, 0) + now.get(name, 0) for name in dict.fromkeys([*before, *now])}

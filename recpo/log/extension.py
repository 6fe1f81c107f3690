"""Extends a prepared directory by the files of the following days: writes the next prepared directory.

Train shards are linked into the new directory; they are neither read nor rewritten. An extension reads these parts of
the previous directory: the item and user tables with their features; the histories; the shards of the held-out periods,
with the standard events that they were made from (``held_out.parquet``); and from the pairs (user, item) of the train
period (``train_past/``), the row groups of users who are held out in the new directory. So the cost depends on the new
files, the held-out periods, the catalog and the users, and not on the length of the past log, except for the past items
of held-out users.
"""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import SIDES, Categories, Category, Feature, Side, plain_type
from recpo.log import schema
from recpo.log.engine import Engine
from recpo.log.events import (
    appended,
    item_indices,
    item_table,
    length_ms,
    more_columns,
    name_requests,
    time_order,
    user_indices,
    whole_duration,
)
from recpo.log.feature_columns import CONTEXT
from recpo.log.feature_tables import ID, TableSide, write_table
from recpo.log.files import wider_type
from recpo.log.id_map import IdMap
from recpo.log.locations import Place, locate
from recpo.log.prepare import SHOWN_OUTSIDE, STAGES, Preparation, PrepareRun
from recpo.log.prepared import HELD_OUT, ITEMS, QUANTILES, USERS, Prepared
from recpo.log.previous import BEFORE, EARLIER, IS_KEPT, KEPT_LABEL, PreviousData, kept_preparation, validate_sources
from recpo.log.schema import PERIODS, RETIRED, TIE_RULE, TRAIN, Derived, Fault, LogColumns
from recpo.log.shaping import Cutoffs, bucket_counts, cutoff_table, quantile_table, quantiles_in_seconds
from recpo.log.splits import past_items, recent_events
from recpo.log.writing import Output, Sources, Workplace, totals, workplace, write_parquet, write_rows

_OWN_PERIOD = "own_period"


def extend(
    data: Prepared,
    asked: Preparation,
    sources: Sources,
    output: Output,
    retire: Sequence[Any] | pa.Array = (),
) -> dict[str, Any]:
    """Writes a prepared directory that extends ``data`` by the days of a new log.

    The same split is applied to the extended log, so the periods move forward: test is the last days of the new log,
    valid the days before them, and everything earlier is train. Held-out events of ``data`` that lie before the new
    valid period become train, and so do such events of the new log. They are in new train shards. There, as in the
    shards of the held-out periods, each user's events follow the last ``max_context`` earlier events as context rows
    (``is_target`` False), so every train event is a target in exactly one shard. Items and users keep their numbers;
    new ones are appended by the rules of the catalog.

    Fitted values are kept: the cutoffs of the feedback levels, the quantile table, and the label of every event that
    has one. ``WatchQuantiles`` compares a new event with the watch times of its user that the extension reads (the
    context and the new train events), or with the kept table if these are too few. An item that had a duration keeps
    it.

    Up to the order of appended items and users, an extension has the same events in each period as ``prepare`` of the
    whole log, with the same feedback levels, requests, held-out contexts, past items, serving histories and counts, if
    ``min_item_events`` is at most 1, ``min_user_events`` is 0, the fitted values are the same, and no request continues
    after the last event of ``data``. Each request with its last ``max_context`` earlier events is then the same
    training example.

    Args:
        data: the directory to extend.
        asked: options; each must have its default or the value of ``data``.
        sources: the new files; all of their events are later than those of ``data``. Tables of items and users are
            required if ``data`` has them. They may contain only some items; the others keep their features. Feature
            values are those of the new table, encoded with the fitted features of ``data``.
        output: where the directory is written; extensions run on DuckDB.
        retire: external ids of items that are no longer candidates, in addition to the items that ``data`` has retired.
            They keep their numbers and remain in histories and in training.

    Returns:
        The manifest of the new directory.

    Raises:
        RecpoError: other options, events before the end of ``data``, faults in the log, or the output exists.
    """
    choice = kept_preparation(data, asked)
    root = _local(data.root, "extends")
    validate_sources(data, sources.tables)
    if output.engine.engine != "duckdb":
        raise RecpoError(
            "engine: an extension runs on duckdb; the new files of a few days fit on one machine",
            code="unsupported",
            field="engine",
        )
    _local(locate(output.out), "out")
    with workplace(sources, output, len(STAGES), inputs=[root]) as place:
        return _ExtensionRun(data, root, retire, choice, place).write()


def _local(place: Place, name: str) -> Path:
    if isinstance(place, Path):
        return place
    raise RecpoError(
        f"{name} {place}: an extension links files, which an object store cannot; use a local directory",
        code="not_local",
        field=name,
    )


class _ExtensionRun(PrepareRun):
    """One pass from the previous directory and the new files to the next directory."""

    def __init__(
        self, data: Prepared, root: Path, retire: Sequence[Any] | pa.Array, choice: Preparation, place: Workplace
    ) -> None:
        super().__init__(choice, place)
        self.data, self.root, self.retire = data, root, retire
        self.before = PreviousData(data, root, self.engine)
        self.train_past = self.before.train_past()
        self.features = data.feature_schema
        self.fitted: dict[str, FittedFeatures] = {side: data.fitted_features(side) for side in SIDES}

    def _facts(self, shards: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """See ``PrepareRun``. What was fitted before is kept."""
        old, log = self.data.manifest, self.log
        fresh = len(shards["train"]) - len(old["shards"]["train"])
        sizes = {"items": self.data.num_items, "users": old["num_users"], "bytes_read": self.before.bytes_read}
        return {
            **{name: old[name] for name in ("columns", "label", "feedback")},
            "config": {**old["config"], "log": [*old["config"]["log"], *sorted(file.shown for file in log.files)]},
            "counts": self._counts(shards),
            "warnings": self._warnings(old["counts"]["watch_time_ties"]),
            "segments": [*self.data.segments, *([fresh] if fresh else [])],
            "extends": sizes,
        }

    def _read(self) -> list[Fault]:
        self.before.verify()
        return super()._read()

    def _unmatched_flags(self, rows: ir.Table, raw: ir.Table) -> list[Fault]:
        return []  # a day may have no dislike

    def _read_table(self, side: TableSide, files: Sequence[Place]) -> list[Fault]:
        """See ``PrepareRun``. Values must have the types of the vocabularies."""
        faults = super()._read_table(side, files)
        table = self.tables.get(side)
        if table is None:
            return faults
        rows = table.rows(self.engine)
        for place, feature in enumerate(table.features):
            kind = self._other_type(side, feature, rows[f"f{place}"])
            if kind is not None:
                problem = f"its values are of another type than in {self.root}, where they are {kind}"
                faults.append(Fault(table.log.name, feature.source, problem, "cast the column", code="mismatch"))
        return faults

    def _other_type(self, side: Side, feature: Feature, column: ir.Column) -> pa.DataType | None:
        """The type of a category's vocabulary if only one of vocabulary and column holds strings; else None."""
        if not isinstance(feature, Category | Categories):
            return None
        vocabulary, plain = self.fitted[side].vocabularies[feature.name], column.type()
        is_text = plain.value_type.is_string() if plain.is_array() else plain.is_string()
        if not len(vocabulary) or is_text == pa.types.is_string(vocabulary.values.type):
            return None
        known = column.as_table().filter(column.notnull())
        return vocabulary.values.type if self.engine.count(known) else None

    def _settle_types(self) -> None:
        """Id types that hold the previous and the new ids, and the previous types of request features.

        Raises:
            RecpoError: one of them has strings and the other has integers, of users, items or a request feature.
        """
        kept = pq.read_schema(self.root / HELD_OUT)
        types = dict(self.log.types)
        for column in LogColumns.IDS:
            if column not in types:
                continue
            before, now = kept.field(column).type, types[column]
            if pa.types.is_integer(before) == pa.types.is_integer(now):
                types[column] = wider_type(before, now)
            elif column == LogColumns.REQUEST_ID:
                types[column] = pa.string()  # the log of a server; these ids only say which events share a request
            else:
                raise self._other_column_type(column, now, before)
        for feature in self.more.context:
            column = CONTEXT + feature.name
            before, now = kept.field(column).type, types[column]
            vocabulary = self.fitted["context"].vocabularies.get(feature.name, ())
            if pa.types.is_null(now):
                types[column] = before
            elif len(vocabulary) and plain_type(feature, now) != before:
                raise self._other_column_type(column, now, before)
        self.log = replace(self.log, types=types)

    def _other_column_type(self, column: str, now: pa.DataType, before: pa.DataType) -> RecpoError:
        log = self.log
        return RecpoError(
            f"{log.name}, column {log.columns[column]}: type {now}, {self.root} has {before}: cast the column"
            + "".join(f"\n  warning: {text}" for text in log.warnings),
            code="mismatch",
            field=log.columns[column],
        )

    def _new_quantiles(self, new: ir.Table) -> Cutoffs:
        """Quantiles of the watch times of the new events alone, to check their units."""
        events = new.mutate(**{Derived.PERIOD: ibis.literal(TRAIN, "int8")})
        counts = bucket_counts(events, self.choice.label)
        return quantiles_in_seconds(self.engine.table(cutoff_table(quantile_table(counts))))

    def _split(self, events: ir.Table) -> ir.Table:
        """The current standard events with their periods: the previous held-out events and the new ones."""
        self._stage("splitting")
        kept, time = self.data.manifest["boundaries"], events[LogColumns.TIMESTAMP]
        ends = self.engine.row(events.aggregate(first=time.min(), last=time.max()))
        if ends["first"] <= kept["last_ms"]:
            raise RecpoError(
                f"{self.log.name}: an event at {ends['first']} ms lies before the end of {self.root}, whose last event "
                f"is at {kept['last_ms']} ms: give the files of later days only, each once",
                code="mismatch",
                field=LogColumns.TIMESTAMP,
            )
        boundaries = self.choice.split.boundaries(kept["first_ms"], ends["last"], True)
        self.boundaries = {"first_ms": kept["first_ms"], "last_ms": ends["last"], **boundaries}
        layout = self._held_out_schema()
        unknown = {Derived.LABEL: ibis.null("float64"), Derived.REQUEST: ibis.null("int64")}
        columns = dict(ibis.Schema.from_pyarrow(layout).items())
        fresh = events.mutate(**unknown, **{Derived.IS_PLACED: ibis.literal(False)}).select(layout.names).cast(columns)
        held = self.before.table(HELD_OUT).select(layout.names).cast(columns)
        current = self.engine.materialize("events", self.choice.split.assign(held.union(fresh), boundaries))
        self.quantiles = self._new_quantiles(events)
        return current

    def _items(self, events: ir.Table) -> ir.Table:
        """All items, with new ones appended."""
        choice, item = self.choice, Derived.ITEM_INDEX
        kind = {LogColumns.ITEM_ID: ibis.dtype(self.log.types[LogColumns.ITEM_ID])}
        old = self.before.table(ITEMS).select(LogColumns.ITEM_ID, item).cast(kind)
        listed = None
        if choice.catalog == "items":
            rows = self.tables["item"].rows(self.engine)
            listed = rows.anti_join(old, rows[ID] == old[LogColumns.ITEM_ID])[ID]
        fresh = item_indices(events.anti_join(old, LogColumns.ITEM_ID), choice.catalog, choice.min_item_events, listed)
        return old.union(fresh.mutate(**{item: (fresh[item] + self.data.num_items).cast("int32")}).cast(kind))

    def _users(self, events: ir.Table) -> ir.Table:
        """All users, with new ones appended, and their number of earlier train events."""
        user = Derived.USER_INDEX
        old = self.before.table(USERS).cast({LogColumns.USER_ID: ibis.dtype(self.log.types[LogColumns.USER_ID])})
        old = old.select(LogColumns.USER_ID, user, **{BEFORE: old.train_count})
        fresh = user_indices(events.anti_join(old, LogColumns.USER_ID), self.choice.min_user_events)
        number = (fresh[user] + self.data.manifest["num_users"]).cast("int32")
        return old.union(fresh.select(LogColumns.USER_ID, **{user: number, BEFORE: ibis.literal(0, "int64")}))

    def _label(self, events: ir.Table) -> None:
        """The current events and the context before them; labels and the definition of feedback are kept."""
        self._stage("labeling")
        request_id = events[LogColumns.REQUEST_ID].type()
        begun = events.inner_join(self.users.select(Derived.USER_INDEX, BEFORE), Derived.USER_INDEX)
        placed = self.engine.materialize("placed", _with_positions(begun))
        given = self.before.with_encoded(placed.rename({KEPT_LABEL: Derived.LABEL, IS_KEPT: Derived.IS_PLACED}))
        names = [*TIE_RULE, Derived.USER_INDEX, Derived.POSITION, Derived.REQUEST, Derived.PERIOD, KEPT_LABEL, IS_KEPT]
        names = [name for name in names if name not in (LogColumns.ITEM_ID, LogColumns.REQUEST_ID)]
        names += [Derived.ITEM_INDEX, LogColumns.REQUEST_ID, *more_columns(given)]
        context = self.before.context(placed, self.items, self.users)
        context = context.mutate(**{LogColumns.REQUEST_ID: ibis.null(request_id)})
        rows = appended(given.select(names), context)
        # context events are train events, so their watch times count among the user's own
        rows = rows.mutate(
            **{
                _OWN_PERIOD: rows[Derived.PERIOD],
                Derived.PERIOD: ibis.ifelse(rows[Derived.PERIOD] == EARLIER, TRAIN, rows[Derived.PERIOD]).cast("int8"),
            }
        )
        rows, method = self.engine.materialize("rows", rows), self.choice.label
        labeled = method.add(rows, bucket_counts(rows, method, kept=self.before.table(QUANTILES)))
        label = ibis.ifelse(labeled[IS_KEPT], labeled[KEPT_LABEL], labeled[Derived.LABEL])
        shaped = labeled.mutate(**{Derived.LABEL: label, Derived.PERIOD: labeled[_OWN_PERIOD]})
        self.events = self.engine.materialize("shaped", shaped.drop(KEPT_LABEL, IS_KEPT, _OWN_PERIOD))
        self.engine.drop("placed", "rows")
        self._past_pairs, self.feedback = self._earlier_pairs(), self.data.feedback

    def _earlier_pairs(self) -> ir.Table:
        """The pairs of the previous train period, for the users who are held out now."""
        held_out = self.events.filter(self.events[Derived.PERIOD] > TRAIN).select(Derived.USER_INDEX).distinct()
        users = np.sort(self.engine.table(held_out).column(0).to_numpy())
        assert isinstance(self.place.work, Path)
        write_rows(self.before.pairs(users), schema.PAST_SCHEMA, self.place.work / "pairs.parquet")
        return self.engine.read_parquet([self.place.work / "pairs.parquet"], []).drop(Engine.FILE, Engine.ROW)

    def _past(self, period: int) -> ir.Table:
        return past_items(self.events, period, self._past_pairs)

    def _write_catalog(self) -> dict[str, int]:
        """See ``PrepareRun``. The counts of the events that became train are added to the previous ones."""
        available, types = self._available(), self.log.types
        fresh = item_table(self.items, self.events, self.choice.feedback, available)
        rows = _with_kept(fresh, self.before.table(ITEMS), ends_by_events=bool(self.idle_days))
        table = self.engine.table(self._with_own_durations(rows))
        table = table.cast(schema.item_schema(types, self._times)).combine_chunks()
        if available is not None:
            self._count_shown_outside(table)
        if len(retired := self._retired(table[LogColumns.ITEM_ID].combine_chunks())):
            table = table.append_column(RETIRED, pa.array(np.isin(table[Derived.ITEM_INDEX].to_numpy(), retired)))
        write_parquet(table, self.partial / ITEMS)
        train = self.events.filter(self.events[Derived.PERIOD] == TRAIN)
        counts = train.group_by(Derived.USER_INDEX).aggregate(fresh=train.count())
        rows = self.users.left_join(counts, Derived.USER_INDEX).drop(f"{Derived.USER_INDEX}_right")
        rows = rows.mutate(train_count=rows[BEFORE] + rows.fresh.fill_null(0)).order_by(Derived.USER_INDEX)
        self.trained = self.engine.count(rows.filter(rows.train_count > 0))
        return {"num_items": len(table), "num_users": self._write_rows(rows, schema.user_schema(types), USERS)}

    def _given(self) -> ir.Table:
        """What the new item table says; of items that it lacks, the previous times and durations."""
        today, kept = self._item_facts(), self.before.table(ITEMS)
        kept = kept.mutate(**{Derived.DURATION_MS: whole_duration(length_ms(kept, LogColumns.DURATION, "s"))})
        return appended(today, kept.select(today.columns).anti_join(today, LogColumns.ITEM_ID))

    def _write_features(self) -> None:
        """Writes the features of all items and users (``write_table``); what was fitted is kept."""
        self._stage("features")
        before = {"item": (self.items, "num_items"), "user": (self.users, "num_users")}
        for side, table in self.tables.items():
            indices, number = before[side]
            previous = (self.root, self.data.manifest[number])
            counts = write_table(self.engine, table, indices, self.fitted[side], self.partial, previous)
            inferred = self.data.manifest["feature_tables"][side]["inferred"]
            self.feature_tables[side] = {**table.describe(counts), "inferred": inferred}
        self.context = self.fitted["context"] or None

    def _retired(self, item_ids: pa.Array) -> np.ndarray:
        """Internal ids of the items that were or become retired.

        Raises:
            RecpoError: an item to retire is not in the catalog.
        """
        found = IdMap(item_ids).to_internal(self.retire)
        unknown = np.flatnonzero(found == 0)
        if len(unknown):
            raise RecpoError(
                f"retire: {len(unknown)} of {len(found)} items are not in the catalog, the first is "
                f"{self.retire[int(unknown[0])]!r}: leave them out",
                code="unknown_name",
                field="retire",
            )
        return np.union1d(self.data.retired_items, found)

    def _write_period(self, period: int) -> list[dict[str, Any]]:
        """See ``PrepareRun``. Previous train shards are linked; shards of the events that became train follow."""
        if period != TRAIN:
            return super()._write_period(period)
        self._stage(PERIODS[TRAIN])
        kept: list[dict[str, Any]] = self.data.manifest["shards"]["train"]
        for shard in kept:
            self._link(shard["file"])
        return [*kept, *self._write_shards(TRAIN, has_context=True, first=len(kept))]

    def _histories(self) -> ir.Table:
        """The histories of users with current events are updated; the others are copied."""
        own = self.events.filter(self.events[Derived.PERIOD] >= TRAIN)
        most, user = self.choice.max_context, Derived.USER_INDEX
        fresh = recent_events(own, self.items, self.users, most, self.more.behaviors)
        lengths = own.group_by(user).aggregate(length=own[Derived.POSITION].max() + 1)
        kept = self.before.earlier_history(self.items, self.users).left_join(lengths, user).drop(f"{user}_right")
        return appended(fresh, kept.filter(kept[Derived.POSITION] >= kept.length.fill_null(0) - most))

    def _write_for_extension(self, outside: ir.Table | None) -> list[str]:
        """See ``PrepareRun``. The previous pairs, quantiles and vocabularies are linked."""
        for name in (QUANTILES, *self.before.vocabularies(), *self.train_past):
            self._link(name)
        return super()._write_for_extension(outside)

    def _counts(self, shards: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """The counts of the whole log. Events dropped from the held-out periods are counted again."""
        old, now = self.data.manifest["counts"], self.counts
        lost = {reason: count for reason, count in old["dropped"].items() if not reason.endswith(("(valid)", "(test)"))}
        periods = totals(shards, self.more.behaviors)
        periods["train"]["users"] = self.trained
        return {
            "read": old["read"] + now["read"],
            "empty_files": old["empty_files"] + now["empty_files"],
            "neutralized": dict(Counter(old["neutralized"]) + Counter(now["neutralized"])),
            "watch_time_ties": old["watch_time_ties"],
            "dropped": dict(Counter(lost) + Counter(self.dropped)),
            "splits": periods,
            **{name: now[name] for name in ("repeated_targets", "repeated_positives")},
            **{name: now[name] for name in SHOWN_OUTSIDE if name in now},
        }

    def _link(self, name: str) -> None:
        """Links a file of the previous directory into the new one; copies it if the file system has no hard links."""
        target = self.partial / name
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(self.root / name, target)
        except OSError:
            shutil.copy2(self.root / name, target)
        self.checksums[name] = self.data.checksums[name]


def _with_positions(placed: ir.Table) -> ir.Table:
    """Adds ``position``, which continues the user's train events, and names requests as ``add_positions`` does.

    A request that began in the train period keeps its name.
    """
    user = placed[Derived.USER_INDEX]
    place = ibis.row_number().over(group_by=user, order_by=time_order(placed))
    placed = placed.mutate(**{Derived.POSITION: (place + placed[BEFORE]).cast("int64")})
    group = [placed[Derived.USER_INDEX], placed[LogColumns.REQUEST_ID]]
    began = placed[Derived.REQUEST] % (1 << 32)
    began = ibis.ifelse(began < placed[BEFORE], began, ibis.null("int64"))
    first = began.min().over(group_by=group).coalesce(placed[Derived.POSITION].min().over(group_by=group))
    return name_requests(placed, first).drop(BEFORE)


def _with_kept(fresh: ir.Table, kept: ir.Table, ends_by_events: bool) -> ir.Table:
    """``items.parquet`` of all items: counts are added; a known duration and time of availability are kept.

    Args:
        fresh: the rows of all items, with the counts of the events that became train.
        kept: the previous rows, of the first items.
        ends_by_events: items end some days after their last event, which may be one that ``kept`` alone knows.
    """
    item, duration, available = Derived.ITEM_INDEX, LogColumns.DURATION, Derived.AVAILABLE_FROM
    rows = fresh.left_join(kept.rename(lambda name: f"kept_{name}"), fresh[item] == kept[item])
    columns = {name: rows[name] for name in fresh.columns}
    for name in ("train_count", "train_positives"):
        columns[name] += rows[f"kept_{name}"].fill_null(0)
    columns[duration] = rows[f"kept_{duration}"].coalesce(rows[duration])
    if available in columns:  # until an item's first train event, the item table decides; of its end, always
        trained = rows["kept_train_count"] > 0
        columns[available] = ibis.ifelse(trained, rows[f"kept_{available}"], rows[available])
    if ends_by_events:
        until = Derived.AVAILABLE_UNTIL
        columns[until] = rows[until].coalesce(rows[f"kept_{until}"])
    return rows.select(**columns).order_by(item)

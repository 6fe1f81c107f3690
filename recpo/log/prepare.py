"""``Preparation`` has the options of a prepared directory; ``PrepareRun.write`` has the steps to it."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.compute as pc

from recpo import __version__
from recpo.base.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, RecpoError, validate_ranges
from recpo.base.feature_encoding import FittedFeatures, vocabulary_file
from recpo.base.features import SIDES, Feature, FeatureSchema, plain_type
from recpo.base.feedback import FeedbackDefinition, FeedbackRule
from recpo.log import events as standard_events, feature_columns, feature_tables, schema, shaping, splits, writing
from recpo.log.csv_files import CsvFormat
from recpo.log.engine import Engine
from recpo.log.events import CatalogScope
from recpo.log.feature_tables import ID, FeatureTable
from recpo.log.files import Log, open_log
from recpo.log.locations import Place
from recpo.log.prepared import FEATURE_FILES, HELD_OUT, HISTORIES, ITEMS, QUANTILES, TRAIN_PAST, USERS
from recpo.log.schema import AVAILABILITY, PERIODS, TRAIN, VALID, Columns, Derived, Fault, FlagColumn, LogColumns
from recpo.log.shaping import Label, WatchQuantiles
from recpo.log.splits import Split, TemporalSplit
from recpo.log.validate import check_rows, label_faults, tie_warnings, unit_warnings, unmatched_flags, usable_rows
from recpo.log.writing import Encoding, Output, Sources, Workplace

#: Counts of the items that were shown at other times than those of ``AVAILABILITY`` in the item table.
SHOWN_OUTSIDE: Final = ("shown_before_available_from", "shown_after_available_until")
#: the steps that the progress bar shows
STAGES: Final = ("reading", "checking", "splitting", "labeling", "features", *PERIODS, "histories")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The options that determine a prepared directory."""

    preset: schema.PresetName = "plain"
    """column names and units to start from, including features and behaviors"""
    columns: Columns = Columns()  # noqa: RUF009  frozen
    """columns and units that differ from the preset"""
    split: Split = TemporalSplit()  # noqa: RUF009  frozen
    """TemporalSplit, LeaveLastOut or TrainOnly"""
    label: Label = WatchQuantiles()  # noqa: RUF009  frozen
    """how the preference label is made: WatchQuantiles, WatchRatio, D2Q, WatchTimeGain, BinaryColumn, NumericColumn
    or EveryEvent"""
    feedback: FeedbackRule = FeedbackRule()  # noqa: RUF009  frozen
    """which labels make an event positive or skipped; training and evaluation on this log use this definition"""
    max_context: PositiveInt = 200
    """number of earlier events that a held-out user keeps as context, and number of events in a serving history"""
    rows_per_shard: PositiveInt = 500_000
    """a shard ends with the user who reaches this number of rows"""
    min_user_events: NonNegativeInt = 0
    """drop users with fewer train events; 0 keeps users who first appear later"""
    min_item_events: NonNegativeInt = 1
    """drop items with fewer events in the period that ``catalog`` names; counted before users"""
    catalog: CatalogScope = "train"
    """the items of the train period (train), so that the catalog contains no information about the future; of the
    full log (log); or of the train period and of the item table, whose items can be recommended before their first
    event (items)"""
    max_watch_time: PositiveFloat = 86_400.0
    """maximum possible watch time in seconds"""
    strict: bool = False
    """reject impossible values and exact duplicates instead of neutralizing or dropping them"""
    skip_incomplete: bool = False
    """leave out and count rows without a user, an item or a time that parses, instead of rejecting the log"""
    begin: str | None = None
    """ISO time (UTC without an offset); earlier rows, as of wrong clocks, are left out and counted"""
    end: str | None = None
    """ISO time (UTC without an offset); rows of this time and later ones are left out and counted"""
    outcome_rows: bool = False
    """an exposure and what followed, such as a view and a purchase, have rows of their own: of a user's events with an
    item on one UTC day, only the first one with the highest label stays"""
    repeats: bool | None = None
    """whether lists may have items of a user's past, as in music or groceries: training, evaluation and export follow
    it. null = if most positives of the validation period are of such items: what people choose again. Where not all
    events are positive, they must also be liked more than 1.6 times as often as new ones, or nine tenths must be, and
    liked at least as often as others: else they are only shown again"""
    idle_days: NonNegativeFloat | None = None
    """after so many days without an event an item has ended, as news and offers do: it is no candidate, and no bundle
    lists it. 0 = items do not end. null = as the log shows (docs/your_own_log.md), unless the table of items says when
    they end (``features.available_until``)"""
    features: feature_columns.FeatureColumns = feature_columns.FeatureColumns()  # noqa: RUF009  frozen
    """features of items, users and requests, and the columns that they are read from"""
    behaviors: Mapping[str, str | FlagColumn] | None = None
    """named feedback besides label and dislike: name -> column of the log (bool or 0/1), such as ``{"like":
    "is_like"}``, or name -> ``{column: thumb, equals: up}``; null = the preset's"""
    csv: CsvFormat = CsvFormat()  # noqa: RUF009  frozen
    """format of text files: their delimiter, such as ``::``, and their column names if the first line has none"""

    def __post_init__(self) -> None:
        if self.preset not in schema.PRESETS:
            raise RecpoError(
                f"preset {self.preset!r}: expected one of {', '.join(schema.PRESETS)}",
                code="unknown_name",
                field="preset",
            )
        validate_ranges(self)
        self.more, self.ends  # noqa: B018 checks the names of behaviors, and the times
        if self.outcome_rows and LogColumns.LABEL not in self.label.needs:
            raise RecpoError(
                f"outcome_rows compares the labels of rows, and label {type(self.label).__name__} reads none: choose "
                "BinaryColumn or NumericColumn, or leave it out",
                code="conflicting_options",
                field="outcome_rows",
            )

    @property
    def mapping(self) -> Columns:
        """The user's columns, completed by the preset."""
        return self.columns.over(schema.PRESETS[self.preset])

    @property
    def more(self) -> feature_columns.EventColumns:
        """Behaviors and request features: the user's, completed by the preset."""
        behaviors = feature_columns.PRESET_BEHAVIORS.get(self.preset, {}) if self.behaviors is None else self.behaviors
        chosen = {feature_columns.BEHAVIOR + name for name in self.behaviors or ()}
        chosen |= {feature_columns.CONTEXT + feature.name for feature in self.features.context or ()}
        return feature_columns.EventColumns(behaviors, self.table_columns.context or (), frozenset(chosen))

    @property
    def ends(self) -> list[int | None]:
        """``begin`` and ``end`` in ms."""
        return [splits.iso_ms("begin", self.begin), splits.iso_ms("end", self.end)]

    @property
    def table_columns(self) -> feature_columns.FeatureColumns:
        """Features and other columns of tables: the user's, completed by the preset."""
        known = feature_columns.PRESET_FEATURES
        return self.features.over(known.get(self.preset, feature_columns.FeatureColumns()))

    def describe(self) -> dict[str, Any]:
        """The options for the manifest, with the complete mapping."""
        return {
            **{name: value for name, value in vars(self).items() if isinstance(value, str | int | float)},
            "columns": self.mapping.to_json(),
            "split": describe(self.split),
            "label": describe(self.label),
            "feedback": asdict(self.feedback),
            "features": self.features.to_json(),
            "behaviors": None if self.behaviors is None else schema.columns_to_json(self.behaviors),
            "csv": asdict(self.csv),
        }

    def write(self, sources: Sources, output: Output) -> dict[str, Any]:
        """Writes a prepared directory and returns its manifest.

        Raises:
            RecpoError: the log has faults (all of them in one message), cannot be split, or the output exists.
        """
        self._validate_tables(sources)
        with writing.workplace(sources, output, len(STAGES)) as place:
            return PrepareRun(self, place).write()

    def _validate_tables(self, sources: Sources) -> None:
        given = sources.tables
        for side in ("item", "user"):
            if self.features.of(side) and not given[side]:
                raise RecpoError(
                    f"features.{side} names features, but there is no table of {side}s: pass --{side}s FILE",
                    code="missing_option",
                    field=f"{side}s",
                )
        if self.catalog == "items" and not given["item"]:
            raise RecpoError(
                "catalog items takes the items of a table, and there is none: pass --items FILE",
                code="missing_option",
                field="items",
            )


class PrepareRun:
    """One pass from files to shards: read, check, split, keep, label, then write catalog, features, shards, histories.

    An extension (``recpo.log.extension``) overrides some of these steps.

    Attributes:
        log: the files of the log, its columns and types.
        boundaries: of the periods, for the manifest.
        items: ``item_id`` and ``item_index`` of the catalog.
        users: ``user_id`` and ``user_index``.
        events: the kept events with the indices of their item and user, period, position, request and label.
        feedback: how labels and watch times become feedback levels.
    """

    log: Log
    boundaries: dict[str, Any]
    items: ir.Table
    users: ir.Table
    events: ir.Table
    feedback: FeedbackDefinition

    def __init__(self, choice: Preparation, place: Workplace) -> None:
        self.choice, self.place, self.engine, self.partial = choice, place, place.engine, place.directory
        self.tables: dict[feature_columns.TableSide, FeatureTable] = {}
        self.more = choice.more
        self.features = FeatureSchema()
        self.context: FittedFeatures | None = None
        self.feature_tables: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.dropped: dict[str, int] = {}
        self.rows_written = 0
        self.train_past: list[str] = []  # files of pairs of users and items that exist before
        self.checksums: dict[str, str] = {}  # checksums of files that are not written now

    def write(self) -> dict[str, Any]:
        """Writes the directory, and returns its manifest."""
        read = self._check(self._read())
        self._settle_types()
        events = self._split(read)
        self._label(self._keep(events))
        outside = self._outside(events)
        self.idle_days = self._idle_days()
        sizes = self._write_catalog()
        self._write_features()
        shards = {name: self._write_period(number) for number, name in enumerate(PERIODS)}
        self._write_histories()
        later = self._write_for_extension(outside)
        past = [shard["past"] for listed in shards.values() for shard in listed if "past" in shard]
        features = [name for side, name in FEATURE_FILES.items() if self.features.of(side)]
        features += [vocabulary_file(side, name) for side in SIDES for name in self.features.coded(side)]
        manifest: dict[str, Any] = {
            "recpo_version": __version__,
            "max_context": self.choice.max_context,
            "boundaries": self.boundaries,
            "shards": shards,
            "files": (ITEMS, USERS, QUANTILES, HISTORIES, *past, *later, *features),
            **self._facts(shards),
        }
        if self.features or self.tables:
            manifest |= {"features": self.features.to_json(), "feature_tables": self.feature_tables}
        if self.more.behaviors:
            manifest["behaviors"] = list(self.more.behaviors)
        return writing.write_manifest(self.partial, manifest | sizes, self.checksums)

    def _facts(self, shards: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """The entries of the manifest about the options, what was fitted, and what was counted."""
        counts = {**self.counts, "dropped": self.dropped, "splits": writing.totals(shards, self.more.behaviors)}
        repeats = splits.chosen_again(counts) if self.choice.repeats is None else self.choice.repeats
        found = {"repeats": repeats, "idle_days": self.idle_days, "log": sorted(file.shown for file in self.log.files)}
        return {
            "config": {**self.choice.describe(), **found},
            "columns": {column: self.log.columns.get(column) for column in LogColumns.ALL},
            "label": describe(self.choice.label),
            "feedback": self.feedback.to_json(),
            "counts": counts,
            "warnings": self._warnings(self.counts["watch_time_ties"]),
            "segments": [len(shards["train"])],
        }

    def _stage(self, name: str) -> None:
        """Shows which step begins; the steps before it are done."""
        self.place.bar.update(STAGES.index(name) - self.place.bar.n)
        self.place.bar.set_description(f"prepare: {name}")

    def _read(self) -> list[Fault]:
        """Opens the files and settles their columns and types; returns the faults that are found without the rows."""
        self._stage("reading")
        choice, place = self.choice, self.place
        self.log, faults = open_log(place.log, choice.mapping, choice.columns, place.work, self.more, choice.csv)
        self.more = self.more.among(self.log.columns)
        for side, files in place.tables.items():
            if files:
                faults += self._read_table(side, files)
        return faults + label_faults(choice.label, self.log, self._of_items)

    def _check(self, faults: list[Fault]) -> ir.Table:
        """Checks every row, and returns the distinct events in standard form.

        Raises:
            RecpoError: there are faults; all of them are in the message.
        """
        self._stage("checking")
        choice, mapping, log = self.choice, self.choice.mapping, self.log
        if log.files and log.columns:
            rows = self.engine.read_parquet([file.path for file in log.files], [*dict.fromkeys(log.columns.values())])
            raw = standard_events.select_columns(rows, log.columns, log.flags)
            raw, self.dropped = usable_rows(self.engine, raw, mapping, choice.skip_incomplete, *choice.ends)
            read, neutralized, row_faults = check_rows(
                self.engine, raw, log, mapping, choice.label, choice.max_watch_time, choice.strict, self.more
            )
            faults = [*faults, *row_faults, *self._unmatched_flags(rows, raw)]
        schema.validate_no_faults(faults, self._file_warnings())
        distinct = self.engine.materialize("distinct", raw.drop(Engine.FILE, Engine.ROW).distinct())
        kept = self.engine.count(distinct)
        self.dropped |= {"exact duplicate of another event": read - kept} if read > kept else {}
        read = kept + sum(self.dropped.values())
        self.counts = {"read": read, "empty_files": log.empty_files, "neutralized": neutralized}
        events = standard_events.standardize(distinct, mapping, choice.max_watch_time, self.more)
        if LogColumns.DURATION in self._of_items:
            events = standard_events.with_durations(events, self._given())
        if not choice.outcome_rows:
            return events
        outcomes = self.engine.materialize("outcomes", standard_events.outcomes(events))
        if others := kept - self.engine.count(outcomes):
            self.dropped["another event of the user with the item on the same day"] = others
        self.engine.drop("distinct")
        return outcomes

    @property
    def _read_events(self) -> str:
        """The materialized table of the events that were read."""
        return "outcomes" if self.choice.outcome_rows else "distinct"

    def _warnings(self, ties: dict[str, int]) -> list[str]:
        label = self.choice.label
        units = unit_warnings(self.quantiles, label.base)
        return [*tie_warnings(label, ties), *units, *self._file_warnings()]

    def _file_warnings(self) -> list[str]:
        """Warnings about the files of the log and of the feature tables."""
        return [text for one in (self.log, *(table.log for table in self.tables.values())) for text in one.warnings]

    def _unmatched_flags(self, rows: ir.Table, raw: ir.Table) -> list[Fault]:
        return unmatched_flags(self.engine, rows, raw, self.log)

    def _read_table(self, side: feature_columns.TableSide, files: Sequence[Place]) -> list[Fault]:
        """Opens a feature table."""
        choice, key = self.choice, LogColumns.ITEM_ID if side == "item" else LogColumns.USER_ID
        columns = choice.table_columns
        name, kind = choice.mapping.named()[key], self.log.types.get(key)
        table, faults = feature_tables.open_table(files, side, name, kind, columns, choice.features, self.place.work)
        if table is None:
            return faults
        self.tables[side] = table
        return faults + feature_tables.table_faults(self.engine, table, columns.available_unit)

    def _settle_types(self) -> None:
        """Settles the types that the columns of the log are written in: here, its own."""

    def _split(self, events: ir.Table) -> ir.Table:
        """The events with their periods."""
        self._stage("splitting")
        split, time = self.choice.split, events[LogColumns.TIMESTAMP]
        ends = self.engine.row(events.aggregate(first=time.min(), last=time.max()))
        boundaries = split.boundaries(ends["first"], ends["last"], self.choice.mapping.has_clock)
        self.boundaries = {"first_ms": ends["first"], "last_ms": ends["last"], **boundaries}
        events = split.assign(events, boundaries)
        return events if split.is_per_event else self.engine.materialize("events", events)

    def _keep(self, events: ir.Table) -> ir.Table:
        """Finds the items of the catalog and the users; returns their events with both indices."""
        engine = self.engine
        self.items = engine.materialize("items", self._items(events))
        known = events.semi_join(self.items, LogColumns.ITEM_ID)
        self.users = engine.materialize("users", self._users(known))
        self.dropped |= standard_events.count_dropped(engine, events, known, "item outside the catalog")
        if self.choice.min_user_events:
            active = known.semi_join(self.users, LogColumns.USER_ID)
            self.dropped |= standard_events.count_dropped(engine, known, active, "user below min_user_events")
        return standard_events.place_events(events, self.items, self.users)

    def _items(self, events: ir.Table) -> ir.Table:
        listed = self.tables["item"].rows(self.engine)[ID] if self.choice.catalog == "items" else None
        return standard_events.item_indices(events, self.choice.catalog, self.choice.min_item_events, listed)

    def _users(self, events: ir.Table) -> ir.Table:
        """The users of the events of kept items."""
        return standard_events.user_indices(events, self.choice.min_user_events)

    def _label(self, events: ir.Table) -> None:
        """Adds positions, requests and labels; the watch-time quantiles of the train period are fitted and written."""
        self._stage("labeling")
        engine, label = self.engine, self.choice.label
        counts = engine.materialize("counts", shaping.bucket_counts(events, label))
        quantiles = shaping.quantile_table(counts)
        self._write_rows(quantiles.order_by(quantiles.columns[:2]), schema.QUANTILE_SCHEMA, QUANTILES)
        self.counts["watch_time_ties"] = engine.row(shaping.watch_ties(quantiles))
        placed = standard_events.add_positions(events, standard_events.time_order(events))
        if not label.reads_events_once:
            placed = engine.materialize("placed", placed)
        self.events = engine.materialize("shaped", label.add(placed, counts))
        if not label.reads_events_once:
            engine.drop("placed")
        # the label with its options, and the column that it reads: logs whose labels mean the same agree in it
        described = repr(label) + self._label_column()
        self.quantiles = shaping.quantiles_in_seconds(engine.table(shaping.cutoff_table(quantiles)))
        self.feedback = shaping.definition(
            self.quantiles, self.choice.feedback, label, self.choice.max_watch_time, described
        )

    def _label_column(self) -> str:
        """The column that the label reads, and the values that have grades; empty if it reads none."""
        column, values = self.log.columns.get(LogColumns.LABEL), self.log.flags.get(LogColumns.LABEL)
        if column is None or LogColumns.LABEL not in self.choice.label.needs:
            return ""
        return f" of {column}" + (f" {json.dumps(values.to_json()['equals'])}" if values else "")

    def _outside(self, events: ir.Table) -> ir.Table | None:
        """The dropped events that an extension needs; None = the split cannot be extended.

        After this step, the rows of the log are no longer needed.
        """
        if not self.choice.split.is_per_event:
            self.engine.drop(self._read_events, "events")
            return None
        outside = self.engine.materialize("outside", splits.outside_events(events, self.items, self.users))
        self.engine.drop(self._read_events)
        return outside

    def _write_catalog(self) -> dict[str, int]:
        """Writes the items and the users; returns their numbers."""
        available, types = self._available(), self.log.types
        rows = standard_events.item_table(self.items, self.events, self.choice.feedback, available)
        rows = self._with_own_durations(rows)
        if available is not None:
            self._count_shown_outside(self.engine.table(available))
        return {
            "num_items": self._write_rows(rows, schema.item_schema(types, self._times), ITEMS),
            "num_users": self._write_rows(self.users.order_by(Derived.USER_INDEX), schema.user_schema(types), USERS),
        }

    def _available(self) -> ir.Table | None:
        """When items may be recommended; None = at every time."""
        if not self._times:
            return None
        given = self._given() if self._said else None
        times = standard_events.availability(self.items, self.events, given, self.idle_days)
        return self.engine.materialize("available", times)

    def _idle_days(self) -> float:
        """The option, or what the log shows."""
        begin = self.boundaries.get("valid_start_ms")
        if Derived.AVAILABLE_UNTIL in self._said:
            return 0.0
        if self.choice.idle_days is not None or begin is None:
            return self.choice.idle_days or 0.0
        shown = self.engine.table(standard_events.exposures(self.events))
        first, last, trained, later = (shown[name].to_numpy() for name in ("first", "last", "trained", "later"))
        return splits.idle_days(first, last, trained, later, begin, self.boundaries["last_ms"])

    def _count_shown_outside(self, items: pa.Table) -> None:
        """Counts the items that were shown before or after the times of the item table.

        Args:
            items: ``item_index`` and the times that hold.
        """
        if not self._said:
            return
        said = self.engine.table(self._item_facts().inner_join(self.items, LogColumns.ITEM_ID))
        held = items.take(pc.index_in(said[Derived.ITEM_INDEX], items[Derived.ITEM_INDEX].combine_chunks()))
        for name, count, differs in zip(AVAILABILITY, SHOWN_OUTSIDE, (pc.less, pc.greater), strict=True):
            if name in self._said:
                self.counts[count] = pc.sum(differs(held[name], said[name])).as_py() or 0

    @property
    def _of_items(self) -> Collection[str]:
        """Columns of the item table that are read, by their options."""
        return self.tables["item"].facts if "item" in self.tables else ()

    @property
    def _said(self) -> list[str]:
        """The times of availability that the item table has."""
        return [name for name in AVAILABILITY if name in self._of_items]

    @property
    def _times(self) -> list[str]:
        """The times of availability that are known: those, and how long after its last event an item ends."""
        by_events = {Derived.AVAILABLE_UNTIL} if self.idle_days else set[str]()
        return [name for name in AVAILABILITY if name in {*self._said} | by_events]

    def _given(self) -> ir.Table:
        """Of all items, from the item table: ``item_id``, the times of ``_said`` in ms, and ``duration_ms``."""
        return self._item_facts()

    def _item_facts(self) -> ir.Table:
        """Of the items of the item table alone; see ``_given``."""
        rows, columns = self.tables["item"].rows(self.engine), self.choice.table_columns
        facts = {name: standard_events.timestamp_ms(rows[name], columns.available_unit) for name in self._said}
        if LogColumns.DURATION in self._of_items:
            length = standard_events.length_ms(rows, LogColumns.DURATION, columns.duration_unit)
            facts[Derived.DURATION_MS] = standard_events.whole_duration(length)
        return rows.select(rows[ID].name(LogColumns.ITEM_ID), **facts)

    def _with_own_durations(self, rows: ir.Table) -> ir.Table:
        """Rows of ``items.parquet``, with the durations of the item table before those of events."""
        if LogColumns.DURATION not in self._of_items:
            return rows
        given = self._given()
        seconds = (given[Derived.DURATION_MS].cast("float64") / 1000.0).cast("float32")
        joined = rows.left_join(given.select(LogColumns.ITEM_ID, own=seconds), LogColumns.ITEM_ID)
        filled = joined.mutate(**{LogColumns.DURATION: joined.own.coalesce(joined[LogColumns.DURATION])})
        return filled.select(rows.columns).order_by(Derived.ITEM_INDEX)

    def _write_features(self) -> None:
        """Fits and writes the features of the tables, and fits those of requests."""
        self._stage("features")
        found: dict[str, tuple[Feature, ...]] = {}
        for side, table in self.tables.items():
            indices = self.items if side == "item" else self.users
            fitted = feature_tables.fit_table(self.engine, table, indices, self.events, self.partial)
            counts = feature_tables.write_table(self.engine, table, indices, fitted, self.partial)
            found[side], self.feature_tables[side] = fitted.features, table.describe(counts)
        if context := self.more.context:
            train = self.events.filter(self.events[Derived.PERIOD] == TRAIN)
            columns = {feature.name: feature_columns.CONTEXT + feature.name for feature in context}
            self.context = feature_tables.fit_features(self.engine, "context", context, train, columns, self.partial)
            found["context"] = self.context.features
        self.features = FeatureSchema(**found)

    def _write_histories(self) -> None:
        """Writes the last events of every user, for serving."""
        self._stage("histories")
        columns = schema.history_schema(self.log.types, self.more.behaviors, self._plain_context())
        self._written(self._write_rows(splits.as_histories(self._histories()), columns, HISTORIES))
        self.place.bar.update()

    def _histories(self) -> ir.Table:
        """The last events of every user, with their positions."""
        return splits.recent_events(self.events, self.items, self.users, self.choice.max_context, self.more.behaviors)

    def _write_for_extension(self, outside: ir.Table | None) -> list[str]:
        """Writes the files that ``prepare --extends`` reads instead of train shards, if the split can be extended."""
        if outside is None:
            return []
        (self.partial / TRAIN_PAST).mkdir(exist_ok=True)
        past = f"{TRAIN_PAST}/{len(self.train_past):05d}.parquet"
        pairs = writing.without_repeats(self.engine.stream(splits.train_items(self.events)))
        writing.write_rows(pairs, schema.PAST_SCHEMA, self.partial / past)
        rows = splits.held_out_events(outside, self.events, self.items, self.users)
        self._write_rows(rows, self._held_out_schema(), HELD_OUT)
        return [HELD_OUT, *self.train_past, past]

    def _held_out_schema(self) -> pa.Schema:
        context = {feature_columns.CONTEXT + name: kind for name, kind in self._plain_context().items()}
        return schema.held_out_schema(self.log.types, bool(self.more.behaviors), context)

    def _plain_context(self) -> dict[str, pa.DataType]:
        """Types of the plain request features, by name."""
        return {
            one.name: plain_type(one, self.log.types[feature_columns.CONTEXT + one.name]) for one in self.more.context
        }

    def _write_rows(self, rows: ir.Table, columns: pa.Schema, file: str) -> int:
        return writing.write_rows(self.engine.stream(rows), columns, self.partial / file)

    def _write_period(self, period: int) -> list[dict[str, Any]]:
        """Writes the shards of a period, and for held-out periods the items that users had before."""
        self._stage(PERIODS[period])
        shards = self._write_shards(period, has_context=period != TRAIN)
        wanted = period == TRAIN or self.choice.split.holds_out
        if wanted and not any(shard["targets"] for shard in shards):
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
            raise RecpoError(
                f"the {PERIODS[period]} period has no events (dropped: {dropped or 'nothing'}): choose another split, "
                "a smaller min_item_events or min_user_events, or catalog log",
                code="empty",
                field=PERIODS[period],
            )
        if shards and period != TRAIN:
            shards = writing.write_past(self.engine.stream(self._past(period)), shards, self.partial)
        if period == VALID:
            self.counts |= writing.repeated(shards, self.partial, self.feedback.rule)
        return shards

    def _write_shards(self, period: int, has_context: bool, first: int = 0) -> list[dict[str, Any]]:
        rows = splits.period_rows(self.events, period, self.choice.max_context, has_context)
        return writing.write_shards(
            self.engine.stream(rows),
            self.partial / PERIODS[period],
            self.choice.rows_per_shard,
            Encoding(self.feedback, tuple(self.more.behaviors), self.context),
            self._written,
            self.place.writers,
            first,
        )

    def _past(self, period: int) -> ir.Table:
        return splits.past_items(self.events, period)

    def _written(self, rows: int) -> None:
        self.rows_written += rows
        self.place.bar.set_postfix_str(f"{self.rows_written:,} rows written")


def describe(choice: Any) -> dict[str, Any]:
    """A dataclass instance as class path and arguments."""
    kind = type(choice)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": asdict(choice)}

"""Reads an unknown log step by step: which files and rows are of it, what its columns and its tables are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.features import is_text
from recpo.base.frames import some_of
from recpo.log.column_facts import (
    MOSTLY,
    ColumnFacts,
    bound_of,
    column_facts,
    days_of_texts,
    is_fixed,
    plain_name,
    rank_as,
    words,
)
from recpo.log.event_kinds import are_kinds
from recpo.log.feature_columns import PRESET_FEATURES, FeatureColumns
from recpo.log.files import TableSample, together
from recpo.log.recognition import Recognition, recognize
from recpo.log.schema import MILLISECONDS_PER_DAY, MILLISECONDS_PER_UNIT, PRESETS, Columns, Derived, LogColumns, name_of

_FIRST_DAY, _LAST_DAY = 365.0, 47_482.0  # 1971-01-01 and 2100-01-01
#: 31.01.26 or 31st of January 2026: nothing that ``DATE_FORMS`` reads
_OTHER_DATE: Final = (
    r"^[0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2}\b"
    r"|(?i:\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\b.*\b(19|20)[0-9]{2}\b)"
)
_DECIMAL_COMMA: Final = r"^-?[0-9]+(\.[0-9]{3})*,[0-9]+$"
#: At most this share of the rows are of wrong clocks, further from the others than this multiple of their span.
_CLOCKS, _FAR = 0.005, 10.0
_OUTSIDE: Final = 0.01  # of the events, at most, are of items that are not available by a column of their table
_MOSTLY_KNOWN: Final = 0.9  # of the ids of a log, at least, are in the table of them
_WITHOUT_TIMES: Final = "to do without times, pass --columns.time_unit none"
_NAMES_SHOWN: Final = 8
_QUANTITIES: Final = frozenset({"quantity", "qty", "amount", "units"})  # of what was bought
_MANY_ROWS: Final = 100  # so many rows have users and items that come again
_ROWS_OF_ID: Final = 5  # of a user or item in the mean, at least, tell feedback from what it has once


@dataclass
class LogReading:
    """What is known of a log so far.

    Attributes:
        sample: the files of the log, and the inspected rows.
        others: the other files.
        given: column names and units that the user has decided.
        facts: facts about the values of every column, by its name.
        found: what the columns are.
        questions: what only the user can answer.
        doubts: what to check.
        left_out: options of ``prepare`` that leave out rows without a user, item or time, or of wrong clocks.
        table_columns: columns of the tables: durations, times of availability, and ids with other names than in the
            log, by the options of ``FeatureColumns``.
        no_feedback: columns called like feedback that say something of users or items.
    """

    sample: TableSample
    others: tuple[TableSample, ...]
    given: Columns
    questions: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    left_out: dict[str, Any] = field(default_factory=dict)
    table_columns: dict[str, Any] = field(default_factory=dict)
    no_feedback: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        table = self.sample.table
        self.facts = {name: column_facts(name, table[name]) for name in table.column_names}
        self._recognize()

    @classmethod
    def of(cls, samples: Sequence[TableSample], given: Columns) -> LogReading:
        """The file that is most like a log, with the others that are parts of it."""
        readings = [cls(one, tuple(other for other in samples if other is not one), given) for one in samples]
        best = max(readings, key=LogReading._likeness)
        parts = [one for one in best.others if best._has_part(one)]
        if not parts:
            return best
        return cls(together([best.sample, *parts]), tuple(one for one in best.others if one not in parts), given)

    @property
    def used(self) -> list[str]:
        """The columns of the log that are read."""
        behaviors = map(name_of, self.found.behaviors.values())
        return [*(one.column for one in self.found.findings), *behaviors]

    @property
    def days(self) -> np.ndarray | None:
        """When the inspected events happened, in days since 1970, nan = unknown; None if the log has no clock."""
        column, columns = self.found.column(LogColumns.TIMESTAMP), self.found.columns
        if column is None or not columns.has_clock:
            return None
        return days_of(self.sample.table[column], self.facts[column], columns.time_unit)

    @cached_property
    def tables(self) -> dict[str, tuple[TableSample, str]]:
        """The tables of items and users, and their columns of ids; of several, the one with most preset features."""
        tables = {}
        item, user = (self.found.column(role) for role in (LogColumns.ITEM_ID, LogColumns.USER_ID))
        for side, own, other in (("item", item, user), ("user", user, item)):
            preset = PRESET_FEATURES.get(self.found.preset, FeatureColumns())
            features = preset.of("item" if side == "item" else "user") or ()
            columns = {feature.source for feature in features}
            suiting = [
                (len(columns & set(one.table.column_names)), one, key)
                for one in self.others
                if own is not None and other not in one.table.column_names
                if one.table.num_columns + len(one.lists) > 1 and (key := self._key_of(one, own, side)) is not None
            ]
            if suiting:
                tables[side] = max(suiting, key=lambda three: three[0])[1:]
        return tables

    @cached_property
    def item_rows(self) -> pa.Table:
        """The row of the table of items for each inspected event; without columns if there is no such table."""
        if "item" not in self.tables:
            return pa.table({})
        (items, key), own = self.tables["item"], self.sample.table[str(self.found.column(LogColumns.ITEM_ID))]
        try:
            return items.table.take(pc.index_in(own, value_set=items.table[key].cast(own.type).combine_chunks()))
        except pa.ArrowException:  # `prepare` refuses ids of another type
            return pa.table({})

    def read_texts(self) -> None:
        """Asks for the time if it is written in another form, and doubts numbers with decimal commas."""
        time = self._unread_time() if self.given.time_unit is None else None
        if time is not None:  # as if given, so that nothing else is added about the time
            self.given = replace(self.given, timestamp=time)
            self._recognize()
            shown = f"timestamp: `{time}` ({', '.join(self.facts[time].examples)}) has no times that recpo reads"
            remedy = "write ISO times such as 2026-01-31T18:30:00 (pandas.to_datetime with a format), or seconds since"
            self.questions.append(f"{shown}: {remedy} 1970; {_WITHOUT_TIMES}")
        parts = [name for name in self.facts if plain_name(name) in ("year", "month", "day")]
        has_time = self.found.column(LogColumns.TIMESTAMP) is not None or self.given.time_unit is not None
        if len(parts) == 3 and not has_time:
            shown = f"timestamp: {', '.join(f'`{name}`' for name in parts)} are parts of dates"
            self.questions.append(f"{shown}: write one column (pandas.to_datetime); {_WITHOUT_TIMES}")
        asked = self.found.questions
        texts = [self.facts[name] for name in self.found.unused if not any(f"`{name}`" in one for one in asked)]
        numbers = [one for one in texts if one.kind == "text" and self._share(one.name, _DECIMAL_COMMA) >= 0.9]
        doubt = "`{}` ({}) is not read: write numbers with points, not with commas"
        self.doubts += [doubt.format(one.name, ", ".join(one.examples)) for one in numbers]
        doubt = "`{}` ({}) is not read, so the events of a day have no order: write it behind the dates, as one column"
        clocks = [one for one in texts if rank_as(LogColumns.TIMESTAMP, one.name) is not None and one.kind == "text"]
        clocks = [one for one in clocks if self._share(one.name, r"^[0-9]{1,2}:[0-9]{2}") >= MOSTLY]
        self.doubts += [doubt.format(one.name, ", ".join(one.examples)) for one in clocks]

    def leave_rows_out(self) -> None:
        """Keeps the rows with a user, an item and a time that is not far from all others; asks if most have none."""
        roles = {self.found.column(role): role for role in LogColumns.REQUIRED}
        absent = {name: self._absent(name, role) for name, role in roles.items() if name is not None}
        absent = {name: mask for name, mask in absent.items() if mask.any()}
        if absent:
            gone, rows = np.any(list(absent.values()), axis=0), self.sample.table.num_rows
            shown = ", ".join(f"{mask.sum():,} without `{name}`" for name, mask in absent.items())
            if 2 * gone.sum() > rows:
                role = roles[max(absent, key=lambda name: absent[name].sum())]
                remedy = f"name another column (--columns.{role} NAME), or remove these rows from the log"
                most = f"{role}: most of the {rows:,} rows have no user, item or time ({shown}): {remedy}"
                self.questions.append(most)
                return
            self._keep(~gone)
            self.left_out["skip_incomplete"] = True
            said = f"{gone.sum():,} of {rows:,} rows have no user, item or time ({shown})"
            self.doubts.append(f"{said}: skip_incomplete leaves them out")
        if (days := self.days) is None or (is_near := _near(days)) is None:
            return
        (first, last), far = (days[is_near].min(), days[is_near].max()), days[~is_near]
        ends = {"begin": _day(first)} if far.min() < first else {}
        ends |= {"end": _day(last + 1)} if far.max() > last else {}
        dates = f"{_day(far.min())} to {_day(far.max())}, all others of {_day(first)} to {_day(last)}"
        said = f"{len(far):,} rows, as of wrong clocks, are of {dates}"
        self.doubts.append(f"{said}: {' and '.join(ends)} leaves them out")
        self.left_out |= ends
        self._keep(is_near)

    def name_returns(self) -> None:
        """Doubts rows of a negative quantity, which count as positives where no column is the label."""
        for name in self.found.unused if self.found.column(LogColumns.LABEL) is None else ():
            if (self.facts[name].least or 0.0) < 0 and not _QUANTITIES.isdisjoint(words(name)):
                doubt = f"`{name}` ({self.facts[name].evidence}) has negative numbers, as what was returned has"
                self.doubts.append(f"{doubt}: these rows count as positives, so leave them out of the log")

    def read_tables(self) -> None:
        """Finds the durations and the times of availability in the table of items, and ids with other names."""
        for side, (_, key) in self.tables.items():
            if key != self.found.column(f"{side}_id"):
                self.table_columns[f"{side}_id"] = key
        is_short = self.found.column(LogColumns.DURATION) is None
        if self.found.column(LogColumns.WATCH_TIME) is not None and is_short and (name := self._length()) is not None:
            values = self.item_rows[name]
            self.sample = replace(self.sample, table=self.sample.table.append_column(name, values))
            self.facts[name] = column_facts(name, values)
            self._recognize()
            self.table_columns |= {"duration": name, "duration_unit": self.found.columns.duration_unit or "s"}
            self.doubts.append(f"`{name}` of the table of items is the duration of each event")
        if (shown := self.days) is None:
            return
        for name in self.item_rows.column_names:
            if (bound := bound_of(name)) is not None:
                self._read_bound(name, bound, shown)

    def read_files(self) -> None:
        """Says what is not read of the files of the log, and which others are not read."""
        sample, first = self.sample, list[str]()
        asked = self.found.questions
        if sample.form.names is not None and "column_1" in sample.form.names:
            shown = some_of([str(value) for value in sample.table.slice(0, 1).to_pylist()[0].values()])
            named = f"name its {len(sample.form.names)} columns in order, with --csv.names '[user_id, item_id, ...]'"
            first.append(f"the first line has no names ({shown}): {named}")
            asked = ()  # by numbers of columns
        self._read_ids()
        files = ", ".join(file.name for file in sample.files[:3])
        for name in sorted(sample.repeated & {*self.used}):
            first.append(f"several columns of {files} are called `{name}`: rename or remove all but one")
        if said := self._in_directories():
            has_time = self.found.column(LogColumns.TIMESTAMP) is not None or self.given.time_unit is not None
            (self.doubts if has_time else first).append(said if has_time else f"timestamp: {said}; {_WITHOUT_TIMES}")
        self.questions = [*first, *asked, *self.questions]
        self.doubts = [*self.found.doubts, *self._doubts_of_files(), *self.doubts]

    def _in_directories(self) -> str | None:
        """What is not read of directories such as ``day=2026-01-31``, if the files of the log are in several."""
        parts = {part for file in self.sample.files for part in str(file).split("/")[:-1] if "=" in part}
        names = {part.partition("=")[0] for part in parts} - set(self.sample.table.column_names)
        names = {name for name in names if sum(part.startswith(f"{name}=") for part in parts) > 1}
        if not names:
            return None
        shown = ", ".join(f"`{name}`" for name in sorted(names))
        return f"{shown}: in the names of directories only ({min(parts)}), not read: write it as a column"

    def _read_ids(self) -> None:
        """Asks about ids that all rows share or that no two rows do, and doubts a user with very many rows."""
        for role in (LogColumns.USER_ID, LogColumns.ITEM_ID):
            if (name := self.found.column(role)) is None or name in self.given.named().values():
                continue
            counts = pc.value_counts(self.sample.table[name].drop_null())
            numbers, rows = pc.struct_field(counts, "counts").to_numpy(), self.sample.table.num_rows
            if len(numbers) == 1 < rows or (rows >= _MANY_ROWS and len(numbers) > _MOSTLY_KNOWN * rows):
                found = "has one value in all rows" if len(numbers) == 1 else "has another value in nearly every row"
                remedy = f"pass --columns.{role} NAME of another column, or `{name}` itself"
                self.questions.append(f"{role}: `{name}` {found} ({self.facts[name].examples[0]}): {remedy}")
            elif role == LogColumns.USER_ID and numbers.max(initial=0) > max(0.05, 10 / len(numbers)) * rows:
                most = counts[int(numbers.argmax())]["values"].as_py()
                shown = f"`{name}` {most} has {numbers.max() / rows:.0%} of the events"
                self.doubts.append(f"{shown}: if that is nobody, as where people did not sign in, leave them out")

    def leave_columns_out(self) -> None:
        """A number that each user or item has once is no feedback, such as a mean rating or the length of a session."""
        named = map(self.found.column, (LogColumns.USER_ID, LogColumns.ITEM_ID))
        keys = [key for key in named if key is not None]
        for role in (LogColumns.WATCH_TIME, LogColumns.LABEL):
            name = self.found.column(role)
            if name is None or name in self.given.named().values() or self.found.preset != "plain":
                continue
            if self.facts[name].distinct > 1 and any(
                is_fixed(self.sample.table, name, key, _ROWS_OF_ID) for key in keys
            ):
                self.no_feedback = (*self.no_feedback, name)
                self._recognize()
                doubt = f"`{name}` is not read as the {role}, as nearly every user, or item, has one value"
                self.doubts.append(f"{doubt} (pass --columns.{role} {name} if it is)")

    def _recognize(self) -> None:
        table, given = self.sample.table, self.given
        names, others = set(table.column_names), self.others
        keys = {name for one in others for name in names & set(one.table.column_names) if _is_key(one, name)}
        keys = {name for name in keys if not _is_key(self.sample, name)}
        facts = [one for name, one in self.facts.items() if name not in self.no_feedback]
        found = recognize(facts, given, table, keys)
        self.found: Recognition = replace(found, unused=(*found.unused, *self.no_feedback))

    def _likeness(self) -> tuple[int, int, int]:
        """How similar a table is to a log: number of required columns, then of all columns, then of rows."""
        found = self.found
        required = sum(found.column(role) is not None for role in LogColumns.REQUIRED)
        return required, len(found.findings) + len(found.behaviors) + 3 * (found.preset != "plain"), self.sample.rows

    def _has_part(self, one: TableSample) -> bool:
        """Whether other files are of the log: they have its columns, and none more that ``prepare`` looks for."""
        names, own = set(one.table.column_names), set(self.sample.table.column_names)
        sought = set(map(name_of, PRESETS[self.found.preset].sources().values()))
        is_found = all(self.found.column(role) is not None for role in (LogColumns.USER_ID, LogColumns.ITEM_ID))
        return is_found and names.issuperset(self.used) and not sought & (names ^ own) and one.form == self.sample.form

    def _key_of(self, one: TableSample, own: str, side: str) -> str | None:
        """The column of ids of a table: called as in the log, or as ids are, with the values of the log."""
        if own in one.table.column_names:
            return own if _is_key(one, own) else None
        known = self.sample.table[own].unique()
        for name in one.table.column_names:
            if (plain_name(name) == "id" or rank_as(f"{side}_id", name) is not None) and _is_key(one, name):
                with suppress(pa.ArrowException):  # ids of another type
                    found = pc.is_in(known, value_set=one.table[name].combine_chunks().cast(known.type))
                    if pc.mean(found).as_py() >= _MOSTLY_KNOWN:
                        return name
        return None

    def _unread_time(self) -> str | None:
        """The column that is the time by its name, or has dates of a form that is not read; None = there is none."""
        time = self.found.column(LogColumns.TIMESTAMP)
        names = [time] if time is not None else [name for name in self.found.unused if self.facts[name].distinct > 1]
        names = [name for name in names if self.facts[name].kind == "text" and not self.facts[name].forms]
        texts = [name for name in names if self.facts[name].dated < MOSTLY and self._share(name, r"^[0-9]+$") < MOSTLY]
        called = [name for name in texts if name == time or rank_as(LogColumns.TIMESTAMP, name) is not None]
        return next(iter(called + [name for name in names if self._share(name, _OTHER_DATE) >= MOSTLY]), None)

    def _share(self, name: str, pattern: str) -> float:
        """Which share of the values of a column match, as texts."""
        texts = self.sample.table[name].drop_null().cast(pa.string())
        return (pc.sum(pc.match_substring_regex(texts, pattern)).as_py() or 0) / max(1, len(texts))

    def _absent(self, name: str, role: str) -> np.ndarray:
        """Which rows have no value in a column, or no time that parses."""
        values, days = self.sample.table[name], self.days if role == LogColumns.TIMESTAMP else None
        if days is not None:
            return ~((days >= _FIRST_DAY) & (days < _LAST_DAY))
        if is_text(values.type):
            return ~pc.fill_null(pc.match_substring_regex(values.cast(pa.string()), r"\S"), False).to_numpy()
        empty: np.ndarray = pc.is_null(values, nan_is_null=True).to_numpy()
        return empty

    def _keep(self, mask: np.ndarray) -> None:
        sample, gone = self.sample, round(self.sample.rows * np.mean(~mask))
        self.sample = replace(sample, table=sample.table.filter(pa.array(mask)), rows=sample.rows - gone)

    def _length(self) -> str | None:
        """The column of the table of items that the user named as the duration, or else is called so."""
        rows = self.item_rows
        free = [name for name in rows.column_names if name not in self.sample.table.column_names]
        if self.given.duration in free:
            return self.given.duration
        numbers = [name for name in free if column_facts(name, rows[name]).is_number]
        ranked = [(rank, name) for name in numbers if (rank := rank_as(LogColumns.DURATION, name)) is not None]
        return min(ranked, default=(0, None))[1]

    def _read_bound(self, name: str, bound: str, shown: np.ndarray) -> None:
        """Reads a column of the table of items as a time of availability, unless events are at other times.

        Args:
            name: the column.
            bound: the time that it is called.
            shown: when the events happened, in days.
        """
        own, chosen = column_facts(name, self.item_rows[name]), self.table_columns
        unit = own.clock_units[0] if len(own.clock_units) == 1 else None
        is_time = own.kind == "time" or own.dated == 1.0 or unit is not None
        limits = days_of(self.item_rows[name], own, unit) if is_time else None
        if limits is None or bound in chosen or (unit and unit != chosen.get("available_unit", unit)):
            return
        outside = np.mean(shown < np.floor(limits) if bound == Derived.AVAILABLE_FROM else shown >= limits + 1)
        if ((limits < _FIRST_DAY) | (limits >= _LAST_DAY)).any():
            doubt = f"`{name}` is not read, as it has times outside of 1971 to 2099: write nulls for no limit"
        elif outside > _OUTSIDE:
            doubt = f"`{name}` is not read as {bound} of the items: {outside:.0%} of the events are at other times"
        else:
            chosen |= {bound: name} | ({} if unit is None else {"available_unit": unit})
            doubt = f"`{name}` of the table of items is their {bound}: lists have no item at other times"
        self.doubts.append(doubt)

    def _doubts_of_files(self) -> list[str]:
        sample, doubts = self.sample, list[str]()
        if len(sample.files) > 1:
            names = ", ".join(file.name for file in sample.files[:5])
            extra = ", ".join(f"`{name}`" for name in sample.partial)
            also = f"; not all of them have {extra}, which is not read" if extra else ""
            doubts.append(f"{len(sample.files)} files have the same columns and are one log: {names}{also}")
            if are_kinds(sorted({file.name.partition(".")[0] for file in sample.files})):
                doubts.append(f"{names} are called as kinds of events, which count alike: write a column of kinds")
        read = [one for one, _ in self.tables.values()]
        doubts += [self._not_read(one) for one in self.others if not any(one is table for table in read)]
        if sample.nested:
            doubts.append(
                f"{', '.join(f'`{name}`' for name in sample.nested)}: nested columns are not read; write their fields "
                "as columns of their own, for example user.id as user_id, and a row for each value of a list"
            )
        if sample.skipped:
            doubts.append(f"{sample.skipped:,} rows have another number of values: recpo prepare will refuse them")
        if not sample.is_whole:
            doubts.append(f"{sample.table.num_rows:,} of about {sample.rows:,} rows were looked at")
        return doubts

    def _not_read(self, one: TableSample) -> str:
        """Why a file is neither the log nor one of its tables."""
        names, files = one.table.column_names, ", ".join(map(str, one.files))
        named = (self.found.column(role) for role in (LogColumns.ITEM_ID, LogColumns.USER_ID))
        ids = [name for name in named if name is not None]
        keys = [name for name in ids if name in names]
        if not keys:
            if (joined := self._joined(names)) is not None:
                return f"{files}: not read; {joined}"
            wanted = " or ".join(f"`{name}`" for name in ids) or "a user or item of the log"
            return f"{files}: not read, as no column is {wanted} ({', '.join(names[:_NAMES_SHOWN])})"
        if len(keys) == 1 and (again := one.table.num_rows - pc.count_distinct(one.table[keys[0]]).as_py()):
            repeated = f"{again:,} rows have the `{keys[0]}` of an earlier row"
            return f"{files}: not read, as {repeated}: a table has one row for each"
        lacking = ", ".join(f"`{name}`" for name in self.used if name not in names)
        also = "it has another delimiter, or a column that recpo would look for in all"
        why = f"it lacks {lacking}" if lacking else also
        return f"{files}: other columns than the log, not read ({one.rows:,} rows), as {why}"

    def _joined(self, names: Sequence[str]) -> str | None:
        """How another file with these columns, among them what the log lacks, becomes a part of it, if it may."""
        shared = [name for name in names if name in self.sample.table.column_names]
        for role in (LogColumns.USER_ID, LogColumns.ITEM_ID):
            found = [name for name in names if rank_as(role, name) is not None]
            if self.found.column(role) is None and found and shared:
                return f"if `{found[0]}` is the {role}, join it to the log by `{shared[0]}` (merge of pandas)"
        return None


def days_of(values: pa.ChunkedArray, facts: ColumnFacts, unit: str | None) -> np.ndarray | None:
    """Times in days since 1970, texts without their time of day, nan = unknown; None = these are no times.

    Args:
        values: of a column.
        facts: facts about them.
        unit: their unit, if they are numbers, or the form of their dates; None = it is not known, or ISO 8601.
    """
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    factor = 1.0
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        values, factor = values.cast(pa.timestamp("ms"), safe=False).cast(pa.int64()), 1 / MILLISECONDS_PER_DAY
    elif facts.forms or not facts.is_number:
        if unit is None and facts.dated < MOSTLY:
            return None
        return days_of_texts(values, unit)
    else:
        if unit is None:
            return None
        factor = MILLISECONDS_PER_UNIT[unit] / MILLISECONDS_PER_DAY
    return pc.multiply(values.cast(pa.float64(), safe=False), factor).to_numpy()


def _is_key(one: TableSample, name: str) -> bool:
    return bool(pc.count_distinct(one.table[name]).as_py() == one.table.num_rows > 0)


def _near(days: np.ndarray) -> np.ndarray | None:
    """Which times are not those of the few that are far from all others; None if there are no such."""
    few, known = int(_CLOCKS * len(days)), np.sort(days)
    if not few:
        return None
    first, last = known[few], known[-few - 1]
    is_near: np.ndarray = np.abs(days - (first + last) / 2) <= (_FAR + 0.5) * max(1.0, last - first)
    first, last, far = days[is_near].min(), days[is_near].max(), days[~is_near]
    is_far = np.maximum(first - far, far - last) > _FAR * max(1.0, last - first)
    return is_near if 0 < len(far) <= few and is_far.all() else None


def _day(days: float) -> str:
    return str(np.datetime64(int(np.floor(days)), "D"))

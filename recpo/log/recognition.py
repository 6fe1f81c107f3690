"""Recognizes the columns of a log and their units from names and values, and lists what remains open.

Pure functions over the facts about columns (``recpo.log.column_facts``). If two readings differ by units, neither is
chosen: a question names the option with which the user decides.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from recpo.base.frames import some_of
from recpo.log import column_facts, event_kinds, schema
from recpo.log.column_facts import ColumnFacts, plain_name, rank_as, unit_of_name
from recpo.log.event_kinds import opinions, true_texts
from recpo.log.feature_columns import PRESET_BEHAVIORS
from recpo.log.schema import Columns, FlagColumn, LogColumns, PresetName, name_of, preset_of

_UNIT_OPTION: Final = {
    LogColumns.TIMESTAMP: "time_unit",
    LogColumns.WATCH_TIME: "watch_time_unit",
    LogColumns.DURATION: "duration_unit",
}
#: plausible range of the median watch time, in multiples of the median duration
_RATIO: Final = (0.02, 3.0)
_WITHOUT_TIME: Final = (
    "; a column that orders the events of a user has --columns.time_unit order; for a log without times, pass "
    "--columns.time_unit none"
)
#: So many columns of numbers, where no column is the item, may be the items of a matrix.
_LEAST_MATRIX: Final = 10
_MATRIX: Final = (
    "{number:,} columns have numbers and none is the item: if each is an item, the log is a matrix, and recpo reads "
    "rows of a user, an item and a rating: write frame.melt(id_vars=[USER], var_name='item_id', value_name='rating')"
    ".dropna() of pandas, without the numbers that mean that nothing was rated"
)
#: Beginning of the doubt about a log without feedback.
UNLABELED: Final = "no column says how good an event was"
#: Words for what became of something, which may be feedback.
_STAGES: Final = frozenset({"status", "state", "stage", "result", "outcome", "resolution", "decision"})
_NO_TIME: Final = (
    "no column has times, so the events of each user are put into a random order (time_unit none): the order of the "
    "rows may be that of the items; if a column orders the events, pass --columns.timestamp NAME"
)


@dataclass(frozen=True)
class Finding:
    """A standard column that was recognized.

    Attributes:
        role: its standard name.
        source: the column as ``Columns`` has it: its name, or the flag that is read from its texts.
        unit: its unit; None = it has no unit, or the unit is not decided.
        evidence: the reason why it was recognized, and its values.
    """

    role: str
    source: str | FlagColumn
    unit: str | None
    evidence: str

    @property
    def column(self) -> str:
        """The log's name of the column."""
        return name_of(self.source)

    @property
    def said(self) -> str:
        """The column, and which of its values count."""
        values = self.source.values if isinstance(self.source, FlagColumn) else ()
        return f"{self.column} ({' or '.join(map(str, values))})" if values else self.column


@dataclass(frozen=True)
class Recognition:
    """The recognized columns of a log.

    Attributes:
        preset: name of the well-known log, or "plain".
        findings: its standard columns.
        behaviors: name -> column of each behavior, or flag that is read from its texts.
        questions: questions that only the user can answer; each names the option that decides.
        doubts: assumptions that should be checked.
        unused: columns that are not used.
    """

    preset: PresetName = "plain"
    findings: tuple[Finding, ...] = ()
    behaviors: Mapping[str, str | FlagColumn] = field(default_factory=dict)
    questions: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def column(self, role: str) -> str | None:
        """The log's name of a standard column; None = the log has no such column."""
        source = self.source(role)
        return None if source is None else name_of(source)

    def source(self, role: str) -> str | FlagColumn | None:
        """A standard column, as ``Columns`` has it; None = the log has no such column."""
        return next((found.source for found in self.findings if found.role == role), None)

    @property
    def outcome_rows(self) -> bool:
        """Whether what followed on an exposure has rows of its own: the label is read from kinds of events."""
        label = self.source(LogColumns.LABEL)
        return isinstance(label, FlagColumn) and plain_name(label.column) in event_kinds.EVENT_KINDS

    @property
    def columns(self) -> Columns:
        """The complete mapping for ``recpo prepare``."""
        said: dict[str, Any] = {found.role: found.source for found in self.findings}
        said |= {_UNIT_OPTION[found.role]: found.unit for found in self.findings if found.role in _UNIT_OPTION}
        return Columns(**said) if LogColumns.TIMESTAMP in said else Columns(**said, time_unit="none")


def recognize(
    facts: Iterable[ColumnFacts],
    given: Columns = Columns(),  # noqa: B008  frozen
    table: pa.Table | None = None,
    keys: Collection[str] = (),
) -> Recognition:
    """Recognizes the columns of a log.

    Args:
        facts: facts about all of its columns.
        given: column names and units that the user has decided.
        table: its rows, in which a watch time is found by its values; None = names and facts only.
        keys: columns of which another file has one row for each value, as a table of items or users has.
    """
    return _Recognizer({one.name: one for one in facts}, given, keys).recognition(table)


class _Recognizer:
    """Decides about the columns of a log, one role after the other.

    Attributes:
        facts: name -> facts about the column.
        given: column names and units that the user has decided.
        keys: columns of which another file has one row for each value.
        columns: standard name -> recognized column, or flag that is read from its texts.
        how: standard name -> how the column was recognized: by the user, the preset, its name, or its values.
    """

    def __init__(self, facts: Mapping[str, ColumnFacts], given: Columns, keys: Collection[str] = ()) -> None:
        self.facts, self.given, self.keys = facts, given, keys
        self.preset = preset_of(facts)
        self.columns: dict[str, str | FlagColumn] = {}
        self.how: dict[str, str] = {}
        self.units: dict[str, str | None] = {}
        self.behaviors: dict[str, str | FlagColumn] = {}
        self.questions: list[str] = []
        self.doubts: list[str] = []

    def recognition(self, table: pa.Table | None) -> Recognition:
        """What is recognized, and what remains open."""
        self._find_roles()
        self._read_texts()
        opinion_doubts = self._add_opinions()
        missing = [role for role in self.given.required if role not in self.columns]
        if LogColumns.TIMESTAMP in missing and not any(
            rank_as(LogColumns.TIMESTAMP, name) is not None or one.is_clock for name, one in self.facts.items()
        ):
            self.doubts.append(_NO_TIME)
            missing.remove(LogColumns.TIMESTAMP)
        self.questions += self._matrix() if LogColumns.ITEM_ID in missing else []
        self.questions += [
            f"{role}: not recognized among the columns {some_of(list(self.facts))}: pass --columns.{role} NAME"
            + (_WITHOUT_TIME if role == LogColumns.TIMESTAMP else "")
            for role in missing
        ]
        self.questions += self._unread_numbers()
        unsuitable = self._unsuitable()
        self.questions += unsuitable.values()
        self.units = {role: self._unit(role) for role in _UNIT_OPTION if role in self.columns.keys() - unsuitable}
        if table is not None and LogColumns.WATCH_TIME not in self.columns and self.units.get(LogColumns.DURATION):
            self._find_watch_time(table)
        self._add_behaviors()
        self.doubts += [*opinion_doubts, *self._label_by_actions()]
        used = {name_of(column) for columns in (self.columns, self.behaviors) for column in columns.values()}
        rest = [one for name, one in self.facts.items() if name not in used]
        found = [(role, self.columns[role]) for role in LogColumns.ALL if role in self.columns]
        evidence = {role: f"{self.how[role]}: {self._facts_of(role).evidence}" for role, _ in found}
        findings = (Finding(role, source, self.units.get(role), evidence[role]) for role, source in found)
        self.doubts += [*self._other_readings(rest), *self._doubts_of(rest), *self._unlabeled(rest)]
        known = self.preset, tuple(findings), self.behaviors
        return Recognition(*known, tuple(self.questions), tuple(self.doubts), tuple(one.name for one in rest))

    def _matrix(self) -> list[str]:
        """What to do where the columns may be the items of a matrix."""
        numbers = [name for name, one in self.facts.items() if self._is_free(name) and one.is_number]
        is_log = {LogColumns.TIMESTAMP, LogColumns.LABEL} & self.columns.keys()
        is_matrix = not is_log and len(numbers) >= _LEAST_MATRIX and 2 * len(numbers) > len(self.facts)
        return [_MATRIX.format(number=len(numbers))] if is_matrix else []

    def _set(self, role: str, column: str | FlagColumn, how: str) -> None:
        self.columns[role], self.how[role] = column, how

    def _facts_of(self, role: str) -> ColumnFacts:
        """Facts about the column of a role that was recognized."""
        return self.facts[name_of(self.columns[role])]

    def _name(self, role: str) -> str | None:
        source = self.columns.get(role)
        return None if source is None else name_of(source)

    def _is_free(self, name: str) -> bool:
        return name not in map(name_of, self.columns.values())

    def _find_roles(self) -> None:
        """Columns by the user, the preset, or their names; a time also by its values."""
        for role, source in self.given.sources().items():
            if name_of(source) in self.facts:
                self._set(role, source, "given")
        for role, column in schema.PRESETS[self.preset].named().items() if self.preset != "plain" else ():
            if role not in self.columns and column in self.facts and _suits(self.facts[column], role):
                self._set(role, column, f"preset {self.preset}")
        for role in (*self.given.required, *LogColumns.OPTIONAL):
            suiting = [name for name, one in self.facts.items() if self._is_free(name) and _suits(one, role)]
            if role == LogColumns.LABEL:
                suiting = [name for name in suiting if column_facts.may_be_label(self.facts[name])]
            named = [self.facts[name] for name in suiting if rank_as(role, name) is not None]
            if role not in self.columns and named:
                named.sort(key=lambda one: (one.distinct == 1, rank_as(role, one.name), one.name))
                best = column_facts.of_most_events(named) if role == LogColumns.LABEL else named[0]
                self._set(role, best.name, "by its name")
        self._find_alone()

    def _find_alone(self) -> None:
        """A time by its values, users and items by their tables or the ends of names, where one column is left."""
        if LogColumns.TIMESTAMP not in self.columns and LogColumns.TIMESTAMP in self.given.required:
            clocks = [name for name, one in self.facts.items() if self._is_free(name) and one.is_clock]
            if len(clocks) > 1:  # others are when something followed, if it did
                clocks = [name for name in clocks if not self.facts[name].nulls]
            begins = [name for name in clocks if column_facts.BEGINS & set(column_facts.words(name))]
            if len(clocks) == 1 or len(begins) == 1:
                self._set(LogColumns.TIMESTAMP, (begins or clocks)[0], "by its values")
        for role in (LogColumns.ITEM_ID, LogColumns.USER_ID):
            self._find_id(role)

    def _find_id(self, role: str) -> None:
        """An item or user that no name says: the only column with a table of its own, or the only one that is left."""
        if role in self.columns:
            return
        free = [name for name, one in self.facts.items() if self._is_free(name) and one.kind in ("whole", "text")]
        free = [name for name in free if column_facts.may_be_id(name) and self.facts[name].distinct > 1]
        own = column_facts.words(self._name(LogColumns.USER_ID) or "")[:1]  # customer_unique_id is no item of customers
        free = [name for name in free if column_facts.words(name)[:1] != own]
        keyed = [name for name in free if name in self.keys]
        ids = [name for name in free if column_facts.is_id_of_something(name)]
        alone = [name for name in free if plain_name(name) in column_facts.ITEMS_WITH_ID]
        if len(keyed) == 1:
            self._set(role, keyed[0], "by another file, which has one row for each")
        elif keyed or role == LogColumns.USER_ID:
            return
        elif len(ids) == 1:
            self._set(role, ids[0], "by the end of its name, as no other column is an id")
        elif len(alone) == 1:
            self._set(role, alone[0], "by its name, as no other column is an item")
        elif self._is_what_was_rated(free):
            self._set(role, free[0], "as the only column that is left of a log of ratings")

    def _is_what_was_rated(self, names: Sequence[str]) -> bool:
        """Whether it is one column whose values recur, and the only one without a role, where users rate something."""
        left = [name for name in self.facts if self._is_free(name)]
        rated = {LogColumns.USER_ID, LogColumns.LABEL} <= self.columns.keys()
        recurs = [self.facts[name].distinct < self.facts[name].rows for name in left]
        return rated and left == list(names) and recurs == [True]

    def _read_texts(self) -> None:
        """Reads flags and a label from columns of texts, where the user has not said which texts mean true."""
        for role in LogColumns.FLAGS_OR_LABEL:
            column = self.columns.get(role)
            if not isinstance(column, str) or self.facts[column].kind != "text":
                continue
            texts = self.facts[column].texts
            stated = opinions(column, texts)
            by_role = {LogColumns.DISLIKE: stated.dislikes, LogColumns.LABEL: stated.likes}
            if meant := true_texts(texts) or by_role.get(role, ()):
                self.columns[role] = event_kinds.flag_of(column, meant)

    def _add_opinions(self) -> list[str]:
        """Adds the dislikes, labels and behaviors that columns of texts state; returns doubts."""
        doubts = []
        for name, facts in self.facts.items():
            stated = opinions(name, facts.texts)
            if not self._is_free(name) or not (stated.likes or stated.dislikes) or self._are_kinds(name):
                continue
            if not stated.is_certain:
                shown = "', '".join(facts.texts[:5])
                flag = f"'{{column: {name}, equals: VALUE}}'"
                doubts.append(
                    f"`{name}` ('{shown}') could be feedback; if it is, pass --columns.dislike {flag} or "
                    f"--columns.label {flag} with the values that mean it"
                )
                continue
            read = []
            if stated.dislikes and LogColumns.DISLIKE not in self.columns:
                self._set(LogColumns.DISLIKE, event_kinds.flag_of(name, stated.dislikes), "by its values")
                read.append(f"{event_kinds.either(stated.dislikes)} is read as a dislike")
            if stated.likes and not {LogColumns.WATCH_TIME, LogColumns.LABEL} & self.columns.keys():
                self._set(LogColumns.LABEL, event_kinds.flag_of(name, stated.likes), "by its values")
                read.append(f"{event_kinds.either(stated.likes)} is read as a like")
            elif stated.likes and "like" not in self.behaviors:
                self.behaviors["like"] = event_kinds.flag_of(name, stated.likes)
                read.append(f"{event_kinds.either(stated.likes)} is read as the behavior like")
            doubts += [f"`{name}`: {' and '.join(read)}, other values as neither"] if read else []
        return doubts

    def _unread_numbers(self) -> list[str]:
        """Questions about texts that are called like feedback and look like numbers in another form, as 4,5 does."""
        return [
            f"{role}: `{name}` ({facts.evidence}) is text: write numbers (0.73 for 73%, 4.5 for 4,5, seconds for "
            f"00:15:23), or leave the column out"
            for role in (LogColumns.LABEL, LogColumns.WATCH_TIME)
            for name, facts in self.facts.items()
            if role not in self.columns and self._is_free(name) and rank_as(role, name) is not None and facts.has_digits
        ]

    def _unsuitable(self) -> dict[str, str]:
        """Standard name -> question, for columns that the user named and ``recpo prepare`` would refuse."""
        questions = {}
        for role, column in self.columns.items():
            if self.how[role] != "given" or isinstance(column, FlagColumn) or role == LogColumns.TIMESTAMP:
                continue
            facts = self.facts[column]
            if _suits(facts, role):
                continue
            if role in LogColumns.FLAGS_OR_LABEL and facts.kind in ("text", "whole"):
                remedy = f"say which values mean true: --columns.{role} '{{column: {column}, equals: VALUE}}'"
            else:
                remedy = f"pass --columns.{role} NAME of another column"
            questions[role] = f"{role}: `{column}` ({facts.evidence}) has other values than a {role}: {remedy}"
        return questions

    def _unit(self, role: str) -> str | None:
        """The unit of one column; None = it has none, or a question about it was added."""
        if (said := getattr(self.given, _UNIT_OPTION[role])) is not None:
            return str(said)
        return self._time_unit() if role == LogColumns.TIMESTAMP else self._length_unit(role)

    def _time_unit(self) -> str | None:
        facts = self._facts_of(LogColumns.TIMESTAMP)
        if not facts.is_number and not facts.forms:
            return None
        units, said, shown = facts.clock_units, unit_of_name(facts.name), f"`{facts.name}` ({facts.evidence})"
        if len(units) == 1:
            if said not in (None, units[0]):
                self.doubts.append(f"{facts.name} is called {said}, its values are times in {units[0]} only")
            return units[0]
        if facts.forms or facts.has_clock_end:
            several = "has values of several units, or some that are no times"
            wrong = "may have the day or the month first" if facts.forms else several
            remedy = " or ".join(f"--columns.time_unit {unit}" for unit in units or ("UNIT",))
            self.questions.append(f"timestamp: {shown} {wrong}: pass {remedy}")
            return None
        self.doubts.append(
            f"{shown} is no clock time in any unit: it only orders the events of a user (time_unit order); where it "
            "counts seconds from another begin than 1970, add that to it to split by time"
        )
        return "order"

    def _length_unit(self, role: str) -> str | None:
        option, own = _UNIT_OPTION[role], self._facts_of(role)
        preset = getattr(schema.PRESETS[self.preset], option) if self.preset != "plain" else None
        units, said = column_facts.length_units(own, role), unit_of_name(own.name) or preset
        if said is not None and (said in units or said == "min" or not units):
            if not column_facts.is_plausible(own, role, said):
                found = f"median {column_facts.read_as(own, said)}"
                self.doubts.append(
                    f"`{own.name}` is in {said} by its name, but then its values are not plausible: {found}"
                )
            return said
        if said is None and len(units) > 1:
            units = self._of_partner(role, units)
        if len(units) == 1 and said is None:
            return units[0]
        readings = sorted({*units, said or "s", "s", "ms"}, key=("s", "ms", "us", "min", "ns").index)
        shown = ", ".join(column_facts.read_as(own, unit) for unit in readings)
        options = " or ".join(f"--columns.{option} {unit}" for unit in readings)
        self.questions.append(
            f"{role}: `{own.name}` ({own.evidence}; median of those above 0: {shown}): pass {options}"
        )
        return None

    def _of_partner(self, role: str, units: list[str]) -> list[str]:
        """The units in which watch times and durations fit each other, if the unit of the other column is decided."""
        partner = LogColumns.DURATION if role == LogColumns.WATCH_TIME else LogColumns.WATCH_TIME
        if partner not in self.columns:
            return units
        own, other = self._facts_of(role), self._facts_of(partner)
        named = getattr(self.given, _UNIT_OPTION[partner]) or unit_of_name(other.name)
        settled = [named] if named else column_facts.length_units(other, partner)
        if len(settled) != 1 or not other.median or not own.median:
            return units
        reference, suiting = other.median * schema.MILLISECONDS_PER_UNIT[settled[0]], []
        for unit in units:
            here = own.median * schema.MILLISECONDS_PER_UNIT[unit]
            ratio = here / reference if role == LogColumns.WATCH_TIME else reference / here
            suiting += [unit] if _RATIO[0] <= ratio <= _RATIO[1] else []
        return suiting or units

    def _find_watch_time(self, table: pa.Table) -> None:
        """Finds the watch time by its values beside the durations, if one column is certain; adds what to check."""
        numbers = [
            name
            for name, one in self.facts.items()
            if self._is_free(name) and one.kind in ("whole", "number") and one.few is None
        ]
        duration, unit = self._facts_of(LogColumns.DURATION).name, self.units[LogColumns.DURATION] or ""
        found = column_facts.watch_shares(table, numbers, duration, unit, self._name(LogColumns.ITEM_ID))
        stated = {one.column: self.given.watch_time_unit or unit_of_name(one.column) or one.unit for one in found}
        found = [one for one in found if one.unit == stated[one.column]]
        certain = [one for one in found if one.is_certain]
        if len(certain) == 1:
            (one,) = certain
            self._set(LogColumns.WATCH_TIME, one.column, "by its values")
            self.units[LogColumns.WATCH_TIME] = one.unit
            self.doubts.append(
                f"`{one.column}` is read as the watch time in {one.unit}: {one.within:.0%} of its values are at most "
                f"`{duration}`; if it is something else, remove it from prepare.yaml and choose another label"
            )
        elif found:
            options = " or ".join(
                f"--columns.watch_time {one.column} --columns.watch_time_unit {one.unit}" for one in certain or found
            )
            self.doubts.append(
                f"no column is certain to be the watch time, but some values are shares of `{duration}`: if one is, "
                f"pass {options}"
            )

    def _add_behaviors(self) -> None:
        """Adds the behaviors that flags state."""
        known = {column: name for name, column in PRESET_BEHAVIORS.get(self.preset, {}).items()}
        for name, facts in self.facts.items():
            happened = bool(facts.nulls) and facts.is_clock
            behavior = known.get(name) or event_kinds.behavior_of(name, at=happened)
            if not self._is_free(name) or behavior is None or behavior in self.behaviors:
                continue
            if happened:
                self.behaviors[behavior] = FlagColumn(name, schema.ANY)
            elif facts.kind == "flag":
                self.behaviors[behavior] = name
            elif texts := true_texts(facts.texts):
                self.behaviors[behavior] = event_kinds.flag_of(name, texts)

    def _label_by_actions(self) -> list[str]:
        """Without watch times and ratings, what users did with an exposure says how good it was.

        Returns:
            What to check.
        """
        rated = self._name(LogColumns.LABEL) if self.how.get(LogColumns.LABEL) == "by its name" else None
        sparse = rated if rated is not None and self.facts[rated].is_sparse else None
        score = rated if rated is not None and plain_name(rated) in column_facts.MODEL_SCORES else None
        if LogColumns.WATCH_TIME in self.columns or (LogColumns.LABEL in self.columns and not (sparse or score)):
            return []
        found = next(chain(self._kinds_as_labels(), self._behaviors_as_labels(), self._skips_as_labels()), None)
        if found is None:
            return []
        label, unwanted = found
        if sparse and not score and (isinstance(label, FlagColumn) or self.facts[label].nulls):
            return []
        name = name_of(label)
        self.behaviors = {one: column for one, column in self.behaviors.items() if name_of(column) != name}
        self._set(LogColumns.LABEL, label, "by its name, as no other column says how good every event was")
        texts = self.facts[name].texts if isinstance(label, FlagColumn) else ()
        disliked = tuple(text for text in texts if event_kinds.event_kind(text) == "dislike")
        if disliked and LogColumns.DISLIKE not in self.columns:
            self._set(LogColumns.DISLIKE, event_kinds.flag_of(name, disliked), "by its values")
        doubt = (
            f"`{name}` is the label, so {unwanted} count as exposures that the user did not want; if they are "
            "something else, remove it from prepare.yaml and choose label EveryEvent"
        )
        if score is not None:
            return [f"`{score}` is read as said by a model, or of all (pass --columns.label {score} if not)", doubt]
        if sparse is None:
            return [doubt]
        return [f"`{sparse}` is known of few events (pass --columns.label {sparse} if it counts)", doubt]

    def _behaviors_as_labels(self) -> Iterator[tuple[str | FlagColumn, str]]:
        """The behavior whose flag has both values, often enough if it is a conversion: its column, and other events."""
        both = [name for name, column in self.behaviors.items() if self.facts[name_of(column)].distinct > 1]
        if both:
            enough = [name for name in both if self._converted(name) >= event_kinds.ENOUGH_CONVERSIONS]
            first = min(enough or both, key=list(event_kinds.BEHAVIORS).index)
            others = [name_of(self.behaviors[name]) for name in both if name != first]
            instead = f" (or pass --columns.label NAME for {_any_of(others)})" if others else ""
            yield self.behaviors[first], f"events without it{instead}"

    def _converted(self, behavior: str) -> int:
        """Number of events with a behavior that users come for; 0 of another one."""
        facts = self.facts[name_of(self.behaviors[behavior])]
        return (facts.positive if facts.is_number else facts.rows - facts.nulls) * (behavior in event_kinds.CONVERSIONS)

    def _skips_as_labels(self) -> Iterator[tuple[FlagColumn, str]]:
        """Flags of skips, and the other events."""
        for name, facts in self.facts.items():
            is_free = self._is_free(name) and facts.distinct > 1
            if is_free and facts.kind == "flag" and plain_name(name) in event_kinds.SKIPS:
                yield FlagColumn(name, event_kinds.UNSKIPPED), "events with it"

    def _kinds_as_labels(self) -> Iterator[tuple[FlagColumn, str]]:
        """Kinds of events of which some are mere offers, and these."""
        for name, facts in self.facts.items():
            offered = event_kinds.offers(facts.texts) if self._is_free(name) and self._are_kinds(name) else ()
            if offered and len(offered) < len(facts.texts):
                grades = event_kinds.outcome_grades(facts.texts)
                kinds = (
                    FlagColumn(name, grades) if min(grades.values()) < 1.0 else event_kinds.flag_of(name, tuple(grades))
                )
                yield kinds, f"events of {event_kinds.either(offered)}"

    def _are_kinds(self, name: str) -> bool:
        """Whether a column says what kind of event a row is, by its name or by its texts."""
        return plain_name(name) in event_kinds.EVENT_KINDS or event_kinds.are_kinds(self.facts[name].texts)

    def _other_readings(self, rest: Sequence[ColumnFacts]) -> list[str]:
        """Columns without a role that could be the item, its duration, or a dislike; presets leave nothing open."""
        if self.preset != "plain":
            return []
        doubts = []
        for role, called in ((LogColumns.ITEM_ID, "item"), (LogColumns.LABEL, "label")):
            others = [one.name for one in rest if rank_as(role, one.name) is not None and one.distinct > 1]
            if (own := self._name(role)) is not None and rank_as(role, own) is not None and others:
                doubts.append(f"`{own}` is the {called}; if it is {_any_of(others)}, pass --columns.{role} NAME")
        if LogColumns.WATCH_TIME in self.columns and LogColumns.DURATION not in self.columns:
            lengths = [one.name for one in rest if one.kind in ("whole", "number") and (one.least or 0.0) >= 0]
            if lengths:
                remedy = f"if it is {_any_of(lengths)}, pass --columns.duration NAME"
                doubts.append(f"no column is the item's duration, so watch times of all items count alike; {remedy}")
        flags = [one.name for one in rest if one.kind == "flag" and one.distinct > 1]
        if flags and LogColumns.DISLIKE not in self.columns:
            doubts.append(f"no column is a dislike; if {_any_of(flags)} says one, pass --columns.dislike NAME")
        return doubts

    def _doubts_of(self, rest: Sequence[ColumnFacts]) -> list[str]:
        """Unused columns that state the kind of event, or are called like a flag and are none."""
        doubts = [
            f"`{one.name}` says what kind of event a row is ({one.evidence}): all kinds count alike; say what they are "
            f"worth: --columns.label '{{column: {one.name}, equals: {{VALUE: 0.5, VALUE: 1}}}}'; others are worth 0"
            for one in rest
            if plain_name(one.name) in event_kinds.EVENT_KINDS
            and (one.kind == "text" or (one.kind == "whole" and one.few))
        ]
        return doubts + [
            f"`{one.name}` is called like a {role} and has other values ({one.evidence}): it is not read"
            for role in LogColumns.FLAGS
            for one in rest
            if rank_as(role, one.name) is not None and one.kind != "flag"
        ]

    def _unlabeled(self, rest: Sequence[ColumnFacts]) -> list[str]:
        """What it costs if no column says how good an event was, and the numbers, or else the words, that might."""
        if {LogColumns.WATCH_TIME, LogColumns.LABEL, LogColumns.DISLIKE} & self.columns.keys():
            return []
        for behavior, column in self.behaviors.items():
            own = self.facts[name_of(column)]
            if own.distinct == 1 and own.nulls:
                return [
                    f"`{own.name}` ({own.evidence}) has one value, and no column says how good other events "
                    f"were: where a missing value means no {behavior}, write 0, and it becomes the label"
                ]
        free = [one for one in rest if not column_facts.is_called_id(one.name)]
        stages = [one for one in free if one.texts[1:] and not _STAGES.isdisjoint(column_facts.words(one.name))]
        numbers = [one for one in free if one.is_number and one.distinct > 1]
        others = [*stages, *numbers] or [one for one in free if one.texts[1:]]
        shown = ", ".join(f"`{one.name}` ({one.evidence})" for one in others[:5])
        remedy = "if one is feedback, pass --columns.watch_time, --columns.label or --columns.dislike NAME"
        said = f"others: {shown}: {remedy}" if shown else "the log has no other column that could say it"
        return [
            f"{UNLABELED}, so every event has the same label: a policy can imitate what users open, but it cannot be "
            f"aligned with what they like; {said}"
        ]


def _suits(facts: ColumnFacts, role: str) -> bool:
    """Whether the values of a column are possible for the role."""
    if role in LogColumns.IDS:
        return facts.kind in ("whole", "text", "flag")
    if role == LogColumns.TIMESTAMP:
        return facts.kind in ("whole", "number", "time") or facts.dated >= column_facts.MOSTLY or bool(facts.forms)
    if role in LogColumns.FLAGS:
        return facts.kind == "flag" or (facts.kind == "text" and bool(true_texts(facts.texts)))
    if role == LogColumns.PROPENSITY:
        return facts.is_number and (facts.least or 0.0) >= 0 and 0 < (facts.most or 0.0) <= 1
    if role in (LogColumns.WATCH_TIME, LogColumns.DURATION):
        return facts.kind in ("whole", "number") and (facts.most or 0.0) > 0
    return facts.is_number


def _any_of(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[:5]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"

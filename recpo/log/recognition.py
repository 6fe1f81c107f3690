"""Recognizes the columns of a log and their units from names and values, and lists what remains open.

Pure functions over the facts about columns (``recpo.log.column_facts``). If two readings differ by units, neither is
chosen: a question names the option with which the user decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa

from recpo.log.column_facts import (
    EVENT_KINDS,
    ColumnFacts,
    Opinions,
    WatchShare,
    behavior_of,
    clock_units,
    is_plausible,
    length_units,
    opinions,
    plain_name,
    rank_as,
    read_as,
    true_texts,
    unit_of_name,
    watch_shares,
)
from recpo.log.feature_columns import PRESET_BEHAVIORS
from recpo.log.schema import PRESETS, Columns, FlagColumn, LogColumns, PresetName, name_of

_UNIT_OPTION: Final = {
    LogColumns.TIMESTAMP: "time_unit",
    LogColumns.WATCH_TIME: "watch_time_unit",
    LogColumns.DURATION: "duration_unit",
}
#: plausible range of the median watch time, in multiples of the median duration
_RATIO: Final = (0.02, 3.0)
_MOSTLY: Final = 0.5  # minimum share of text values with a date in a column of times
_IDS: Final = (LogColumns.USER_ID, LogColumns.ITEM_ID, LogColumns.REQUEST_ID)
_FLAGS: Final = (LogColumns.DISLIKE, LogColumns.IS_RANDOM)


@dataclass(frozen=True)
class Finding:
    """A standard column that was recognized.

    Attributes:
        role: its standard name.
        column: its name in the log.
        unit: its unit; None = it has no unit, or the unit is not decided.
        evidence: the reason why it was recognized, and its values.
        texts: the texts that mean true, for a flag that is read from texts.
    """

    role: str
    column: str
    unit: str | None
    evidence: str
    texts: tuple[str, ...] = ()

    @property
    def source(self) -> str | FlagColumn:
        """The column as ``Columns`` has it: its name, or the flag that is read from its texts."""
        return _flag_of(self.column, self.texts) if self.texts else self.column


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
        return next((found.column for found in self.findings if found.role == role), None)

    def texts(self, role: str) -> tuple[str, ...]:
        """The texts that mean true, for a flag that is read from texts; else empty."""
        return next((found.texts for found in self.findings if found.role == role), ())

    @property
    def columns(self) -> Columns:
        """The complete mapping for ``recpo prepare``."""
        said: dict[str, Any] = {found.role: found.source for found in self.findings}
        said |= {_UNIT_OPTION[found.role]: found.unit for found in self.findings if found.role in _UNIT_OPTION}
        return Columns(**said)


def recognize(
    facts: Iterable[ColumnFacts],
    given: Columns = Columns(),  # noqa: B008  frozen
    table: pa.Table | None = None,
) -> Recognition:
    """Recognizes the columns of a log.

    Args:
        facts: facts about all of its columns.
        given: column names and units that the user has decided.
        table: its rows, in which a watch time is found by its values; None = names and facts only.
    """
    by_name = {one.name: one for one in facts}
    preset = _preset(by_name)
    columns, how = _roles(by_name, preset, given)
    texts = _true_texts(columns, by_name, given)
    behaviors, opinion_doubts = _add_opinions(columns, how, texts, by_name)
    questions = [
        f"{role}: not recognized among the columns {', '.join(by_name)}: pass --columns.{role} NAME"
        for role in LogColumns.REQUIRED
        if role not in columns
    ]
    unsuitable = _unsuitable(columns, texts, by_name, given)
    questions += unsuitable.values()
    units, doubts = {}, []
    for role in _UNIT_OPTION:
        if role in columns and role not in unsuitable:
            partner = {name: by_name[column] for name, column in columns.items() if name in _UNIT_OPTION}
            unit, asked, doubt = _unit(role, partner, preset, given)
            units[role] = unit
            questions += [asked] if asked else []
            doubts += [doubt] if doubt else []
    if table is not None and LogColumns.WATCH_TIME not in columns and units.get(LogColumns.DURATION) is not None:
        share, said = _watched(table, columns, units[LogColumns.DURATION] or "", by_name, given)
        doubts += said
        if share is not None:
            columns[LogColumns.WATCH_TIME], how[LogColumns.WATCH_TIME] = share.column, "by its values"
            units[LogColumns.WATCH_TIME] = share.unit
    findings = tuple(
        Finding(role, column, units.get(role), f"{how[role]}: {by_name[column].evidence}", texts.get(role, ()))
        for role, column in sorted(columns.items(), key=lambda one: LogColumns.ALL.index(one[0]))
    )
    found = Recognition(preset, findings, behaviors, tuple(questions), (*doubts, *opinion_doubts))
    return _with_the_rest(found, by_name)


def _flag_of(column: str, texts: Sequence[str]) -> FlagColumn:
    return FlagColumn(column, texts[0] if len(texts) == 1 else tuple(texts))


def _true_texts(
    columns: Mapping[str, str], by_name: Mapping[str, ColumnFacts], given: Columns
) -> dict[str, tuple[str, ...]]:
    """Standard name -> the texts that mean true, for flags in columns of texts."""
    found = {role: flag.values for role, flag in given.flags().items() if role in columns}
    for role, column in columns.items():
        facts = by_name[column]
        if role in found or facts.kind != "text" or role not in (*_FLAGS, LogColumns.LABEL):
            continue
        stated = opinions(column, facts.texts) or Opinions((), (), False)
        by_role = {LogColumns.DISLIKE: stated.dislikes, LogColumns.LABEL: stated.likes}
        if texts := true_texts(facts.texts) or by_role.get(role, ()):
            found[role] = texts
    return found


def _add_opinions(
    columns: dict[str, str],
    how: dict[str, str],
    texts: dict[str, tuple[str, ...]],
    by_name: Mapping[str, ColumnFacts],
) -> tuple[dict[str, str | FlagColumn], list[str]]:
    """Adds dislikes and labels that columns of texts state; returns the behaviors that they state, and doubts."""
    behaviors: dict[str, str | FlagColumn] = {}
    doubts = []
    for name, facts in by_name.items():
        stated = opinions(name, facts.texts) if name not in columns.values() else None
        if stated is None or plain_name(name) in EVENT_KINDS:
            continue
        if not stated.is_certain:
            shown = "', '".join(facts.texts[:5])
            flag = f"'{{column: {name}, equals: VALUE}}'"
            doubts.append(
                f"`{name}` ('{shown}') could be feedback; if it is, pass --columns.dislike {flag} or --columns.label "
                f"{flag} with the values that mean it"
            )
            continue
        read = []
        if stated.dislikes and LogColumns.DISLIKE not in columns:
            columns[LogColumns.DISLIKE], texts[LogColumns.DISLIKE] = name, stated.dislikes
            how[LogColumns.DISLIKE] = "by its values"
            read.append(f"{_or(stated.dislikes)} is read as a dislike")
        if stated.likes and not {LogColumns.WATCH_TIME, LogColumns.LABEL} & columns.keys():
            columns[LogColumns.LABEL], texts[LogColumns.LABEL] = name, stated.likes
            how[LogColumns.LABEL] = "by its values"
            read.append(f"{_or(stated.likes)} is read as a like")
        elif stated.likes and "like" not in behaviors:
            behaviors["like"] = _flag_of(name, stated.likes)
            read.append(f"{_or(stated.likes)} is read as the behavior like")
        doubts += [f"`{name}`: {' and '.join(read)}, other values as neither"] if read else []
    return behaviors, doubts


def _or(texts: Sequence[str]) -> str:
    return " or ".join(f"'{text}'" for text in texts)


def _unsuitable(
    columns: Mapping[str, str],
    texts: Mapping[str, tuple[str, ...]],
    by_name: Mapping[str, ColumnFacts],
    given: Columns,
) -> dict[str, str]:
    """Standard name -> question, for columns that the user named and whose values ``recpo prepare`` would refuse."""
    questions = {}
    for role, column in columns.items():
        facts = by_name[column]
        if getattr(given, role) is None or role in texts or role == LogColumns.TIMESTAMP or _suits(facts, role):
            continue
        if role in (*_FLAGS, LogColumns.LABEL) and facts.kind in ("text", "whole"):
            remedy = f"say which values mean true: --columns.{role} '{{column: {column}, equals: VALUE}}'"
        else:
            remedy = f"pass --columns.{role} NAME of another column"
        questions[role] = f"{role}: `{column}` ({facts.evidence}) has other values than a {role}: {remedy}"
    return questions


def _watched(
    table: pa.Table,
    columns: Mapping[str, str],
    duration_unit: str,
    by_name: Mapping[str, ColumnFacts],
    given: Columns,
) -> tuple[WatchShare | None, list[str]]:
    """The watch time by its values beside the durations, if one column is certain; and what to check."""
    numbers = [
        name
        for name, one in by_name.items()
        if name not in columns.values() and one.kind in ("whole", "number") and one.few is None
    ]
    duration = columns[LogColumns.DURATION]
    found = watch_shares(table, numbers, duration, duration_unit, columns.get(LogColumns.ITEM_ID))
    stated = {one.column: given.watch_time_unit or unit_of_name(one.column) or one.unit for one in found}
    found = [one for one in found if one.unit == stated[one.column]]
    certain = [one for one in found if one.is_certain]
    if len(certain) == 1:
        (one,) = certain
        doubt = (
            f"`{one.column}` is read as the watch time in {one.unit}: {one.within:.0%} of its values are at most "
            f"`{duration}`; if it is something else, remove it from prepare.yaml and choose another label"
        )
        return one, [doubt]
    options = [f"--columns.watch_time {one.column} --columns.watch_time_unit {one.unit}" for one in certain or found]
    if not options:
        return None, []
    remedy = f"if one is, pass {' or '.join(options)}"
    return None, [f"no column is certain to be the watch time, but some values are shares of `{duration}`: {remedy}"]


def _preset(by_name: Mapping[str, ColumnFacts]) -> PresetName:
    """The preset whose column names the log has: all required ones, and all that differ from plain names."""
    found: list[PresetName] = []
    presets: tuple[PresetName, ...] = ("kuairand", "movielens", "recbole")
    for name in presets:
        mapping = PRESETS[name].named()
        required = all(mapping[role] in by_name for role in LogColumns.REQUIRED)
        optional = [column for role, column in mapping.items() if role in LogColumns.OPTIONAL]
        if required and (name == "recbole" or any(column in by_name for column in optional)):
            found.append(name)
    return found[0] if len(found) == 1 else "plain"


def _roles(
    by_name: Mapping[str, ColumnFacts], preset: PresetName, given: Columns
) -> tuple[dict[str, str], dict[str, str]]:
    """Standard name -> column, and how it was recognized: by the user, the preset, its name, or its values."""
    columns, how = {}, {}
    for role, column in given.named().items():
        if column in by_name:
            columns[role], how[role] = column, "given"
    for role, column in PRESETS[preset].named().items() if preset != "plain" else ():
        if role not in columns and column in by_name and _suits(by_name[column], role):
            columns[role], how[role] = column, f"preset {preset}"
    taken = set(columns.values())
    for role in LogColumns.ALL:
        ranked = [
            (rank_as(role, name), name) for name, one in by_name.items() if name not in taken and _suits(one, role)
        ]
        best = min(((rank, name) for rank, name in ranked if rank is not None), default=None)
        if role not in columns and best is not None:
            columns[role], how[role] = best[1], "by its name"
            taken.add(best[1])
    if LogColumns.TIMESTAMP not in columns:
        clocks = [name for name, one in by_name.items() if name not in taken and _is_clock(one)]
        if len(clocks) == 1:
            columns[LogColumns.TIMESTAMP], how[LogColumns.TIMESTAMP] = clocks[0], "by its values"
    return columns, how


def _suits(facts: ColumnFacts, role: str) -> bool:
    """Whether the values of a column are possible for the role."""
    if role in _IDS:
        return facts.kind in ("whole", "text", "flag")
    if role == LogColumns.TIMESTAMP:
        return facts.kind in ("whole", "number", "time") or facts.dated >= _MOSTLY
    if role in _FLAGS:
        return facts.kind == "flag" or (facts.kind == "text" and bool(true_texts(facts.texts)))
    if role == LogColumns.PROPENSITY:
        return facts.is_number and (facts.least or 0.0) >= 0 and 0 < (facts.most or 0.0) <= 1
    if role in (LogColumns.WATCH_TIME, LogColumns.DURATION):
        return facts.kind in ("whole", "number") and (facts.most or 0.0) > 0
    return facts.is_number


def _is_clock(facts: ColumnFacts) -> bool:
    return facts.kind == "time" or facts.dated >= _MOSTLY or (facts.distinct > 1 and len(clock_units(facts)) == 1)


def _unit(
    role: str, facts: Mapping[str, ColumnFacts], preset: PresetName, given: Columns
) -> tuple[str | None, str | None, str | None]:
    """The unit of one column, or the question about it; and a doubt about it, if any."""
    option = _UNIT_OPTION[role]
    if (said := getattr(given, option)) is not None:
        return said, None, None
    if role == LogColumns.TIMESTAMP:
        return _time_unit(facts[role])
    return _length_unit(role, facts, getattr(PRESETS[preset], option) if preset != "plain" else None, given)


def _time_unit(facts: ColumnFacts) -> tuple[str | None, str | None, str | None]:
    if not facts.is_number:
        return None, None, None
    units, said = clock_units(facts), unit_of_name(facts.name)
    ask = f"timestamp: `{facts.name}` ({facts.evidence})"
    if len(units) == 1:
        other = f"{facts.name} is called {said}, its values are times in {units[0]} only" if said else None
        return units[0], None, other if said not in (None, units[0]) else None
    ends = [_clock_of(value) for value in (facts.least, facts.most)]
    if any(ends):
        return (
            None,
            f"{ask} has values of several units, or some that are no times: pass --columns.time_unit UNIT",
            None,
        )
    doubt = (
        f"`{facts.name}` ({facts.evidence}) is no clock time in any unit: it only orders the events of a user "
        "(time_unit order); where it counts seconds from another begin than 1970, add that to it to split by time"
    )
    return "order", None, doubt


def _clock_of(value: float | None) -> bool:
    return value is not None and bool(clock_units(ColumnFacts("", "whole", 1, 0, 1, least=value, most=value)))


def _length_unit(
    role: str, facts: Mapping[str, ColumnFacts], preset: str | None, given: Columns
) -> tuple[str | None, str | None, str | None]:
    own, said = facts[role], unit_of_name(facts[role].name) or preset
    units = length_units(own, role)
    option, shown = _UNIT_OPTION[role], f"{role}: `{own.name}` ({own.evidence}; median of those above 0: "
    if said is not None and (said in units or said == "min" or not units):
        doubt = (
            f"`{own.name}` is in {said} by its name, but then its values are not plausible: median {read_as(own, said)}"
        )
        return said, None, None if is_plausible(own, role, said) else doubt
    if said is None and len(units) > 1:
        units = _of_partner(role, facts, units, given)
    if len(units) == 1 and said is None:
        return units[0], None, None
    readings = sorted({*units, said or "s", "s", "ms"}, key=("s", "ms", "us", "min", "ns").index)
    options = " or ".join(f"--columns.{option} {unit}" for unit in readings)
    return None, f"{shown}{', '.join(read_as(own, unit) for unit in readings)}): pass {options}", None


def _of_partner(role: str, facts: Mapping[str, ColumnFacts], units: list[str], given: Columns) -> list[str]:
    """The units in which watch times and durations fit each other, if the unit of the other column is decided."""
    other = LogColumns.DURATION if role == LogColumns.WATCH_TIME else LogColumns.WATCH_TIME
    if other not in facts:
        return units
    named = getattr(given, _UNIT_OPTION[other]) or unit_of_name(facts[other].name)
    settled = [named] if named else length_units(facts[other], other)
    if len(settled) != 1 or not facts[other].median or not facts[role].median:
        return units
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
    reference = (facts[other].median or 0.0) * scale[settled[0]]
    suiting = []
    for unit in units:
        here = (facts[role].median or 0.0) * scale[unit]
        ratio = here / reference if role == LogColumns.WATCH_TIME else reference / here
        suiting += [unit] if _RATIO[0] <= ratio <= _RATIO[1] else []
    return suiting or units


def _with_the_rest(found: Recognition, by_name: Mapping[str, ColumnFacts]) -> Recognition:
    """Adds behaviors, doubts about other columns, and unused columns."""
    taken = {one.column for one in found.findings}
    behaviors = dict(found.behaviors)
    known = {column: name for name, column in PRESET_BEHAVIORS[found.preset].items()}
    for name, facts in by_name.items():
        behavior = known.get(name) or behavior_of(name)
        if name in taken or behavior is None or behavior in behaviors:
            continue
        if facts.kind == "flag":
            behaviors[behavior] = name
        elif texts := true_texts(facts.texts):
            behaviors[behavior] = _flag_of(name, texts)
    used = taken | {name_of(column) for column in behaviors.values()}
    rest = [name for name in by_name if name not in used]
    doubts = _other_readings(found, [by_name[name] for name in rest])
    kinds = [by_name[name] for name in rest if plain_name(name) in EVENT_KINDS and by_name[name].kind == "text"]
    doubts += [
        f"`{one.name}` says what kind of event a row is ({one.evidence}): all kinds count alike; read flags from it "
        f"(behaviors: {{purchase: {{column: {one.name}, equals: VALUE}}}}), or leave out rows that are no feedback"
        for one in kinds
    ]
    doubts += [
        f"`{one.name}` is called like a {role} and has other values ({one.evidence}): it is not read"
        for role in _FLAGS
        for one in by_name.values()
        if one.name in rest and rank_as(role, one.name) is not None and one.kind != "flag"
    ]
    doubts += _unlabeled(found, by_name, [*(name_of(column) for column in behaviors.values()), *rest])
    return replace(found, behaviors=behaviors, doubts=(*found.doubts, *doubts), unused=tuple(rest))


def _unlabeled(found: Recognition, by_name: Mapping[str, ColumnFacts], rest: Sequence[str]) -> list[str]:
    """What it costs if no column says how good an event was, and the columns that might."""
    graded = (LogColumns.WATCH_TIME, LogColumns.LABEL, LogColumns.DISLIKE)
    if any(found.column(role) is not None for role in graded):
        return []
    numbers = [by_name[name] for name in rest if by_name[name].is_number and by_name[name].distinct > 1]
    shown = ", ".join(f"`{one.name}` ({one.evidence})" for one in numbers[:5])
    remedy = "if one is feedback, pass --columns.watch_time, --columns.label or --columns.dislike NAME"
    return [
        "no column says how good an event was, so every event has the same label: a policy can imitate what users "
        "open, but it cannot be aligned with what they like; "
        + (f"other numbers: {shown}: {remedy}" if shown else "the log has no other number that could say it")
    ]


def _other_readings(found: Recognition, rest: Sequence[ColumnFacts]) -> list[str]:
    """Columns without a role that could be the item, its duration, or a dislike; presets leave nothing open."""
    if found.preset != "plain":
        return []
    item, doubts = found.column(LogColumns.ITEM_ID), []
    if item is not None and rank_as(LogColumns.ITEM_ID, item) is not None:
        others = [one.name for one in rest if rank_as(LogColumns.ITEM_ID, one.name) is not None]
        doubts += [f"`{item}` is the item; if it is {_any_of(others)}, pass --columns.item_id NAME"] if others else []
    if found.column(LogColumns.WATCH_TIME) is not None and found.column(LogColumns.DURATION) is None:
        lengths = [one.name for one in rest if one.kind in ("whole", "number") and (one.least or 0.0) >= 0]
        if lengths:
            remedy = f"if it is {_any_of(lengths)}, pass --columns.duration NAME"
            doubts.append(f"no column is the item's duration, so watch times of all items count alike; {remedy}")
    flags = [one.name for one in rest if one.kind == "flag" and one.distinct > 1]
    if flags and found.column(LogColumns.DISLIKE) is None:
        doubts.append(f"no column is a dislike; if {_any_of(flags)} says one, pass --columns.dislike NAME")
    return doubts


def _any_of(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[:5]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"

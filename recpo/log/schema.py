"""The columns of an interaction log with their units, and the columns of prepared data.

Every name is defined once, here. ``LogColumns`` has the standard columns of a log. ``Columns`` maps them to the names
and units of a given log. ``PRESETS`` has the mappings of well-known logs. ``EVENT_SCHEMA`` is the layout of the
prepared shards.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Self

import pyarrow as pa

from recpo.base.errors import Code, RecpoError

TimeUnit = Literal["s", "ms", "us", "ns", "day_first", "month_first", "year_first", "order", "none"]
DurationUnit = Literal["s", "ms", "us", "min"]
#: Time units of timestamps that are positions of a user's events, not times.
POSITIONS: Final = ("order", "none")
#: What times begin with that are written as text: year, month and day.
DATED: Final = "^([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})"

_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")

MILLISECONDS_PER_DAY: Final = 86_400_000
MILLISECONDS_PER_UNIT: Final[dict[str, float]] = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}


class LogColumns:
    """Standard names of the columns of an interaction log. Only the first three are required.

    Attributes:
        USER_ID: the user; an integer or a string.
        ITEM_ID: the item; an integer or a string.
        TIMESTAMP: when the item was shown; a number (in ``Columns.time_unit``), a time, or a string that parses.
        WATCH_TIME: how long it was watched.
        DURATION: how long the item is.
        DISLIKE: an explicit negative signal; bool or 0/1.
        LABEL: a number that a label method reads (a rating, a binary "long view").
        PROPENSITY: probability in (0, 1] with which the logging policy showed the item.
        IS_RANDOM: the exposure was uniformly random; bool or 0/1.
        REQUEST_ID: shared by the events of one request (impression).
    """

    USER_ID: Final = "user_id"
    ITEM_ID: Final = "item_id"
    TIMESTAMP: Final = "timestamp"
    WATCH_TIME: Final = "watch_time"
    DURATION: Final = "duration"
    DISLIKE: Final = "dislike"
    LABEL: Final = "label"
    PROPENSITY: Final = "propensity"
    IS_RANDOM: Final = "is_random"
    REQUEST_ID: Final = "request_id"

    IDS: Final = (USER_ID, ITEM_ID, REQUEST_ID)
    FLAGS: Final = (DISLIKE, IS_RANDOM)
    FLAGS_OR_LABEL: Final = (*FLAGS, LABEL)  # those that may be read from values (``FlagColumn``)
    REQUIRED: Final = (USER_ID, ITEM_ID, TIMESTAMP)
    OPTIONAL: Final = (WATCH_TIME, DURATION, DISLIKE, LABEL, PROPENSITY, IS_RANDOM, REQUEST_ID)
    ALL: Final = REQUIRED + OPTIONAL


class Derived:
    """Names of the columns that the Ibis expressions of this package add before the shards are written.

    Attributes:
        WATCH_MS: watch time in integer milliseconds, null = unknown; counts of them make quantiles exact.
        DURATION_MS: duration in integer milliseconds, null = unknown.
        PERIOD: 0 train, 1 valid, 2 test (``PERIODS``).
        VALUE: the number in the log's label column, null = missing; input of label methods.
        LABEL: how good the event was, in [0, 1]; null = unknown.
        FEEDBACK: feedback level 0..5 (``recpo.base.feedback.FeedbackDefinition``).
        POSITION: position of the event in its user's history, from 0.
        BEHAVIORS: bit set of what the user did with the item: bit b is the b-th behavior of the manifest.
        AVAILABLE_FROM: time in ms from which an item may be recommended, null = always.
        AVAILABLE_UNTIL: first time in ms at which an item may no longer be recommended, null = never.
    """

    WATCH_MS: Final = "watch_ms"
    DURATION_MS: Final = "duration_ms"
    PERIOD: Final = "period"
    VALUE: Final = "value"
    LABEL: Final = "label"
    FEEDBACK: Final = "feedback"
    POSITION: Final = "position"
    USER_INDEX: Final = "user_index"
    ITEM_INDEX: Final = "item_index"
    REQUEST: Final = "request"
    IS_TARGET: Final = "is_target"
    BEHAVIORS: Final = "behaviors"
    AVAILABLE_FROM: Final = "available_from"
    AVAILABLE_UNTIL: Final = "available_until"
    IS_PLACED: Final = "is_placed"


TRAIN, VALID, TEST = 0, 1, 2
PERIODS: Final = ("train", "valid", "test")

#: The order of a user's events, nulls first. It does not depend on the order of rows and files in the log.
TIE_RULE: Final = (
    LogColumns.TIMESTAMP,
    LogColumns.REQUEST_ID,
    LogColumns.ITEM_ID,
    Derived.WATCH_MS,
    Derived.DURATION_MS,
    LogColumns.DISLIKE,
    Derived.VALUE,
    LogColumns.PROPENSITY,
    LogColumns.IS_RANDOM,
)

EVENT_SCHEMA: Final = pa.schema(
    [
        (Derived.USER_INDEX, pa.int32()),
        (Derived.ITEM_INDEX, pa.int32()),
        (LogColumns.TIMESTAMP, pa.int64()),
        (Derived.LABEL, pa.float32()),
        (LogColumns.DISLIKE, pa.bool_()),
        (Derived.FEEDBACK, pa.int8()),
        (LogColumns.WATCH_TIME, pa.float32()),
        (LogColumns.DURATION, pa.float32()),
        (LogColumns.PROPENSITY, pa.float32()),
        (LogColumns.IS_RANDOM, pa.bool_()),
        (Derived.REQUEST, pa.int64()),
        (Derived.IS_TARGET, pa.bool_()),
    ]
)

QUANTILE_SCHEMA: Final = pa.schema(
    [("bucket", pa.int32()), (Derived.WATCH_MS, pa.int64()), ("count", pa.int64()), ("quantile", pa.float64())]
)


#: Layout of the items that the users of a held-out shard had before the period; pairs are distinct.
PAST_SCHEMA: Final = pa.schema([(Derived.USER_INDEX, pa.int32()), (Derived.ITEM_INDEX, pa.int32())])


def item_schema(types: Mapping[str, pa.DataType], times: Iterable[str]) -> pa.Schema:
    """Layout of ``items.parquet``, with the type of the external ids in the log and those ``times`` of availability."""
    return pa.schema(
        [
            (Derived.ITEM_INDEX, pa.int32()),
            (LogColumns.ITEM_ID, types[LogColumns.ITEM_ID]),
            ("train_count", pa.int64()),
            ("train_positives", pa.int64()),
            (LogColumns.DURATION, pa.float32()),
            *((name, pa.int64()) for name in times),
        ]
    )


#: Column of ``items.parquet`` that exists once an item was retired; a retired item is no longer a candidate.
RETIRED: Final = "retired"
ALWAYS: Final = -(2**63)
NEVER: Final = 2**63 - 1
#: Columns of the times at which an item may be listed, and the value without a limit.
AVAILABILITY: Final = {Derived.AVAILABLE_FROM: ALWAYS, Derived.AVAILABLE_UNTIL: NEVER}


def user_schema(types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Layout of ``users.parquet``, with the type of the external ids in the log; ``train_count`` counts events."""
    user_id = (LogColumns.USER_ID, types[LogColumns.USER_ID])
    return pa.schema([(Derived.USER_INDEX, pa.int32()), user_id, ("train_count", pa.int64())])


def held_out_schema(
    types: Mapping[str, pa.DataType], has_behaviors: bool, context: Mapping[str, pa.DataType]
) -> pa.Schema:
    """Layout of ``held_out.parquet``: the standard events of the held-out periods, which an extension reads again.

    Events of items and users outside the catalog are included, because they may enter it later. ``label`` and
    ``request`` are known if ``is_placed``, that is, for events that are in the shards.

    Args:
        types: types of the ids in the log, which may lack those of requests.
        has_behaviors: there is a column of bit sets.
        context: columns of request features and the types of their plain values.
    """
    return pa.schema(
        [
            (LogColumns.USER_ID, types[LogColumns.USER_ID]),
            (LogColumns.ITEM_ID, types[LogColumns.ITEM_ID]),
            (LogColumns.TIMESTAMP, pa.int64()),
            (Derived.WATCH_MS, pa.int64()),
            (Derived.DURATION_MS, pa.int64()),
            (LogColumns.DISLIKE, pa.bool_()),
            (Derived.VALUE, pa.float64()),
            (LogColumns.PROPENSITY, pa.float64()),
            (LogColumns.IS_RANDOM, pa.bool_()),
            (LogColumns.REQUEST_ID, types.get(LogColumns.REQUEST_ID, pa.int64())),
            (Derived.LABEL, pa.float64()),
            (Derived.REQUEST, pa.int64()),
            (Derived.IS_PLACED, pa.bool_()),
            *[(Derived.BEHAVIORS, pa.int32())] * has_behaviors,
            *context.items(),
        ]
    )


def history_schema(
    types: Mapping[str, pa.DataType], behaviors: Iterable[str], context: Mapping[str, pa.DataType]
) -> pa.Schema:
    """Layout of ``histories.parquet``: raw events with external ids, for ``recpo recommend``; null = unknown.

    Args:
        types: types of the ids in the log.
        behaviors: names of behaviors, one flag each.
        context: names of request features and the types of their values.
    """
    return pa.schema(
        [
            (LogColumns.USER_ID, types[LogColumns.USER_ID]),
            (LogColumns.ITEM_ID, types[LogColumns.ITEM_ID]),
            (LogColumns.TIMESTAMP, pa.int64()),
            (LogColumns.WATCH_TIME, pa.float64()),
            (LogColumns.DURATION, pa.float64()),
            (LogColumns.DISLIKE, pa.bool_()),
            (Derived.LABEL, pa.float32()),
            *((name, pa.bool_()) for name in behaviors),
            *context.items(),
        ]
    )


#: In ``FlagColumn.equals``: every value means true, and a missing one false, as in a column ``clicked_at`` of times.
ANY: Final = "*"


@dataclass(frozen=True)
class FlagColumn:
    """A flag that is read from a column of values: true where the value is one of ``equals``, null where it is missing.

    For a column ``thumb`` with "up", "down" and null, a dislike is ``FlagColumn("thumb", "down")``; in YAML,
    ``dislike: {column: thumb, equals: down}``. Texts are compared without the spaces around them. A label may have
    grades instead: ``label: {column: event, equals: {cart: 0.5, purchase: 1}}`` is 0 for other values.

    Args:
        column: column of the log; strings, numbers or booleans.
        equals: the value, or values, that mean true; of a label also values with their grades in (0, 1]. ``"*"`` = any
            value, and no value means false: the time at which something happened, if it did.
    """

    column: str
    equals: str | int | bool | tuple[str | int | bool, ...] | dict[str, float] | dict[int, float]

    def __post_init__(self) -> None:
        if not self.values or "" in self.values or not all(0.0 < grade <= 1.0 for grade in self.grades.values()):
            raise RecpoError(
                f"column {self.column}: equals is {self.equals!r}, expected the values that mean true, or values with "
                "their grades in (0, 1]",
                code="bad_value",
                field=self.column,
            )

    @property
    def values(self) -> tuple[str, ...]:
        """The values of ``equals`` as texts; "true" and "false" for booleans."""
        given = self.equals if isinstance(self.equals, tuple | list | dict) else (self.equals,)
        return tuple(str(value).lower() if isinstance(value, bool) else str(value).strip() for value in given)

    @property
    def grades(self) -> dict[str, float]:
        """Value -> grade; empty for a flag, which is true for all of its values."""
        grades = self.equals.values() if isinstance(self.equals, dict) else ()
        return dict(zip(self.values, map(float, grades), strict=False))

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values that are numbers, which are compared with columns of numbers."""
        return tuple(float(value) for value in self.values if _NUMBER.fullmatch(value))

    def to_json(self) -> dict[str, Any]:
        """For the manifest; ``read_column`` reads it."""
        return {"column": self.column, "equals": self.grades or list(self.values)}


def validate_flag(option: str, column: str | FlagColumn | None) -> None:
    """Raises ``RecpoError`` if values have grades where they mean true or false.

    Args:
        option: the option that names the column, for the message.
        column: the column.
    """
    if isinstance(column, FlagColumn) and column.grades:
        raise RecpoError(
            f"{option}: equals has grades, but a flag is true or false: list the values that mean true",
            code="bad_value",
            field=option,
        )


def name_of(column: str | FlagColumn) -> str:
    """Name in the log of a column, which may be a flag that is read from values."""
    return column if isinstance(column, str) else column.column


def columns_to_json(columns: Mapping[str, str | FlagColumn]) -> dict[str, Any]:
    """Names and flags, for the manifest; ``read_column`` reads each of them."""
    return {name: one.to_json() if isinstance(one, FlagColumn) else one for name, one in columns.items()}


def read_column(entry: str | Mapping[str, Any]) -> str | FlagColumn:
    """The column of an entry of the manifest: a name, or the content of a flag."""
    if isinstance(entry, str):
        return entry
    equals = entry["equals"]
    return FlagColumn(entry["column"], tuple(equals) if isinstance(equals, list) else equals)


@dataclass(frozen=True)
class Columns:
    """The log's names and units of the standard columns.

    A column named here must exist in the log. A column that is left out keeps its name in the preset, and is used if
    the log has it.

    Args:
        user_id: column of the user, integer or string.
        item_id: column of the item, integer or string.
        timestamp: column of the time of the event: number, time, or string that parses.
        watch_time: column of the watch time.
        duration: column of the item's duration.
        dislike: column of an explicit negative signal, bool or 0/1; or ``{column: thumb, equals: down}``, for a column
            of values of which some mean a dislike.
        label: column of a number that the label method reads (a rating, a binary signal); or ``{column: thumb, equals:
            up}``, which is 1 for these values and 0 for others; or values with their grades, ``{column: event, equals:
            {cart: 0.5, purchase: 1}}``.
        propensity: column of the logging policy's probability of the item, in (0, 1].
        is_random: column that is true for uniformly random exposures, bool or 0/1; or ``{column: ..., equals: ...}``.
        request_id: column that is shared by the events of one request.
        time_unit: unit of a numeric ``timestamp``, since 1970-01-01 UTC; of dates that are not written as in ISO 8601,
            their order: "day_first" (31.01.2026 18:30, 31-Jan-2026), "month_first" (1/31/2026 6:30 PM, Sat Jan 31
            18:30:00 +0000 2026) or "year_first" (20260131, 2026-01-31 06:30 PM); "order" = a position without a clock;
            "none" = the log has no times, or they are not read: the events of each user are put into a random order.
        watch_time_unit: unit of ``watch_time``.
        duration_unit: unit of ``duration``.
    """

    user_id: str | None = None
    item_id: str | None = None
    timestamp: str | None = None
    watch_time: str | None = None
    duration: str | None = None
    dislike: FlagColumn | str | None = None
    label: FlagColumn | str | None = None
    propensity: str | None = None
    is_random: FlagColumn | str | None = None
    request_id: str | None = None
    time_unit: TimeUnit | None = None
    watch_time_unit: DurationUnit | None = None
    duration_unit: DurationUnit | None = None

    def __post_init__(self) -> None:
        for role, column in self.sources().items():
            if not isinstance(column, str | FlagColumn):  # as in frames whose columns have numbers
                raise RecpoError(
                    f"columns.{role} {column!r}: expected the name of a column: give the columns of the frame names",
                    code="wrong_type",
                    field=f"columns.{role}",
                )
        for role in LogColumns.FLAGS:
            validate_flag(f"columns.{role}", getattr(self, role))

    def over(self, preset: Self) -> Self:
        """This mapping, completed by ``preset``."""
        return replace(preset, **{name: value for name, value in vars(self).items() if value is not None})

    def sources(self) -> dict[str, str | FlagColumn]:
        """Standard name -> name in the log, or flag that is read from values, for every column of this mapping."""
        given = {column: getattr(self, column) for column in (*self.required, *LogColumns.OPTIONAL)}
        return {column: source for column, source in given.items() if source is not None}

    def named(self) -> dict[str, str]:
        """Standard name -> name in the log, for every column of this mapping."""
        return {column: name_of(source) for column, source in self.sources().items()}

    @property
    def has_clock(self) -> bool:
        """Whether timestamps are times, not positions."""
        return self.time_unit not in POSITIONS

    @property
    def required(self) -> tuple[str, ...]:
        """The standard columns that the log must have."""
        return tuple(one for one in LogColumns.REQUIRED if one != LogColumns.TIMESTAMP or self.time_unit != "none")

    def to_json(self) -> dict[str, Any]:
        """Names and units, for the manifest."""
        return columns_to_json(vars(self))


PresetName = Literal["plain", "kuairand", "movielens", "recbole"]

#: Columns of well-known logs; ``plain`` is the standard names themselves.
PRESETS: Final[dict[str, Columns]] = {
    "plain": Columns(
        **{column: column for column in LogColumns.ALL},
        time_unit="ms",
        watch_time_unit="s",
        duration_unit="s",
    ),
    # KuaiRand (Gao et al., CIKM 2022, arXiv 2208.08696): log_standard_*.csv, log_random_*.csv; kuairand.com
    "kuairand": Columns(
        user_id="user_id",
        item_id="video_id",
        timestamp="time_ms",
        watch_time="play_time_ms",
        duration="duration_ms",
        dislike="is_hate",
        label="long_view",
        is_random="is_rand",
        time_unit="ms",
        watch_time_unit="ms",
        duration_unit="ms",
    ),
    # MovieLens (Harper and Konstan, 2015): ratings.csv of ml-latest, ml-25m, ml-32m; grouplens.org/datasets/movielens
    "movielens": Columns(
        user_id="userId",
        item_id="movieId",
        timestamp="timestamp",
        label="rating",
        time_unit="s",
        watch_time_unit="s",
        duration_unit="s",
    ),
    # atomic files of RecBole (Zhao et al., CIKM 2021, arXiv 2011.01731): <dataset>.inter, each name with its type
    "recbole": Columns(
        user_id="user_id:token",
        item_id="item_id:token",
        timestamp="timestamp:float",
        label="rating:float",
        time_unit="s",
        watch_time_unit="s",
        duration_unit="s",
    ),
}


_FILES: Final = 3  # names of files with the same fault that are shown
#: offending rows that a fault shows
EXAMPLES: Final = 3


@dataclass(frozen=True)
class Example:
    """One offending row: its file, its number in that file (data rows, from 0), and the value."""

    file: str
    row: int
    value: Any


@dataclass(frozen=True)
class Fault:
    """One reason why a log cannot be prepared.

    Attributes:
        where: the file, or the log if a fault spans files.
        column: name of the column in the log; None if the fault concerns a whole file.
        problem: what was found.
        fix: how to fix it.
        count: number of offending rows; None if the fault does not concern rows.
        examples: the first offending rows.
        code: what kind of fault it is, for programs and tests.
    """

    where: str
    column: str | None
    problem: str
    fix: str
    count: int | None = None
    examples: Sequence[Example] = ()
    code: Code = "bad_value"

    def __str__(self) -> str:
        place = self.where if self.column is None else f"{self.where}, column {self.column}"
        number = "" if self.count is None else f"{self.count:,} {'row' if self.count == 1 else 'rows'}: "
        return f"{place}: {number}{self.problem}{self._first_rows()}; {self.fix}"

    def _first_rows(self) -> str:
        if not self.examples:
            return ""
        several = len({example.file for example in self.examples}) > 1
        rows = (
            f"{example.file + ' ' if several else ''}row {example.row} ({_shown(example.value)})"
            for example in self.examples
        )
        return f" [first: {', '.join(rows)}]"


def validate_no_faults(faults: Sequence[Fault], warnings: Sequence[str] = ()) -> None:
    """Raises one error that lists all ``faults``; does nothing if there are none.

    Args:
        faults: what is wrong.
        warnings: about the same files; they may explain a fault.

    Raises:
        RecpoError: there is at least one fault.
    """
    if not faults:
        return
    faults = _merged(faults)
    lines = [f"  {number}. {fault}" for number, fault in enumerate(faults, start=1)]
    noun = "fault" if len(faults) == 1 else "faults"
    raise RecpoError(
        "\n".join(
            [
                f"the log cannot be prepared: {len(faults)} {noun} (rows count from 0), nothing written",
                *lines,
                *(f"  warning: {text}" for text in warnings),
            ]
        ),
        code=faults[0].code,
        field=(faults[0].column or faults[0].where) if len(faults) == 1 else None,
    )


def _merged(faults: Sequence[Fault]) -> list[Fault]:
    """The faults, with one for the same problem of the same column in several files."""
    alike: dict[tuple[str | None, str, str], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((fault.column, fault.problem, fault.fix), []).append(fault)
    return [found[0] if len(found) == 1 else _together(found) for found in alike.values()]


def _together(faults: Sequence[Fault]) -> Fault:
    files = list(dict.fromkeys(fault.where for fault in faults))
    more = f" and {len(files) - _FILES} more files" if len(files) > _FILES else ""
    count = None if faults[0].count is None else sum(fault.count or 0 for fault in faults)
    examples = [example for fault in faults for example in fault.examples][:EXAMPLES]
    return replace(faults[0], where=", ".join(files[:_FILES]) + more, count=count, examples=examples)


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def preset_of(names: Collection[str]) -> PresetName:
    """The preset whose column names the log has: all required ones, and all that differ from plain names."""
    found: list[PresetName] = []
    presets: tuple[PresetName, ...] = ("kuairand", "movielens", "recbole")
    for name in presets:
        mapping = PRESETS[name].named()
        required = all(mapping[role] in names for role in LogColumns.REQUIRED)
        optional = [column for role, column in mapping.items() if role in LogColumns.OPTIONAL]
        if required and (name == "recbole" or any(column in names for column in optional)):
            found.append(name)
    return found[0] if len(found) == 1 else "plain"

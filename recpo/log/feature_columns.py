"""The columns of a log and of its tables that are features and behaviors, and the presets of well-known logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from recpo.base.errors import RecpoError, validate_range
from recpo.base.features import SIDES, Categories, Category, Feature, FeatureSchema, Number, Side
from recpo.log import schema

TableSide = Literal["item", "user"]
#: Prefix of event columns for behaviors and request features while a log is prepared.
BEHAVIOR, CONTEXT = "behavior_", "context_"
#: Prefix, in an extension, of the encoded request features of events that were prepared before.
ENCODED: Final = "encoded_"
#: Prefix of table columns for features while a file is read.
FEATURE: Final = "feature_"
#: Options that name columns of the item table beside its features.
ITEM_FACTS: Final = (*schema.AVAILABILITY, schema.LogColumns.DURATION)
_MOST_BEHAVIORS: Final = 31  # bits of an int32
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TAKEN: Final = frozenset({*schema.LogColumns.ALL, schema.Derived.FEEDBACK, "behaviors", "exclude", "k"})


@dataclass(frozen=True)
class FeatureColumns:
    """Features of items, users and requests, and the columns that they are read from.

    Args:
        item: features in the item table; null = the preset's, or all columns of the table, with kinds that follow from
            their types.
        user: features in the user table; null = the preset's, or all columns of the table, with kinds that follow from
            their types.
        context: features in the log, ``Category`` or ``Number``: the surface, the hour, or the device of the request
            that showed an event; null = the preset's, or none.
        item_id: column of the item id in the item table; null = as in the log.
        user_id: column of the user id in the user table; null = as in the log.
        available_from: column of the item table with the time from which an item may be recommended. It is not a
            feature. null = the preset's, or none.
        available_until: column of the item table with the first time at which an item may no longer be recommended,
            such as the end of an offer. It is not a feature. null = none.
        available_unit: unit of numeric ``available_from`` and ``available_until``.
        duration: column of the item table with the duration of the item, for events without one in the log. null =
            none.
        duration_unit: unit of ``duration``.
    """

    item: tuple[Feature, ...] | None = None
    user: tuple[Feature, ...] | None = None
    context: tuple[Feature, ...] | None = None
    item_id: str | None = None
    user_id: str | None = None
    available_from: str | None = None
    available_until: str | None = None
    available_unit: schema.TimeUnit = "ms"
    duration: str | None = None
    duration_unit: schema.DurationUnit = "s"

    def __post_init__(self) -> None:
        for side in SIDES:
            for feature in self.of(side) or ():
                _validate(feature, side)
        FeatureSchema(*(self.of(side) or () for side in SIDES))

    def of(self, side: Side) -> tuple[Feature, ...] | None:
        """The features of one side; None = not given."""
        found: tuple[Feature, ...] | None = getattr(self, side)
        return found

    def over(self, preset: FeatureColumns) -> FeatureColumns:
        """These columns, completed by ``preset``."""
        said: dict[str, Any] = {side: self.of(side) for side in SIDES if self.of(side) is not None}
        named = ("item_id", "user_id", *ITEM_FACTS)
        said |= {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        return replace(preset, **said, available_unit=self.available_unit, duration_unit=self.duration_unit)

    def to_json(self) -> dict[str, Any]:
        """The columns as they were given, for the manifest."""
        given = {side: features for side in SIDES if (features := self.of(side)) is not None}
        return asdict(self) | {side: [feature.to_json() for feature in features] for side, features in given.items()}


def _validate(feature: Feature, side: Side) -> None:
    where = f"features.{side}: {feature.name!r}"
    if not _NAME.fullmatch(feature.name):
        raise RecpoError(
            f"{where}: a name has letters, digits, and . _ - between them; set `column` for the column",
            code="bad_value",
            field=f"features.{side}",
        )
    given = [name for name in feature.fitted if name != "width" and getattr(feature, name) is not None]
    if given:
        raise RecpoError(
            f"{where}: {', '.join(given)} is fitted by prepare: leave it out",
            code="unused_option",
            field=f"features.{side}",
        )
    if side == "context" and not isinstance(feature, Category | Number):
        raise RecpoError(
            f"{where}: a feature of a request is a Category or a Number, not {type(feature).__name__}",
            code="wrong_class",
            field=f"features.{side}",
        )
    if side == "context" and feature.name in _TAKEN:
        raise RecpoError(
            f"{where}: the column {feature.name} of an event has a meaning already; choose another name",
            code="duplicate",
            field=f"features.{side}",
        )


def _validate_behaviors(behaviors: Mapping[str, str | schema.FlagColumn], context: tuple[Feature, ...]) -> None:
    number, rule = len(behaviors), f"are at most {_MOST_BEHAVIORS}"
    validate_range(number <= _MOST_BEHAVIORS, "behaviors", rule, f"{number} of them")
    taken = _TAKEN | {feature.name for feature in context}
    for name, column in behaviors.items():
        schema.validate_flag(f"behaviors.{name}", column)
        if not _NAME.fullmatch(name) or name in taken:
            raise RecpoError(
                f"behaviors: {name!r} is not a valid name: use letters, digits, and . _ - between them, not a name of "
                "another column of events (a dislike is columns.dislike)",
                code="bad_value",
                field="behaviors",
            )


def or_map_values(column: str, name: str) -> str:
    """The remedy for texts in a column that is wanted as a flag, for messages; empty for all other columns.

    Args:
        column: its name while the log is prepared.
        name: its name in the log.
    """
    flag = f"{{column: {name}, equals: VALUE}}"
    if column in schema.LogColumns.FLAGS_OR_LABEL:
        return f", or say which values mean true: columns.{column}: {flag}"
    if column.startswith(BEHAVIOR):
        return f", or say which values mean true: behaviors: {{{column.removeprefix(BEHAVIOR)}: {flag}}}"
    return ""


def _categories(*names: str) -> tuple[Feature, ...]:
    return tuple(Category(name) for name in names)


_KUAIRAND: Final = FeatureColumns(
    item=(
        *_categories("author_id", "video_type", "upload_type", "music_id", "music_type"),
        Categories("tag", separator=",", length=8),
        Number("video_duration", log=True),
        Number("server_width"),
        Number("server_height"),
    ),
    user=(
        *_categories("user_active_degree", "is_lowactive_period", "is_live_streamer", "is_video_author"),
        *(Number(name, log=True) for name in ("follow_user_num", "fans_user_num", "friend_user_num", "register_days")),
        *_categories("follow_user_num_range", "fans_user_num_range", "friend_user_num_range", "register_days_range"),
        *_categories(*(f"onehot_feat{number}" for number in range(18))),
    ),
    context=(Category("tab"), Category("hour", column="hourmin")),
    available_from="upload_dt",
)
#: Features of well-known logs that have any. A column that a table or log lacks is left out.
PRESET_FEATURES: Final[dict[schema.PresetName, FeatureColumns]] = {
    # video_features_basic_*.csv, user_features_*.csv; hourmin is the hour times 100
    "kuairand": _KUAIRAND,
    # movies.csv
    "movielens": FeatureColumns(item=(Categories("genres", separator="|"),)),
}

#: Behaviors of well-known logs that have any: name -> column. A column that a log lacks is left out.
PRESET_BEHAVIORS: Final[dict[schema.PresetName, dict[str, str]]] = {
    "kuairand": {
        "click": "is_click",
        "like": "is_like",
        "follow": "is_follow",
        "comment": "is_comment",
        "share": "is_forward",
        "profile": "is_profile_enter",
    },
}


@dataclass(frozen=True)
class EventColumns:
    """Non-standard columns of the log: behaviors and request features.

    Attributes:
        behaviors: name -> column, or flag that is read from values; behavior b is bit b.
        context: request features.
        chosen: standard names of the columns that the user named; these must exist.

    Raises:
        RecpoError: the name of a behavior is not allowed.
    """

    behaviors: Mapping[str, str | schema.FlagColumn] = field(default_factory=dict)
    context: tuple[Feature, ...] = ()
    chosen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _validate_behaviors(self.behaviors, self.context)

    def sources(self) -> dict[str, str | schema.FlagColumn]:
        """Name while the log is prepared -> name in the log, or flag that is read from values."""
        behaviors = {BEHAVIOR + name: column for name, column in self.behaviors.items()}
        return behaviors | {CONTEXT + feature.name: feature.source for feature in self.context}

    def among(self, columns: Mapping[str, str]) -> EventColumns:
        """The columns that a log has, by the names of ``sources``."""
        behaviors = {name: column for name, column in self.behaviors.items() if BEHAVIOR + name in columns}
        context = tuple(feature for feature in self.context if CONTEXT + feature.name in columns)
        return replace(self, behaviors=behaviors, context=context)

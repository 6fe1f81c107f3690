"""The options of a prepared directory, which its extensions keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from recpo.artifacts import named_class
from recpo.base.errors import RecpoError
from recpo.base.features import Feature, Side
from recpo.base.feedback import FeedbackRule
from recpo.log import shaping, splits
from recpo.log.feature_columns import (
    PRESET_BEHAVIORS,
    PRESET_FEATURES,
    EventColumns,
    FeatureColumns,
    behaviors_to_json,
    event_columns,
)
from recpo.log.feature_tables import AVAILABLE, ID
from recpo.log.prepare import Preparation, describe
from recpo.log.prepared import Prepared
from recpo.log.schema import Columns, FlagColumn, read_column
from recpo.log.splits import TemporalSplit

_NO_PLAIN_OPTIONS: Final = ("columns", "preset", "strict", "features", "behaviors", "csv")


@dataclass(frozen=True)
class KeptPreparation(Preparation):
    """The options of a prepared directory, with exactly its columns, features and behaviors."""

    @property
    def mapping(self) -> Columns:
        """No preset adds a column."""
        return self.columns

    @property
    def more(self) -> EventColumns:
        """No preset adds a behavior or a feature of requests."""
        return event_columns("plain", self.features, self.behaviors or {})

    @property
    def table_columns(self) -> FeatureColumns:
        """No preset adds a feature."""
        return self.features


def kept_preparation(data: Prepared, asked: Preparation) -> KeptPreparation:
    """The options that ``data`` was prepared with, which its extensions keep.

    Args:
        data: the directory to extend.
        asked: the options that the caller passed; an option with its default value is ignored.

    Raises:
        RecpoError: an option has another value, or cannot be extended.
    """
    config = data.manifest["config"]
    others = _others(asked, config)
    if others:
        raise RecpoError(
            f"{data.root} was prepared with other options: {', '.join(others)} differ. An extension keeps those of the "
            "directory that it extends: leave them out, or prepare the whole log again"
        )
    found = {column: name for column, name in data.manifest["columns"].items() if name is not None}
    found = {column: read_column(config["columns"][column] or name) for column, name in found.items()}
    units = {name: config["columns"][name] for name in ("time_unit", "watch_time_unit", "duration_unit")}
    plain = ("preset", "max_context", "rows_per_shard", "min_user_events", "min_item_events", "catalog")
    kept = KeptPreparation(
        columns=Columns(**found, **units),
        split=_made(config["split"], splits, asked.split),
        label=_made(config["label"], shaping, asked.label),
        feedback=FeedbackRule(**config["feedback"]),
        max_watch_time=config["max_watch_time"],
        strict=asked.strict,
        csv=asked.csv,
        features=_kept_features(data),
        behaviors=_kept_behaviors(data),
        **{name: config[name] for name in plain},
    )
    _validate_split(kept, data)
    return kept


def _others(asked: Preparation, config: Mapping[str, Any]) -> list[str]:
    """Names of the options that the caller set to other values than those of ``config``."""
    default = Preparation()
    names = [field.name for field in fields(Preparation) if field.name not in _NO_PLAIN_OPTIONS]
    changed = [name for name in names if getattr(asked, name) != getattr(default, name)]
    others = [name for name in changed if _plain(getattr(asked, name)) != config[name]]
    if asked.features != default.features and asked.features.to_json() != config["features"]:
        others.append("features")
    behaviors = None if asked.behaviors is None else behaviors_to_json(asked.behaviors)
    if behaviors is not None and behaviors != config["behaviors"]:
        others.append("behaviors")
    columns = (asked.preset, asked.columns)
    if columns != (default.preset, default.columns) and asked.mapping.to_json() != config["columns"]:
        others.append("columns")
    return others


def _kept_features(data: Prepared) -> FeatureColumns:
    """The features of ``data``, with the columns that they were read from."""
    schema, tables, config = data.feature_schema, data.manifest.get("feature_tables", {}), data.manifest["config"]
    given, preset = config["features"], PRESET_FEATURES[config["preset"]]
    says = given if given["available_from"] is not None else asdict(preset)
    columns = {side: tables[side]["columns"] if side in tables else {} for side in ("item", "user")}
    sides: dict[str, Any] = {side: _declared(schema.of(side)) for side in columns}  # type: ignore[arg-type]
    return FeatureColumns(
        **sides,
        context=_declared(schema.context),
        item_id=columns["item"].get(ID),
        user_id=columns["user"].get(ID),
        available_from=columns["item"].get(AVAILABLE),
        available_from_unit=says["available_from_unit"],
    )


def _declared(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
    """Fitted features as they were declared, vectors with their widths."""
    return tuple(
        replace(one, **{name: None for name in one.fitted if name != "width"})  # type: ignore[type-var]
        for one in features
    )


def _kept_behaviors(data: Prepared) -> dict[str, str | FlagColumn]:
    """The behaviors of ``data``, in the order of their bits."""
    config = data.manifest["config"]
    columns = PRESET_BEHAVIORS[config["preset"]] if config["behaviors"] is None else config["behaviors"]
    return {name: read_column(columns[name]) for name in data.behaviors}


def validate_sources(data: Prepared, given: Mapping[Side, bool]) -> None:
    """Raises ``RecpoError`` if an item or user table is given that ``data`` lacks, or the other way round.

    Args:
        data: the directory to extend.
        given: for "item" and "user", whether a new table is given.
    """
    tables = data.manifest.get("feature_tables", {})
    for side, is_given in given.items():
        if is_given and side not in tables:
            raise RecpoError(
                f"--{side}s: {data.root} was prepared without a table of {side}s, and an extension fits no features: "
                "leave it out, or prepare the whole log again with it"
            )
        if side in tables and not is_given:
            raise RecpoError(
                f"{data.root} was prepared with a table of {side}s: pass --{side}s FILE; rows of new and changed "
                f"{side}s are enough, the others keep what they had"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, FeedbackRule):
        return asdict(value)
    return value if isinstance(value, str | int | float | bool) else describe(value)


def _made(entry: Mapping[str, Any], module: Any, asked: Any) -> Any:
    """A label or a split as the manifest describes it: a class of recpo, or the object that the caller passed."""
    if describe(asked) == entry:
        return asked
    try:
        own = named_class(entry["class_path"], object, [module.__name__])
    except (ValueError, ImportError) as error:
        raise RecpoError(f"extends: {entry['class_path']} is none of recpo's own: give it with its options") from error
    return own(**entry["init_args"])


def _validate_split(kept: Preparation, data: Prepared) -> None:
    split = kept.split
    if not isinstance(split, TemporalSplit) or split.valid_start is not None or split.test_start is not None:
        raise RecpoError(
            f"{data.root} was prepared with {split}: only the periods of TemporalSplit with valid_days and test_days "
            "roll forward; prepare the whole log again, with such a split"
        )

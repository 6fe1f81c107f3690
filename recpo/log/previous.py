"""What an extension takes from the previous directory: its options, held-out shards, histories, pairs and tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.artifacts.documents import named_class
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import stored_type
from recpo.base.features import Feature
from recpo.base.feedback import FeedbackRule
from recpo.log import feature_columns, shaping, splits
from recpo.log.engine import Engine
from recpo.log.events import appended, behavior_bits, more_columns
from recpo.log.feature_columns import BEHAVIOR, CONTEXT, ENCODED, FeatureColumns, TableSide
from recpo.log.feature_tables import ID
from recpo.log.prepare import Preparation, describe
from recpo.log.prepared import FEATURE_FILES, HELD_OUT, HISTORIES, ITEMS, QUANTILES, TRAIN_PAST, USERS, Prepared
from recpo.log.schema import PERIODS, Columns, Derived, FlagColumn, LogColumns, read_column
from recpo.log.splits import TemporalSplit

#: options that an extension may have of its own; preset is a part of columns
_OWN_OPTIONS: Final = ("preset", "strict", "csv", "skip_incomplete", "begin", "end")


@dataclass(frozen=True)
class KeptPreparation(Preparation):
    """The options of a prepared directory, with exactly its columns; its features and behaviors are spelled out."""

    @property
    def mapping(self) -> Columns:
        """No preset adds a column."""
        return self.columns


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
            "directory that it extends: leave them out, or prepare the whole log again",
            code="mismatch",
            field=others[0],
        )
    plain: dict[str, Any] = {name: one for name, one in config.items() if isinstance(one, str | int | float)}
    found = {column: name for column, name in data.manifest["columns"].items() if name is not None}
    found = {column: read_column(config["columns"][column] or name) for column, name in found.items()}
    units = {name: config["columns"][name] for name in ("time_unit", "watch_time_unit", "duration_unit")}
    kept = KeptPreparation(
        columns=Columns(**found, **units),
        split=_made(config["split"], splits, asked.split),
        label=_made(config["label"], shaping, asked.label),
        feedback=FeedbackRule(**config["feedback"]),
        strict=asked.strict,
        skip_incomplete=asked.skip_incomplete or config["skip_incomplete"],
        begin=asked.begin,
        end=asked.end,
        csv=asked.csv,
        features=_kept_features(data),
        behaviors=_kept_behaviors(data),
        **{name: value for name, value in plain.items() if name not in _OWN_OPTIONS},
    )
    split = kept.split
    if not isinstance(split, TemporalSplit) or split.valid_start is not None or split.test_start is not None:
        raise RecpoError(
            f"{data.root} was prepared with {split}: only the periods of TemporalSplit with valid_days and test_days "
            "roll forward; prepare the whole log again, with such a split",
            code="unsupported",
            field="split",
        )
    if not kept.label.keeps_fitted:
        raise RecpoError(
            f"label {type(kept.label).__name__}: what it fits is not kept, so that a directory with it cannot be "
            "extended; prepare the whole log again, or take another --label",
            code="unsupported",
            field="label",
        )
    return kept


def _others(asked: Preparation, config: Mapping[str, Any]) -> list[str]:
    """Names of the options that the caller set to other values than those of ``config``."""
    default, said = Preparation(), asked.describe()
    changed = [name for name in said if getattr(asked, name) != getattr(default, name)]
    changed += ["columns"] * (asked.preset != default.preset and "columns" not in changed)
    return [name for name in changed if name not in _OWN_OPTIONS and said[name] != config[name]]


def _kept_features(data: Prepared) -> FeatureColumns:
    """The features of ``data``, with the columns that they were read from."""
    schema, tables = data.feature_schema, data.manifest.get("feature_tables", {})
    given = data.manifest["config"]["features"]
    columns = {side: tables[side]["columns"] if side in tables else {} for side in ("item", "user")}
    sides: dict[str, Any] = {side: _declared(schema.of(side)) for side in columns}  # type: ignore[arg-type]
    return FeatureColumns(
        **sides,
        context=_declared(schema.context),
        item_id=columns["item"].get(ID),
        user_id=columns["user"].get(ID),
        **(tables["item"]["facts"] if "item" in tables else {}),
        **{name: given[name] for name in ("available_unit", "duration_unit")},
    )


def _declared(features: tuple[Feature, ...]) -> tuple[Feature, ...]:
    """Fitted features as they were declared, vectors with their widths."""
    return tuple(
        replace(one, **{name: None for name in one.fitted if name != "width"})  # type: ignore[arg-type]
        for one in features
    )


def _kept_behaviors(data: Prepared) -> dict[str, str | FlagColumn]:
    """The behaviors of ``data``, in the order of their bits."""
    config = data.manifest["config"]
    known = feature_columns.PRESET_BEHAVIORS.get(config["preset"], {})
    columns = known if config["behaviors"] is None else config["behaviors"]
    return {name: read_column(columns[name]) for name in data.behaviors}


def validate_sources(data: Prepared, given: Mapping[TableSide, bool]) -> None:
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
                "leave it out, or prepare the whole log again with it",
                code="unused_option",
                field=f"{side}s",
            )
        if side in tables and not is_given:
            raise RecpoError(
                f"{data.root} was prepared with a table of {side}s: pass --{side}s FILE; rows of new and changed "
                f"{side}s are enough, the others keep what they had",
                code="missing_option",
                field=f"{side}s",
            )


def _made(entry: Mapping[str, Any], module: Any, asked: Any) -> Any:
    """A label or a split as the manifest describes it: a class of recpo, or the object that the caller passed."""
    if describe(asked) == entry:
        return asked
    try:
        own = named_class(entry["class_path"], object, [module.__name__])
    except (ValueError, ImportError) as error:
        raise RecpoError(
            f"extends: {entry['class_path']} is none of recpo's own: give it with its options",
            code="wrong_class",
            field="extends",
        ) from error
    return own(**entry["init_args"])


EARLIER: Final = -1  # period of context events, which are already in a train shard
#: Further columns of current events: number of earlier train events of the user, and the values that a prepared event
#: already has.
BEFORE, KEPT_LABEL, IS_KEPT = "before", "kept_label", "is_kept"
_PLACE: Final = "place"


class PreviousData:
    """The previous prepared directory, as tables of an engine.

    Args:
        data: the directory.
        root: its path.
        engine: reads its files.

    Attributes:
        start_ms: start of its held-out periods.
        bytes_read: number of bytes read from it.
    """

    def __init__(self, data: Prepared, root: Path, engine: Engine) -> None:
        self.data, self.root, self._engine = data, root, engine
        self.start_ms: int = data.manifest["boundaries"]["valid_start_ms"]
        self._context = data.feature_schema.context
        self.bytes_read = 0

    def verify(self) -> None:
        """Verifies the checksum of every file that is read completely, and counts its bytes."""
        listed = [shard["file"] for period in PERIODS[1:] for shard in self.data.manifest["shards"][period]]
        listed += [HELD_OUT, ITEMS, USERS, HISTORIES, QUANTILES, *self.vocabularies()]
        listed += [name for name in FEATURE_FILES.values() if name in self.data.manifest["files"]]
        self.data.verify(listed)
        self.bytes_read = sum((self.root / name).stat().st_size for name in listed)

    def vocabularies(self) -> list[str]:
        """The vocabulary files."""
        return sorted(name for name in self.data.manifest["files"] if name.startswith("vocabularies/"))

    def train_past(self) -> list[str]:
        """The files with the pairs of users and items of the train period."""
        return sorted(name for name in self.data.manifest["files"] if name.startswith(f"{TRAIN_PAST}/"))

    def table(self, file: str) -> ir.Table:
        """The rows of a file."""
        return self._engine.read_parquet([self.root / file], []).drop(Engine.FILE, Engine.ROW)

    def with_encoded(self, events: ir.Table) -> ir.Table:
        """Adds empty columns for the encoded request features of new events."""
        kinds = {ENCODED + CONTEXT + one.name: ibis.dtype(stored_type(one)) for one in self._context}
        return events.mutate(**{name: ibis.null(kind) for name, kind in kinds.items()})

    def history_rows(self, items: ir.Table, users: ir.Table) -> ir.Table:
        """The rows of the histories, with item and user indices and their place in the file."""
        rows = self._engine.read_parquet([self.root / HISTORIES], [])
        names = {BEHAVIOR + name: name for name in self.data.behaviors}
        rows = rows.rename(names | {CONTEXT + one.name: one.name for one in self._context})
        rows = rows.mutate(**{_PLACE: rows[Engine.ROW].cast("int64")}).drop(Engine.FILE, Engine.ROW)
        rows = rows.inner_join(items.select(LogColumns.ITEM_ID, Derived.ITEM_INDEX), LogColumns.ITEM_ID)
        return rows.inner_join(users.select(LogColumns.USER_ID, Derived.USER_INDEX), LogColumns.USER_ID)

    def earlier_history(self, items: ir.Table, users: ir.Table) -> ir.Table:
        """The rows of the histories before the held-out periods, with their positions."""
        rows = self.history_rows(items, users)
        return _with_positions(rows.filter(rows[LogColumns.TIMESTAMP] < self.start_ms), users).drop(_PLACE)

    def context(self, placed: ir.Table, items: ir.Table, users: ir.Table) -> ir.Table:
        """The last ``max_context`` train events of the users of ``placed``, with their positions.

        For held-out users, they are context rows of their shard; for the others, rows of the histories.
        """
        user = Derived.USER_INDEX
        valid, test = (self._shard_rows(period, placed) for period in PERIODS[1:])
        contexts = [
            valid.filter(~valid[Derived.IS_TARGET]),
            test.filter(~test[Derived.IS_TARGET], test[LogColumns.TIMESTAMP] < self.start_ms).anti_join(valid, user),
        ]
        found = contexts[0].union(contexts[1]).drop(Derived.IS_TARGET)
        rows = self.history_rows(items, users).semi_join(placed, user).anti_join(valid, user).anti_join(test, user)
        found = _with_positions(appended(found, self._as_events(rows)), users)
        alone = found[user].cast("int64") * (1 << 32) + found[Derived.POSITION]
        return found.mutate(
            **{
                Derived.REQUEST: found[Derived.REQUEST].coalesce(alone).cast("int64"),
                Derived.PERIOD: ibis.literal(EARLIER, "int8"),
                Derived.VALUE: ibis.null("float64"),
                IS_KEPT: ibis.literal(True),
            }
        )

    def _as_events(self, rows: ir.Table) -> ir.Table:
        """Rows of the histories with the columns of current events. Request features are plain in both."""
        more = behavior_bits(rows, self.data.behaviors)
        unknown = {LogColumns.PROPENSITY: ibis.null("float64"), LogColumns.IS_RANDOM: ibis.literal(False)}
        rows = rows.mutate(**more, **unknown, **{Derived.REQUEST: ibis.null("int64")})
        return self.with_encoded(_in_milliseconds(rows))

    def _shard_rows(self, period: str, events: ir.Table) -> ir.Table:
        """The rows of the shards of a held-out period as current events, with encoded request features.

        Args:
            period: "valid" or "test".
            events: events with the plain request features, which these rows lack.
        """
        files = [self.root / shard["file"] for shard in self.data.manifest["shards"][period]]
        rows = self._engine.read_parquet(files, [])
        context = [CONTEXT + one.name for one in self._context]
        rows = rows.mutate(
            **{
                _PLACE: rows[Engine.ROW].cast("int64"),
                LogColumns.PROPENSITY: _known(rows[LogColumns.PROPENSITY]),
                **{ENCODED + name: rows[name] for name in context},
                **{name: ibis.null(events[name].type()) for name in context},
            }
        )
        kept = [Derived.USER_INDEX, Derived.ITEM_INDEX, LogColumns.TIMESTAMP, LogColumns.DISLIKE, LogColumns.IS_RANDOM]
        kept += [LogColumns.PROPENSITY, Derived.REQUEST, Derived.IS_TARGET, _PLACE]
        kept += [*more_columns(events), *(ENCODED + name for name in context)]
        return _in_milliseconds(rows).select(*kept, Derived.WATCH_MS, Derived.DURATION_MS, KEPT_LABEL)

    def pairs(self, users: np.ndarray) -> Iterator[pa.RecordBatch]:
        """The pairs of ``users``, from the row groups of ``train_past/`` that may contain them."""
        for name in self.train_past():
            for table, size in self.data.pairs(name, users, self.root / name):
                self.bytes_read += size
                yield from table.filter(pc.is_in(table.column(0), pa.array(users, pa.int32()))).to_batches()


def _with_positions(rows: ir.Table, users: ir.Table) -> ir.Table:
    """Adds ``position`` to the last train events of every user, which are ordered by place."""
    user = Derived.USER_INDEX
    rows = rows.inner_join(users.select(user, BEFORE), user)
    place = ibis.row_number().over(group_by=rows[user], order_by=rows[_PLACE])
    first = rows[BEFORE] - rows.count().over(group_by=rows[user])
    return rows.mutate(**{Derived.POSITION: (place + first).cast("int64")})


def _in_milliseconds(rows: ir.Table) -> ir.Table:
    """Adds ``watch_ms``, ``duration_ms`` and the kept label to rows in seconds; nan becomes null."""
    return rows.mutate(
        **{
            Derived.WATCH_MS: (_known(rows[LogColumns.WATCH_TIME]) * 1000.0).round().cast("int64"),
            Derived.DURATION_MS: (_known(rows[LogColumns.DURATION]) * 1000.0).round().cast("int64"),
            KEPT_LABEL: _known(rows[Derived.LABEL]),
        }
    )


def _known(values: ir.FloatingColumn) -> ir.FloatingColumn:
    return ibis.ifelse(values.isnan(), ibis.null("float64"), values.cast("float64"))

"""Item and user tables: checked, converted to one plain form, fitted to the train period, and written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Final

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base import features as kinds
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures, Moments, Vocabulary, scaled, vocabulary_file
from recpo.base.features import Categories, Category, Feature, Number, Side, Vector, is_text, of_type
from recpo.log import csv_files
from recpo.log.engine import Engine
from recpo.log.events import absent, timestamp_ms
from recpo.log.feature_columns import FEATURE, ITEM_FACTS, FeatureColumns, TableSide
from recpo.log.files import Log, LogFile, open_files, settle_columns, settle_types
from recpo.log.locations import Place, readable, writable
from recpo.log.prepared import FEATURE_FILES
from recpo.log.schema import AVAILABILITY, EXAMPLES, TRAIN, Derived, Example, Fault, LogColumns
from recpo.log.validate import copies, examples
from recpo.log.writing import write_rows

#: column of a plain table in addition to ``ITEM_FACTS`` and its features, which are named f0, f1, ... ...
ID: Final = "id"
_BATCH_ROWS: Final = 1 << 14


@dataclass(frozen=True)
class FeatureTable:
    """A checked item or user table in plain form (``recpo.base.features``).

    Attributes:
        side: item or user.
        log: its plain files, with the names of the user's files.
        features: its features, including the widths of vectors.
        inferred: whether the features were inferred from the types of its columns.
        left_alone: its unused columns.
        facts: option of ``ITEM_FACTS`` -> column, for those that it has.
    """

    side: TableSide
    log: Log
    features: tuple[Feature, ...]
    inferred: bool
    left_alone: tuple[str, ...]
    facts: Mapping[str, str]

    @property
    def times(self) -> list[str]:
        """Which times of availability it has."""
        return [name for name in AVAILABILITY if name in self.facts]

    def rows(self, engine: Engine) -> ir.Table:
        """The plain rows: ``id``, ``f0`` and so on, the ``facts``, file and row number."""
        columns = [ID, *(f"f{place}" for place in range(len(self.features))), *self.facts]
        read = engine.read_parquet([file.path for file in self.log.files], columns)
        return read.select(*columns, Engine.FILE, Engine.ROW)

    @property
    def plain_columns(self) -> dict[str, str]:
        """Feature name -> its column in ``rows``."""
        return {feature.name: f"f{place}" for place, feature in enumerate(self.features)}

    def placed(self, engine: Engine, indices: ir.Table) -> ir.Table:
        """The rows of kept items or users: their index, and the columns of the features."""
        key, index = _KEYS[self.side]
        rows = self.rows(engine)
        return rows.inner_join(indices, rows[ID] == indices[key]).select(index, *self.plain_columns.values())

    def describe(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """For the manifest: the files, their counts, and which columns are used, were inferred, or are unused."""
        return {
            "files": sorted(file.shown for file in self.log.files),
            "columns": self.log.columns,
            "facts": dict(self.facts),
            "inferred": self.inferred,
            "left_alone": list(self.left_alone),
            "counts": dict(counts),
        }


def open_table(
    paths: Sequence[Place],
    side: TableSide,
    id_name: str,
    id_type: pa.DataType | None,
    columns: FeatureColumns,
    chosen: FeatureColumns,
    work: Place,
) -> tuple[FeatureTable | None, list[Fault]]:
    """Checks every file of a table and writes its plain form to ``work``.

    Args:
        paths: its files.
        side: item or user.
        id_name: name of the id column in the log.
        id_type: type of the ids in the log; None = unknown, because the log has faults.
        columns: the features and other columns, including those of the preset.
        chosen: the columns that the user named; they must exist.
        work: a directory for temporary files.

    Returns:
        The table, or None if it cannot be read; and all of its faults.
    """
    id_name = (columns.item_id if side == "item" else columns.user_id) or id_name
    names = _names(paths)
    declared = columns.of(side)
    if declared is not None and chosen.of(side) is None:  # from the preset: the columns that the table has
        declared = tuple(feature for feature in declared if feature.source in names)
    named = {name: getattr(columns, name) for name in ITEM_FACTS} if side == "item" else {}
    facts = {name: source for name, source in named.items() if getattr(chosen, name) is not None or source in names}
    keys = {ID: id_name, **facts}
    # how long an item lasts may also be a feature
    taken = {source for name, source in keys.items() if name != LogColumns.DURATION}
    free = [name for name in names if name not in taken]
    sources = free if declared is None else [feature.source for feature in declared]
    read = {FEATURE + name: name for name in dict.fromkeys([*sources, *facts.values()])}
    files, faults = open_files(paths, {LogColumns.ITEM_ID: id_name} | read, work, f"{side}s")
    if not files:
        return None, faults
    features = _inferred(files[0].schema, taken) if declared is None else declared
    faults += _faults(files, side, keys, id_type, features)
    if faults:
        return None, faults
    features, found = _with_widths(features, files)
    faults += found
    plain, found = _write_plain(files, side, keys, features, work)
    used = {feature.name: feature.source for feature in features} | keys
    unused = tuple(dict.fromkeys(name for name in names if name not in used.values()))
    log = Log(tuple(plain), 0, used, {}, what=f"table of {side}s")
    return FeatureTable(side, log, features, declared is None, unused, facts), faults + found


def _names(paths: Sequence[Place]) -> list[str]:
    """The columns of the first readable file; none if no file is, which opening the files reports."""
    for path in paths:
        with suppress(RecpoError, pa.ArrowException, OSError, ValueError):
            if csv_files.is_text_file(path):
                return csv_files.header(path, csv_files.table_format(path))
            with pq.ParquetFile(readable(path)) as parquet:
                return list(parquet.schema_arrow.names)
    return []


def _inferred(schema: pa.Schema, taken: set[str]) -> tuple[Feature, ...]:
    """The features of the columns for whose types there is a kind of feature."""
    found = dict[str, Feature]()
    for field in schema:
        feature = None if field.name in taken else kinds.inferred_feature(field.name, field.type)
        if feature is not None:
            found.setdefault(feature.name, feature)
    return tuple(found.values())


def _faults(
    files: Sequence[LogFile],
    side: TableSide,
    keys: Mapping[str, str],
    id_type: pa.DataType | None,
    features: Sequence[Feature],
) -> list[Fault]:
    """Missing columns, else columns of unsuitable types."""
    remedies = {what: f"pass --features.{what} NAME" for what in (f"{side}_id", *ITEM_FACTS)}
    by_column = {f"feature {feature.name}": feature for feature in features}
    wanted = {f"{side}_id" if key == ID else key: name for key, name in keys.items()}
    wanted |= {column: feature.source for column, feature in by_column.items()}

    def remedy(column: str) -> str:
        return remedies.get(column, f"name its column in --features.{side}")

    def expected(column: str, kind: pa.DataType) -> str | None:
        if column in by_column:
            return kinds.expected_type(by_column[column], kind)
        if column == LogColumns.DURATION:
            return None if pa.types.is_integer(kind) or pa.types.is_floating(kind) else "numbers"
        return None if column in AVAILABILITY or pa.types.is_integer(kind) or is_text(kind) else "integers or strings"

    columns, missing = settle_columns(files, wanted, wanted, remedy)
    if missing:
        return list(missing.values())
    types, faults = settle_types(files, columns, expected)
    kind = types.get(f"{side}_id", id_type)
    if id_type is not None and is_text(kind) != is_text(id_type):
        problem = f"type {kind}, the log has {id_type}"
        faults.append(Fault(files[0].shown, keys[ID], problem, "cast one of them", code="mismatch"))
    return faults


def _with_widths(features: Sequence[Feature], files: Sequence[LogFile]) -> tuple[tuple[Feature, ...], list[Fault]]:
    settled, faults = list[Feature](), []
    for feature in features:
        if isinstance(feature, Vector) and feature.width is None:
            widths = (
                kinds.first_width(batch.column(0)) for file in files for batch in _batches(file, [feature.source])
            )
            width = next((width for width in widths if width is not None), None)
            if not width:
                problem, fix = "no vector: all are null or empty", "leave the feature out, or set its width"
                faults.append(Fault(files[0].shown, feature.source, problem, fix, code="wrong_shape"))
            feature = replace(feature, width=width or 1)
        settled.append(feature)
    return tuple(settled), faults


def _batches(file: LogFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(readable(file.path)) as parquet:
        yield from parquet.iter_batches(_BATCH_ROWS, columns=columns)


def _write_plain(
    files: Sequence[LogFile],
    side: TableSide,
    columns: dict[str, str],
    features: Sequence[Feature],
    work: Place,
) -> tuple[list[LogFile], list[Fault]]:
    """Writes the plain form of every file; returns the files, and a fault for the offending rows of each batch."""
    plain, faults, schema = list[LogFile](), list[Fault](), _plain_schema(columns, features, files[0].schema)
    for number, file in enumerate(files):
        staged = replace(file, path=work / f"{side}s-plain-{number}.parquet")
        with writable(staged.path) as sink, pq.ParquetWriter(sink, schema) as writer:
            for begin, batch, offenses in _plain_batches(file, columns, features, schema):
                writer.write_batch(batch)
                faults += [_offense_fault(file, begin, column, offense) for column, offense in offenses]
        plain.append(staged)
    return plain, faults


def _offense_fault(file: LogFile, begin: int, column: str, offense: kinds.Offense) -> Fault:
    """The fault of the offending rows of a batch that begins with the row ``begin`` of a file."""
    rows = [csv_files.row_in_file(begin + int(row), file.left_out) for row in offense.rows[:EXAMPLES]]
    first = [Example(file.shown, row, value) for row, value in zip(rows, offense.values)]  # noqa: B905
    return Fault(file.shown, column, offense.problem, offense.fix, len(offense.rows), first)


def _plain_schema(columns: dict[str, str], features: Sequence[Feature], schema: pa.Schema) -> pa.Schema:
    kind = schema.field(columns[ID]).type
    own = [(ID, pa.string() if is_text(kind) else pa.int64())]
    own += [(f"f{place}", kinds.plain_type(one, schema.field(one.source).type)) for place, one in enumerate(features)]
    for name in ITEM_FACTS:
        if name in columns:
            kind = schema.field(columns[name]).type
            own.append((name, pa.string() if is_text(kind) else kind))
    return pa.schema(own)


def _plain_batches(
    file: LogFile, columns: dict[str, str], features: Sequence[Feature], schema: pa.Schema
) -> Iterator[tuple[int, pa.RecordBatch, list[tuple[str, kinds.Offense]]]]:
    """The first row of every batch, the batch, and its offending rows by column."""
    names = list(dict.fromkeys([*columns.values(), *(feature.source for feature in features)]))
    begin = 0
    for batch in _batches(file, names):
        ids = batch.column(columns[ID])
        made, offenses = [ids.cast(schema.field(ID).type)], list[tuple[str, kinds.Offense]]()
        nulls = ids.is_null().to_numpy(zero_copy_only=False).nonzero()[0]
        if len(nulls):
            what = kinds.Offense("null key", "every row needs an id: remove these rows", nulls, [None] * EXAMPLES)
            offenses.append((columns[ID], what))
        for feature in features:
            values, wrong = kinds.plain_column(feature, batch.column(feature.source))
            made.append(values)
            offenses += [(feature.source, one) for one in wrong]
        made += [batch.column(columns[name]).cast(schema.field(name).type) for name in ITEM_FACTS if name in columns]
        yield begin, pa.RecordBatch.from_arrays(made, schema=schema), offenses
        begin += batch.num_rows


def table_faults(engine: Engine, table: FeatureTable, unit: str) -> list[Fault]:
    """Faults that require all rows of the table: repeated ids, and times that do not parse.

    Args:
        engine: runs the expressions.
        table: a table without other faults.
        unit: unit of numeric times of availability.
    """
    rows = table.rows(engine).select(ID, *table.times, Engine.FILE, Engine.ROW)
    known = rows.filter(rows[ID].notnull())
    fix = f"one row for each {table.side}: remove the others"
    faults = _counted(engine, copies(known, [ID]), ID, table, "an id that an earlier row has", fix)
    fix = "write ISO times of 1971 to 2099, or numbers in --features.available_unit; null = no limit"
    for name in table.times:
        wrong = rows.filter(timestamp_ms(rows[name], unit).isnull() & ~absent(rows[name]))
        faults += _counted(engine, wrong, name, table, "unparseable or impossible time", fix)
    return faults


def _counted(engine: Engine, wrong: ir.Table, column: str, table: FeatureTable, problem: str, fix: str) -> list[Fault]:
    count = engine.count(wrong)
    if not count:
        return []
    first = examples(engine, wrong, column, table.log)
    return [Fault(table.log.name, table.log.columns[column], problem, fix, count, first)]


_COLUMNS_OF_QUERY: Final = 64
_GIVEN: Final = "is_given"
_KEYS: Final = {"item": (LogColumns.ITEM_ID, Derived.ITEM_INDEX), "user": (LogColumns.USER_ID, Derived.USER_INDEX)}


def fit_features(
    engine: Engine, side: Side, features: tuple[Feature, ...], rows: ir.Table, columns: Mapping[str, str], root: Path
) -> FittedFeatures:
    """Fits features to rows: vocabularies, which are written to ``root``, and moments.

    Args:
        engine: runs the expressions.
        side: items, users or context.
        features: the features, including the widths of vectors.
        rows: the rows of the train period, with plain columns.
        columns: feature name -> its column in ``rows``.
        root: the directory that is being prepared.
    """
    (root / "vocabularies").mkdir(exist_ok=True)
    moments = _moments(engine, [(one, columns[one.name]) for one in of_type(features, Number)], rows)
    vocabularies = dict[str, Vocabulary]()
    for name, values in _value_counts(engine, features, rows, columns):
        write_rows([values], values.schema, root / vocabulary_file(side, name))
        vocabularies[name] = Vocabulary(values["value"].combine_chunks())
    return FittedFeatures(tuple(_fitted(one, vocabularies, moments) for one in features), vocabularies)


def _fitted(
    feature: Feature, vocabularies: Mapping[str, Vocabulary], moments: Mapping[str, tuple[float, float]]
) -> Feature:
    if isinstance(feature, Category | Categories):
        return replace(feature, num_codes=vocabularies[feature.name].num_codes)
    if isinstance(feature, Number):
        mean, std = moments[feature.name]
        return replace(feature, mean=mean, std=std)
    return feature


def _value_counts(
    engine: Engine, features: Sequence[Feature], rows: ir.Table, columns: Mapping[str, str]
) -> Iterator[tuple[str, pa.Table]]:
    """The name of every category, and its ``value`` and ``count``, the most frequent first.

    One query counts the values of many columns. A query for each column would take time quadratic in their number,
    because every query is compiled with all columns of ``rows``.
    """
    alike = dict[str, list[Category | Categories]]()
    for feature in features:
        if isinstance(feature, Category | Categories):
            alike.setdefault(str(rows[columns[feature.name]].type()), []).append(feature)
    for same in alike.values():
        for begin in range(0, len(same), _COLUMNS_OF_QUERY):
            some = same[begin : begin + _COLUMNS_OF_QUERY]
            table = engine.table(_counts_of(some, rows, columns))
            kind = pa.string() if pa.types.is_string(table["value"].type) else pa.int64()
            table = table.cast(pa.schema([("place", pa.int32()), ("value", kind), ("count", pa.int64())]))
            ends = np.searchsorted(table["place"].to_numpy(), np.arange(len(some) + 1))
            for place, feature in enumerate(some):
                yield feature.name, table.slice(ends[place], ends[place + 1] - ends[place]).drop_columns(["place"])


def _counts_of(some: Sequence[Category | Categories], rows: ir.Table, columns: Mapping[str, str]) -> ir.Table:
    """``place`` (of a feature in ``some``), ``value`` and ``count``, in order. The columns have one type."""
    cells = [
        ibis.struct(
            {
                "place": ibis.literal(place, "int32"),
                "least": ibis.literal(feature.min_count, "int64"),
                "value": rows[columns[feature.name]],
            }
        )
        for place, feature in enumerate(some)
    ]
    cell = rows.select(cell=ibis.array(cells).unnest())["cell"]
    value = cell["value"].unnest() if isinstance(some[0], Categories) else cell["value"]
    values = cell.as_table().select(place=cell["place"], least=cell["least"], value=value)
    known = values.filter(values["value"].notnull())
    counts = known.group_by(["place", "least", "value"]).aggregate(count=ibis._.count())
    kept = counts.filter(counts["count"] >= counts["least"])
    return kept.order_by([kept["place"], kept["count"].desc(), kept["value"]]).select("place", "value", "count")


def _moments(engine: Engine, numbers: list[tuple[Number, str]], rows: ir.Table) -> dict[str, tuple[float, float]]:
    """Mean and (population) standard deviation of every number, in two passes, independent of the order of rows."""
    if not numbers:
        return {}
    chosen = rows.select(*{column: rows[column] for _, column in numbers})

    def pass_over(centers: Mapping[str, float] | None) -> dict[str, float]:
        sums = {number.name: Moments() for number, _ in numbers}
        for batch in engine.stream(chosen):
            for number, column in numbers:
                values = batch.column(column).drop_null().to_numpy(zero_copy_only=False)
                values = scaled(number, values)
                sums[number.name].add(values if centers is None else (values - centers[number.name]) ** 2)
        return {name: total.mean for name, total in sums.items()}

    means = pass_over(None)
    return {name: (means[name], sqrt(variance) or 1.0) for name, variance in pass_over(means).items()}


def fit_table(engine: Engine, table: FeatureTable, indices: ir.Table, events: ir.Table, root: Path) -> FittedFeatures:
    """Fits the features of a table to the items or users with an event in the train period.

    Args:
        engine: runs the expressions.
        table: the table.
        indices: external id and index of all kept items or users.
        events: events with their period.
        root: the directory that is being prepared.
    """
    index, columns = _KEYS[table.side][1], table.plain_columns
    trained = events.filter(events[Derived.PERIOD] == TRAIN).select(index).distinct()
    fitted_to = [columns[one.name] for one in table.features if not isinstance(one, Vector)]
    placed = table.placed(engine, indices).semi_join(trained, index).select(index, *fitted_to)
    fitted = fit_features(engine, table.side, table.features, engine.materialize("train_rows", placed), columns, root)
    engine.drop("train_rows")
    return fitted


def write_table(
    engine: Engine,
    table: FeatureTable,
    indices: ir.Table,
    fitted: FittedFeatures,
    root: Path,
    previous: tuple[Path, int] | None = None,
) -> dict[str, int]:
    """Writes the features of all kept items or users by index.

    Args:
        engine: runs the expressions.
        table: the table.
        indices: external id and index of all kept items or users.
        fitted: the fitted features, which encode the rows.
        root: the directory that is being prepared. A table without features, which only has the times from which items
            are candidates, gets no file.
        previous: the directory that is extended, and how many items or users it has: those without a row keep their
            features; None = such items or users have none.

    Returns:
        Counts: ``rows`` of the table; ``unused`` rows, whose ids are not kept; items or users ``without`` features;
        with ``previous``, those that ``kept`` theirs.
    """
    index, columns = _KEYS[table.side][1], table.plain_columns
    placed = table.placed(engine, indices).mutate(**{_GIVEN: ibis.literal(True)})
    joined = indices.left_join(placed, index).drop(f"{index}_right").order_by(index)
    joined = joined.mutate(**{_GIVEN: joined[_GIVEN].fill_null(False)})
    if table.features:
        plain = joined.select(**{name: joined[column] for name, column in columns.items()}, **{_GIVEN: joined[_GIVEN]})
        names = [feature.name for feature in of_type(table.features, Category)]
        with ExitStack() as opened:
            file = None if previous is None else previous[0] / FEATURE_FILES[table.side]
            before = None if file is None else opened.enter_context(pq.ParquetFile(file))
            encoded = _encoded(engine.stream(plain), fitted, before)
            write_rows(encoded, fitted.schema, root / FEATURE_FILES[table.side], names)
    rows, used, every = map(engine.count, (table.rows(engine), placed, indices))
    counts = {"rows": rows, "unused": rows - used, "without": every - used}
    if previous is None:
        return counts
    first = int(table.side == "item")  # index of the first row
    kept = engine.count(joined.filter(joined[index] < previous[1] + first, ~joined[_GIVEN]))
    return counts | {"without": every - used - kept, "kept": kept}


def _encoded(
    batches: Iterable[pa.RecordBatch], fitted: FittedFeatures, before: pq.ParquetFile | None
) -> Iterator[pa.Table]:
    """The encoded rows of ``batches`` where given, else those of ``before``. Both are in the order of the index."""
    held = fitted.schema.empty_table()
    more = iter(()) if before is None else before.iter_batches(columns=fitted.schema.names)
    for batch in batches:
        while held.num_rows < batch.num_rows and (found := next(more, None)) is not None:
            held = pa.concat_tables([held, pa.Table.from_batches([found]).cast(fitted.schema)])
        encoded, known = fitted.encode(batch), held.slice(0, batch.num_rows)
        held = held.slice(len(known))
        if not len(known):
            yield encoded
            continue
        place = np.arange(len(encoded))
        stays = ~batch.column(_GIVEN).to_numpy(zero_copy_only=False) & (place < len(known))
        yield pa.concat_tables([encoded, known]).take(np.where(stays, place + len(encoded), place))

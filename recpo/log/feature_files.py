"""Fits features to the train period, and writes vocabularies and the feature tables of items and users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, Final

import ibis
import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.base.feature_encoding import FittedFeatures, Moments, Vocabulary, scaled
from recpo.base.features import Categories, Category, Feature, Number, Side, Vector, of_type
from recpo.log.engine import Engine
from recpo.log.feature_columns import CONTEXT
from recpo.log.feature_tables import ID, FeatureTable
from recpo.log.prepared import ITEM_FEATURES, USER_FEATURES, vocabulary_file
from recpo.log.schema import TRAIN, Derived, LogColumns
from recpo.log.writing import write_rows

_COLUMNS_OF_QUERY: Final = 64
_GIVEN: Final = "is_given"
_FILES: Final = {"item": ITEM_FEATURES, "user": USER_FEATURES}
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


def write_table(
    engine: Engine, table: FeatureTable, indices: ir.Table, events: ir.Table, root: Path
) -> tuple[FittedFeatures, dict[str, int]]:
    """Fits the features of a table to the items or users of the train period, and writes them by index.

    Args:
        engine: runs the expressions.
        table: the table.
        indices: external id and index of all kept items or users.
        events: events with their period. Items and users with a train event are fitted to.
        root: the directory that is being prepared. A table without features, which only has the times from which items
            are candidates, gets no file.

    Returns:
        The fitted features, and counts: ``rows`` of the table; ``unused`` rows, whose ids are not kept; and kept items
        or users ``without`` a row.
    """
    key, index = _KEYS[table.side]
    columns = {feature.name: f"f{place}" for place, feature in enumerate(table.features)}
    rows = table.rows(engine)
    placed = rows.inner_join(indices, rows[ID] == indices[key]).select(index, *columns.values())
    trained = events.filter(events[Derived.PERIOD] == TRAIN).select(index).distinct()
    fitted_to = [columns[one.name] for one in table.features if not isinstance(one, Vector)]
    train = engine.materialize("train_rows", placed.semi_join(trained, index).select(index, *fitted_to))
    fitted = fit_features(engine, table.side, table.features, train, columns, root)
    engine.drop("train_rows")
    if table.features:
        joined = indices.left_join(placed, index).drop(f"{index}_right").order_by(index)
        plain = joined.select(**{name: joined[column] for name, column in columns.items()})
        names = [feature.name for feature in of_type(table.features, Category)]
        write_rows(_encoded(engine, plain, fitted), fitted.schema, root / _FILES[table.side], names)
    found = rows.select(ID)
    counted = (found, found.semi_join(indices, found[ID] == indices[key]), indices)
    read, used, kept = (engine.row(some.aggregate(rows=some.count()))["rows"] for some in counted)
    return fitted, {"rows": read, "unused": read - used, "without": kept - used}


def extend_table(
    engine: Engine,
    table: FeatureTable,
    indices: ir.Table,
    fitted: FittedFeatures,
    before: Path,
    number: int,
    root: Path,
) -> dict[str, int]:
    """Writes the features of all kept items or users: the rows of the new table, and the previous features of the rest.

    Args:
        engine: runs the expressions.
        table: the new table.
        indices: external id and index of all kept items or users.
        fitted: the fitted features, which encode the rows.
        before: the directory that is extended.
        number: how many items or users it has.
        root: the directory that is being prepared.

    Returns:
        Counts: ``rows`` of the table; ``unused`` rows; items or users with ``kept`` previous features; and new ones
        ``without`` a row.
    """
    key, index = _KEYS[table.side]
    columns = {feature.name: f"f{place}" for place, feature in enumerate(table.features)}
    rows = table.rows(engine)
    placed = rows.inner_join(indices, rows[ID] == indices[key]).select(index, *columns.values())
    joined = indices.left_join(placed.mutate(**{_GIVEN: ibis.literal(True)}), index)
    joined = joined.drop(f"{index}_right").order_by(index).mutate(**{_GIVEN: ibis._[_GIVEN].fill_null(False)})
    if table.features:
        plain = joined.select(**{name: joined[column] for name, column in columns.items()}, **{_GIVEN: joined[_GIVEN]})
        names = [feature.name for feature in of_type(table.features, Category)]
        with pq.ParquetFile(before / _FILES[table.side]) as earlier:
            written = _over(engine.stream(plain), fitted, earlier)
            write_rows(written, fitted.schema, root / _FILES[table.side], names)
    first = int(table.side == "item")  # index of the first row
    known = joined.filter(joined[index] < number + first, ~joined[_GIVEN])
    counted = (rows, placed, indices, known)
    read, used, every, kept = (engine.row(some.aggregate(rows=some.count()))["rows"] for some in counted)
    return {"rows": read, "unused": read - used, "without": every - used - kept, "kept": kept}


def _over(batches: Iterable[pa.RecordBatch], fitted: FittedFeatures, earlier: pq.ParquetFile) -> Iterator[pa.Table]:
    """The encoded rows of ``batches`` where given, else those of ``earlier``. Both are in the order of the index."""
    held, more = fitted.schema.empty_table(), earlier.iter_batches(columns=fitted.schema.names)
    for batch in batches:
        while held.num_rows < batch.num_rows and (found := next(more, None)) is not None:
            held = pa.concat_tables([held, pa.Table.from_batches([found]).cast(fitted.schema)])
        encoded, known = fitted.encode(batch), held.slice(0, batch.num_rows)
        held = held.slice(len(known))
        place = np.arange(len(encoded))
        stays = ~batch.column(_GIVEN).to_numpy(zero_copy_only=False) & (place < len(known))
        yield pa.concat_tables([encoded, known]).take(np.where(stays, place + len(encoded), place))


def _encoded(engine: Engine, plain: ir.Table, fitted: FittedFeatures) -> Iterator[pa.Table]:
    for batch in engine.stream(plain):
        yield fitted.encode(batch)


def fit_context(engine: Engine, features: tuple[Feature, ...], events: ir.Table, root: Path) -> FittedFeatures:
    """Fits request features to the events of the train period."""
    columns = {feature.name: CONTEXT + feature.name for feature in features}
    train = events.filter(events[Derived.PERIOD] == TRAIN)
    return fit_features(engine, "context", features, train, columns, root)


def describe_table(table: FeatureTable, counts: Mapping[str, int]) -> dict[str, Any]:
    """Describes a table and the counts of its rows, for the manifest."""
    return {**table.describe(), "counts": dict(counts)}

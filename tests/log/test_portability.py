"""The expressions of preparation do not depend on DuckDB: the same ones compile for Spark."""

import ibis
import pytest
from ibis.config import Config

from recpo.base.feedback import FeedbackRule
from recpo.log.events import (
    add_positions,
    availability,
    exposures,
    item_indices,
    item_table,
    outcomes,
    place_events,
    select_columns,
    standardize,
    time_order,
    user_indices,
)
from recpo.log.feature_columns import EventColumns
from recpo.log.schema import PRESETS, FlagColumn, LogColumns
from recpo.log.shaping import (
    D2Q,
    BinaryColumn,
    EveryEvent,
    NumericColumn,
    WatchQuantiles,
    WatchRatio,
    WatchTimeGain,
    bucket_counts,
    cutoff_table,
    quantile_table,
    watch_ties,
)
from recpo.log.splits import LeaveLastOut, TemporalSplit, as_histories, period_rows, recent_events
from recpo.log.validate import row_checks

LABELS = [
    *(WatchQuantiles(), WatchQuantiles(smoothing=10.0, duration_exponent=0.7), WatchRatio(), D2Q(), WatchTimeGain()),
    *(BinaryColumn(), NumericColumn(0, 1), EveryEvent()),
]
DAY_MS = 86_400_000


class SparkOptions(Config):
    treat_nan_as_null: bool = False


@pytest.fixture(autouse=True)
def _spark_options():
    """What Ibis sets when pyspark is installed."""
    before, ibis.options.pyspark = ibis.options.pyspark, SparkOptions()
    yield
    ibis.options.pyspark = before


def log(time):
    kinds = {
        **dict.fromkeys(LogColumns.ALL, "float64"),
        "user_id": "string",
        "item_id": "int64",
        "request_id": "float64",
    }
    kinds |= {"timestamp": time, "dislike": "boolean", "is_random": "int8", "__file": "string", "__row": "int64"}
    return ibis.table(kinds, name="log")


@pytest.mark.parametrize("time", ["int64", "string", "timestamp"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checks_and_standard_columns_compile_for_spark(time):
    raw = select_columns(log(time), {column: column for column in LogColumns.ALL}, {})
    assert "SELECT" in ibis.to_sql(standardize(raw, PRESETS["plain"], 86_400.0, EventColumns()), dialect="pyspark")
    for check in row_checks(raw, PRESETS["plain"], 86_400.0, EventColumns()):
        assert "SELECT" in ibis.to_sql(raw.aggregate(count=check.offends.sum()), dialect="pyspark"), check.reason


@pytest.mark.parametrize("kind", ["string", "int64", "float64", "boolean"])
def test_flags_of_values_compile_for_spark(kind):
    rows = ibis.table({"thumb": kind, "__file": "string", "__row": "int64"}, name="log")
    raw = select_columns(rows, {"dislike": "thumb"}, {"dislike": FlagColumn("thumb", ("down", 2))})
    assert raw["dislike"].type().is_boolean()
    assert "SELECT" in ibis.to_sql(raw, dialect="pyspark")


def compiles(*tables):
    return all("SELECT" in ibis.to_sql(table, dialect="pyspark") for table in tables)


def unbound(table, name):
    return ibis.table(table.schema(), name=name)


def test_the_pipeline_compiles_for_spark():
    events = unbound(standardize(log("int64"), PRESETS["plain"], 86_400.0, EventColumns()), "standard")
    assert compiles(outcomes(events))
    split = TemporalSplit()
    boundaries = split.boundaries(1_700_000_000_000, 1_700_000_000_000 + 9 * DAY_MS, True)
    assert compiles(split.assign(events, boundaries), LeaveLastOut(valid_share=0.2).assign(events, {}))
    events = unbound(split.assign(events, boundaries), "events")
    items, users = item_indices(events, "train", 1), user_indices(events, 0)
    assert compiles(items, users)
    items, users = unbound(items, "items"), unbound(users, "users")
    placed = place_events(events, items, users)
    placed = add_positions(placed, time_order(placed))
    assert compiles(placed)
    placed = unbound(placed, "placed")
    counts = bucket_counts(placed, WatchQuantiles())
    quantiles = quantile_table(unbound(counts, "counts"))
    fitted = unbound(quantiles, "quantiles")
    labels = [label.add(placed, bucket_counts(placed, label)) for label in LABELS]
    assert compiles(counts, quantiles, cutoff_table(fitted), watch_ties(fitted), *labels)
    shaped = unbound(EveryEvent().add(placed, counts), "shaped")
    assert compiles(
        item_table(items, shaped, FeedbackRule(), None),
        availability(items, shaped, None, 3.0),
        exposures(shaped),
        as_histories(recent_events(shaped, items, users, 9)),
        period_rows(shaped, 2, 9, True),
    )

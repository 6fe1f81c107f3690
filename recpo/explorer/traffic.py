"""What a server logged, over time and by variant: exposures, exploration, outcomes, and their value with intervals.

DuckDB aggregates the Parquet files that ``recpo serve --log`` published; only sums per user are in memory.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb

from recpo.base.errors import RecpoError
from recpo.evaluation.sequences import clustered_mean
from recpo.explorer.people_and_items import known
from recpo.log.prepared import Prepared
from recpo.log.schema import LogColumns

_HOUR_MS: Final = 3_600_000
_MOST_HOURS: Final = 72  # longer logs are shown by day
#: The column of a log that was written with several policies in production.
VARIANT: Final = "variant"


class Rates(NamedTuple):
    """A group of exposures.

    Attributes:
        name: when they were, or which variant made them.
        requests: number of lists.
        exposures: number of items shown.
        users: number of users.
        explored: share of exposures that were drawn uniformly.
        answered: share of exposures with an outcome.
        disliked: share of exposures that were disliked.
        value: mean over the exposures with an outcome: the label, or the watched share (at most 1); None = none.
        half_width: half of its 95 % interval, with users as clusters; None = fewer than two users.
        shortest: number of items in the shortest list.
        short_lists: share of lists that are shorter than the longest one of the group.
        unknown_items: share of exposures whose items the prepared data do not know.
    """

    name: str
    requests: int
    exposures: int
    users: int
    explored: float
    answered: float
    disliked: float
    value: float | None
    half_width: float | None
    shortest: int
    short_lists: float
    unknown_items: float


class Traffic(NamedTuple):
    """A server's log.

    Attributes:
        over_time: by hour, or by day if the log is longer than three days, oldest first.
        by_variant: one group per variant, and one of the exposures without any; without variants, one of all exposures.
        unit: ``hour`` or ``day``.
        value_of: what ``value`` is a mean of.
    """

    over_time: list[Rates]
    by_variant: list[Rates]
    unit: str
    value_of: str


def traffic(log: Path, data: Prepared) -> Traffic:
    """Reads the log of a server.

    Args:
        log: directory with the Parquet files that ``recpo serve --log`` published.
        data: prepared data; items that are not in them are unknown.

    Raises:
        RecpoError: there are no published exposures, or a file is not a log of exposures.
    """
    files = sorted(str(file) for file in log.rglob("*.parquet"))
    if not files:
        message = f"{log} has no published exposures (*.parquet): wait until the outcome window of the first is over"
        raise RecpoError(message, code="empty", field="server_log")
    try:
        with duckdb.connect() as database:
            names = {str(row[0]) for row in database.execute(_COLUMNS, [files]).fetchall()}
            if missing := sorted({LogColumns.REQUEST_ID, *LogColumns.REQUIRED} - names):
                message = f"{log} has no column {missing[0]!r}: name the directory that `recpo serve --log` writes"
                raise RecpoError(message, code="missing_column", field="server_log")
            value, value_of = _value(names)
            variant = f"coalesce(log.{VARIANT}, 'no variant')" if VARIANT in names else "'all exposures'"
            is_random, dislike = (f"coalesce(log.{name}, false)" if name in names else "false" for name in _FLAGS)
            exposures = _EXPOSURES.format(value=value, variant=variant, is_random=is_random, dislike=dislike)
            database.execute(exposures, [files, str(data.root / "items.parquet")])
            first, last = database.execute("SELECT min(timestamp), max(timestamp) FROM exposures").fetchall()[0]
            unit, length = ("hour", _HOUR_MS) if last - first <= _MOST_HOURS * _HOUR_MS else ("day", 24 * _HOUR_MS)
            over_time = _groups(database, f"timestamp // {length} * {length}")
            variants = _groups(database, "variant")
    except (duckdb.Error, OSError) as error:
        message = f"{log} cannot be read as a log of exposures ({str(error).splitlines()[0]})"
        raise RecpoError(message, code="damaged", field="server_log") from error
    return Traffic([one._replace(name=_time(int(one.name), unit)) for one in over_time], variants, unit, value_of)


_FLAGS: Final = ("is_random", "dislike")
_COLUMNS: Final = "DESCRIBE SELECT * FROM read_parquet(?, union_by_name = true)"
_EXPOSURES: Final = """
CREATE TEMP TABLE exposures AS
SELECT log.timestamp, log.user_id, log.request_id, {variant} AS variant, {value} AS value,
       {is_random} AS is_random, {dislike} AS dislike, known.item_id IS NULL AS is_unknown
FROM read_parquet(?, union_by_name = true) AS log
LEFT JOIN (SELECT item_id FROM read_parquet(?)) AS known ON known.item_id = log.item_id
"""
_GROUPS: Final = """
WITH grouped AS (SELECT {group} AS name, * FROM exposures),
lists AS (SELECT name, request_id, count(*) AS length FROM grouped GROUP BY ALL),
longest AS (SELECT name, max(length) AS longest, min(length) AS shortest FROM lists GROUP BY ALL),
short AS (
    SELECT name, shortest, avg((length < longest)::DOUBLE) AS share
    FROM lists JOIN longest USING (name) GROUP BY ALL
)
SELECT grouped.name::VARCHAR AS name, count(DISTINCT request_id) AS requests, count(*) AS exposures,
       count(DISTINCT user_id) AS users, avg(is_random::DOUBLE) AS explored,
       avg((value IS NOT NULL)::DOUBLE) AS answered, avg(dislike::DOUBLE) AS disliked,
       any_value(shortest) AS shortest, any_value(share) AS short_lists, avg(is_unknown::DOUBLE) AS unknown_items
FROM grouped JOIN short USING (name)
GROUP BY grouped.name ORDER BY grouped.name
"""
_USERS: Final = """
SELECT {group} AS name, sum(value) AS total, count(value) AS n FROM exposures
WHERE value IS NOT NULL GROUP BY name, user_id
"""


def _groups(database: duckdb.DuckDBPyConnection, group: str) -> list[Rates]:
    users = database.execute(_USERS.format(group=group)).df()
    means = {str(name): clustered_mean(own["total"], own["n"]) for name, own in users.groupby("name")}
    groups = []
    row: Any
    for row in database.execute(_GROUPS.format(group=group)).df().itertuples(index=False):
        mean = means.get(row.name, clustered_mean([], []))
        groups.append(Rates(**row._asdict(), value=known(mean.mean), half_width=known(mean.half_width)))
    return groups


def _value(names: set[str]) -> tuple[str, str]:
    """The SQL of the value of an exposure, and what it is."""
    if LogColumns.LABEL in names:
        return f"log.{LogColumns.LABEL}", "label"
    if {LogColumns.WATCH_TIME, LogColumns.DURATION} <= names:
        share = f"log.{LogColumns.WATCH_TIME} / nullif(log.{LogColumns.DURATION}, 0)"
        return f"CASE WHEN {share} > 1 THEN 1 ELSE {share} END", "watched share of an item, at most 1"
    if LogColumns.WATCH_TIME in names:
        return f"log.{LogColumns.WATCH_TIME}", "seconds watched"
    return "NULL::DOUBLE", "nothing: the log has no outcomes"


def _time(milliseconds: int, unit: str) -> str:
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return f"{moment:%Y-%m-%d %H:%M}" if unit == "hour" else f"{moment:%Y-%m-%d}"

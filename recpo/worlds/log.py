"""Draws the interaction log in blocks of users and streams it to Parquet in bounded memory.

Results of days on which a policy served the simulated users, as in ``served.json``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from recpo.artifacts.artifact import Artifact, facts_in
from recpo.artifacts.checksums import seal
from recpo.artifacts.documents import read_json
from recpo.artifacts.outputs import output_directory, write_json
from recpo.base.errors import RecpoError, reading
from recpo.worlds.parameters import MILLISECONDS_PER_DAY, World
from recpo.worlds.preferences import ITEM_TABLE, USER_TABLE, FloatArray, IntArray, Preferences, write_side_information
from recpo.worlds.truth import FORMAT_VERSION as TRUTH_VERSION, Truth

if TYPE_CHECKING:
    import pandas as pd


SERVED: Final = "served.json"
FORMAT_VERSION: Final = 3
_REMEDY: Final = "simulate the day again"


@dataclass(frozen=True)
class DayReport:
    """A day in true values; means are over the requests that were shown an item, each request counting once.

    Attributes:
        day: its number; day 0 begins the world's log.
        requests: number of requests.
        short_slates: requests with fewer items than requested, because no more items could be listed.
        exposures: items shown, the rows of the log.
        value: realized value, the mean true expected reward of a slate's items.
        dislikes: mean true probability of a dislike of a slate's items.
        logged_dislikes: share of exposures that were disliked in the log.
        logging_value: exact expected reward of the simulator's own logging policy for the same requests.
        logging_dislikes: exact dislike probability of the logging policy for the same requests.
        oracle_value: mean true reward of the best slates of the same lengths, without the items that were excluded.
        regret: ``oracle_value - value``.
        coverage: share of the catalog that was shown.
        logging_coverage: expected share of the catalog that the logging policy would have shown in as many exposures.
        explored: share of exposures whose item is not one of the best, which would be shown without exploration.
        is_random: share of exposures on uniformly drawn slates.
    """

    day: int
    requests: int
    short_slates: int
    exposures: int
    value: float
    dislikes: float
    logged_dislikes: float
    logging_value: float
    logging_dislikes: float
    oracle_value: float
    regret: float
    coverage: float
    logging_coverage: float
    explored: float
    is_random: float


@dataclass(frozen=True)
class ServedDays:
    """Consecutive days under one policy.

    Attributes:
        policy: the policy that served; for a bundle ``bundle`` (name of its directory), ``manifest`` (SHA-256 of its
            manifest) and ``origin``.
        exploration: options of ``recpo.Exploration``; None = the best items in their order.
        seed: seed of sessions, draws and feedback.
        days: the reports, in the order of the days.
        repeat_after: days (of 24 hours) after which an item may be shown to a user again; None = never.
    """

    policy: Mapping[str, Any]
    exploration: Mapping[str, Any] | None
    seed: int
    days: tuple[DayReport, ...] = ()
    repeat_after: float | None = None

    def save(self, root: Path) -> None:
        """Writes ``served.json`` into the directory ``root``."""
        write_json(root / SERVED, seal({"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}))

    @classmethod
    def load(cls, root: Path) -> ServedDays | None:
        """Reads ``served.json``; None if the logging policy made the log, which has no such file.

        Raises:
            RecpoError: it is damaged or of another version.
        """
        file = root / SERVED
        if not file.exists():
            return None
        content = facts_in(read_json(file, _REMEDY), file, FORMAT_VERSION, _REMEDY)
        with reading(file, KeyError, TypeError, remedy=_REMEDY):
            days = tuple(DayReport(**day) for day in content.pop("days"))
            served = cls(**content, days=days)
        if not days or [day.day for day in days] != list(range(days[0].day, days[0].day + len(days))):
            message = f"{file} is damaged (its days are not consecutive): {_REMEDY}"
            raise RecpoError(message, code="damaged", field="days")
        return served


LOG = "log"
SCHEMA = pa.schema(
    [
        pa.field("user_id", pa.int64(), nullable=False),
        pa.field("item_id", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("watch_time", pa.float32(), nullable=False),
        pa.field("duration", pa.float32(), nullable=False),
        pa.field("dislike", pa.bool_(), nullable=False),
        pa.field("propensity", pa.float32(), nullable=False),
        pa.field("is_random", pa.bool_(), nullable=False),
        pa.field("request_id", pa.int64(), nullable=False),
    ]
)

_COUNT_STREAM, _BLOCK_STREAM = 3, 4
_EVENTS_PER_BLOCK = 1 << 17  # rows in memory; part of the format, because other sizes draw other numbers
_EVENTS_PER_FILE = 1 << 20
PAUSE_MS = (200, 2_000)  # pause between two exposures of a session
_SKIP_SECONDS = (0.3, 3.0)
_MAX_WATCH_RATIO = 5.0
_FULL_WATCH = 0.2, 1.0  # watch ratio if not skipped: offset + slope * affinity, at the median duration
_DAYS_OF_COMPLETE_USERS: Final = 3
_WAKING_HOURS = (6.0, 20.0, 23.5)  # sessions start between the first and the last, most often at the middle one


class Sessions(NamedTuple):
    """When the exposures of a block happen.

    Attributes:
        start: ``[E]`` int64, planned start of the event's session, milliseconds since day 0.
        opens_user: ``[E]`` bool, true for the first event of a user.
        opens_session: ``[E]`` bool.
        opens_request: ``[E]`` bool.
    """

    start: IntArray
    opens_user: NDArray[np.bool_]
    opens_session: NDArray[np.bool_]
    opens_request: NDArray[np.bool_]


@dataclass(frozen=True)
class Simulation(Artifact):
    """A simulated log and its truth, on disk.

    Attributes:
        root: the directory with ``log/part-*.parquet`` and ``truth/``, and ``items.parquet`` and ``users.parquet`` if
            the world is living or replays rewards with tables.
        truth: true rewards and exposure probabilities.
        served: the policy and the results of days that another policy served; None = the simulator's own logging policy
            made the log.
    """

    kind: ClassVar = "simulation"
    version: ClassVar = TRUTH_VERSION
    made_by: ClassVar = "recpo simulate"

    root: Path
    truth: Truth
    served: ServedDays | None = None

    @classmethod
    def _read(cls, root: Path) -> Self:
        cls.recognize(root)
        if not (root / LOG).is_dir():  # the log itself is checked like any log
            raise RecpoError(f"{root} is damaged ({LOG}/ is missing): {cls.remedy()}", code="damaged", field=LOG)
        return cls(root, Truth.load(root), ServedDays.load(root))

    @property
    def log(self) -> Path:
        """Directory of the log's Parquet files, for ``recpo.prepare``."""
        return self.root / LOG

    @property
    def days(self) -> range:
        """Numbers of the days of the log; the world starts with day 0."""
        if self.served is None:
            return range(self.truth.preferences.parameters.days)
        return range(self.served.days[0].day, self.served.days[-1].day + 1)

    @property
    def items(self) -> Path | None:
        """Table of the items, in a living world of those born by the last day; None = this world has none."""
        return _if_written(self.root / ITEM_TABLE)

    @property
    def users(self) -> Path | None:
        """Table of the users' attributes; None = this world has none."""
        return _if_written(self.root / USER_TABLE)

    def to_pandas(self) -> pd.DataFrame:
        """The full log in memory, sorted by user and time."""
        return pq.read_table(self.log).to_pandas()

    def values(self, k: int = 10, users: int = 500) -> dict[str, float]:
        """True expected reward on the last day of random items, of the logging policy and of the best lists.

        Args:
            k: length of the lists, at most the size of the catalog.
            users: number of users, from the first on, to average over; only those with known rewards count.
        """
        truth, day = self.truth, float(self.days[-1])
        sample, k = truth.user_ids[truth.preferences.complete][:users], min(k, int(truth.available(day).sum()))
        values = {
            "uniform": truth.uniform_value(sample, day),
            "logging policy": truth.logging_value(sample, day),
            f"best {k} items": truth.top_k_value(sample, truth.oracle_top_k(sample, k, day), day),
        }
        return {name: float(np.mean(value)) for name, value in values.items()}


def _if_written(file: Path) -> Path | None:
    return file if file.is_file() else None


def write_simulation(
    preferences: Preferences,
    out: Path,
    *,
    world: World = "default",
    tables: Mapping[str, Path] = MappingProxyType({}),
    overwrite: bool = False,
    progress: bool = False,
) -> Simulation:
    """Writes ``out/log/part-*.parquet`` and ``out/truth/``, completely or not at all.

    A living world also has ``out/items.parquet`` and ``out/users.parquet``, see ``recpo.worlds.preferences``; a world
    that replays rewards has copies of those that are given.

    Rows are sorted by user and time. The feedback of a row depends on the day on which its session was planned.
    ``propensity`` is the marginal probability of the item under the logging policy, whether ``is_random`` or not (a
    random row was drawn from the uniform part, with probability 1 / V). ``request_id`` is the global number of the
    request's first event. Memory grows with users and items, not with events.

    Args:
        preferences: users, items and all parameters.
        out: output directory.
        world: name of the world that the parameters are based on, for ``truth.json``.
        tables: files to copy by their names in ``out``, ``items.parquet`` and ``users.parquet``.
        overwrite: replace an existing ``out``.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: ``out`` exists and ``overwrite`` is False.
    """
    truth = Truth(preferences, world)
    with output_directory(out, kind="simulation", overwrite=overwrite) as partial:
        truth.save(partial / "truth")
        write_side_information(preferences, partial, preferences.parameters.days - 1)
        for name, file in tables.items():
            shutil.copyfile(file, partial / name)
        write_parts(draw_log(truth), partial / LOG, preferences.parameters.events, progress)
    return Simulation(Path(out), truth)


def draw_log(truth: Truth) -> Iterator[pa.Table]:
    """Yields the log in blocks of complete users; each block has its own random stream, so memory is bounded."""
    parameters, users, _ = truth.preferences
    activity = users.activity.astype(np.float64)
    counts = parameters.generator(_COUNT_STREAM).multinomial(parameters.events, activity / activity.sum())
    total = np.cumsum(counts)
    edges = np.searchsorted(total, np.arange(_EVENTS_PER_BLOCK, parameters.events, _EVENTS_PER_BLOCK)) + 1
    edges = np.unique(np.concatenate([[0], edges, [parameters.users]]))
    for block, (begin, end) in enumerate(pairwise(edges)):
        user_rows = np.repeat(np.arange(begin, end), counts[begin:end])
        if len(user_rows):
            first_event = int(total[begin] - counts[begin])
            yield _draw_block(truth, user_rows, first_event, parameters.generator(_BLOCK_STREAM, block))


def write_parts(blocks: Iterable[pa.Table], directory: Path, events: int, progress: bool) -> None:
    """Writes the blocks of a log into the new ``directory``."""
    directory.mkdir()
    writer: pq.ParquetWriter | None = None
    parts = written = 0
    try:
        # disable=None: a bar on a terminal, nothing in a log file
        disable = None if progress else True
        with tqdm(total=events, unit="event", unit_scale=True, desc="simulate", disable=disable) as bar:
            for block in blocks:
                if writer is None or written >= _EVENTS_PER_FILE:
                    if writer is not None:
                        writer.close()
                    writer = pq.ParquetWriter(directory / f"part-{parts:05d}.parquet", SCHEMA, compression="zstd")
                    parts, written = parts + 1, 0
                writer.write_table(block)
                written += block.num_rows
                bar.update(block.num_rows)
    finally:
        if writer is not None:
            writer.close()


def _draw_block(truth: Truth, user_rows: IntArray, first_event: int, rng: np.random.Generator) -> pa.Table:
    preferences = truth.preferences
    items = preferences.items
    sessions = draw_sessions(preferences, user_rows, rng)
    day = sessions.start // MILLISECONDS_PER_DAY
    item_rows, is_random, propensity = _draw_exposures(truth, user_rows, day, rng)
    affinity = preferences.affinity(user_rows, item_rows[:, None], day)[:, 0]
    watch_time = draw_watch_time(preferences, affinity, items.duration[item_rows], rng)
    dislike = rng.random(len(affinity)) < preferences.dislike_probability(affinity, items.clickbait[item_rows])
    event = first_event + np.arange(len(user_rows))
    columns = {
        "user_id": preferences.users.user_id[user_rows],
        "item_id": items.item_id[item_rows],
        "timestamp": preferences.parameters.start_ms + event_times(sessions, watch_time, rng),
        "watch_time": watch_time.astype(np.float32),
        "duration": items.duration[item_rows],
        "dislike": dislike,
        "propensity": propensity.astype(np.float32),
        "is_random": is_random,
        "request_id": np.maximum.accumulate(np.where(sessions.opens_request, event, 0)),
    }
    return pa.table(columns, schema=SCHEMA)


def _draw_exposures(
    truth: Truth, user_rows: IntArray, day: IntArray, rng: np.random.Generator
) -> tuple[IntArray, NDArray[np.bool_], FloatArray]:
    """Items ``[E]``, whether they are random, and their propensities, each under the logging policy of its day."""
    days = day if truth.lives else np.zeros_like(day)
    item_rows, is_random = np.zeros_like(user_rows), np.zeros(len(user_rows), bool)
    propensity = np.zeros(len(user_rows))
    for number in np.unique(days):
        rows, policy = np.flatnonzero(days == number), truth.policy_on(int(number))
        item_rows[rows], is_random[rows] = policy.sample(user_rows[rows], rng)
        propensity[rows] = policy.propensity(user_rows[rows], item_rows[rows, None])[:, 0]
    return item_rows, is_random, propensity


def draw_sessions(preferences: Preferences, user_rows: IntArray, rng: np.random.Generator) -> Sessions:
    """Cuts each user's exposures into sessions of geometric length on uniformly drawn days, and those into requests.

    Where rewards are replayed, users with unknown rewards have none on the last three days: the default test and
    validation day, and a day on which a session that began late may end.
    """
    parameters = preferences.parameters
    size = len(user_rows)
    opens_user = np.concatenate([[True], user_rows[1:] != user_rows[:-1]])
    opens_session = opens_user | (rng.random(size) < 1 / parameters.session_length)
    first = np.flatnonzero(opens_session)
    hour = rng.triangular(*_WAKING_HOURS, size=len(first))
    last: int | IntArray = parameters.days
    if preferences.replays:
        early = max(1, parameters.days - _DAYS_OF_COMPLETE_USERS)
        last = np.where(preferences.complete[user_rows[first]], parameters.days, early)
    start = rng.integers(0, last, len(first)) * MILLISECONDS_PER_DAY + np.rint(hour * 3_600_000)
    start = start.astype(np.int64)
    start = start[np.lexsort((start, user_rows[first]))]
    session = np.cumsum(opens_session) - 1
    position = np.arange(size) - first[session]
    return Sessions(start[session], opens_user, opens_session, position % parameters.request_size == 0)


def draw_watch_time(
    preferences: Preferences, affinity: FloatArray, duration: FloatArray, rng: np.random.Generator
) -> FloatArray:
    """Watch times ``[E]`` in seconds, whole milliseconds, of exposures with these affinities and durations.

    With probability ``skip_share (1 - affinity)`` the user swipes on within three seconds. Otherwise

        ratio = (0.2 + affinity) (duration_median / duration)^duration_bias exp(watch_noise z),    z ~ N(0, 1)

    at most 5: short videos are watched again, long ones are abandoned. So a watch time is only meaningful in comparison
    with others of the same duration.
    """
    parameters = preferences.parameters
    seconds = duration.astype(np.float64)
    offset, slope = _FULL_WATCH
    level = offset + slope * affinity
    bias = (parameters.duration_median / seconds) ** parameters.duration_bias
    noise = np.exp(parameters.watch_noise * rng.standard_normal(len(affinity)))
    watched = np.minimum(level * bias * noise, _MAX_WATCH_RATIO) * seconds
    skipped = np.minimum(rng.uniform(*_SKIP_SECONDS, len(affinity)), seconds)
    is_skip = rng.random(len(affinity)) < parameters.skip_share * (1 - affinity)
    return np.round(np.where(is_skip, skipped, watched), 3)


def event_times(sessions: Sessions, watch_time: FloatArray, rng: np.random.Generator) -> IntArray:
    """Milliseconds since day 0 ``[E]``, strictly increasing within a user.

    Every exposure starts after the previous one was watched and a pause. A session that is planned before the previous
    one has ended waits for it: ``t_j = elapsed_j + max over the user's sessions l <= j of (start_l - elapsed_l)``.
    """
    busy = np.rint(watch_time * 1000).astype(np.int64) + rng.integers(*PAUSE_MS, len(watch_time))
    elapsed = np.cumsum(busy) - busy
    lead = sessions.start - elapsed
    # An offset per user, larger than the range of the block, separates the users, so one running maximum serves all.
    user = (np.cumsum(sessions.opens_user) - 1) * (np.ptp(lead) + 1)
    lowest = np.iinfo(np.int64).min
    return elapsed + np.maximum.accumulate(np.where(sessions.opens_session, lead + user, lowest)) - user

"""The days after a log: a policy serves the simulated users, who react by their true preferences on each day.

Users behave as in the log: the number of exposures per day is the log's average, distributed over users by activity, in
sessions and requests of the same lengths, with the same model of watch times, dislikes and drift.

Requests are served in rounds: the n-th requests of all users of a day form one batch. So every request sees everything
that its user was shown before, also on the same day, and the number of batches of a day is that of the requests of its
most active user.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.worlds import log
from recpo.worlds.parameters import MILLISECONDS_PER_DAY
from recpo.worlds.preferences import FloatArray, IntArray, Preferences, write_side_information
from recpo.worlds.truth import RequestValues, Truth, request_values

_SERVED_STREAM = 5
_LOWEST = np.iinfo(np.int64).min


class Shown(NamedTuple):
    """Slates that a policy shows in some requests.

    Attributes:
        item_ids: ``[R, k]`` external ids; entries beyond a slate's length are not read.
        propensity: ``[R, k]`` probability of the item at a random position of the slate.
        explored: ``[R, k]`` bool, the item is not one of the best.
        is_random: ``[R]`` bool, the slate was drawn uniformly.
        lengths: ``[R]`` number of items in each slate, at most the requested number.
    """

    item_ids: IntArray
    propensity: FloatArray
    explored: NDArray[np.bool_]
    is_random: NDArray[np.bool_]
    lengths: IntArray


ShowSlates = Callable[[pa.Table, pa.Table, IntArray, IntArray, np.random.Generator], Shown]
"""A policy that serves: ``(histories, exclude, user_ids, sizes, generator)`` to slates of ``sizes [R]`` items for the
distinct users ``user_ids [R]``. ``histories`` are all events of these users so far, columns as in the log, in any
order; ``exclude`` are the events whose items must not be shown to their users; all random numbers come from
``generator``."""


class Requests(NamedTuple):
    """The requests of a day, ``[N]`` each, sorted by user and time.

    Attributes:
        user_row: user of the request.
        size: number of requested items.
        due: planned start of the session, milliseconds since day 0; equal for all requests of a session.
        opens_session: whether it starts a session and waits for ``due``; otherwise, it follows the previous request.
        turn: number of the request among the user's requests of the day, from 0.
    """

    user_row: IntArray
    size: IntArray
    due: IntArray
    opens_session: NDArray[np.bool_]
    turn: IntArray


class _Served(NamedTuple):
    """A round of requests: its log rows, the time at which each user is free again, and its true values."""

    events: pa.Table
    free: IntArray
    values: RequestValues
    not_shown: FloatArray
    explored: int
    short: int


def write_next_days(
    worlds: Sequence[log.Simulation],
    out: Path,
    show: ShowSlates,
    how: log.ServedDays,
    *,
    days: int,
    overwrite: bool = False,
    progress: bool = False,
    inputs: Sequence[Path] = (),
) -> log.Simulation:
    """Writes ``out/log/``, ``out/truth/`` and ``out/served.json``, completely or not at all.

    Reads the full log so far into memory.

    Args:
        worlds: all days so far: a world, followed by the days that policies served, in order.
        out: output directory.
        show: the policy.
        how: how it serves; ``served.json`` is this with the reports of the days.
        days: number of days to serve.
        overwrite: replace an existing ``out``.
        progress: show a progress bar on a terminal.
        inputs: further directories that are read meanwhile, besides those of ``worlds``.

    Raises:
        RecpoError: the worlds are not consecutive days of one world; ``out`` exists and ``overwrite`` is False.
    """
    first = validate_worlds(worlds)
    truth = worlds[0].truth
    read = [*inputs, *(world.root for world in worlds)]
    with output_directory(out, kind="simulation", overwrite=overwrite, inputs=read) as partial:
        past = pa.concat_tables([pq.read_table(world.log, schema=log.SCHEMA) for world in worlds])
        numbers = range(first, first + days)
        events, reports = serve_days(truth, past, show, how, days=numbers, progress=progress)
        truth.save(partial / "truth")
        write_side_information(truth.preferences, partial, numbers[-1])
        for table in (worlds[0].items, worlds[0].users) if truth.preferences.replays else ():
            if table is not None:
                shutil.copyfile(table, partial / table.name)
        log.write_parts([events], partial / log.LOG, events.num_rows, progress=False)
        served = dataclasses.replace(how, days=tuple(reports))
        served.save(partial)
    return log.Simulation(Path(out), truth, served)


def validate_worlds(worlds: Sequence[log.Simulation]) -> int:
    """The number of the next day.

    Raises:
        RecpoError: the first does not start with day 0, one belongs to another world, or a day is missing.
    """
    parameters, day = worlds[0].truth.preferences.parameters, 0
    for world in worlds:
        if world.truth.preferences.parameters != parameters or not _same_rewards(world.truth, worlds[0].truth):
            message = f"simulate: {world.root} belongs to another world than {worlds[0].root}: name days of one world"
            raise RecpoError(message, code="mismatch", field="after")
        if world.days[0] != day:
            message = (
                f"simulate: {world.root} begins on day {world.days[0]}, expected day {day}: name the world first, and "
                "after it every day that was served since, in order"
            )
            raise RecpoError(message, code="mismatch", field="days")
        day = world.days[-1] + 1
    return day


def _same_rewards(one: Truth, other: Truth) -> bool:
    own, others = one.preferences.users.rewards, other.preferences.users.rewards
    if own is None or others is None:
        return own is others
    return np.array_equal(own, others, equal_nan=True)


def serve_days(
    truth: Truth,
    past: pa.Table,
    show: ShowSlates,
    how: log.ServedDays,
    *,
    days: Sequence[int],
    progress: bool = False,
) -> tuple[pa.Table, list[log.DayReport]]:
    """Serves consecutive days.

    Every day depends only on the seed, its number and the log so far: serving two days at once gives the same result as
    serving them one after the other.

    Args:
        truth: truth of the world.
        past: the complete log so far.
        show: the policy.
        how: how it serves: other seeds give other days of the same world, and the oracle repeats items as it does.
        days: numbers of the days to serve.
        progress: show a progress bar on a terminal.

    Returns:
        The new rows of the log, sorted by user and time, and a report of every day.
    """
    served, reports = [log.SCHEMA.empty_table()], []
    with tqdm(unit="request", desc="simulate", disable=None if progress else True) as bar:
        for day in days:
            key = np.random.SeedSequence([truth.preferences.parameters.seed, how.seed], spawn_key=(_SERVED_STREAM, day))
            generator = np.random.default_rng(key)
            requests = plan_day(truth.preferences, day, generator)
            bar.reset(total=len(requests.user_row))
            so_far = _sorted(pa.concat_tables([past, *served]))
            events, report = _serve_day(truth, so_far, show, requests, day, how.repeat_after, generator, bar)
            served.append(events)
            reports.append(report)
    return _sorted(pa.concat_tables(served)), reports


def plan_day(preferences: Preferences, day: int, generator: np.random.Generator) -> Requests:
    """The requests of a day: users, times and numbers of items."""
    parameters, users, _ = preferences
    # users with unknown rewards are in the log only
    activity = np.where(preferences.complete, users.activity.astype(np.float64), 0.0)
    share = activity.sum() / users.activity.astype(np.float64).sum()
    events = max(1, round(parameters.events * share / parameters.days))
    one_day = preferences._replace(parameters=dataclasses.replace(parameters, events=events, days=1))
    counts = generator.multinomial(events, activity / activity.sum())
    user_rows = np.repeat(np.arange(len(counts)), counts)
    sessions = log.draw_sessions(one_day, user_rows, generator)
    first = np.flatnonzero(sessions.opens_request)
    opens_user = np.flatnonzero(sessions.opens_user[first])
    return Requests(
        user_row=user_rows[first],
        size=np.diff(np.append(first, events)),
        due=day * MILLISECONDS_PER_DAY + sessions.start[first],
        opens_session=sessions.opens_session[first],
        turn=np.arange(len(first)) - np.repeat(opens_user, np.diff(np.append(opens_user, len(first)))),
    )


def _serve_day(
    truth: Truth,
    past: pa.Table,
    show: ShowSlates,
    requests: Requests,
    day: int,
    repeat_after: float | None,
    generator: np.random.Generator,
    bar: tqdm[None],
) -> tuple[pa.Table, log.DayReport]:
    ids = past["request_id"].to_numpy()
    request_ids = int(ids.max(initial=-1)) + 1 + np.arange(len(requests.user_row))
    owner = np.searchsorted(truth.user_ids, past["user_id"].to_numpy())
    offsets = np.searchsorted(owner, np.arange(len(truth.user_ids) + 1))
    free = _free_after(truth, past, offsets)
    rounds: list[_Served] = []
    for turn in range(int(requests.turn.max(initial=-1)) + 1):
        chosen = np.flatnonzero(requests.turn == turn)
        user_rows = requests.user_row[chosen]
        today = [_of_users(one.events, truth.user_ids[user_rows]) for one in rounds]
        histories = pa.concat_tables([past.take(_ranges(offsets[user_rows], offsets[user_rows + 1])), *today])
        asked = Requests._make(column[chosen] for column in requests)
        begin = np.where(asked.opens_session, np.maximum(asked.due, free[user_rows]), free[user_rows])
        excluded = _excluded(truth, histories, user_rows, begin, repeat_after)
        shown = show(histories, excluded, truth.user_ids[user_rows], asked.size, generator)
        one = _serve_round(truth, shown, excluded, asked, begin, request_ids[chosen], day, generator)
        free[user_rows] = one.free
        rounds.append(one)
        bar.update(len(chosen))
    events = pa.concat_tables([log.SCHEMA.empty_table(), *(one.events for one in rounds)])
    return events, _report(truth, day, rounds, events)


def _serve_round(
    truth: Truth,
    shown: Shown,
    excluded: pa.Table,
    asked: Requests,
    begin: IntArray,
    request_ids: IntArray,
    day: int,
    generator: np.random.Generator,
) -> _Served:
    """One request for each of some users: the feedback on the items shown, and the true values."""
    preferences, items, user_rows = truth.preferences, truth.preferences.items, asked.user_row
    user_ids = truth.user_ids[user_rows]
    filled = np.arange(shown.item_ids.shape[1]) < shown.lengths[:, None]
    item_rows = np.where(filled, np.searchsorted(items.item_id, np.where(filled, shown.item_ids, 0)), -1)
    request, place = np.nonzero(filled)
    item = item_rows[request, place]
    _validate_born(truth, item, day)
    affinity = preferences.affinity(user_rows[request], item[:, None], float(day))[:, 0]
    watch_time = log.draw_watch_time(preferences, affinity, items.duration[item], generator)
    dislike = generator.random(len(item)) < preferences.dislike_probability(affinity, items.clickbait[item])
    busy = np.zeros(filled.shape, np.int64)
    busy[filled] = np.rint(watch_time * 1000).astype(np.int64) + generator.integers(*log.PAUSE_MS, len(item))
    start = preferences.parameters.start_ms + begin[:, None] + np.cumsum(busy, axis=1) - busy
    # a propensity that rounds to 0 in float32 would be read as missing
    propensity = np.maximum(shown.propensity[filled], np.finfo(np.float32).tiny)
    events = {
        "user_id": user_ids[request],
        "item_id": items.item_id[item],
        "timestamp": start[filled],
        "watch_time": watch_time.astype(np.float32),
        "duration": items.duration[item],
        "dislike": dislike,
        "propensity": propensity.astype(np.float32),
        "is_random": shown.is_random[request],
        "request_id": request_ids[request],
    }
    order = np.argsort(user_ids)
    barred = (
        order[np.searchsorted(user_ids[order], excluded["user_id"].to_numpy())],
        np.searchsorted(items.item_id, excluded["item_id"].to_numpy()),
    )
    values, not_shown = request_values(truth, float(day), user_rows, item_rows, barred)
    return _Served(
        pa.table(events, schema=log.SCHEMA),
        begin + busy.sum(axis=1),
        values,
        not_shown,
        int(shown.explored[filled].sum()),
        int((shown.lengths < asked.size).sum()),
    )


def _excluded(
    truth: Truth, histories: pa.Table, user_rows: IntArray, begin: IntArray, repeat_after: float | None
) -> pa.Table:
    """The events of users ``user_rows [R]`` whose items they may not be shown ``begin [R]`` ms after day 0."""
    if repeat_after is None:
        return histories
    since = np.full(len(truth.user_ids), _LOWEST)
    since[user_rows] = begin + truth.preferences.parameters.start_ms - round(repeat_after * MILLISECONDS_PER_DAY)
    owner = np.searchsorted(truth.user_ids, histories["user_id"].to_numpy())
    return histories.filter(pa.array(histories["timestamp"].to_numpy() > since[owner]))


def _validate_born(truth: Truth, item_rows: IntArray, day: int) -> None:
    unborn = item_rows[~truth.preferences.exists(item_rows, float(day))]
    if len(unborn):
        named = ", ".join(map(str, np.unique(truth.item_ids[unborn])[:5]))
        message = (
            f"simulate: the policy shows items on day {day} that are born later, such as {named}: serve a bundle whose "
            "catalog has no future items"
        )
        raise RecpoError(message, code="mismatch", field="policy")


def _report(truth: Truth, day: int, rounds: Sequence[_Served], events: pa.Table) -> log.DayReport:
    values = RequestValues(*(np.concatenate(column) for column in zip(*(one.values for one in rounds), strict=True)))
    shown = ~np.isnan(values.value)

    def mean(numbers: NDArray[Any]) -> float:
        return float(np.mean(numbers)) if len(numbers) else 0.0

    value, oracle = mean(values.value[shown]), mean(values.oracle_value[shown])
    available = truth.available(float(day))
    return log.DayReport(
        day,
        requests=len(shown),
        short_slates=sum(one.short for one in rounds),
        exposures=events.num_rows,
        value=value,
        dislikes=mean(values.dislikes[shown]),
        logged_dislikes=mean(events["dislike"].to_numpy()),
        logging_value=mean(values.logging_value[shown]),
        logging_dislikes=mean(values.logging_dislikes[shown]),
        oracle_value=oracle,
        regret=oracle - value,
        coverage=len(np.unique(events["item_id"].to_numpy())) / int(available.sum()),
        logging_coverage=mean(-np.expm1(sum((one.not_shown for one in rounds), np.zeros(len(available))))[available]),
        explored=sum(one.explored for one in rounds) / max(1, events.num_rows),
        is_random=mean(events["is_random"].to_numpy()),
    )


def _free_after(truth: Truth, past: pa.Table, offsets: IntArray) -> IntArray:
    """``[U]`` time from which each user is free, milliseconds since day 0: the end of the last watch so far."""
    free = np.full(len(truth.user_ids), _LOWEST)
    known = offsets[1:] > offsets[:-1]
    last = offsets[1:][known] - 1
    watched = np.rint(past["watch_time"].to_numpy()[last].astype(np.float64) * 1000).astype(np.int64)
    begin = past["timestamp"].to_numpy()[last] - truth.preferences.parameters.start_ms
    free[known] = begin + watched + log.PAUSE_MS[0]
    return free


def _sorted(events: pa.Table) -> pa.Table:
    return events.take(np.lexsort((events["timestamp"].to_numpy(), events["user_id"].to_numpy())))


def _of_users(events: pa.Table, user_ids: IntArray) -> pa.Table:
    return events.take(np.flatnonzero(np.isin(events["user_id"].to_numpy(), user_ids)))


def _ranges(begin: IntArray, end: IntArray) -> IntArray:
    """``begin[0] .. end[0] - 1``, ``begin[1] .. end[1] - 1``, ..."""
    lengths = end - begin
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(begin - before, lengths)

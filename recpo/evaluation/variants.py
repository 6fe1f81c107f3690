"""Variants of a served log: value and dislikes of each, differences to the control, preference of interleaved lists.

The unit is the impression, one slate of a request. Its value is the sum over its items of

    grade - dislike_cost disliked,    grade = label, or min(watch_time / duration, 1); 0 if nothing was reported

Users are the clusters of every interval, because the slates of a user are alike. NumPy and pyarrow only: the guard of
the server adds up the same numbers.

Confidence sequences are intervals that hold at all times at once, so that one may look at any time and stop. An
ordinary 95 % interval misses its mean at 5 % of the times; somebody who looks every hour sees a miss almost surely. A
confidence sequence misses it at any time at all with probability ``alpha``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import ArrayLike, NDArray

from recpo import __version__
from recpo.base.errors import RecpoError, validate_range
from recpo.evaluation import Z95

_NEEDED: Final = ("user_id", "timestamp", "request_id", "dislike", "experiment", "variant")
_GRADES: Final = ("label", "watch_time", "duration")
_INTERLEAVED: Final = ("team", "credit")
#: What the intervals in tables of variants are.
INTERVALS: Final = "per impression, ± half of the 95 % interval over users; [low, high]: 95 % at all times together"
#: The tables of interleaved lists use this name for them.
INTERLEAVED: Final = "interleaved"


FloatArray = NDArray[np.float64]
#: Error probability of confidence sequences, unless another one is given.
ALPHA: Final = 0.05
#: Clusters before which the normal approximation is not used.
FIRST_LOOK: Final = 100
_LARGEST_BET = 0.5


class EmpiricalBernstein:
    """Confidence sequence of the mean of values in [0, 1]: predictable plug-in empirical Bernstein.

    At each time t, with probability 1 - alpha for all t together,

        |sum_i l_i m_i / L - sum_i l_i x_i / L| <= (log(2 / alpha) + sum_i v_i psi(l_i)) / L,    L = sum_i l_i

    with ``psi(l) = (-log(1 - l) - l) / 4``, ``v_i = 4 (x_i - mean_(i-1))^2`` and bets ``l_i``, which depend on the
    values before i only (Waudby-Smith and Ramdas, arXiv 2010.09686, theorem 2). It needs no distribution, no
    independence and no minimum count: ``m_i`` is the expectation of ``x_i`` given all values before. If it is constant,
    the interval is of that mean; otherwise of its weighted mean so far, for example over the users who came. Intervals
    of earlier times are not intersected, because that mean may move.

    Args:
        shape: shape of the sequences that are followed side by side; () = one.
        alpha: probability of a miss at any time.

    Attributes:
        count: number of values so far.
        low: lower end now; 0 before the first value.
        high: upper end now; 1 before the first value.

    Raises:
        RecpoError: ``alpha`` is outside (0, 1).
    """

    def __init__(self, shape: tuple[int, ...] = (), *, alpha: float = ALPHA) -> None:
        validate_range(0 < alpha < 1, "alpha", "must be between 0 and 1", alpha)
        self._log = math.log(2 / alpha)
        self.count = 0
        self._sum, self._squares = np.full(shape, 0.5), np.full(shape, 0.25)
        self._bets, self._weighted, self._variation = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.low, self.high = np.zeros(shape), np.ones(shape)

    def update(self, values: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Appends values ``[*shape, n]`` and returns both ends ``[*shape, n]`` after each of them.

        Raises:
            RecpoError: a value outside [0, 1].
        """
        x = np.asarray(values, np.float64)
        if not ((x >= 0) & (x <= 1)).all():  # nan as well
            raise RecpoError("a value outside [0, 1]: scale it by its bounds", code="out_of_range", field="values")
        times = self.count + np.arange(1, x.shape[-1] + 1)
        sums = self._sum[..., None] + x.cumsum(-1)
        mean = sums / (times + 1)
        squares = self._squares[..., None] + np.square(x - mean).cumsum(-1)
        before = np.concatenate([self._squares[..., None], squares], -1)[..., :-1] / times  # the variance before
        mean_before = np.concatenate([self._sum[..., None], sums], -1)[..., :-1] / times
        bets = np.minimum(np.sqrt(2 * self._log / (before * times * np.log1p(times))), _LARGEST_BET)
        variation = np.square(x - mean_before) * (-np.log1p(-bets) - bets)
        total = self._bets[..., None] + bets.cumsum(-1)
        weighted = self._weighted[..., None] + (bets * x).cumsum(-1)
        varied = self._variation[..., None] + variation.cumsum(-1)
        center, half = weighted / total, (self._log + varied) / total
        low, high = np.maximum(center - half, 0.0), np.minimum(center + half, 1.0)
        if len(times):
            self.count = int(times[-1])
            self._sum, self._squares = sums[..., -1], squares[..., -1]
            self._bets, self._weighted, self._variation = total[..., -1], weighted[..., -1], varied[..., -1]
            self.low, self.high = low[..., -1], high[..., -1]
        return low, high


class ClusteredMean(NamedTuple):
    """A mean per impression with its standard error over users.

    Attributes:
        mean: sum of all values over the number of impressions; nan without impressions.
        error: its standard error, whose clusters are the users; nan with fewer than two users.
        impressions: number of impressions.
        users: number of clusters U.
    """

    mean: float
    error: float
    impressions: int
    users: int

    def __sub__(self, other: ClusteredMean) -> ClusteredMean:
        """The difference of two means of different users, with the error of independent samples.

        Its number of clusters is that of the smaller sample: that one has most of the error, and a look has to wait
        for it.
        """
        error, users = math.hypot(self.error, other.error), min(self.users, other.users)
        return ClusteredMean(self.mean - other.mean, error, self.impressions + other.impressions, users)

    @property
    def half_width(self) -> float:
        """Half-width of the ordinary 95 % interval, which holds if one looks once."""
        return Z95 * self.error

    def sequence_half_width(self, *, alpha: float = ALPHA, tightest: int = 2000) -> float:
        """Half-width of the confidence sequence; infinite before the first look, see ``anytime_half_width``."""
        return float(anytime_half_width(self.error, self.users, alpha=alpha, tightest=tightest))


def clustered_mean(sums: ArrayLike, counts: ArrayLike) -> ClusteredMean:
    """The mean per impression, its standard error from the users' residuals (the linearized ratio).

        mean = S / N,    error^2 = U / (U - 1) sum_u (s_u - mean n_u)^2 / N^2

    Args:
        sums: ``[U]`` sum of a user's values.
        counts: ``[U]`` number of a user's impressions.
    """
    s, n = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    total, users = float(n.sum()), int((n > 0).sum())
    if not total:
        return ClusteredMean(math.nan, math.nan, 0, 0)
    mean = float(s.sum()) / total
    squares = float(np.square(s - mean * n).sum())
    error = math.sqrt(users / (users - 1) * squares) / total if users > 1 else math.nan
    return ClusteredMean(mean, error, int(total), users)


def anytime_half_width(error: ArrayLike, count: ArrayLike, *, alpha: float = ALPHA, tightest: int = 2000) -> FloatArray:
    """Half-width of the asymptotic confidence sequence of a mean (Waudby-Smith et al., arXiv 2103.06476, theorem 2.2).

        error sqrt((1 + 1 / (t r)) log((t r + 1) / alpha^2)),    r = (-2 log alpha + log(-2 log alpha) + 1) / tightest

    It is the boundary of a normal mixture (Robbins, 1970) and needs no bounds of the values. With users as clusters it
    is conservative if the values of a user are positively correlated: the deviations at two times are then more alike
    than those of independent increments, and cross the boundary less often (Slepian's inequality).

    Args:
        error: standard error of the mean at time t.
        count: t, the number of clusters; the half-width is infinite before ``FIRST_LOOK``.
        alpha: probability of a miss at any time.
        tightest: the t at which the interval is about as short as possible: 1.55 times the ordinary 95 %
            interval there, for alpha = 0.05.
    """
    validate_range(0 < alpha < 1, "alpha", "must be between 0 and 1", alpha)
    validate_range(tightest >= 1, "tightest", "must be at least 1", tightest)
    t, twice = np.maximum(np.asarray(count, np.float64), 1.0), -2 * math.log(alpha)
    scaled = t * (twice + math.log(twice) + 1) / tightest
    factor = np.sqrt((1 + 1 / scaled) * (np.log1p(scaled) + twice))
    known = (t >= FIRST_LOOK) & ~np.isnan(np.asarray(error, np.float64))
    return np.where(known, factor * np.nan_to_num(np.asarray(error, np.float64)), np.inf)


class Slates(NamedTuple):
    """Impressions of one variant, in order of time.

    Attributes:
        user_id: ``[N]`` the users.
        value: ``[N]`` the value of each slate.
        disliked: ``[N]`` 1.0 if an item of the slate was disliked, otherwise 0.0.
        preference: ``[N]`` sum of credit times value over the items of an interleaved slate, nan for others.
    """

    user_id: NDArray[Any]
    value: NDArray[np.float64]
    disliked: NDArray[np.float64]
    preference: NDArray[np.float64]


def read_log(log: Path | str) -> pa.Table:
    """The columns that ``slates`` needs, of the Parquet files of a log of ``recpo serve``.

    Raises:
        RecpoError: there are no files, or they have no variants.
    """
    path = Path(log)
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        message = f"{path} has no Parquet files: give the directory of --log of `recpo serve`, after its outcome window"
        raise RecpoError(message, code="missing_file", field="log")
    schema = pa.unify_schemas([ds.dataset(file).schema for file in files])
    if missing := [name for name in _NEEDED if name not in schema.names]:
        message = f"{path} has no column {missing[0]}: expected a log that `recpo serve --variant` wrote"
        raise RecpoError(message, code="missing_column", field=missing[0])
    columns = [name for name in (*_NEEDED, *_GRADES, *_INTERLEAVED) if name in schema.names]
    return ds.dataset(files, schema=schema).to_table(columns, filter=ds.field("experiment").is_valid())


def slates(table: pa.Table, *, dislike_cost: float = 1.0) -> dict[str, Slates]:
    """The impressions of each variant of one experiment, and of the interleaved lists under ``INTERLEAVED``.

    Args:
        table: rows of a log, see ``read_log``.
        dislike_cost: what a dislike subtracts.
    """
    names = table.schema.names
    if "label" in names:
        grade = pc.fill_null(table["label"], 0.0)
    else:
        duration = pc.if_else(pc.greater(table["duration"], 0.0), table["duration"], None)
        grade = pc.fill_null(pc.min_element_wise(pc.divide(table["watch_time"], duration), 1.0, skip_nulls=False), 0.0)
    disliked = pc.cast(pc.fill_null(table["dislike"], False), pa.float64())
    value = pc.subtract(grade, pc.multiply(disliked, dislike_cost))
    unknown = pa.nulls(len(table), pa.float64())
    preference = pc.multiply(table["credit"], value) if "credit" in names else unknown
    keys = ["request_id", "user_id", "timestamp", "variant"]
    rows = table.select(keys).append_column("value", value).append_column("disliked", disliked)
    rows = rows.append_column("preference", preference)
    sums = [("value", "sum"), ("disliked", "max"), ("preference", "sum")]
    found = rows.group_by(keys).aggregate(sums).sort_by([("timestamp", "ascending"), ("request_id", "ascending")])
    variant = pc.fill_null(found["variant"], INTERLEAVED)
    result = {}
    for name in sorted(pc.unique(variant).to_pylist()):
        own = found.filter(pc.equal(variant, name))
        columns = (own[f"{column}_{how}"].to_numpy() for column, how in sums)
        result[name] = Slates(own["user_id"].to_numpy(), *columns)
    return result


class PerUser:
    """Sums over the impressions of each user, to which further impressions are added as they are published."""

    def __init__(self) -> None:
        self._sums: dict[Any, float] = defaultdict(float)
        self._counts: dict[Any, int] = defaultdict(int)

    def add(self, users: Sequence[Any] | NDArray[Any], values: NDArray[np.float64]) -> None:
        """Adds one value per impression."""
        distinct, places = np.unique(np.asarray(users), return_inverse=True)
        sums, counts = np.bincount(places, values, len(distinct)), np.bincount(places, minlength=len(distinct))
        for user, total, count in zip(distinct.tolist(), sums.tolist(), counts.tolist(), strict=True):
            self._sums[user] += total
            self._counts[user] += count

    def mean(self) -> ClusteredMean:
        """The mean per impression with its error over users."""
        return clustered_mean(np.fromiter(self._sums.values(), float), np.fromiter(self._counts.values(), float))


def variants_document(log: Path | str, *, control: str | None = None, dislike_cost: float = 1.0) -> dict[str, Any]:
    """Every number of ``recpo evaluate --by variant``, of the latest experiment in the log, as JSON values.

    ``variants``: name, users, impressions, value and dislikes per impression, and their differences to the control;
    ``preference``: of the second variant of interleaved lists, null without them; ``warnings``. A number is ``mean``,
    ``half_width`` of the ordinary 95 % interval over users, and ``sequence`` of the confidence sequence, [low, high],
    null before 100 users.

    Args:
        log: directory of a log of ``recpo serve --variant``.
        control: name of the variant that others are compared with; None = the one with most impressions.
        dislike_cost: what a dislike subtracts from the value.

    Raises:
        RecpoError: there is no log with variants, or no such control.
    """
    table = read_log(log)
    if not len(table):
        raise RecpoError(f"{log} has no row of a variant", code="empty", field="log")
    chosen = table["experiment"][int(pc.index(table["timestamp"], pc.max(table["timestamp"])).as_py())].as_py()
    known, warnings = sorted(pc.unique(table["experiment"]).to_pylist()), []
    if others := [name for name in known if name != chosen]:
        warnings.append(f"The log has further experiments, which are left out: {', '.join(others)}.")
    found = slates(table.filter(pc.equal(table["experiment"], chosen)), dislike_cost=dislike_cost)
    interleaved = found.pop(INTERLEAVED, None)
    most = sorted(found, key=lambda name: -len(found[name].value))
    if control is not None and control not in found:
        message = f"{log} has no variant {control!r}, it has {', '.join(most)}"
        raise RecpoError(message, code="unknown_name", field="control")
    control = control or (most[0] if most else None)
    rows, means = [], {name: (_mean(of, of.value), _mean(of, of.disliked)) for name, of in found.items()}
    for name in most:
        value, dislikes = means[name]
        row: dict[str, Any] = {"variant": name, "users": value.users, "impressions": value.impressions}
        row["value"], row["dislikes"] = _as_json(value), _as_json(dislikes)
        bounds = EmpiricalBernstein()
        bounds.update(found[name].disliked)
        row["dislikes"]["sequence"] = [float(bounds.low), float(bounds.high)]
        if name != control and control is not None:
            row["difference"] = _as_json(value - means[control][0])
            row["dislikes_difference"] = _as_json(dislikes - means[control][1])
        rows.append(row)
    return {
        "experiment": chosen,
        "control": control,
        "dislike_cost": dislike_cost,
        "alpha": ALPHA,
        "variants": rows,
        "preference": None if interleaved is None else _preference(interleaved, _teams(table, chosen)),
        "warnings": warnings,
        "recpo_version": __version__,
    }


def _mean(of: Slates, values: NDArray[np.float64]) -> ClusteredMean:
    mean = PerUser()
    mean.add(of.user_id, values)
    return mean.mean()


def _teams(table: pa.Table, experiment: str) -> Sequence[str]:
    """The two variants of interleaved lists, the one with negative credit first."""
    rows = table.filter(pc.and_(pc.equal(table["experiment"], experiment), pc.is_valid(table["team"])))
    sums = rows.group_by("team").aggregate([("credit", "mean")]).sort_by("credit_mean")
    names: list[str] = sums["team"].to_pylist()
    return names


def _preference(of: Slates, teams: Sequence[str]) -> dict[str, Any]:
    """How much more the items of the second variant are worth in lists that show both."""
    found = _mean(of, of.preference)
    wins, losses = float((of.preference > 0).mean()), float((of.preference < 0).mean())
    document = {"of": teams[-1], "over": teams[0], "users": found.users, "impressions": found.impressions}
    return document | _as_json(found) | {"wins": wins, "losses": losses}


def _as_json(found: ClusteredMean) -> dict[str, Any]:
    half = found.sequence_half_width()
    sequence = None if math.isinf(half) else [found.mean - half, found.mean + half]
    half_width = None if math.isnan(found.error) else found.half_width
    return {"mean": found.mean, "half_width": half_width, "sequence": sequence}

"""Estimates with intervals and warnings from sums per user, and paired differences of two contenders.

Memory grows with users, not with rows. Intervals are those of sums of ratios over users, whose rows depend on each
other: ``sums [U, 2 J]`` hold each user's numerators and denominators, and users are taken as independent draws from a
population. A user's rows may depend on each other in any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from recpo.base.errors import RecpoError, validate_range
from recpo.evaluation.estimates import NOWHERE, Interval, percentile_interval, resampled
from recpo.evaluation.off_policy.diagnostics import (
    MEAN_WEIGHT_LEVEL,
    Diagnostics,
    WeightDistribution,
    effective_sample_size,
    warnings_of,
)
from recpo.evaluation.off_policy.estimators import (
    SNIPS,
    Estimator,
    FloatArray,
    OffPolicyOptions,
    PropensitySource,
    Rows,
    influences_of,
    sum_of_ratios,
)

if TYPE_CHECKING:
    import pandas as pd

_CELLS_KEPT = 1 << 23  # of a resamples x users matrix, two bytes each


def influence(sums: FloatArray) -> FloatArray:
    """How much each user moves the estimate: ``[U]``, of sum 0.

    The delta method: ``sum_j (numerator_uj - ratio_j denominator_uj) / sum_u denominator_uj``.
    """
    return np.asarray(influences_of(sums).sum(1))


def normal_interval(influences: FloatArray, value: float, level: float = 0.95) -> Interval:
    """``value +- z sqrt(U / (U - 1) sum_u influence_u^2)``: right for many users and weights without a long tail.

    nan at both ends where the value is nan, and below two users.

    Args:
        influences: ``[U]`` of the estimate, or differences of those of two estimates on the same users.
        value: the estimate.
        level: probability with which the interval is to contain what is estimated.
    """
    half_width = ndtri((1 + level) / 2).item() * standard_error(influences)
    return Interval(value - half_width, value + half_width)


def standard_error(influences: FloatArray) -> float:
    """``sqrt(U / (U - 1) sum_u influence_u^2)`` of ``influences [U]``; nan below two users."""
    users = len(influences)
    return math.sqrt(users / (users - 1) * (influences**2).sum()) if users > 1 else math.nan


def bootstrap_values(samples: Sequence[FloatArray], resamples: int, seed: int) -> list[FloatArray]:
    """Estimates ``[resamples]`` of each of ``samples`` over users drawn with replacement.

    The same users for all: values of two contenders may be subtracted. Memory: a few resamples at a time.

    Args:
        samples: ``[U, 2 J]`` sums of as many estimators over the same users.
        resamples: how many.
        seed: of the random numbers.
    """
    users = len(samples[0])
    joined = np.concatenate(samples, axis=1)
    draws: Callable[[int, int, int], Iterable[NDArray[np.integer]]]
    draws = _kept_draws if users * resamples <= _CELLS_KEPT else resampled
    totals = np.concatenate([part.astype(np.float64) @ joined for part in draws(users, resamples, seed)])
    edges = np.cumsum([sample.shape[1] for sample in samples])[:-1]
    return [sum_of_ratios(part) for part in np.split(totals, edges, axis=1)]


@lru_cache(maxsize=4)
def _kept_draws(users: int, resamples: int, seed: int) -> tuple[NDArray[np.integer], ...]:
    """``resampled``, kept: every contender, target and pair of contenders of an evaluation has the same."""
    return tuple(part.astype(np.uint16) for part in resampled(users, resamples, seed))


def empirical_bernstein_interval(values: FloatArray, low: float, high: float, level: float = 0.95) -> Interval:
    """An interval that holds for every number of independent ``values [U]`` in ``[low, high]``, not only for many.

        mean +- (sqrt(2 s^2 ln(4 / delta) / U) + 7 (high - low) ln(4 / delta) / (3 (U - 1))),   delta = 1 - level

    Maurer and Pontil (COLT 2009, arXiv 0907.3740), theorem 4, applied to both sides with delta / 2 each. Wide: it pays
    for what it promises.

    Raises:
        RecpoError: a value outside the range.
    """
    users = len(values)
    if users < 2:
        return NOWHERE
    slack = 1e-9 * max(-low, high, 1.0)
    least, most = values.min(), values.max()
    fits = low - slack <= least and most <= high + slack
    validate_range(fits, "values", f"must lie from {low:g} to {high:g}", f"{least:g} to {most:g}")
    log_term = math.log(4 / (1 - level))
    mean, variance = float(values.mean()), float(values.var(ddof=1))
    half_width = math.sqrt(2 * variance * log_term / users) + 7 * (high - low) * log_term / (3 * (users - 1))
    return Interval(max(low, mean - half_width), min(high, mean + half_width))


IntArray = NDArray[np.integer]

_ROW, _WEIGHT, _SQUARED_WEIGHT, _OWN_COLUMNS = 0, 1, 2, 3


class Clusters(NamedTuple):
    """Sums per user.

    Attributes:
        users: ``[U]`` int64, ascending.
        sums: ``[U, K]`` float64, sums over the user's rows.
        rows: ``[U]`` int64, number of the user's rows.
    """

    users: IntArray
    sums: FloatArray
    rows: IntArray


class ClusterSums:
    """Adds up columns of rows per user. A user's rows may come in several chunks."""

    def __init__(self, num_columns: int) -> None:
        self._parts = [Clusters(np.zeros(0, np.int64), np.zeros((0, num_columns)), np.zeros(0, np.int64))]

    def update(self, users: IntArray, columns: FloatArray) -> None:
        """Adds rows: ``users [N]`` and ``columns [N, K]``."""
        self._parts.append(_summed(np.asarray(users, np.int64), columns, np.ones(len(users), np.int64)))
        if sum(len(part.users) for part in self._parts[1:]) > len(self._parts[0].users):
            self.compute()  # merged at every doubling, so each user is merged a logarithmic number of times

    def compute(self) -> Clusters:
        """The sums so far."""
        if len(self._parts) > 1:
            self._parts = [_summed(*(np.concatenate(columns) for columns in zip(*self._parts, strict=True)))]
        return self._parts[0]


def _summed(users: IntArray, columns: FloatArray, rows: IntArray) -> Clusters:
    distinct, position = np.unique(users, return_inverse=True)
    sums = np.empty((len(distinct), columns.shape[1]))
    for column, values in enumerate(columns.T):
        sums[:, column] = np.bincount(position, values, len(distinct))
    return Clusters(distinct, sums, np.bincount(position, rows, len(distinct)).astype(np.int64))


class TargetTotals(NamedTuple):
    """The sums of one target policy over the whole log.

    Attributes:
        users: ``[U]`` int64, ascending.
        rows: ``[U]`` int64, number of the user's rows.
        by_estimator: estimator -> its numerators and denominators ``[U, 2 J]``: sums over the user's rows, divided by
            their number if every user has the same weight. Control variates have no coefficients yet.
        diagnostics: diagnostics of the weights.
    """

    users: IntArray
    rows: IntArray
    by_estimator: dict[Estimator, FloatArray]
    diagnostics: Diagnostics

    @property
    def estimated(self) -> dict[Estimator, FloatArray]:
        """``by_estimator`` with the coefficients of control variates."""
        return {estimator: estimator.with_coefficients(sums) for estimator, sums in self.by_estimator.items()}


class TargetSums:
    """Accumulates the sums per user for the estimators and diagnostics of one target policy.

    Memory: some numbers per user and two per item, for any number of rows.
    """

    def __init__(self, estimators: Sequence[Estimator], num_items: int) -> None:
        ends = list(accumulate((2 * e.num_ratios for e in estimators), initial=_OWN_COLUMNS))
        self._columns = {e: slice(*ends[i : i + 2]) for i, e in enumerate(estimators)}
        self._sums = ClusterSums(ends[-1])
        self._weights = WeightDistribution()
        self._shown = np.zeros(num_items + 1, bool)
        self._chosen = np.zeros(num_items + 1, np.int64)

    def update(self, users: IntArray, items: IntArray, rows: Rows) -> None:
        """Adds rows: ``users [N]`` who were shown ``items [N]``."""
        weight = rows.weight
        self._weights.update(weight)
        self._shown[items] = True
        own = np.stack([np.ones_like(weight), weight, weight**2], 1)
        terms = [estimator.terms(rows) for estimator in self._columns]
        self._sums.update(users, np.concatenate([own, *terms], axis=1))

    def add_choices(self, items: IntArray) -> None:
        """Counts the items that the target policy would show: item ids, 0 = a draw that is not an item."""
        self._chosen += np.bincount(items, minlength=len(self._chosen))

    def compute(self, *, by_user: bool, rows_without_reward: int, rows_without_propensity: int) -> TargetTotals:
        """The totals so far.

        Args:
            by_user: a mean over users of their means over exposures; False: a mean over exposures.
            rows_without_reward: see ``Diagnostics``.
            rows_without_propensity: see ``Diagnostics``.
        """
        clusters = self._sums.compute()
        sums = clusters.sums / clusters.rows[:, None] if by_user else clusters.sums
        weight, squares = sums[:, _WEIGHT], sums[:, _SQUARED_WEIGHT] / (clusters.rows if by_user else 1)
        against_rows = sums[:, [_WEIGHT, _ROW]]
        mean_weight = float(sum_of_ratios(against_rows.sum(0)))
        total = float(weight.sum())
        diagnostics = Diagnostics(
            rows=int(clusters.rows.sum()),
            users=len(clusters.users),
            rows_without_reward=rows_without_reward,
            rows_without_propensity=rows_without_propensity,
            effective_rows=total**2 / float(squares.sum()) if total else 0.0,
            effective_users=effective_sample_size(weight),
            mean_weight=mean_weight,
            mean_weight_interval=normal_interval(influence(against_rows), mean_weight, MEAN_WEIGHT_LEVEL),
            tail=self._weights.compute(),
            unsupported_share=_share(self._chosen[1:][~self._shown[1:]], self._chosen[1:]),
            no_item_share=_share(self._chosen[:1], self._chosen),
        )
        by_estimator = {estimator: sums[:, columns] for estimator, columns in self._columns.items()}
        return TargetTotals(clusters.users, clusters.rows, by_estimator, diagnostics)


def _share(part: IntArray, whole: IntArray) -> float:
    total = int(whole.sum())
    return float(part.sum() / total) if total else np.nan


#: The target of the logging policy.
LOGGING_POLICY = "logging policy"
#: The target of items drawn from the policy.
POLICY = "policy"
#: The target of items drawn from deep lists, by the place of half the discount.
DISCOUNTED = "discounted_{k}"

IntervalKind = Literal["normal", "bootstrap", "empirical_bernstein"]

_SHOWN: tuple[IntervalKind, ...] = ("normal", "bootstrap")
_ROUNDING = 1e-6  # tolerance for float32 probabilities of nearly certain items
_NO_INTERVALS: dict[IntervalKind, Interval] = {"normal": NOWHERE, "bootstrap": NOWHERE, "empirical_bernstein": NOWHERE}
_REFUSED = "refused: the policy would have shown none of the logged items to whom they were shown: there is no support"


class OffPolicyEstimate(NamedTuple):
    """One estimator's estimate of one target policy.

    Attributes:
        target: ``policy`` (items drawn from the policy), ``top_k`` such as ``top_10`` (items drawn uniformly from its
            list of k), ``discounted_k`` (items drawn from its deep list, the first more often), or ``logging policy``.
        estimator: name of the estimator.
        value: mean reward per exposure; nan = no estimate, see the warnings.
        intervals: intervals by kind; nan = not defined.
        effective_sample_size: number of equally weighted rows with the same information.
        rows: number of exposures used.
        users: number of users with these exposures.
        propensity: source of the propensities.
        diagnostics: diagnostics of the target's weights, equal for all of its estimators.
        warnings: reasons not to believe it; empty if there are none.
    """

    target: str
    estimator: str
    value: float
    intervals: dict[IntervalKind, Interval]
    effective_sample_size: float
    rows: int
    users: int
    propensity: PropensitySource
    diagnostics: Diagnostics
    warnings: tuple[str, ...]


class OffPolicyDifference(NamedTuple):
    """The difference in value of two contenders on the same log, by the same estimator.

    Attributes:
        target: target of both contenders.
        estimator: name of the estimator.
        value: the difference of the estimates.
        intervals: normal and bootstrap intervals, paired over users.
        standard_error: standard error of the difference, over users.
        users: number of users with rows.
    """

    target: str
    estimator: str
    value: float
    intervals: dict[IntervalKind, Interval]
    standard_error: float
    users: int

    def __neg__(self) -> OffPolicyDifference:
        """The difference in the other direction."""
        ends = {kind: Interval(-one.high, -one.low) for kind, one in self.intervals.items()}
        return self._replace(value=-self.value, intervals=ends)


@dataclass(frozen=True)
class OffPolicyResult:
    """All estimates of one contender.

    Attributes:
        estimates: all estimates, ordered by target.
        totals: target -> its sums per user.
        options: how values are estimated.
    """

    estimates: tuple[OffPolicyEstimate, ...]
    totals: dict[str, TargetTotals]
    options: OffPolicyOptions

    def to_pandas(self) -> pd.DataFrame:
        """The estimates, one per row: target, estimator, value, and ends of the normal and the bootstrap interval."""
        import pandas as pd

        rows = [
            {
                "target": one.target,
                "estimator": one.estimator,
                "value": one.value,
                **{f"{kind}_{end}": getattr(one.intervals[kind], end) for kind in _SHOWN for end in ("low", "high")},
                "warnings": "; ".join(one.warnings),
            }
            for one in self.estimates
        ]
        return pd.DataFrame(rows)

    def estimate(self, target: str, estimator: str) -> OffPolicyEstimate:
        """One estimate.

        Raises:
            RecpoError: there is no such target or estimator.
        """
        for found in self.estimates:
            if (found.target, found.estimator) == (target, estimator):
                return found
        raise RecpoError(f"there is no estimate {estimator} of {target}", code="unknown_name", field=estimator)

    def differences(self, other: OffPolicyResult) -> tuple[OffPolicyDifference, ...]:
        """The difference in value to ``other``, for every common target and estimator.

        Both contenders weight the same rewards of the same users, so the intervals are those of the users' differences:
        narrower than two separate intervals suggest, if the contenders agree. Estimators with control variates get the
        coefficients of least variance of the difference, not of the two values (Jeunen and Ustimenko, RecSys 2024,
        arXiv 2405.10024), so their difference is not exactly that of the two estimates. Targets
        without an estimate are omitted.

        Raises:
            RecpoError: the two were not evaluated on the same rows.
        """
        found: list[OffPolicyDifference] = []
        for target, mine in self.totals.items():
            if target == LOGGING_POLICY or target not in other.totals:
                continue
            theirs = other.totals[target]
            _validate_pair(mine, theirs)
            shared = [estimator for estimator in mine.by_estimator if estimator in theirs.by_estimator]
            pairs = {e: _pair(e, mine.by_estimator[e], theirs.by_estimator[e]) for e in shared}
            found += self._differences(target, pairs)
        return tuple(found)

    def gains(self, other: OffPolicyResult, target: str) -> FloatArray:
        """``SNIPS - other's SNIPS`` of a target as one number per user, ``[U]``: the pseudo-values of the jackknife.

        ``difference + U influence_u``, whose mean is the difference, and whose standard error is that of the difference
        (to first order; Miller, "The jackknife: a review", Biometrika 61, 1974).

        Raises:
            RecpoError: the two were not evaluated on the same rows.
        """
        mine, theirs = self.totals[target], other.totals[target]
        _validate_pair(mine, theirs)
        sums = mine.by_estimator[SNIPS], theirs.by_estimator[SNIPS]
        values = [sum_of_ratios(one.sum(0)) + len(one) * influence(one) for one in sums]
        return np.asarray(values[0] - values[1])

    def over_logging_policy(self) -> tuple[OffPolicyDifference, ...]:
        """The paired difference in value to the logging policy, on the same users."""
        logged = self.totals[LOGGING_POLICY]
        (earned,) = logged.by_estimator.values()
        found: list[OffPolicyDifference] = []
        for target, totals in self.totals.items():
            if target == LOGGING_POLICY:
                continue
            # a row without a propensity only counts for the logging policy
            every = np.union1d(totals.users, logged.users)
            theirs = _spread(earned, logged.users, every)
            pairs = {e: (_spread(sums, totals.users, every), theirs) for e, sums in totals.estimated.items()}
            found += self._differences(target, pairs)
        return tuple(found)

    def _differences(
        self, target: str, pairs: dict[Estimator, tuple[FloatArray, FloatArray]]
    ) -> list[OffPolicyDifference]:
        samples, options, found = [sums for pair in pairs.values() for sums in pair], self.options, []
        drawn = bootstrap_values(samples, options.resamples, options.seed)
        for (estimator, (mine, theirs)), of_mine, of_theirs in zip(pairs.items(), drawn[::2], drawn[1::2], strict=True):
            value = float(sum_of_ratios(mine.sum(0)) - sum_of_ratios(theirs.sum(0)))
            influences = influence(mine) - influence(theirs)
            intervals: dict[IntervalKind, Interval] = {
                "normal": normal_interval(influences, value, options.level),
                "bootstrap": percentile_interval(of_mine - of_theirs, options.level),
            }
            error = standard_error(influences)
            found.append(OffPolicyDifference(target, estimator.name, value, intervals, error, len(influences)))
        return found


def _validate_pair(one: TargetTotals, other: TargetTotals) -> None:
    if not (np.array_equal(one.users, other.users) and np.array_equal(one.rows, other.rows)):
        message = "a paired difference needs both results on the same rows of the same users"
        raise RecpoError(message, code="mismatch", field="users")


def snips_of(result: OffPolicyResult | None, target: str) -> tuple[float, float]:
    """The SNIPS estimate of a target, and the half-width of its normal interval; nan if there is none."""
    for found in () if result is None else result.estimates:
        if (found.target, found.estimator) == (target, SNIPS.name):
            low, high = found.intervals["normal"]
            return found.value, (high - low) / 2
    return math.nan, math.nan


def result_of_rows(rows: Rows, users: IntArray, options: OffPolicyOptions) -> OffPolicyResult:
    """All estimates of one target, named ``policy``, from rows given as arrays.

    Args:
        rows: exposures; with ``q_hat`` and ``v_hat`` for the estimators that need a reward model.
        users: ``[N]`` int64, user of each row; rows of different users are independent.
        options: clip, threshold, level, resamples and so on; options about a pass over batches are ignored.

    Raises:
        RecpoError: a propensity outside (0, 1], a probability outside [0, 1], or a reward that is not finite.
    """
    _validate_rows(rows)
    sums = TargetSums(options.estimators(rows.v_hat is not None), num_items=0)
    sums.update(users, np.zeros_like(users), rows)
    by_user = options.average == "user"
    totals = sums.compute(by_user=by_user, rows_without_reward=0, rows_without_propensity=0)
    return result_of({POLICY: totals}, replace(options, propensity="logged"))


def _validate_rows(rows: Rows) -> None:
    checks = {
        "reward": (np.isfinite(rows.reward), "a finite number"),
        "target": ((rows.target >= 0) & (rows.target <= 1 + _ROUNDING), "a probability from 0 to 1"),
        "propensity": (
            (rows.propensity > 0) & (rows.propensity <= 1 + _ROUNDING),
            "a probability above 0 and at most 1; leave rows out whose propensity is unknown",
        ),
    }
    for name, (holds, expected) in checks.items():
        if not holds.all():
            row = int((~holds).argmax())
            found = getattr(rows, name)[row]
            raise RecpoError(
                f"off-policy value: {name} of row {row} is {found:g}, expected {expected}", code="bad_value", field=name
            )


def result_of(totals: dict[str, TargetTotals], options: OffPolicyOptions) -> OffPolicyResult:
    """All estimates. If every weight of a target is 0, its values are nan, with a warning that gives the reason."""
    estimates: list[OffPolicyEstimate] = []
    for target, found in totals.items():
        known, supported = found.diagnostics, found.diagnostics.effective_rows > 0
        shared = known.effective_rows, known.rows, known.users, options.propensity, known
        intervals = _intervals(found, options) if supported else {}
        for estimator, sums in found.estimated.items():
            value = float(sum_of_ratios(sums.sum(0))) if supported else math.nan
            said = warnings_of(estimator, known, options.propensity) if supported else (_REFUSED,)
            ends = intervals.get(estimator, _NO_INTERVALS)
            estimates.append(OffPolicyEstimate(target, estimator.name, value, ends, *shared, said))
    usable = {target: found for target, found in totals.items() if found.diagnostics.effective_rows > 0}
    return OffPolicyResult(tuple(estimates), usable, options)


def _intervals(found: TargetTotals, options: OffPolicyOptions) -> dict[Estimator, dict[IntervalKind, Interval]]:
    estimated = found.estimated
    resampled = bootstrap_values(list(estimated.values()), options.resamples, options.seed)
    intervals: dict[Estimator, dict[IntervalKind, Interval]] = {}
    for (estimator, sums), values in zip(estimated.items(), resampled, strict=True):
        value = float(sum_of_ratios(sums.sum(0)))
        intervals[estimator] = {
            "normal": normal_interval(influence(sums), value, options.level),
            "bootstrap": percentile_interval(values, options.level),
            "empirical_bernstein": NOWHERE,
        }
        if estimator.clip < math.inf and options.reward_range is not None:
            bounded = _empirical_bernstein(estimator, sums, found, options)
            intervals[estimator]["empirical_bernstein"] = bounded
    return intervals


def _empirical_bernstein(
    estimator: Estimator, sums: FloatArray, found: TargetTotals, options: OffPolicyOptions
) -> Interval:
    """Units are users: a mean over exposures is a mean of users' sums, whose range grows with the most active user."""
    assert options.reward_range is not None
    rows_per_user = found.rows.mean() if options.average == "exposure" else 1.0
    most = found.rows.max() / rows_per_user if options.average == "exposure" else 1.0
    low, high = (estimator.clip * float(most) * bound for bound in options.reward_range)
    return empirical_bernstein_interval(sums[:, 0] / rows_per_user, min(low, 0.0), max(high, 0.0), options.level)


def _pair(estimator: Estimator, mine: FloatArray, theirs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The sums of two contenders, or the sums of their difference and zeros, if control variates explain it."""
    if not estimator.num_controls:
        return mine, theirs
    numerator, denominator = np.split(mine, 2, axis=1)
    between = np.concatenate([numerator - np.split(theirs, 2, axis=1)[0], denominator], axis=1)
    nothing = np.concatenate([np.zeros_like(numerator), denominator], axis=1)
    return estimator.with_coefficients(between), nothing


def _spread(sums: FloatArray, users: IntArray, every: IntArray) -> FloatArray:
    """The sums as rows of a larger set of users; 0 for those who are not among ``users``."""
    spread = np.zeros((len(every), sums.shape[1]))
    spread[np.searchsorted(every, users)] = sums
    return spread

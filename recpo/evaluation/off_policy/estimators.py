"""Estimators of a policy's value from a log of single items, each one formula over rows.

Every row is one exposure: the context x, the item a that the logging policy showed with probability ``p(a | x)``, and
its reward r. The estimated value is ``V = E_x E_{a ~ pi(. | x)}[r(x, a)]``, the mean reward per exposure if the target
policy ``pi`` had chosen the items. All estimators here are sums of ratios of sums over rows,

    V = sum_j (sum_i numerator_ij) / (sum_i denominator_ij),

so a log is read in chunks, and only the sums are kept; for intervals, per user.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpo.base.errors import RecpoError

FloatArray = NDArray[np.floating]


class Rows(NamedTuple):
    """Logged exposures.

    Attributes:
        reward: ``[N]`` the reward r of the exposure.
        target: ``[N]`` probability ``pi(a | x)`` of the logged item under the target policy.
        propensity: ``[N]`` probability ``p(a | x) > 0`` of the logged item under the logging policy.
        q_hat: ``[N]`` a reward model's prediction for the logged item; None = there is no model.
        v_hat: ``[N]`` the model's value of the target policy in the row's context, ``E_{a ~ pi}[q_hat(x, a)]``, exact
            or as an unbiased Monte-Carlo estimate whose draws do not depend on the logged item. If the probabilities of
            the items sum to less than 1, the rest earns 0.
    """

    reward: FloatArray
    target: FloatArray
    propensity: FloatArray
    q_hat: FloatArray | None = None
    v_hat: FloatArray | None = None

    @property
    def weight(self) -> FloatArray:
        """Importance weights ``w = pi(a | x) / p(a | x)``, ``[N]``.

        Raises:
            RecpoError: a propensity is not above 0; an item that the logging policy never shows has no weight.
        """
        if not (self.propensity > 0).all():
            row = int((~(self.propensity > 0)).argmax())
            raise RecpoError(f"the propensity of row {row} is {self.propensity[row]:g}, expected above 0: leave it out")
        return np.asarray(self.target / self.propensity)


class Terms(NamedTuple):
    """Numerators and denominators ``[N, J]`` of an estimator's ratios, per row."""

    numerator: FloatArray
    denominator: FloatArray


class Estimator(ABC):
    """A sum of ratios of sums. Implementations are frozen dataclasses.

    Attributes:
        name: name in results and tables.
        reads_weights: whether it uses importance weights, so that it is only as good as they are.
        reads_model: whether it needs ``q_hat`` and ``v_hat``.
        self_normalized: whether it divides by the sum of the weights, as if their mean were 1.
        num_ratios: number of ratios, J.
    """

    name: ClassVar[str]
    num_ratios: ClassVar[int] = 1
    reads_weights: ClassVar[bool] = True
    reads_model: ClassVar[bool] = False
    self_normalized: ClassVar[bool] = False

    @abstractmethod
    def terms(self, rows: Rows) -> Terms:
        """The numerators and denominators of every row."""

    def __call__(self, rows: Rows) -> float:
        """The estimate over ``rows``; nan without rows, or for a self-normalized estimator if all weights are 0."""
        terms = self.terms(rows)
        return float(sum_of_ratios(np.concatenate([terms.numerator.sum(0), terms.denominator.sum(0)])))


@dataclass(frozen=True)
class IPS(Estimator):
    """Inverse propensity score, ``mean(w r)`` (Horvitz and Thompson, 1952).

    Unbiased if the propensities are correct and no item that the target policy may choose has propensity 0. Its
    variance grows with the largest weights, without bound.
    """

    name: ClassVar[str] = "IPS"

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((rows.weight * rows.reward, None))


@dataclass(frozen=True)
class ClippedIPS(Estimator):
    """IPS with weights clipped at M, ``mean(min(w, M) r)`` (Ionides, 2008; Bottou et al., 2013).

    Bounded, so it has intervals that hold for every sample size. Biased: for rewards >= 0 its mean lies below the
    value.

    Attributes:
        limit: M, the largest weight.
    """

    name: ClassVar[str] = "clipped IPS"
    limit: float = 100.0

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((np.minimum(rows.weight, self.limit) * rows.reward, None))


@dataclass(frozen=True)
class SNIPS(Estimator):
    """Self-normalized IPS, ``sum(w r) / sum(w)`` (Swaminathan and Joachims, NeurIPS 2015).

    Stays within the range of the rewards, does not change if all propensities are wrong by the same factor, and shifts
    with the rewards if a constant is added to them. Its bias falls as 1/N.
    """

    name: ClassVar[str] = "SNIPS"
    self_normalized: ClassVar[bool] = True

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((rows.weight * rows.reward, rows.weight))


@dataclass(frozen=True)
class DM(Estimator):
    """Direct method, ``mean(v_hat)``: the value that the reward model predicts.

    Needs no propensities and has little variance; its bias is that of the model, and no interval contains it.
    """

    name: ClassVar[str] = "DM"
    reads_weights: ClassVar[bool] = False
    reads_model: ClassVar[bool] = True

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((_v_hat(rows), None))


@dataclass(frozen=True)
class DR(Estimator):
    """Doubly robust, ``mean(v_hat + w (r - q_hat))`` (Dudik, Langford and Li, ICML 2011, arXiv 1103.4601).

    Unbiased if the propensities or the model are correct, also with a Monte-Carlo ``v_hat``, whose noise has mean 0 and
    only adds to the variance. A model with accurate predictions lowers the variance below that of IPS.
    """

    name: ClassVar[str] = "DR"
    reads_model: ClassVar[bool] = True

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((_v_hat(rows) + _corrections(rows), None))


@dataclass(frozen=True)
class SNDR(Estimator):
    """Self-normalized doubly robust, ``mean(v_hat) + sum(w (r - q_hat)) / sum(w)`` (Thomas and Brunskill, 2016)."""

    name: ClassVar[str] = "SNDR"
    self_normalized: ClassVar[bool] = True
    num_ratios: ClassVar[int] = 2
    reads_model: ClassVar[bool] = True

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((_v_hat(rows), None), (_corrections(rows), rows.weight))


@dataclass(frozen=True)
class SwitchDR(Estimator):
    """Doubly robust up to a weight of tau, direct method beyond, ``mean(v_hat + w [w <= tau] (r - q_hat))``.

    Wang, Agarwal and Dudik, ICML 2017, arXiv 1612.01205. Between DM (tau = 0) and DR (tau = infinity): the model is
    used for items that the log rarely shows.

    Attributes:
        threshold: tau.
    """

    name: ClassVar[str] = "Switch-DR"
    reads_model: ClassVar[bool] = True
    threshold: float = 100.0

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((_v_hat(rows) + np.where(rows.weight <= self.threshold, _corrections(rows), 0.0), None))


@dataclass(frozen=True)
class LoggedMean(Estimator):
    """``mean(r)``: the value of the logging policy, on-policy and unbiased."""

    name: ClassVar[str] = "mean"
    reads_weights: ClassVar[bool] = False

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((rows.reward, None))


@dataclass(frozen=True)
class NaiveAverage(Estimator):
    """``sum(pi r) / sum(pi)``: the mean logged reward of items that the target policy would show. For comparison only.

    For a list, it is the mean reward of the rows whose item is in the list. It ignores why an item was shown, and so
    attributes the merit of the logging policy to the target policy: an item that was shown to users who like it looks
    good for everybody. It is confounded, and no amount of data fixes that.
    """

    name: ClassVar[str] = "naive average"
    reads_weights: ClassVar[bool] = False

    def terms(self, rows: Rows) -> Terms:
        """See ``Estimator``."""
        return _terms((rows.target * rows.reward, rows.target))


def sum_of_ratios(totals: FloatArray) -> FloatArray:
    """``sum_j numerator_j / denominator_j`` of totals ``[..., 2 J]``, numerators first; nan for division by 0."""
    numerator, denominator = np.split(totals, 2, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(denominator == 0, np.nan, numerator / denominator)
    return np.asarray(ratio.sum(-1))


def _terms(*ratios: tuple[FloatArray, FloatArray | None]) -> Terms:
    """Stacks ratios; a denominator of None counts the rows."""
    numerators = [np.asarray(numerator, np.float64) for numerator, _ in ratios]
    denominators = [np.ones(len(numerators[0])) if d is None else np.asarray(d, np.float64) for _, d in ratios]
    return Terms(np.stack(numerators, 1), np.stack(denominators, 1))


def _v_hat(rows: Rows) -> FloatArray:
    if rows.v_hat is None:
        raise ValueError("this estimator needs the reward model's v_hat")
    return rows.v_hat


def _corrections(rows: Rows) -> FloatArray:
    if rows.q_hat is None:
        raise ValueError("this estimator needs the reward model's q_hat")
    return rows.weight * (rows.reward - rows.q_hat)

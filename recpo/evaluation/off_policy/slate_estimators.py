"""Estimators of the value of whole slates, for logs with a reward for each of several positions.

The value is ``V = E[sum_s position_weight_s r_s]``, the expected sum of a slate's rewards. The estimators differ in
their assumption about what the reward of a position depends on, and so in how many weights of single positions, ``w_s =
pi(a_s | x, a_<s) / p(a_s | x, a_<s)``, they multiply. The weaker the assumption, the larger the variance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpo.evaluation.off_policy.estimators import FloatArray, Terms, sum_of_ratios


class SlateRows(NamedTuple):
    """Logged slates.

    Attributes:
        reward: ``[N, S]`` reward of every position.
        weight: ``[N, S]`` importance weight of every position.
        mask: ``[N, S]`` bool, False if the slate has no such position; its values are not read.
    """

    reward: FloatArray
    weight: FloatArray
    mask: NDArray[np.bool_]


@dataclass(frozen=True)
class SlateEstimator(ABC):
    """A sum over positions of weighted rewards. A position that a slate lacks has reward 0.

    Attributes:
        self_normalized: divide the sum of each position by its sum of weights instead of by the number of slates: lower
            variance, with a bias that falls as 1/N.
        position_weight: weight of a reward at position 1, 2, ..., such as the discounts of DCG; empty = 1 each.
    """

    name: ClassVar[str]
    self_normalized: bool = False
    position_weight: tuple[float, ...] | None = None

    @abstractmethod
    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """The factor of each reward, ``[N, S]``, from the weights of single positions (1 if there is no position)."""

    def terms(self, rows: SlateRows) -> Terms:
        """Numerators and denominators ``[N, S]``: one ratio per position.

        Raises:
            ValueError: more positions than position weights.
        """
        positions = rows.mask.shape[1]
        counts = np.ones(positions) if self.position_weight is None else np.array(self.position_weight[:positions])
        if len(counts) < positions:
            raise ValueError(f"{len(counts)} position weights for slates of {positions}")
        weight = self.slate_weights(np.where(rows.mask, rows.weight, 1.0))
        gained = weight * np.where(rows.mask, rows.reward, 0.0) * counts
        return Terms(gained, weight if self.self_normalized else np.ones_like(gained))

    def __call__(self, rows: SlateRows) -> float:
        """The estimate over ``rows``; nan without slates, or for a self-normalized estimator if all weights are 0."""
        terms = self.terms(rows)
        return float(sum_of_ratios(np.concatenate([terms.numerator.sum(0), terms.denominator.sum(0)])))


@dataclass(frozen=True)
class StandardIPS(SlateEstimator):
    """``mean((prod_s w_s) sum_s r_s)``: a reward may depend on the whole slate (Precup et al., 2000).

    Unbiased for any user behavior, but only useful for very short slates, because the weights multiply.
    """

    name: ClassVar[str] = "standard IPS"

    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """See ``SlateEstimator``."""
        return np.broadcast_to(weight.prod(axis=1, keepdims=True), weight.shape)


@dataclass(frozen=True)
class IndependentIPS(SlateEstimator):
    """``mean(sum_s w_s r_s)``: a reward depends only on its own item and position.

    The item-position model of Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay and Wen (KDD 2018, arXiv 1804.10488).
    Its weights are those of single items, ``pi(a_s | x) / p(a_s | x)``.
    """

    name: ClassVar[str] = "independent IPS"

    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """See ``SlateEstimator``."""
        return weight


@dataclass(frozen=True)
class RewardInteractionIPS(SlateEstimator):
    """``mean(sum_s (prod_{t <= s} w_t) r_s)``: a reward depends on its own item and on the items above it.

    McInerney, Brost, Chandar, Mehrotra and Carterette (KDD 2020, arXiv 2007.12986): users read a slate from the top,
    and earlier positions influence their behavior at later ones.
    """

    name: ClassVar[str] = "reward-interaction IPS"

    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """See ``SlateEstimator``."""
        return np.cumprod(weight, axis=1)

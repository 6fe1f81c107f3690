"""Estimators of the value of whole slates, of which several positions were logged with a reward each.

The value is ``V = E[sum_s position_weight_s r_s]``, the expected sum of a slate's rewards. The estimators differ in
what they let the reward of a position depend on, and so in how many of the weights of single positions,
``w_s = pi(a_s | x, a_<s) / p(a_s | x, a_<s)``, they multiply: the less they assume, the larger their variance.
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
        mask: ``[N, S]`` bool, False where the slate has no such position: what stands there is not read.
    """

    reward: FloatArray
    weight: FloatArray
    mask: NDArray[np.bool_]


@dataclass(frozen=True)
class SlateEstimator(ABC):
    """A sum over positions of weighted rewards; a position that a slate lacks has reward 0.

    Attributes:
        self_normalized: divide the sum of each position by its sum of weights instead of by the number of slates:
            lower variance, a bias that falls as 1/N.
        position_weight: what a reward counts at position 1, 2, ..., such as the discounts of DCG; none = 1 each.
    """

    name: ClassVar[str]
    self_normalized: bool = False
    position_weight: tuple[float, ...] | None = None

    @abstractmethod
    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """What multiplies each reward, ``[N, S]``, from the weights of single positions (1 where there is none)."""

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
        """The estimate over ``rows``; nan without slates, or without weight where the weights normalize."""
        terms = self.terms(rows)
        return float(sum_of_ratios(np.concatenate([terms.numerator.sum(0), terms.denominator.sum(0)])))


@dataclass(frozen=True)
class StandardIPS(SlateEstimator):
    """``mean((prod_s w_s) sum_s r_s)``: a reward may depend on the whole slate (Precup et al., 2000).

    Unbiased whatever users do, and useless for all but the shortest slates: the weights multiply.
    """

    name: ClassVar[str] = "standard IPS"

    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """See ``SlateEstimator``."""
        return np.broadcast_to(weight.prod(axis=1, keepdims=True), weight.shape)


@dataclass(frozen=True)
class IndependentIPS(SlateEstimator):
    """``mean(sum_s w_s r_s)``: a reward depends on its own item and position alone.

    The item-position model of Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay and Wen (KDD 2018, arXiv 1804.10488).
    Its weights are those of single items, ``pi(a_s | x) / p(a_s | x)``.
    """

    name: ClassVar[str] = "independent IPS"

    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """See ``SlateEstimator``."""
        return weight


@dataclass(frozen=True)
class RewardInteractionIPS(SlateEstimator):
    """``mean(sum_s (prod_{t <= s} w_t) r_s)``: a reward depends on its own item and on what was shown above it.

    McInerney, Brost, Chandar, Mehrotra and Carterette (KDD 2020, arXiv 2007.12986): users go through a slate from the
    top, and what they saw and did there changes what they do below.
    """

    name: ClassVar[str] = "reward-interaction IPS"

    def slate_weights(self, weight: FloatArray) -> FloatArray:
        """See ``SlateEstimator``."""
        return np.cumprod(weight, axis=1)

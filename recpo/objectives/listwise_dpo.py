"""List-wise preference: one chosen item against many rejected ones."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from recpo.base.contracts import Requirement
from recpo.base.errors import NonNegativeFloat, PositiveFloat
from recpo.base.types import ObjectiveInputs
from recpo.objectives.inputs import required
from recpo.objectives.preference import PreferenceLists, PreferenceObjective, grade_gaps
from recpo.ops.reduce import check_same_shape, zero_masked


def _reward_gaps(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    logp_ref_chosen: Tensor,
    logp_ref_rejected: Tensor,
    beta: float,
    mask: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``r_chosen - r_rejected [B, L]`` with ``r = beta (logp - logp_ref)``, 0 where masked, and the mask."""
    check_same_shape(logp_chosen=logp_chosen, logp_ref_chosen=logp_ref_chosen, lists=logp_rejected[..., 0])
    check_same_shape(logp_rejected=logp_rejected, logp_ref_rejected=logp_ref_rejected, mask=mask, weights=weights)
    kept = torch.ones_like(logp_rejected, dtype=torch.bool) if mask is None else mask.bool()
    chosen = beta * (logp_chosen - logp_ref_chosen.detach())
    rejected = beta * (zero_masked(logp_rejected, kept) - zero_masked(logp_ref_rejected.detach(), kept))
    return zero_masked(chosen.unsqueeze(-1) - rejected, kept), kept


def softmax_dpo_loss(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    logp_ref_chosen: Tensor,
    logp_ref_rejected: Tensor,
    *,
    beta: float = 1.0,
    mask: Tensor | None = None,
    pair_weights: Tensor | None = None,
    margins: Tensor | None = None,
) -> Tensor:
    """Softmax-DPO (S-DPO, arXiv 2406.09215): cross-entropy of the chosen among chosen and rejected, per list.

    ``-log sigmoid(-logsumexp_l(r_l - r_chosen + margin_l))`` with ``r = beta (logp - logp_ref)``; one rejected item:
    DPO. The gradient on ``r_l`` is the softmax of the rewards: the hardest rejected items are pushed down most.

    Args:
        logp_chosen: ``[B]``, summed over tokens.
        logp_rejected: ``[B, L]``, summed over tokens.
        logp_ref_chosen: ``[B]``; no gradient flows into it.
        logp_ref_rejected: ``[B, L]``; no gradient flows into it.
        beta: temperature.
        mask: ``[B, L]``, True keeps.
        pair_weights: ``[B, L]``, not negative; multiply the term of a rejected item inside the sum (0 removes it).
        margins: ``[B, L]``, lead in reward that the chosen item should have; None = 0. No gradient flows into it.

    Returns:
        ``[B]``; 0 for a list without any rejected item.

    Raises:
        RecpoError: shapes that do not fit.
    """
    gaps, kept = _reward_gaps(logp_chosen, logp_rejected, logp_ref_chosen, logp_ref_rejected, beta, mask, pair_weights)
    terms = -gaps if pair_weights is None else zero_masked(pair_weights.detach(), kept).log() - gaps
    if margins is not None:
        check_same_shape(logp_rejected=logp_rejected, margins=margins)
        terms = terms + zero_masked(margins.detach(), kept)
    terms = terms.masked_fill(~kept, -torch.inf)
    # softplus(logsumexp(terms)), as one logsumexp over the terms and a 0 that stands for the chosen item: with it, an
    # empty list has a finite value and gradient.
    return torch.cat([torch.zeros_like(terms[..., :1]), terms], -1).logsumexp(-1)


def margin_listwise_dpo_loss(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    logp_ref_chosen: Tensor,
    logp_ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    margin: float = 0.0,
    gap_weight: float = 1.0,
    nll_coef: float = 0.1,
    mask: Tensor | None = None,
    pair_weights: Tensor | None = None,
) -> Tensor:
    """The list-wise margin loss as printed in OneSearch (arXiv 2509.03236, eq. 11), per list.

    ``-log sigmoid(logsumexp_l(gap_weight max(0, r_chosen - r_l - margin))) - nll_coef logp_chosen``.

    Note its behavior: a mis-ordered pair (gap below the margin) gets **no** preference gradient, the easiest rejected
    item dominates the sum, and the preference term never exceeds ``log(1 + 1 / L)``. ``softmax_dpo_loss`` has none of
    these traits.

    Args:
        logp_chosen: ``[B]``, summed over tokens.
        logp_rejected: ``[B, L]``, summed over tokens.
        logp_ref_chosen: ``[B]``; no gradient flows into it.
        logp_ref_rejected: ``[B, L]``; no gradient flows into it.
        beta: temperature.
        margin: gap below which a pair has no gradient.
        gap_weight: factor on the gaps.
        nll_coef: weight of the likelihood of the chosen item.
        mask: ``[B, L]``, True keeps.
        pair_weights: ``[B, L]``, not negative; additional factors on the gaps.

    Returns:
        ``[B]``; only the likelihood term for a list without any rejected item.

    Raises:
        RecpoError: shapes that do not fit.
    """
    gaps, kept = _reward_gaps(logp_chosen, logp_rejected, logp_ref_chosen, logp_ref_rejected, beta, mask, pair_weights)
    scaled = gap_weight * (gaps - margin).clamp(min=0.0)
    if pair_weights is not None:
        scaled = scaled * zero_masked(pair_weights.detach(), kept)
    paired = kept.any(-1)
    # An empty list is filled with zeros, not -inf, whose logsumexp has a nan gradient.
    total = scaled.masked_fill(~kept & paired.unsqueeze(-1), -torch.inf).logsumexp(-1)
    return zero_masked(softplus(-total), paired) - nll_coef * logp_chosen


@dataclass(frozen=True)
class SoftmaxDPO(PreferenceObjective):
    """Softmax-DPO (S-DPO, arXiv 2406.09215): softmax cross-entropy of the chosen item among its list.

    ``-log sigmoid(-logsumexp_l(r_l - r_chosen))`` with ``r = beta (logp - logp_ref)`` summed over tokens.

    Attributes:
        gap_weighted: weight each rejected item by the chosen item's reward minus its own (at least 0); needs rewards.
        grade_gap_coef: factor on the gap of the grades; the chosen item should lead every rejected item by this margin
            (RecPO, arXiv 2506.02261). The gap is 0 if either grade is unknown or the rejected item has the higher
            grade.
    """

    beta: PositiveFloat = 1.0
    gap_weighted: bool = False
    grade_gap_coef: NonNegativeFloat = 0.0

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        optional = {Requirement.REWARDS: self.gap_weighted, Requirement.GRADES: self.grade_gap_coef}
        return super().requires | {name for name, weight in optional.items() if weight}

    def list_loss(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists, inputs: ObjectiveInputs) -> Tensor:
        """See ``softmax_dpo_loss``."""
        return softmax_dpo_loss(
            lists.chosen(logp),
            logp,
            lists.chosen(logp_ref),
            logp_ref,
            beta=self.beta,
            mask=lists.is_rejected,
            pair_weights=_gap_weights(lists, inputs, self) if self.gap_weighted else None,
            margins=self.grade_gap_coef * grade_gaps(lists, inputs, self) if self.grade_gap_coef else None,
        )


@dataclass(frozen=True)
class MarginListwiseDPO(PreferenceObjective):
    """The list-wise margin loss as printed in OneSearch (arXiv 2509.03236, eq. 11).

    ``-log sigmoid(logsumexp_l(gap_weight max(0, r_chosen - r_l - margin))) - nll_coef logp_chosen``. Mis-ordered pairs
    get no preference gradient, and the easiest rejected item dominates: see ``margin_listwise_dpo_loss``, and prefer
    ``SoftmaxDPO``.

    Attributes:
        margin: gap below which a pair has no gradient.
        gap_weight: factor on the gaps.
        gap_weighted: also weight each gap by the difference of the rewards (at least 0); needs rewards.
    """

    nll_coef: float = 0.1
    margin: float = 0.0
    gap_weight: float = 1.0
    gap_weighted: bool = False

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return super().requires | ({Requirement.REWARDS} if self.gap_weighted else frozenset())

    def list_loss(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists, inputs: ObjectiveInputs) -> Tensor:
        """See ``margin_listwise_dpo_loss``; the base class adds the likelihood term."""
        return margin_listwise_dpo_loss(
            lists.chosen(logp),
            logp,
            lists.chosen(logp_ref),
            logp_ref,
            beta=self.beta,
            margin=self.margin,
            gap_weight=self.gap_weight,
            nll_coef=0.0,
            mask=lists.is_rejected,
            pair_weights=_gap_weights(lists, inputs, self) if self.gap_weighted else None,
        )


def _gap_weights(lists: PreferenceLists, inputs: ObjectiveInputs, objective: object) -> Tensor:
    rewards = required(inputs, "rewards", objective)
    return (lists.chosen(rewards).unsqueeze(-1) - rewards).clamp(min=0.0)

"""KTO (arXiv 2402.01306): preference from unary labels; each item is desirable or undesirable on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recpo.base.contracts import Objective
from recpo.base.errors import RecpoError
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.health import advantage_shares, masked_mean
from recpo.objectives.inputs import required, validate_log_probs
from recpo.ops.reduce import aggregate, check_same_shape, zero_masked


def kto_loss(
    logp: Tensor,
    logp_ref: Tensor,
    signs: Tensor,
    reference_point: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """One minus the value of an item, which saturates on both sides of a reference point, per item.

    With ``h = logp - logp_ref`` and ``z`` the reference point: the loss is ``desirable_weight (1 - s)`` with ``s =
    sigmoid(beta (h - z))`` for a positive sign, and ``undesirable_weight (1 - s)`` with ``s = sigmoid(beta (z - h))``
    for a negative sign. Gradient on ``logp``: ``-`` or ``+ weight beta s (1 - s)``. It is largest at ``h = z`` and
    almost 0 far from it on both sides, so the loss gives up on items that it cannot move.

    Args:
        logp: ``[..., S]``, summed over tokens.
        logp_ref: ``[..., S]``; no gradient flows into it.
        signs: ``[..., S]``: above 0 desirable, below 0 undesirable, 0 not labeled.
        reference_point: broadcasts to ``[..., S]``, not negative; no gradient flows into it.
        beta: temperature.
        desirable_weight: of the desirable items.
        undesirable_weight: of the undesirable items.
        mask: ``[..., S]``, True keeps.

    Returns:
        ``[..., S]``; 0 where masked or not labeled.

    Raises:
        ValueError: shapes that differ.
    """
    check_same_shape(logp=logp, logp_ref=logp_ref, signs=signs, mask=mask)
    signs = zero_masked(signs.detach(), mask).sign()
    labeled = signs != 0
    lead = zero_masked(logp, labeled) - zero_masked(logp_ref.detach(), labeled) - reference_point.detach()
    weight = torch.where(signs > 0, lead.new_tensor(desirable_weight), lead.new_tensor(undesirable_weight))
    return zero_masked(weight * torch.sigmoid(-beta * signs * lead), labeled)


@dataclass(frozen=True)
class KTO(Objective):
    """Kahneman-Tversky optimization (arXiv 2402.01306): no pairs, only items that are good or bad on their own.

    Items with a positive advantage are desirable, and items with a negative one are undesirable. Only the sign is read;
    items with advantage 0 leave both the loss and its denominator. So any layout and any advantage works: only dislikes
    as undesirable (``TernaryAdvantage``), or everything below a grade (``GradedAdvantage``).

    Attributes:
        beta: temperature of the implicit rewards ``beta (logp - logp_ref)``.
        desirable_weight: weight of the desirable items; the paper keeps ``desirable_weight * number of desirable``
            within 1 to 4/3 of the same product of the undesirable ones.
        undesirable_weight: of the undesirable items.
        reference_point: scope of the estimate of KL(pi || pi_ref) that separates gains from losses: the mean of ``logp
            - logp_ref`` over the labeled items of the ``slate`` or of the micro-``batch``, at least 0.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference_point: Literal["slate", "batch"] = "slate"

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise RecpoError(f"KTO.beta must be above 0, got {self.beta}.")
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) >= 0:
                raise RecpoError(f"KTO.{name} must not be negative, got {getattr(self, name)}.")

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({"advantages", "reference"})

    @property
    def zero_advantage_is_inert(self) -> bool:
        """See ``Objective.zero_advantage_is_inert``."""
        return True

    def _signs(self, inputs: ObjectiveInputs) -> Tensor:
        """``[B, S]`` of -1, 0 and 1; 0 where masked."""
        advantages = required(inputs.advantages, "advantages", self).detach()
        return zero_masked(advantages, inputs.logp.mask.bool().any(-1)).sign()

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Labeled items."""
        return (self._signs(inputs) != 0).sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        signs = self._signs(inputs)
        labeled = signs != 0
        scored = inputs.logp.mask.bool() & labeled.unsqueeze(-1)
        reference = required(inputs.logp.reference, "reference", self).detach()
        validate_log_probs(inputs.logp._replace(mask=scored), self)
        logp, logp_ref = (zero_masked(x, scored).sum(-1) for x in (inputs.logp.policy, reference))
        point = self._reference_point((logp - logp_ref).detach(), labeled)
        losses = kto_loss(
            logp,
            logp_ref,
            signs,
            point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = aggregate(losses, labeled, count=inputs.denominator)
        rewards = self.beta * (logp - logp_ref).detach()
        metrics = {
            "reward_desirable": masked_mean(rewards, signs > 0),
            "reward_undesirable": masked_mean(rewards, signs < 0),
            "reference_point": masked_mean(point.expand_as(logp), labeled),
        }
        return LossOutput(loss, metrics | advantage_shares(signs, inputs.logp.mask.bool().any(-1)))

    def _reference_point(self, log_ratio: Tensor, labeled: Tensor) -> Tensor:
        """``[B, 1]`` or ``[1, 1]``, of log-ratios that are 0 where nothing is labeled."""
        over = (0, 1) if self.reference_point == "batch" else (1,)
        total = log_ratio.sum(over, keepdim=True)
        return (total / labeled.sum(over, keepdim=True).clamp(min=1)).clamp(min=0.0)

"""Exact policy gradient: the expected reward of a policy, summed over the full catalog instead of sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recpo.base.contracts import Objective, Requirement
from recpo.base.errors import NonNegativeFloat, RecpoError
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import masked_mean, required, validate_log_probs
from recpo.ops.reduce import aggregate, check_same_shape, zero_masked

MASS_TOLERANCE: Final = 1e-3
MASS_TOLERANCE_OF_HALVES: Final = 0.1
"""How far the probabilities of a context may sum from 1: a rounding of float32, or of 8 bits per log-probability."""


def catalog_policy_gradient_loss(
    logp: Tensor,
    rewards: Tensor,
    *,
    logp_ref: Tensor | None = None,
    mask: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Tensor:
    """``-sum_i pi_i r_i + kl_coef KL(pi || pi_ref) - entropy_coef H(pi)``, per context.

    All three are sums over the catalog: nothing is sampled, so there is no variance for a baseline to lower. Gradient
    on the logit of item i: ``-pi_i (r_i - sum_j pi_j r_j)``, plus ``kl_coef pi_i (log pi_i - log pi_ref_i - KL)``, plus
    ``entropy_coef pi_i (log pi_i + H)``. The logit of an item with a small probability hardly changes, however good the
    item is; ``MPO`` has no such factor.

    Args:
        logp: ``[..., V]`` of every item, summed over tokens; normalized.
        rewards: ``[..., V]``; no gradient flows into it.
        logp_ref: ``[..., V]``; only read with ``kl_coef``; no gradient flows into it.
        mask: ``[..., V]``, True keeps.
        kl_coef: weight of the divergence from the reference, at least 0.
        entropy_coef: weight of the entropy, at least 0.

    Returns:
        ``[...]``; 0 for a context without any kept item.

    Raises:
        RecpoError: ``kl_coef`` without a reference, or shapes that differ.
    """
    check_same_shape(logp=logp, rewards=rewards, logp_ref=logp_ref, mask=mask)
    logp, pi = _distribution(logp, mask)
    loss = -(pi * zero_masked(rewards.detach(), mask)).sum(-1)
    if kl_coef:
        if logp_ref is None:
            raise RecpoError("kl_coef needs logp_ref", code="missing_option", field="logp_ref")
        loss = loss + kl_coef * (pi * (logp - zero_masked(logp_ref.detach(), mask))).sum(-1)
    return loss + entropy_coef * (pi * logp).sum(-1) if entropy_coef else loss


def _distribution(logp: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities, both 0 where masked."""
    logp = zero_masked(logp, mask)
    return logp, zero_masked(logp.exp(), mask)


@dataclass(frozen=True)
class CatalogPolicyGradient(Objective):
    """Exact policy gradient over the full catalog, averaged over contexts (``rollout.candidates: catalog``).

    ``-sum_i pi_i r_i + kl_coef KL(pi || pi_ref) - entropy_coef H(pi)``. With ``kl_coef`` its optimum is that of ``MPO``
    with ``temperature = kl_coef`` and the reference as base; only the path of training differs.

    Attributes:
        kl_coef: weight of the exact divergence from the reference policy, in units of the reward. 0 = none; then all
            probability moves to the best item of every context.
        entropy_coef: weight of the exact entropy; 0 = none.
    """

    kl_coef: NonNegativeFloat = 0.05
    entropy_coef: NonNegativeFloat = 0.0

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        compared = {Requirement.REFERENCE} if self.kl_coef else set()
        return frozenset({Requirement.REWARDS, Requirement.CATALOG} | compared)

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Contexts with any kept item."""
        return inputs.logp.mask.flatten(1).any(-1).sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``.

        Raises:
            RecpoError: the probabilities of a context do not sum to 1 (checked on a CPU, as all values are).
        """
        validate_log_probs(inputs.logp, self)
        tokens = inputs.logp.mask.bool()
        mask = tokens.any(-1)
        rewards = required(inputs, "rewards", self)
        logp, reference = zero_masked(inputs.logp.policy, tokens).sum(-1), None
        if self.kl_coef:
            reference = zero_masked(required(inputs, "reference", self).detach(), tokens).sum(-1)
        self._validate_mass(logp.detach(), mask)
        losses = catalog_policy_gradient_loss(
            logp, rewards, logp_ref=reference, mask=mask, kl_coef=self.kl_coef, entropy_coef=self.entropy_coef
        )
        loss = aggregate(losses, mask.any(-1), count=inputs.denominator)
        return LossOutput(loss, self._health(logp.detach(), rewards, reference, mask))

    def _validate_mass(self, logp: Tensor, mask: Tensor) -> None:
        """Raises if the candidates are not the full catalog, or the log-probabilities are not normalized."""
        # another device would be waited for, and a compiled step does not branch on values
        if logp.device.type != "cpu" or torch.compiler.is_compiling():
            return
        off = ((_distribution(logp.float(), mask)[1].sum(-1) - 1.0) * mask.any(-1)).abs()
        half = logp.dtype in (torch.float16, torch.bfloat16)
        if (off > (MASS_TOLERANCE_OF_HALVES if half else MASS_TOLERANCE)).any():
            raise RecpoError(
                "CatalogPolicyGradient sums over the whole catalog, and the probabilities of a context miss 1 by up to "
                f"{float(off.max()):.4g}: set rollout.candidates to catalog, with a reward that knows every item "
                "(unknown rewards leave their items out)",
                code="bad_value",
                field="rollout.candidates",
            )

    @torch.no_grad()
    def _health(self, logp: Tensor, rewards: Tensor, reference: Tensor | None, mask: Tensor) -> dict[str, Tensor]:
        contexts, (logp, pi) = mask.any(-1), _distribution(logp, mask)
        metrics = {
            "expected_reward": masked_mean((pi * zero_masked(rewards, mask)).sum(-1), contexts),
            "entropy": masked_mean(-(pi * logp).sum(-1), contexts),
        }
        if reference is not None:
            metrics["kl_reference"] = masked_mean((pi * (logp - reference)).sum(-1), contexts)
        return metrics

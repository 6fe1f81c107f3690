"""Group sequence policy optimization, GSPO (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recpo.objectives.inputs import required
from recpo.objectives.policy_gradient import ClippedObjective
from recpo.ops.reduce import check_same_shape, over_tokens, zero_masked
from recpo.ops.surrogate import RatioLevel, clipped_surrogate, sequence_log_ratio


def gspo_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    level: RatioLevel = "sequence",
) -> Tensor:
    """The clipped surrogate with one ratio per sequence, ``s = exp(mean_t log rho)``, returned on each of its tokens.

    Gradient of the token mean: ``-A s mean_t grad logp_t`` if not clipped. ``level="token"`` uses ``sg(s) pi /
    sg(pi)``: the same value and, under ``seq-mean-token-mean``, the same gradient when the advantage is one per
    sequence, but it admits an advantage per token.

    Args:
        logp: ``[..., T]``.
        logp_old: ``[..., T]``; no gradient flows into it.
        advantages: ``[...]`` or ``[..., T]``; no gradient flows into it.
        mask: ``[..., T]``.
        clip_low: lower clip range: for ``A < 0`` the gradient is zero once ``s < 1 - clip_low``. The geometric mean
            stays near 1, hence the small default.
        clip_high: upper clip range: for ``A > 0`` the gradient is zero once ``s > 1 + clip_high``.
        level: see above.

    Returns:
        ``[..., T]``; 0 at masked tokens; meant for ``seq-mean-token-mean``.

    Raises:
        ValueError: unknown level, or shapes that do not fit.
    """
    check_same_shape(logp=logp, logp_old=logp_old, mask=mask)
    logp = zero_masked(logp, mask)
    log_s = over_tokens(sequence_log_ratio(logp - zero_masked(logp_old.detach(), mask), mask), logp)
    if level == "token":
        log_s = log_s.detach() + logp - logp.detach()
    elif level != "sequence":
        raise ValueError(f"unknown level {level!r}; expected sequence or token")
    return clipped_surrogate(log_s, zero_masked(over_tokens(advantages, logp), mask), clip_low, clip_high)


@dataclass(frozen=True)
class GSPO(ClippedObjective):
    """Group sequence policy optimization (arXiv 2507.18071): one ratio per item, the geometric mean over its tokens.

    ``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``. On a catalog policy (``T = 1``) it is GRPO with another clip
    range: the ratio is then not a mean over many tokens and leaves the paper's range of 3e-4 / 4e-4 at once, so raise
    both options.

    Attributes:
        level: ``token`` is GSPO-token: the same gradient for one advantage per item.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    level: RatioLevel = "sequence"

    def token_loss(self, logp: Tensor, logp_old: Tensor | None, advantages: Tensor, mask: Tensor) -> Tensor:
        """See ``gspo_loss``."""
        old = required(logp_old, "old", self)
        return gspo_loss(
            logp, old, advantages, mask, clip_low=self.clip_low, clip_high=self.clip_high, level=self.level
        )

    def log_ratio(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """One log-ratio per item, on each of its tokens."""
        return zero_masked(over_tokens(sequence_log_ratio(log_ratio, mask), log_ratio), mask)

"""Checks of the inputs of objectives, and the health metrics that objectives log.

Health metrics are detached scalar tensors, computed over the kept entries.
"""

import torch
from torch import Tensor

from recpo.base.contracts import Requirement
from recpo.base.errors import RecpoError
from recpo.base.types import LogProbs, ObjectiveInputs
from recpo.ops.reduce import check_same_shape, zero_masked
from recpo.ops.surrogate import guarded_ratio

ROUNDING = 0.01
"""Largest value of a log-softmax, which exceeds 0 by rounding: 2^-7 in bfloat16."""


def required(inputs: ObjectiveInputs, name: str, objective: object) -> Tensor:
    """The field ``name`` of the inputs or of their log-probabilities.

    Args:
        inputs: the inputs.
        name: the field.
        objective: named in the error.

    Raises:
        RecpoError: the field is None, because the objective does not require it or training did not supply it.
    """
    value: Tensor | None = getattr(inputs.logp if name in LogProbs._fields else inputs, name)
    if value is None:
        requirement = next(one for one in Requirement if name in one.fields)
        raise requirement.missing(objective, f", and its inputs have no {name}")
    return value


@torch.no_grad()
def validate_log_probs(logp: LogProbs, objective: object) -> None:
    """Raises if a policy returned logits or probabilities instead of log-probabilities.

    Shapes are always checked. Values are checked only on a CPU, where this costs a thousandth of a step: an accelerator
    would have to finish its pending work first, and a compiled step cannot branch on values.

    Raises:
        RecpoError: a kept log-probability is above 0, or shapes differ.
    """
    check_same_shape(policy=logp.policy, mask=logp.mask, old=logp.old, reference=logp.reference)
    if logp.policy.device.type != "cpu" or torch.compiler.is_compiling():
        return
    for name, values in (("policy", logp.policy), ("old", logp.old), ("reference", logp.reference)):
        if values is not None and ((values > ROUNDING) & logp.mask.bool()).any():
            largest = float(values[logp.mask.bool()].nan_to_num(nan=-torch.inf).max())
            raise RecpoError(
                f"{type(objective).__name__}: the log-probabilities of the {name} policy reach {largest:.4g}, and a "
                "log-probability is at most 0: return log_softmax(scores), not scores or probabilities.",
                code="bad_value",
                field=name,
            )


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the kept entries; 0 if there are none."""
    return zero_masked(values, mask).float().sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def advantage_shares(advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Shares of positive, negative and zero advantages, and of contexts whose advantages are all zero.

    Args:
        advantages: ``[..., S]``.
        mask: ``[..., S]``.
    """
    advantages = zero_masked(advantages, mask)
    return {
        "positive_share": masked_mean(advantages > 0, mask),
        "negative_share": masked_mean(advantages < 0, mask),
        "zero_share": masked_mean(advantages == 0, mask),
        "zero_group_share": masked_mean((advantages == 0).all(-1), mask.any(-1)),
    }


@torch.no_grad()
def ratio_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Mean, deviation and maximum of the ratio, approximate KL(old || policy), and the effective sample size.

    ``approx_kl = mean(-log_ratio)``, the k1 value; ``effective_sample_size = (sum w)^2 / (n sum w^2)`` in (0, 1], of
    the ratios as importance weights; 0 if nothing is kept.

    Args:
        log_ratio: ``[..., T]``.
        mask: ``[..., T]``.
    """
    ratio = zero_masked(guarded_ratio(zero_masked(log_ratio, mask)), mask).float()
    total, square = ratio.sum(), ratio.square().sum()
    tiny = torch.finfo(ratio.dtype).tiny
    return {
        "ratio_mean": masked_mean(ratio, mask),
        "ratio_std": _variance(ratio, mask).sqrt(),
        "ratio_max": ratio.amax() if ratio.numel() else total,
        "approx_kl": masked_mean(-log_ratio, mask),
        "effective_sample_size": total.square() / (square * mask.sum().clamp(min=1)).clamp(min=tiny),
    }


@torch.no_grad()
def negative_gradient_share(weight: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Share of the summed ``|weight|`` on ``grad logp`` that positions with a negative advantage get; 0 where all is 0.

    Args:
        weight: ``[..., T]`` gradient weights.
        advantages: ``[..., T]``.
        mask: ``[..., T]``.
    """
    size = zero_masked(weight, mask).float().abs()
    return zero_masked(size, advantages < 0).sum() / size.sum().clamp(min=torch.finfo(size.dtype).tiny)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """``1 - Var(returns - values) / Var(returns)`` over the kept positions; 0 where the returns do not vary.

    1: perfect, 0: no better than a constant, below 0: worse.
    """
    residual = _variance(zero_masked(returns - values, mask), mask)
    total = _variance(zero_masked(returns, mask), mask)
    return torch.where(total > 0, 1.0 - residual / torch.where(total > 0, total, 1.0), 0.0)


def _variance(values: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((values.float() - masked_mean(values, mask)).square(), mask)

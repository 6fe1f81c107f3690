"""Checks of the inputs that objectives read from ``ObjectiveInputs``: required tensors, and valid log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import LogProbs
from recpo.ops.reduce import check_same_shape

SOURCES = {
    "advantages": "an advantage estimator",
    "rewards": "rewards in the batch or a reward function",
    "chosen": "preference lists (one chosen item per slate)",
    "old": "an old policy (logged propensities, a snapshot or the current policy)",
    "reference": "a reference policy",
    "values": "a critic",
    "values_old": "a critic",
    "returns": "a critic and an advantage estimator that gives returns",
    "entropy": "the entropy of the policy",
    "divergence": "a reference policy",
    "q_values": "a Q head",
    "q_targets": "a Q head with a target network",
    "scores": "a score head",
    "label": "labels in the batch",
    "dislike": "labels in the batch",
    "grades": "the graded feedback of the log",
    "positive": "the log's own definition of a positive event",
    "behaviors": "the behaviors that `recpo prepare` mapped",
}
"""Where each input comes from, for the error message."""

ROUNDING = 0.01
"""A log-softmax may exceed 0 by rounding: 2^-7 in bfloat16. A larger value is not a log-probability."""


def required(value: Tensor | None, name: str, objective: object) -> Tensor:
    """``value``, or an error that names the missing input.

    Raises:
        RecpoError: the training module did not supply it.
    """
    if value is None:
        raise RecpoError(f"{type(objective).__name__} needs {name}, which come from {SOURCES[name]}: configure one.")
    return value


@torch.no_grad()
def validate_log_probs(logp: LogProbs, objective: object) -> None:
    """Rejects logits or probabilities given as log-probabilities.

    Shapes are always checked. Values are checked only on a CPU, where this costs a thousandth of a step; on another
    device the check would have to wait for pending computation.

    Raises:
        RecpoError: a kept log-probability is above 0.
        ValueError: shapes that differ.
    """
    check_same_shape(policy=logp.policy, mask=logp.mask, old=logp.old, reference=logp.reference)
    if logp.policy.device.type != "cpu":
        return
    for name, values in (("policy", logp.policy), ("old", logp.old), ("reference", logp.reference)):
        if values is not None and ((values > ROUNDING) & logp.mask.bool()).any():
            largest = float(values[logp.mask.bool()].nan_to_num(nan=-torch.inf).max())
            raise RecpoError(
                f"{type(objective).__name__}: the log-probabilities of the {name} policy reach {largest:.4g}, and none "
                "can lie above 0: return log_softmax(scores), not scores or probabilities."
            )

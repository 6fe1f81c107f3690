"""What objectives read out of ``ObjectiveInputs``: required tensors, and preference lists."""

from __future__ import annotations

from torch import Tensor

from recpo.errors import RecpoError

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
    "q_values": "a Q head",
    "q_targets": "a Q head with a target network",
    "scores": "a score head",
}
"""Where each input comes from, for the error message."""


def required(value: Tensor | None, name: str, objective: object) -> Tensor:
    """``value``, or an error that says what the objective lacks.

    Raises:
        RecpoError: the module did not supply it.
    """
    if value is None:
        raise RecpoError(f"{type(objective).__name__} needs {name}, which come from {SOURCES[name]}: configure one.")
    return value

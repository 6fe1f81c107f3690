"""What objectives read out of ``ObjectiveInputs``: required tensors, and preference lists."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recpo.errors import RecpoError
from recpo.ops.reduce import zero_masked
from recpo.types import ObjectiveInputs

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
    "label": "labels in the batch",
    "dislike": "labels in the batch",
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


class PreferenceLists(NamedTuple):
    """Preference lists: one chosen and up to ``L`` rejected items per context.

    Attributes:
        kept: ``[B]`` bool, rows with exactly one chosen item; the others are dropped.
        is_chosen: ``[B, L]`` bool, the chosen position of kept rows.
        is_rejected: ``[B, L]`` bool, every other kept position of kept rows.
    """

    kept: Tensor
    is_chosen: Tensor
    is_rejected: Tensor

    def chosen(self, values: Tensor) -> Tensor:
        """``values [B, L]`` of the chosen item, ``[B]``; 0 in dropped rows."""
        return zero_masked(values, self.is_chosen).sum(-1)

    def pair_mean(self, values: Tensor) -> Tensor:
        """Mean of ``values [B, L]`` over the rejected items, ``[B]``; 0 without any."""
        return zero_masked(values, self.is_rejected).sum(-1) / self.is_rejected.sum(-1).clamp(min=1)


def preference_lists(inputs: ObjectiveInputs, objective: object) -> PreferenceLists:
    """Splits the slate axis into the chosen item and the rejected ones.

    An item is kept when any of its tokens is. Rows without exactly one kept chosen item are dropped.
    """
    kept = inputs.logp.mask.bool().any(-1)
    is_chosen = required(inputs.chosen, "chosen", objective).bool() & kept
    rows = is_chosen.sum(-1) == 1
    return PreferenceLists(rows, is_chosen & rows.unsqueeze(-1), kept & ~is_chosen & rows.unsqueeze(-1))

"""Preference lists, and the common part of the objectives that train on them against a reference policy."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recpo.base.contracts import Objective
from recpo.base.errors import RecpoError
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.health import masked_mean
from recpo.objectives.inputs import required, validate_log_probs
from recpo.ops.reduce import aggregate, zero_masked


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

    An item is kept if any of its tokens is kept. Rows without exactly one kept chosen item are dropped.
    """
    kept = inputs.logp.mask.bool().any(-1)
    is_chosen = required(inputs.chosen, "chosen", objective).bool() & kept
    rows = is_chosen.sum(-1) == 1
    return PreferenceLists(rows, is_chosen & rows.unsqueeze(-1), kept & ~is_chosen & rows.unsqueeze(-1))


def grade_gaps(lists: PreferenceLists, inputs: ObjectiveInputs, objective: object) -> Tensor:
    """Grade of the chosen item minus the grade of each other item, ``[B, L]``.

    0 if the other item has the higher grade, or if either grade is unknown (items that were never shown).
    """
    grades = required(inputs.grades, "grades", objective).detach()
    return zero_masked(
        (lists.chosen(grades).unsqueeze(-1) - grades).nan_to_num(nan=0.0).clamp(min=0.0), lists.is_rejected
    )


@dataclass(frozen=True)
class PreferenceObjective(Objective):
    """One chosen item against the rejected items of its list: ``mean over lists (list loss - nll_coef * logp_chosen)``.

    Log-probabilities are summed over the tokens of an item. For semantic ids, tokens that a rejected item shares with
    the chosen one can be left out of the rejected side (RAD-DPO, arXiv 2602.23964): mask them there.

    Attributes:
        beta: temperature of the implicit rewards ``beta (logp - logp_ref)``; larger = closer to the reference policy.
        nll_coef: weight of the likelihood of the chosen item, which keeps its probability from falling; 0 = none.
    """

    beta: float = 0.1
    nll_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise RecpoError(f"{type(self).__name__}.beta must be above 0, got {self.beta}.")

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({"chosen", "reference"})

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Lists with exactly one chosen item, those without any rejected item included."""
        return preference_lists(inputs, self).kept.sum()

    @abstractmethod
    def list_loss(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists, inputs: ObjectiveInputs) -> Tensor:
        """The preference loss ``[B]`` of token-summed log-probabilities ``[B, L]``, without the likelihood term."""

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        lists = preference_lists(inputs, self)
        logp = self.item_logp(inputs.logp.policy, inputs.logp.mask)
        logp_ref = torch.zeros_like(logp)
        if "reference" in self.requires:
            logp_ref = self.item_logp(required(inputs.logp.reference, "reference", self).detach(), inputs.logp.mask)
        total = self.list_loss(logp, logp_ref, lists, inputs)
        if self.nll_coef:
            total = total - self.nll_coef * lists.chosen(logp)
        loss = aggregate(total, lists.kept, count=inputs.denominator)
        return LossOutput(loss, self._health(logp.detach(), logp_ref, lists))

    def item_logp(self, logp: Tensor, mask: Tensor) -> Tensor:
        """Log-probability of each item, ``[B, L]``: the sum over its kept tokens."""
        return zero_masked(logp, mask).sum(-1)

    @torch.no_grad()
    def _health(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists) -> dict[str, Tensor]:
        rewards = self.beta * (logp - logp_ref)
        margin = lists.chosen(rewards).unsqueeze(-1) - rewards
        paired = lists.is_rejected.any(-1)
        return {
            "reward_chosen": masked_mean(rewards, lists.is_chosen),
            "reward_rejected": masked_mean(rewards, lists.is_rejected),
            "reward_margin": masked_mean(margin, lists.is_rejected),
            "reward_accuracy": masked_mean(margin > 0, lists.is_rejected),
            "best_of_list": masked_mean(((margin > 0) | ~lists.is_rejected).all(-1), paired),
            "logp_chosen": masked_mean(logp, lists.is_chosen),
            "logp_rejected": masked_mean(logp, lists.is_rejected),
            "dropped_list_share": masked_mean(~lists.kept, torch.ones_like(lists.kept)),
            "lone_list_share": masked_mean(~paired, lists.kept),
        }

"""Scores of a reward model: evaluated in bounded memory, and watched on held-out users while it is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recpo.contracts import Objective, Policy, StatePolicy
from recpo.evaluation.exposures import exposure_auc
from recpo.evaluation.targets import held_out_targets
from recpo.objectives.reward_model import PointwiseReward, pointwise_reward_loss
from recpo.policies.critic import ItemScore
from recpo.types import EvaluationBatch, Histories, Slates

_POSITIONS_AT_ONCE = 1 << 14


@torch.no_grad()
def item_scores(policy: StatePolicy, head: ItemScore, histories: Histories, slates: Slates) -> Tensor:
    """Scores ``[B, S, K]`` of the items of ``slates``, 0 at masked positions; no gradient.

    Each is scored after the ``visible`` events of its history. Positions are taken in blocks.
    """
    states = policy.encode(histories)
    rows = torch.arange(len(states), device=states.device)[:, None] * states.shape[1] + slates.visible
    positions = slates.mask.reshape(-1).nonzero().squeeze(1)
    flat, state_rows, items = states.flatten(0, 1), rows.reshape(-1)[positions], slates.item_ids.reshape(-1)[positions]
    parts = [
        head(flat[of_state], of_item, policy.item_vectors(of_item)).float()
        for of_state, of_item in zip(state_rows.split(_POSITIONS_AT_ONCE), items.split(_POSITIONS_AT_ONCE), strict=True)
    ]
    scores = torch.zeros(slates.mask.numel(), head.bias.shape[1], device=states.device)
    return scores.index_copy(0, positions, torch.cat(parts)).view(*slates.mask.shape, -1)


class ScoreMetrics:
    """What is watched while a reward model is trained, on the held-out exposures of the validation split.

    ``log_likelihood``, of a pointwise model, the mean over known targets; ``AUC_other``, the mean over users of the
    probability that the first score puts a positive item above another labeled one.

    Args:
        objective: what is trained.
        head: its scores.
    """

    def __init__(self, objective: Objective, head: ItemScore) -> None:
        self._pointwise = objective if isinstance(objective, PointwiseReward) else None
        self._head = head
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64)  # (sum, number) of each metric

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of ``compute``."""
        return ["AUC_other"] if self._pointwise is None else ["log_likelihood", "AUC_other"]

    @torch.no_grad()
    def update(self, policy: Policy, batch: EvaluationBatch) -> None:
        """Adds the users of ``batch``."""
        assert isinstance(policy, StatePolicy)
        slates = batch.feedback.slates
        scores = item_scores(policy, self._head, batch.feedback.histories, slates)
        sums = []
        if self._pointwise is not None:
            assert slates.label is not None
            assert slates.dislike is not None
            targets, known = self._pointwise.targets(slates.label, slates.dislike)
            known = known & slates.mask[..., None]
            sums.append((-pointwise_reward_loss(scores, targets, known).double().sum(), known.sum().double()))
        per_user = exposure_auc(scores[..., 0], held_out_targets(batch))["AUC_other"]
        sums.append((per_user.double().nansum(), per_user.isfinite().sum().double()))
        self._sums += torch.stack([torch.stack(pair) for pair in sums]).cpu()

    def compute(self, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The means over every rank's users, 0 where there is none; starts anew."""
        totals = reduce_sum(self._sums)
        self._sums = torch.zeros_like(self._sums)
        means = (totals[:, 0] / totals[:, 1].clamp(min=1.0)).float()
        return dict(zip(self.names, means, strict=True))

"""Plans a training step on the CPU, together with the batch, so that the step itself never waits for the device.

A step has to wait whenever the size of a tensor depends on values: which events are not padding, which positions are
scored, which of them share a state. All of these follow from the batch. The planner runs where the batch is gathered
(in the loader's worker processes, if there are any), so the plan is pinned and copied with the batch.

Rewards of the log are computed here too, with the advantages that follow from them. Some values are known only on the
device: what a learned reward says, and which items are hard negatives. Steps with these plan every position that may be
needed, and drop what the device decides against. Where advantages need state values, every position is planned. Not
planned is a learned reward together with logged propensities, which are validated where they are needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.base.contracts import Policy, Requirement, RewardFunction, TokenAdvantageEstimator
from recpo.base.errors import RecpoError
from recpo.base.types import BatchPlan, FeedbackBatch, Histories, ScoringPlan, Slates
from recpo.policies.blocks import event_places
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.sampling import check_visible, plan_of
from recpo.training.contradictions import all_requirements
from recpo.training.networks import continuations_of
from recpo.training.options import LearningOptions
from recpo.training.rollout import context_numbers, items_of


class StepPlanner:
    """Adds a ``BatchPlan`` to a batch, and the places of the events to its histories.

    Args:
        policy: the trained policy; the planner, which worker processes get a copy of, does not keep it.
        options: what it learns from.
        hard_negatives: as in ``InputBuilder``: places behind every slate for which the device chooses items.
    """

    def __init__(self, policy: Policy, options: LearningOptions, hard_negatives: int = 0) -> None:
        objective, estimator, reward = options.objective, options.advantage, options.reward
        requires = all_requirements(objective, estimator)
        is_rewarded = Requirement.REWARDS in requires
        of_log = reward is not None and reward.is_of_log
        # whether the logged slates are scored, and the batch determines the positions
        self._plans_positions = options.rollout is None and not hard_negatives and (of_log or not is_rewarded)
        from_batch = self._plans_positions and Requirement.VALUE not in requires
        of_tokens = from_batch and isinstance(estimator, TokenAdvantageEstimator) and policy.num_tokens > 1
        encoder = policy.encoder if isinstance(policy, FeaturePolicy) else None
        # events that the policy's blocks read; None = it does not skip padding
        self._readable = None if encoder is None or not encoder.skips_padding else encoder.attention_length
        self._advantage = estimator if from_batch else None
        whitens = estimator is not None and estimator.whiten
        self._skips_zeros = options.skips_zero_advantages and not whitens  # a whitened 0 is none
        self._plans_contexts = options.rollout is not None
        self._reward = reward if self._plans_positions and is_rewarded else None
        self._reads_propensities = options.old_policy == "logged"
        self._hard_negatives = min(hard_negatives, policy.num_items)
        # [V + 1, T], for advantages of tokens; None = not read, or every item is its own token
        self._tokens = policy.tokens(torch.arange(policy.num_items + 1)) if of_tokens else None
        self._continues = self._plans_positions and Requirement.Q_VALUE in requires  # what follows a position

    def __call__(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The batch with its plan."""
        if self._reward is not None:
            batch = with_rewards(batch, self._reward)
        histories = batch.histories
        if self._readable is not None:
            width = min(histories.item_ids.shape[1], self._readable)
            histories = histories._replace(places=event_places(histories.lengths.clamp_max(width), width))
        contexts = context_numbers(batch) if self._plans_contexts else None
        plan = self._plan(batch, histories)._replace(contexts=contexts)
        return batch._replace(histories=histories, plan=plan)

    def _plan(self, batch: FeedbackBatch, histories: Histories) -> BatchPlan:
        if not self._plans_positions:
            return BatchPlan(among=self._among(batch, histories))
        advantages = self._advantages(batch)
        needed = needed_positions(batch, advantages if self._skips_zeros else None)
        if self._reads_propensities:
            validate_propensities(batch, needed)
        if self._readable is not None:
            check_visible(histories, batch.slates, needed, self._readable)
        scored = plan_of(batch.slates, needed, histories.item_ids.shape[1] + 1)
        continuations = continuations_of(batch.slates) if self._continues else None
        return BatchPlan(scored._replace(most=int(needed.sum(1).max())), advantages, continuations=continuations)

    def _among(self, batch: FeedbackBatch, histories: Histories) -> ScoringPlan | None:
        """The positions that may be scored: the real ones, and behind them those of hard negatives."""
        if self._plans_contexts or self._reads_propensities:
            return None
        slates, lengths = batch.slates, histories.lengths[:, None]
        mask, visible = items_of(slates), slates.visible
        if self._readable is not None:
            check_visible(histories, slates, mask, self._readable)
        if self._hard_negatives:
            assert slates.chosen is not None
            kept = (slates.chosen & slates.mask).any(1, keepdim=True).expand(-1, self._hard_negatives)
            mask, visible = torch.cat([mask, kept], 1), torch.cat([visible, lengths * kept], 1)
        plan = plan_of(Slates(mask, visible, mask), mask, histories.item_ids.shape[1] + 1)
        return plan._replace(most=int(mask.sum(1).max()), surplus=True)

    def _advantages(self, batch: FeedbackBatch) -> Tensor | None:
        if isinstance(self._advantage, TokenAdvantageEstimator):
            items = batch.slates.item_ids
            tokens = items[..., None] if self._tokens is None else self._tokens[items]
            return self._advantage.token_advantages(batch, tokens)
        return None if self._advantage is None else self._advantage(batch)


def with_rewards(batch: FeedbackBatch, reward: RewardFunction) -> FeedbackBatch:
    """The batch with the rewards of its slates. A position with an unknown reward leaves its slate."""
    slates = batch.slates
    values = reward(batch, slates).detach()
    known = slates.mask & ~values.isnan()
    slates = slates._replace(reward=torch.where(known, values, 0.0), mask=known)
    return batch._replace(slates=slates, plan=None)


def needed_positions(batch: FeedbackBatch, advantages: Tensor | None) -> Tensor:
    """``[B, S]``: real items and, if advantages are given, only the positions with a nonzero advantage."""
    mask = items_of(batch.slates)
    if advantages is None:
        return mask
    acts = advantages != 0
    return mask & (acts.any(-1) if acts.dim() > mask.dim() else acts)


def validate_propensities(batch: FeedbackBatch, needed: Tensor) -> None:
    """Raises ``RecpoError`` if a position ``needed [B, S]`` has no logged propensity."""
    logged = batch.slates.logp_behavior
    missing = int((needed if logged is None else needed & ~logged.isfinite()).sum())
    if logged is None or missing:
        raise RecpoError(
            f"old_policy: logged needs a propensity in (0, 1] for every scored event; {missing} of "
            f"{int(needed.sum())} in this batch have none. Map the log's propensity column in `recpo prepare`, "
            "or set old_policy: snapshot",
            code="missing_value",
            field="old_policy",
        )

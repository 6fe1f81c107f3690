"""Plans a training step on the CPU, together with the batch, so that the step itself never waits for the device.

A step has to wait whenever the size of a tensor depends on values: which events are not padding, which positions are
scored, which of them share a state. All of these follow from the batch. The planner runs where the batch is gathered
(in the loader's worker processes, if there are any), so the plan is pinned and copied with the batch.

Rewards of the log are computed here too, with the advantages that follow from them. Some values are known only on the
device: what a learned reward says, and which items are hard negatives. Steps with these plan every position that may be
needed, and drop what the device decides against. Where advantages need state values, every position is planned. Not
planned is a learned reward together with logged propensities, which are validated where they are needed.
"""

import torch
from torch import Tensor

from recpo.base.contracts import Policy, Requirement, RewardFunction, TokenAdvantageEstimator
from recpo.base.errors import RecpoError
from recpo.base.types import BatchPlan, FeedbackBatch, ScoringPlan, Slates
from recpo.policies.blocks import event_indices
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.sampling import check_visible, plan_of
from recpo.training.contradictions import all_requirements
from recpo.training.networks import next_requests_of
from recpo.training.options import LearningOptions
from recpo.training.rollout import context_numbers, items_of, rewarded


class StepPlanner:
    """Adds a ``BatchPlan`` to a batch, and the places of the events to its histories.

    What is planned depends on what decides over the positions that are scored: the batch, the device, or a rollout,
    which draws its own (only the contexts are numbered).

    Args:
        policy: the trained policy; the planner, which worker processes get a copy of, does not keep it.
        options: what it learns from.
        hard_negatives: as in ``InputBuilder``: places behind every slate for which the device chooses items.
    """

    def __init__(self, policy: Policy, options: LearningOptions, hard_negatives: int = 0) -> None:
        encoder = policy.encoder if isinstance(policy, FeaturePolicy) else None
        # events that the policy's blocks read; None = it does not skip padding
        self._readable = None if encoder is None or not encoder.skips_padding else encoder.attention_length
        requires, advantage = all_requirements(options.objective, options.advantage), options.advantage
        self._of_rollout, self._hard_negatives = options.rollout is not None, min(hard_negatives, policy.num_items)
        is_rewarded = Requirement.REWARDS in requires
        learned = is_rewarded and (options.reward is None or not options.reward.needs_only_slates)
        self._device_decides = bool(hard_negatives) or learned
        of_log = not (self._of_rollout or self._device_decides)
        self._reward = options.reward if of_log and is_rewarded else None
        # advantages that need state values are not planned: every position is scored
        self._advantage = advantage if of_log and Requirement.VALUE not in requires else None
        of_tokens = isinstance(self._advantage, TokenAdvantageEstimator) and policy.num_tokens > 1
        self._tokens = policy.tokens(torch.arange(policy.num_items + 1)) if of_tokens else None
        # a whitened 0 is none
        self._skips_zeros = options.skips_zero_advantages and not (advantage is not None and advantage.whiten)
        self._reads_propensities = options.old_policy == "logged"
        self._plans_next_requests = Requirement.Q_VALUE in requires

    def __call__(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The batch with its plan."""
        histories = batch.histories
        if self._readable is not None:
            width = min(histories.item_ids.shape[1], self._readable)
            indices = event_indices(histories.lengths.clamp_max(width), width)
            batch = batch._replace(histories=histories._replace(event_indices=indices))
        if self._of_rollout:
            return batch._replace(plan=BatchPlan(contexts=context_numbers(batch)))
        if not self._device_decides:
            return self._with_positions(batch)
        # logged propensities are validated where they are needed
        return batch._replace(plan=BatchPlan(scorable=None if self._reads_propensities else self._scorable(batch)))

    def _with_positions(self, batch: FeedbackBatch) -> FeedbackBatch:
        """Plans the positions that are scored, where the batch determines them."""
        if self._reward is not None:
            batch = with_rewards(batch, self._reward)
        slates, histories = batch.slates, batch.histories
        advantages = self._advantages(batch)
        needed = needed_positions(batch, advantages if self._skips_zeros else None)
        if self._reads_propensities:
            validate_propensities(batch, needed)
        if self._readable is not None:
            check_visible(histories, slates, needed, self._readable)
        scored = plan_of(slates, needed, histories.item_ids.shape[1] + 1)
        scored = scored._replace(max_per_context=int(needed.sum(1).max()))
        next_requests = next_requests_of(slates) if self._plans_next_requests else None
        return batch._replace(plan=BatchPlan(scored, advantages, next_requests=next_requests))

    def _advantages(self, batch: FeedbackBatch) -> Tensor | None:
        if isinstance(self._advantage, TokenAdvantageEstimator):
            items = batch.slates.item_ids
            tokens = items[..., None] if self._tokens is None else self._tokens[items]
            return self._advantage.token_advantages(batch, tokens)
        return None if self._advantage is None else self._advantage(batch)

    def _scorable(self, batch: FeedbackBatch) -> ScoringPlan:
        """The positions that may be scored, where the device decides: real ones, and those of hard negatives."""
        slates, histories = batch.slates, batch.histories
        mask, visible = items_of(slates), slates.visible
        if self._readable is not None:
            check_visible(histories, slates, mask, self._readable)
        if self._hard_negatives:
            assert slates.chosen is not None
            kept = (slates.chosen & slates.mask).any(1, keepdim=True).expand(-1, self._hard_negatives)
            mask, visible = torch.cat([mask, kept], 1), torch.cat([visible, histories.lengths[:, None] * kept], 1)
        plan = plan_of(Slates(mask, visible, mask), mask, histories.item_ids.shape[1] + 1)
        return plan._replace(max_per_context=int(mask.sum(1).max()), has_extra_positions=True)


def with_rewards(batch: FeedbackBatch, reward: RewardFunction) -> FeedbackBatch:
    """The batch with the rewards of its slates. A position with an unknown reward leaves its slate."""
    return batch._replace(slates=rewarded(batch.slates, reward(batch, batch.slates)))


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

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

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import AdvantageEstimator, Policy, Requirement, RewardFunction, TokenAdvantageEstimator
from recpo.base.errors import RecpoError
from recpo.base.types import BatchPlan, FeedbackBatch, Histories, ScoringPlan, Slates
from recpo.policies.blocks import event_places
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.sampling import check_visible, plan_of
from recpo.training.contradictions import all_requirements
from recpo.training.networks import continuations_of
from recpo.training.options import LearningOptions
from recpo.training.rollout import context_numbers, items_of


@dataclass(frozen=True)
class StepPlanner:
    """Adds a ``BatchPlan`` to a batch, and the places of the events to its histories.

    Attributes:
        readable: number of events that the policy's blocks read; None = the policy does not skip padding.
        plans_positions: the logged slates are scored, and the batch determines the positions.
        advantage: computes advantages from the batch alone; None = the objective reads none.
        inert: positions with advantage 0 are not scored.
        plans_contexts: a rollout needs the contexts of the batch.
        reward: gives logged slates their rewards; None = the step needs none, or computes them itself.
        reads_propensities: the logged propensities are the old policy.
        hard_negatives: places behind every slate for which the device chooses items.
        tokens: ``[V + 1, T]`` of the items, for advantages of tokens; None = not read, or every item is its own token.
        continues: the step asks what follows a position (Q-learning).
    """

    readable: int | None
    plans_positions: bool
    advantage: AdvantageEstimator | None = None
    inert: bool = False
    plans_contexts: bool = False
    reward: RewardFunction | None = None
    reads_propensities: bool = False
    hard_negatives: int = 0
    tokens: Tensor | None = None
    continues: bool = False

    @classmethod
    def of(cls, policy: Policy, options: LearningOptions, hard_negatives: int = 0) -> StepPlanner:
        """The planner of a training run; ``hard_negatives`` as in ``InputBuilder``."""
        objective, estimator, reward = options.objective, options.advantage, options.reward
        requires = all_requirements(objective, estimator)
        is_rewarded = Requirement.REWARDS in requires
        of_log = reward is not None and reward.is_of_log
        plans = options.rollout is None and not hard_negatives and (of_log or not is_rewarded)
        from_batch = plans and Requirement.VALUE not in requires
        of_tokens = from_batch and isinstance(estimator, TokenAdvantageEstimator) and policy.num_tokens > 1
        encoder = policy.encoder if isinstance(policy, FeaturePolicy) else None
        return cls(
            None if encoder is None or not encoder.skips_padding else encoder.attention_length,
            plans,
            estimator if from_batch else None,
            objective.zero_advantage_is_inert and not options.anchor_coef and not (estimator and estimator.whiten),
            options.rollout is not None,
            reward if plans and is_rewarded else None,
            options.old_policy == "logged",
            min(hard_negatives, policy.num_items),
            policy.tokens(torch.arange(policy.num_items + 1)) if of_tokens else None,
            plans and Requirement.Q_VALUE in requires,
        )

    def __call__(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The batch with its plan."""
        if self.reward is not None:
            batch = with_rewards(batch, self.reward)
        histories = batch.histories
        if self.readable is not None:
            width = min(histories.item_ids.shape[1], self.readable)
            histories = histories._replace(places=event_places(histories.lengths.clamp_max(width), width))
        contexts = context_numbers(batch) if self.plans_contexts else None
        plan = self._plan(batch, histories)._replace(contexts=contexts)
        return batch._replace(histories=histories, plan=plan)

    def _plan(self, batch: FeedbackBatch, histories: Histories) -> BatchPlan:
        if not self.plans_positions:
            return BatchPlan(among=self._among(batch, histories))
        advantages = self._advantages(batch)
        needed = needed_positions(batch, advantages if self.inert else None)
        if self.reads_propensities:
            validate_propensities(batch, needed)
        if self.readable is not None:
            check_visible(histories, batch.slates, needed, self.readable)
        scored = plan_of(batch.slates, needed, histories.item_ids.shape[1] + 1)
        continuations = continuations_of(batch.slates) if self.continues else None
        return BatchPlan(scored._replace(most=int(needed.sum(1).max())), advantages, continuations=continuations)

    def _among(self, batch: FeedbackBatch, histories: Histories) -> ScoringPlan | None:
        """The positions that may be scored: the real ones, and behind them those of hard negatives."""
        if self.plans_contexts or self.reads_propensities:
            return None
        slates, lengths = batch.slates, histories.lengths[:, None]
        mask, visible = items_of(slates), slates.visible
        if self.readable is not None:
            check_visible(histories, slates, mask, self.readable)
        if self.hard_negatives:
            assert slates.chosen is not None
            kept = (slates.chosen & slates.mask).any(1, keepdim=True).expand(-1, self.hard_negatives)
            mask, visible = torch.cat([mask, kept], 1), torch.cat([visible, lengths * kept], 1)
        plan = plan_of(Slates(mask, visible, mask), mask, histories.item_ids.shape[1] + 1)
        return plan._replace(most=int(mask.sum(1).max()), surplus=True)

    def _advantages(self, batch: FeedbackBatch) -> Tensor | None:
        if isinstance(self.advantage, TokenAdvantageEstimator):
            items = batch.slates.item_ids
            return self.advantage.token_advantages(
                batch, items[..., None] if self.tokens is None else self.tokens[items]
            )
        return None if self.advantage is None else self.advantage(batch)


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

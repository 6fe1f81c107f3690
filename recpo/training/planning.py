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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import AdvantageEstimator, Policy, Requirement, RewardFunction, TokenAdvantageEstimator
from recpo.base.errors import RecpoError
from recpo.base.types import BatchPlan, FeedbackBatch, ScoringPlan, Slates
from recpo.policies.blocks import event_places
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.sampling import check_visible, plan_of
from recpo.training.contradictions import all_requirements
from recpo.training.networks import continuations_of
from recpo.training.options import LearningOptions
from recpo.training.rollout import context_numbers, items_of


class StepPlanner:
    """Adds a ``BatchPlan`` to a batch, and the places of the events to its histories.

    What is planned depends on what decides over the positions that are scored: the batch (``_Positions``), the device
    (``_Candidates``), or a rollout, which draws its own (only the contexts are numbered).

    Args:
        policy: the trained policy; the planner, which worker processes get a copy of, does not keep it.
        options: what it learns from.
        hard_negatives: as in ``InputBuilder``: places behind every slate for which the device chooses items.
    """

    def __init__(self, policy: Policy, options: LearningOptions, hard_negatives: int = 0) -> None:
        encoder = policy.encoder if isinstance(policy, FeaturePolicy) else None
        # events that the policy's blocks read; None = it does not skip padding
        self._readable = None if encoder is None or not encoder.skips_padding else encoder.attention_length
        is_rewarded = Requirement.REWARDS in all_requirements(options.objective, options.advantage)
        learned = is_rewarded and (options.reward is None or not options.reward.is_of_log)
        reads_propensities = options.old_policy == "logged"
        self._plan: Callable[[FeedbackBatch], FeedbackBatch]
        if options.rollout is not None:
            self._plan = _with_contexts
        elif hard_negatives or learned:
            self._plan = _Candidates(self._readable, min(hard_negatives, policy.num_items), reads_propensities)
        else:
            self._plan = _Positions.of(policy, options, self._readable)

    def __call__(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The batch with its plan."""
        histories = batch.histories
        if self._readable is not None:
            width = min(histories.item_ids.shape[1], self._readable)
            histories = histories._replace(places=event_places(histories.lengths.clamp_max(width), width))
        return self._plan(batch._replace(histories=histories))


def _with_contexts(batch: FeedbackBatch) -> FeedbackBatch:
    return batch._replace(plan=BatchPlan(contexts=context_numbers(batch)))


@dataclass(frozen=True)
class _Positions:
    """Plans the positions that are scored, where the batch determines them.

    Attributes:
        readable: events that the policy reads; None = all.
        reward: of the log; None = not required.
        advantage: None = not required, or it needs state values, for which every position is scored.
        tokens: ``[V + 1, T]``, for advantages of tokens; None = not read, or every item is its own token.
        skips_zeros: whether a position without an advantage is left out.
        reads_propensities: whether every scored position needs a logged one.
        continues: whether an objective reads what follows a position.
    """

    readable: int | None
    reward: RewardFunction | None
    advantage: AdvantageEstimator | TokenAdvantageEstimator | None
    tokens: Tensor | None
    skips_zeros: bool
    reads_propensities: bool
    continues: bool

    @classmethod
    def of(cls, policy: Policy, options: LearningOptions, readable: int | None) -> _Positions:
        """What these options require of a plan."""
        requires = all_requirements(options.objective, options.advantage)
        advantage = None if Requirement.VALUE in requires else options.advantage
        of_tokens = isinstance(advantage, TokenAdvantageEstimator) and policy.num_tokens > 1
        whitens = options.advantage is not None and options.advantage.whiten
        return cls(
            readable,
            reward=options.reward if Requirement.REWARDS in requires else None,
            advantage=advantage,
            tokens=policy.tokens(torch.arange(policy.num_items + 1)) if of_tokens else None,
            skips_zeros=options.skips_zero_advantages and not whitens,  # a whitened 0 is none
            reads_propensities=options.old_policy == "logged",
            continues=Requirement.Q_VALUE in requires,
        )

    def __call__(self, batch: FeedbackBatch) -> FeedbackBatch:
        if self.reward is not None:
            batch = with_rewards(batch, self.reward)
        slates, histories = batch.slates, batch.histories
        advantages = self._advantages(batch)
        needed = needed_positions(batch, advantages if self.skips_zeros else None)
        if self.reads_propensities:
            validate_propensities(batch, needed)
        if self.readable is not None:
            check_visible(histories, slates, needed, self.readable)
        scored = plan_of(slates, needed, histories.item_ids.shape[1] + 1)
        scored = scored._replace(most=int(needed.sum(1).max()))
        continuations = continuations_of(slates) if self.continues else None
        return batch._replace(plan=BatchPlan(scored, advantages, continuations=continuations))

    def _advantages(self, batch: FeedbackBatch) -> Tensor | None:
        if isinstance(self.advantage, TokenAdvantageEstimator):
            items = batch.slates.item_ids
            tokens = items[..., None] if self.tokens is None else self.tokens[items]
            return self.advantage.token_advantages(batch, tokens)
        return None if self.advantage is None else self.advantage(batch)


@dataclass(frozen=True)
class _Candidates:
    """Plans the positions that may be scored, where the device decides: real ones, and those of hard negatives.

    Attributes:
        readable: events that the policy reads; None = all.
        hard_negatives: items that the device chooses for a slate.
        reads_propensities: then nothing is planned, because logged ones are validated where they are needed.
    """

    readable: int | None
    hard_negatives: int
    reads_propensities: bool

    def __call__(self, batch: FeedbackBatch) -> FeedbackBatch:
        among = None if self.reads_propensities else self._among(batch)
        return batch._replace(plan=BatchPlan(among=among))

    def _among(self, batch: FeedbackBatch) -> ScoringPlan:
        slates, histories = batch.slates, batch.histories
        mask, visible = items_of(slates), slates.visible
        if self.readable is not None:
            check_visible(histories, slates, mask, self.readable)
        if self.hard_negatives:
            assert slates.chosen is not None
            kept = (slates.chosen & slates.mask).any(1, keepdim=True).expand(-1, self.hard_negatives)
            mask, visible = torch.cat([mask, kept], 1), torch.cat([visible, histories.lengths[:, None] * kept], 1)
        plan = plan_of(Slates(mask, visible, mask), mask, histories.item_ids.shape[1] + 1)
        return plan._replace(most=int(mask.sum(1).max()), surplus=True)


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

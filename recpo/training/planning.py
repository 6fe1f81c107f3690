"""Plans a training step beside the batch, on the CPU, so that the step itself waits for no device.

A step must wait wherever the size of a tensor depends on values: which events are not padding, which positions are
scored, which of them share a state. All of that follows from the batch. The planner runs where the batch is gathered
(in the worker processes of the loader, where there are any), so the plan is pinned and copied with the batch.

Not planned, because the values are known on the device only: positions that a learned reward or hard negatives decide,
and advantages that need state values or rewards. Those steps count on the device, as all did before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recpo.contracts import AdvantageEstimator, Policy, TokenAdvantageEstimator
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.layers import event_places
from recpo.policies.plans import check_visible, plan_of
from recpo.training.contradictions import all_requirements
from recpo.training.options import LearningOptions
from recpo.training.slate_edits import items_of
from recpo.types import BatchPlan, FeedbackBatch, Histories


@dataclass(frozen=True)
class StepPlanner:
    """Adds a ``BatchPlan`` to a batch, and the places of the events to its histories.

    Attributes:
        readable: the most events that the policy's blocks read; None = the policy does not skip padding.
        plans_positions: the logged slates are what is scored, and the batch says which positions.
        advantage: gives advantages from the batch alone; None = the objective reads none.
        inert: a position with advantage 0 is not scored.
        plans_contexts: a rollout asks which contexts the batch has.
    """

    readable: int | None
    plans_positions: bool
    advantage: AdvantageEstimator | None = None
    inert: bool = False
    plans_contexts: bool = False

    @classmethod
    def of(cls, policy: Policy, options: LearningOptions, hard_negatives: int = 0) -> StepPlanner:
        """The planner of a training: ``hard_negatives`` as in ``InputBuilder``."""
        objective, estimator = options.objective, options.advantage
        requires = all_requirements(objective, estimator)
        from_batch = not requires & {"rewards", "value"} and not isinstance(estimator, TokenAdvantageEstimator)
        plans = options.rollout is None and not hard_negatives and from_batch
        encoder = policy.encoder if isinstance(policy, FeaturePolicy) else None
        return cls(
            None if encoder is None or encoder.reads_time else encoder.attention_length,
            plans,
            estimator if plans else None,
            objective.zero_advantage_is_inert and not options.anchor_coef,
            options.rollout is not None,
        )

    def __call__(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The batch with its plan."""
        histories = batch.histories
        if self.readable is not None:
            width = min(histories.item_ids.shape[1], self.readable)
            histories = histories._replace(places=event_places(histories.lengths.clamp_max(width), width))
        contexts = context_numbers(batch) if self.plans_contexts else None
        plan = self._plan(batch, histories)._replace(contexts=contexts)
        return batch._replace(histories=histories, plan=plan)

    def _plan(self, batch: FeedbackBatch, histories: Histories) -> BatchPlan:
        if not self.plans_positions:
            return BatchPlan()
        advantages = None if self.advantage is None else self.advantage(batch)
        needed = needed_positions(batch, advantages if self.inert else None)
        if self.readable is not None:
            check_visible(histories, batch.slates, needed, self.readable)
        return BatchPlan(plan_of(batch.slates, needed, histories.item_ids.shape[1] + 1), advantages)


def needed_positions(batch: FeedbackBatch, advantages: Tensor | None) -> Tensor:
    """``[B, S]``: kept items, and of these the positions with an advantage where it is given."""
    mask = items_of(batch.slates)
    if advantages is None:
        return mask
    acts = advantages != 0
    return mask & (acts.any(-1) if acts.dim() > mask.dim() else acts)


def context_numbers(batch: FeedbackBatch) -> str:
    """The contexts of a batch, from which its random numbers are seeded; 0 for an empty row of a last step."""
    rows = (batch.context_ids + 1) * batch.slates.mask.any(-1)
    return ",".join(map(str, rows.tolist()))

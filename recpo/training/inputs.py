"""From a batch to what an objective looks at: only what ``Objective.requires`` names is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from recpo.contracts import AdvantageEstimator, Objective, Policy, ReturnEstimator, RewardFunction, StatePolicy
from recpo.errors import RecpoError
from recpo.objectives.health import masked_mean
from recpo.training.contradictions import OF_STATES, all_requirements
from recpo.training.critic import Critic, CriticOptions
from recpo.training.lists import with_hard_negatives, without_shared_prefix
from recpo.training.rollout import Rollout, RolloutOptions, Rollouts, RolloutSources, roll_out
from recpo.training.rollout_slates import items_of, side_by_side
from recpo.training.snapshots import ReferenceCache, Snapshot
from recpo.types import FeedbackBatch, LogProbs, ObjectiveInputs, Slates

OldPolicy = Literal["current", "logged", "snapshot"]
ReferencePolicy = Literal["frozen", "cached", "snapshot"]


@dataclass(frozen=True)
class InputSources:
    """Where the inputs of an objective come from.

    Attributes:
        advantage: turns feedback into advantages.
        reward: turns feedback into rewards.
        old_policy: ``current``, ``logged`` or ``snapshot``.
        reference: ``frozen``, ``cached`` or ``snapshot``.
        critic: options of the heads.
        hard_negatives: how many of the policy's top ranks are appended to every slate.
        anchored: the likelihood of what the log shows is wanted too.
        mask_shared_prefix: codes that a rejected item shares with the chosen one are left out of its side.
        rollout: learn from candidates that the snapshot draws, instead of the logged slates.
        judge: scores candidates for the metrics alone.
        seed: of the candidates.
    """

    advantage: AdvantageEstimator | None = None
    reward: RewardFunction | None = None
    old_policy: OldPolicy = "current"
    reference: ReferencePolicy = "frozen"
    critic: CriticOptions = field(default_factory=CriticOptions)
    hard_negatives: int = 0
    anchored: bool = False
    mask_shared_prefix: bool = False
    rollout: RolloutOptions | None = None
    judge: RewardFunction | None = None
    seed: int = 0


class Built(NamedTuple):
    """What ``InputBuilder`` makes of a batch.

    Attributes:
        inputs: what the objective looks at.
        metrics: of the slates.
        logged: what an anchor looks at: the log-probabilities of the logged slate. These are the inputs, unless
            candidates took the slate's place.
    """

    inputs: ObjectiveInputs
    metrics: dict[str, Tensor]
    logged: ObjectiveInputs


class _Values(NamedTuple):
    """State values ``[B, S]`` of the policy and of the snapshot, and the states of the snapshot."""

    values: Tensor | None = None
    old: Tensor | None = None
    old_states: Tensor | None = None


class InputBuilder(nn.Module):
    """Computes the inputs of an objective; holds the other policies and the critic, which travel with checkpoints.

    Args:
        policy: the trained policy, which is copied where a frozen one is needed.
        objective: what asks.
        sources: where the answers come from.
    """

    def __init__(self, policy: Policy, objective: Objective, sources: InputSources) -> None:
        super().__init__()
        self._objective, self._sources = objective, sources
        self._requires = all_requirements(objective, sources.advantage)
        self.cache: ReferenceCache | None = None
        frozen = "reference" in self._requires and sources.reference == "frozen"
        self.reference = Snapshot(policy) if frozen else None
        self.critic: Critic | None = None
        if self._requires & (OF_STATES - {"entropy"}):
            assert isinstance(policy, StatePolicy)
            self.critic = Critic(policy, self._requires, sources.critic, objective.num_scores)
        value = None if self.critic is None else self.critic.state_value
        self.old = Snapshot(policy, value) if sources.old_policy == "snapshot" else None
        self.rollouts = None if sources.rollout is None else Rollouts(sources.seed)

    def refresh(self, policy: Policy, step: int, snapshot_every: int) -> None:
        """Brings snapshot and target network to where they stand at optimizer step ``step``."""
        if self.old is not None and step % snapshot_every == 0:
            self.old.refresh(policy, None if self.critic is None else self.critic.state_value)
        if self.critic is not None and isinstance(policy, StatePolicy):
            self.critic.refresh_target(policy, step)

    def forward(self, policy: Policy, batch: FeedbackBatch) -> Built:
        """The inputs, and metrics of the slates."""
        logged, rollout = batch.slates, None
        if self.rollouts is not None:
            rollout = self.rollouts.of(batch, self._roll_out)
            batch = batch._replace(slates=rollout.slates)
        else:
            batch = self._logged(batch, policy)
        states = None
        if self._requires & OF_STATES:
            assert isinstance(policy, StatePolicy)
            states = policy.encode(batch.histories)
        values = self._values(states, batch, rollout)
        advantages, returns = self._advantages(batch, values.old)
        needed = self._needed(batch, advantages)
        anchored = logged if self._sources.anchored and rollout is not None else None
        logp, logp_logged = self._logp(policy, batch, needed, states, anchored)
        log_probs = LogProbs(
            logp,
            self._token_mask(policy, batch.slates).expand_as(logp),
            self._old_logp(batch, logp, needed, values.old_states) if rollout is None else rollout.logp,
            self._reference_logp(batch, needed) if rollout is None else rollout.reference,
        )
        inputs = self._of_slates(ObjectiveInputs(log_probs, advantages, returns=returns), batch.slates)
        inputs = inputs._replace(
            values=values.values, values_old=values.old, entropy=self._entropy(policy, batch, needed, states)
        )
        of_log = inputs
        if logp_logged is not None:
            of_log = ObjectiveInputs(LogProbs(logp_logged, logged.mask[..., None].expand_as(logp_logged)))
        metrics = self._metrics(batch) | ({} if rollout is None else rollout.metrics)
        return Built(self._with_item_values(inputs, policy, batch, states), metrics, of_log)

    def _logged(self, batch: FeedbackBatch, policy: Policy) -> FeedbackBatch:
        """The logged slates with what training adds to them: hard negatives and rewards."""
        if self._sources.hard_negatives:
            batch = with_hard_negatives(batch, policy, self._sources.hard_negatives)
        return self._rewarded(batch) if "rewards" in self._requires else batch

    def _of_slates(self, inputs: ObjectiveInputs, slates: Slates) -> ObjectiveInputs:
        """With what stands on the slates already."""
        if "labels" in self._requires:
            inputs = inputs._replace(label=slates.label, dislike=slates.dislike)
        chosen = None
        if "chosen" in self._requires:
            assert slates.chosen is not None
            chosen = slates.chosen & slates.mask
        return inputs._replace(rewards=slates.reward, chosen=chosen)

    @torch.no_grad()
    def _roll_out(self, batch: FeedbackBatch) -> Rollout:
        """Candidates, and what stays the same of them for the whole phase."""
        sources = self._sources
        assert self.old is not None
        assert sources.rollout is not None
        assert sources.reward is not None
        scorers = RolloutSources(sources.reward, sources.judge)
        rollout = roll_out(self.old.policy, batch, sources.rollout, scorers)
        batch = batch._replace(slates=rollout.slates)
        values = None
        if self.old.head is not None:
            values = self.old.state_values(self.old.encode(batch.histories), batch.slates.visible)
        return rollout._replace(reference=self._reference_logp(batch, items_of(batch.slates)), values=values)

    def _needed(self, batch: FeedbackBatch, advantages: Tensor | None) -> Tensor:
        """Positions that have to be scored. Of candidates it is all of them: they measure the divergence."""
        mask = items_of(batch.slates)
        inert = self._objective.zero_advantage_is_inert and advantages is not None
        if not inert or self._sources.anchored or self._sources.rollout is not None:
            return mask
        assert advantages is not None
        return mask & (advantages != 0)

    def _rewarded(self, batch: FeedbackBatch) -> FeedbackBatch:
        """With rewards; a position whose reward is unknown leaves its slate."""
        assert self._sources.reward is not None
        slates = batch.slates
        reward = self._sources.reward(batch, slates).detach()
        known = slates.mask & ~reward.isnan()
        return batch._replace(slates=slates._replace(reward=torch.where(known, reward, 0.0), mask=known))

    def _token_mask(self, policy: Policy, slates: Slates) -> Tensor:
        mask = items_of(slates)[..., None]
        return without_shared_prefix(mask, policy.tokens(slates.item_ids)) if self._sources.mask_shared_prefix else mask

    def _values(self, states: Tensor | None, batch: FeedbackBatch, rollout: Rollout | None) -> _Values:
        if self.critic is None or self.critic.state_value is None:
            return _Values()
        assert states is not None
        values: Tensor = self.critic.state_value(self.critic.positions(states, batch))
        if rollout is not None:
            return _Values(values, rollout.values)
        if self.old is None:
            return _Values(values, values.detach())
        old_states = self.old.encode(batch.histories)
        return _Values(values, self.old.state_values(old_states, batch.slates.visible), old_states)

    def _advantages(self, batch: FeedbackBatch, values: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        estimator = self._sources.advantage
        if estimator is None:
            return None, None
        if isinstance(estimator, ReturnEstimator) and values is not None:
            return estimator.advantages_and_returns(batch, values)
        return estimator(batch, values), None

    def _logp(
        self, policy: Policy, batch: FeedbackBatch, needed: Tensor, states: Tensor | None, beside: Slates | None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the batch's slates, and of the logged ones ``beside`` them."""
        width = needed.shape[1]
        if beside is not None:
            batch = batch._replace(slates=side_by_side(batch.slates, beside))
            needed = torch.cat([needed, beside.mask], 1)
        if not self._objective.reads_log_prob:
            logp = torch.zeros(*needed.shape, policy.num_tokens, device=needed.device)
        elif states is None:
            logp = policy.log_prob(batch, needed)
        else:
            assert isinstance(policy, StatePolicy)
            logp = policy.log_prob(batch, needed, states)
        return logp[:, :width], None if beside is None else logp[:, width:]

    def _old_logp(self, batch: FeedbackBatch, logp: Tensor, needed: Tensor, states: Tensor | None) -> Tensor | None:
        if self.old is not None:
            return self.old.log_prob(batch, needed, states)
        return logged_logp(batch, logp, needed) if self._sources.old_policy == "logged" else None

    def _reference_logp(self, batch: FeedbackBatch, needed: Tensor) -> Tensor | None:
        if self.cache is not None:
            return self.cache.log_prob(batch)
        if "reference" in self._requires and self._sources.reference == "snapshot":
            assert self.old is not None
            return self.old.log_prob(batch, needed)
        return None if self.reference is None else self.reference.log_prob(batch, needed)

    def _entropy(self, policy: Policy, batch: FeedbackBatch, needed: Tensor, states: Tensor | None) -> Tensor | None:
        if "entropy" not in self._requires:
            return None
        assert isinstance(policy, StatePolicy)
        return policy.entropy(batch, needed, states)

    def _with_item_values(
        self, inputs: ObjectiveInputs, policy: Policy, batch: FeedbackBatch, states: Tensor | None
    ) -> ObjectiveInputs:
        """With Q-values, their targets, and scores, where they are asked for."""
        critic = self.critic
        if critic is None or states is None:
            return inputs
        if critic.q_value is not None:
            assert batch.slates.reward is not None
            q_values = critic.q_value(critic.positions(states, batch), batch.slates.item_ids)
            inputs = inputs._replace(q_values=q_values, q_targets=critic.q_targets(states, batch, batch.slates.reward))
        if critic.score is not None:
            assert isinstance(policy, StatePolicy)
            inputs = inputs._replace(scores=critic.scores(policy, states, batch))
        return inputs

    @torch.no_grad()
    def _metrics(self, batch: FeedbackBatch) -> dict[str, Tensor]:
        slates, metrics = batch.slates, {}
        if slates.reward is not None:
            metrics["reward_mean"] = masked_mean(slates.reward, slates.mask)
        if "chosen" in self._requires:
            assert slates.chosen is not None
            rejected = slates.mask & ~slates.chosen
            metrics["rejected_per_list"] = rejected.sum() / (slates.mask & slates.chosen).sum().clamp(min=1)
            if slates.is_logged is not None:
                metrics["logged_rejected_share"] = masked_mean(slates.is_logged, rejected)
        return metrics


def logged_logp(batch: FeedbackBatch, logp: Tensor, needed: Tensor) -> Tensor:
    """The logged propensities as old log-probabilities ``[B, S, 1]``.

    Raises:
        RecpoError: a needed position has none, or the policy scores several tokens per item.
    """
    logged = batch.slates.logp_behavior
    missing = needed.sum() if logged is None else (needed & ~logged.isfinite()).sum()
    if logged is None or missing:
        raise RecpoError(
            f"old_policy: logged needs a propensity in (0, 1] for every scored event; {int(missing)} of "
            f"{int(needed.sum())} in this batch have none. Map the log's propensity column in `recpo prepare`, "
            "or set old_policy: snapshot"
        )
    if logp.shape[-1] > 1:
        raise RecpoError(
            "old_policy: logged gives one probability per item, this policy scores several tokens per item: set "
            "old_policy to snapshot"
        )
    return torch.where(needed, logged, 0.0)[..., None].to(logp.dtype)

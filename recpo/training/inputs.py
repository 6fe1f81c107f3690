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
from recpo.training.snapshots import ReferenceCache, Snapshot
from recpo.types import FeedbackBatch, LogProbs, ObjectiveInputs, Slates

OldPolicy = Literal["current", "logged", "snapshot"]
ReferencePolicy = Literal["frozen", "cached"]


@dataclass(frozen=True)
class InputSources:
    """Where the inputs of an objective come from.

    Attributes:
        advantage: turns feedback into advantages.
        reward: turns feedback into rewards.
        old_policy: ``current``, ``logged`` or ``snapshot``.
        reference: ``frozen`` or ``cached``.
        critic: options of the heads.
        hard_negatives: how many of the policy's top ranks are appended to every slate.
        scores_inert: also score positions whose advantage is 0.
        mask_shared_prefix: codes that a rejected item shares with the chosen one are left out of its side.
    """

    advantage: AdvantageEstimator | None = None
    reward: RewardFunction | None = None
    old_policy: OldPolicy = "current"
    reference: ReferencePolicy = "frozen"
    critic: CriticOptions = field(default_factory=CriticOptions)
    hard_negatives: int = 0
    scores_inert: bool = False
    mask_shared_prefix: bool = False


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
            self.critic = Critic(policy, self._requires, sources.critic)
        value = None if self.critic is None else self.critic.state_value
        self.old = Snapshot(policy, value) if sources.old_policy == "snapshot" else None

    def refresh(self, policy: Policy, step: int, snapshot_every: int) -> None:
        """Brings snapshot and target network to where they stand at optimiser step ``step``."""
        if self.old is not None and step % snapshot_every == 0:
            self.old.refresh(policy, None if self.critic is None else self.critic.state_value)
        if self.critic is not None and isinstance(policy, StatePolicy):
            self.critic.refresh_target(policy, step)

    def forward(self, policy: Policy, batch: FeedbackBatch) -> tuple[ObjectiveInputs, dict[str, Tensor]]:
        """The inputs, and metrics of the slates."""
        if self._sources.hard_negatives:
            batch = with_hard_negatives(batch, policy, self._sources.hard_negatives)
        if "rewards" in self._requires:
            batch = self._rewarded(batch)
        mask = batch.slates.mask
        states = None
        if self._requires & OF_STATES:
            assert isinstance(policy, StatePolicy)
            states = policy.encode(batch.histories)
        values = self._values(states, batch)
        advantages, returns = self._advantages(batch, values.old)
        needed = mask
        if self._objective.zero_advantage_is_inert and advantages is not None and not self._sources.scores_inert:
            needed = mask & (advantages != 0)
        logp = self._logp(policy, batch, needed, states)
        log_probs = LogProbs(
            logp,
            self._token_mask(policy, batch.slates).expand_as(logp),
            self._old_logp(batch, logp, needed, values.old_states),
            self._reference_logp(batch, needed),
        )
        inputs = ObjectiveInputs(
            log_probs,
            advantages=advantages,
            rewards=batch.slates.reward,
            chosen=_first_position(mask) if "chosen" in self._requires else None,
            values=values.values,
            values_old=values.old,
            returns=returns,
            entropy=self._entropy(policy, batch, needed, states),
        )
        return self._with_item_values(inputs, batch, states), self._metrics(batch)

    def _rewarded(self, batch: FeedbackBatch) -> FeedbackBatch:
        """With rewards; a position whose reward is unknown leaves its slate."""
        assert self._sources.reward is not None
        slates = batch.slates
        reward = self._sources.reward(batch, slates).detach()
        known = slates.mask & ~reward.isnan()
        return batch._replace(slates=slates._replace(reward=torch.where(known, reward, 0.0), mask=known))

    def _token_mask(self, policy: Policy, slates: Slates) -> Tensor:
        mask = slates.mask[..., None]
        return without_shared_prefix(mask, policy.tokens(slates.item_ids)) if self._sources.mask_shared_prefix else mask

    def _values(self, states: Tensor | None, batch: FeedbackBatch) -> _Values:
        if self.critic is None or self.critic.state_value is None:
            return _Values()
        assert states is not None
        values: Tensor = self.critic.state_value(self.critic.positions(states, batch))
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

    def _logp(self, policy: Policy, batch: FeedbackBatch, needed: Tensor, states: Tensor | None) -> Tensor:
        if not self._objective.reads_log_prob:
            return torch.zeros(*needed.shape, policy.num_tokens, device=needed.device)
        if states is None:
            return policy.log_prob(batch, needed)
        assert isinstance(policy, StatePolicy)
        return policy.log_prob(batch, needed, states)

    def _old_logp(self, batch: FeedbackBatch, logp: Tensor, needed: Tensor, states: Tensor | None) -> Tensor | None:
        if self.old is not None:
            return self.old.log_prob(batch, needed, states)
        return logged_logp(batch, logp, needed) if self._sources.old_policy == "logged" else None

    def _reference_logp(self, batch: FeedbackBatch, needed: Tensor) -> Tensor | None:
        if self.cache is not None:
            return self.cache.log_prob(batch)
        return None if self.reference is None else self.reference.log_prob(batch, needed)

    def _entropy(self, policy: Policy, batch: FeedbackBatch, needed: Tensor, states: Tensor | None) -> Tensor | None:
        if "entropy" not in self._requires:
            return None
        assert isinstance(policy, StatePolicy)
        return policy.entropy(batch, needed, states)

    def _with_item_values(
        self, inputs: ObjectiveInputs, batch: FeedbackBatch, states: Tensor | None
    ) -> ObjectiveInputs:
        """With Q-values, their targets, and scores, where they are asked for."""
        critic, items = self.critic, batch.slates.item_ids
        if critic is None or states is None:
            return inputs
        if critic.q_value is not None:
            assert batch.slates.reward is not None
            q_values = critic.q_value(critic.positions(states, batch), items)
            inputs = inputs._replace(q_values=q_values, q_targets=critic.q_targets(states, batch, batch.slates.reward))
        if critic.score is not None:
            inputs = inputs._replace(scores=critic.score(critic.positions(states, batch), items))
        return inputs

    @torch.no_grad()
    def _metrics(self, batch: FeedbackBatch) -> dict[str, Tensor]:
        slates, metrics = batch.slates, {}
        if slates.reward is not None:
            metrics["reward_mean"] = masked_mean(slates.reward, slates.mask)
        if "chosen" in self._requires:
            rejected = slates.mask & ~_first_position(slates.mask)
            metrics["rejected_per_list"] = rejected.sum() / slates.mask[:, 0].sum().clamp(min=1)
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


@torch.no_grad()
def with_hard_negatives(batch: FeedbackBatch, policy: Policy, count: int) -> FeedbackBatch:
    """Appends the policy's ``count`` top ranks after the whole history to every slate, as rejected items.

    Left out: what the slate holds already, and what the user is known to like. The policy ranks in evaluation mode.
    """
    slates, was_training = batch.slates, policy.training
    exclude = slates.item_ids
    if batch.known_positives is not None:
        exclude = torch.cat([exclude, batch.known_positives], 1)
    policy.eval()
    items = policy.recommend(batch.histories, min(count, policy.num_items), exclude).item_ids
    policy.train(was_training)
    kept = (items > 0) & slates.mask[:, :1]

    def appended(values: Tensor | None, fill: float) -> Tensor | None:
        return None if values is None else torch.cat([values, values.new_full(items.shape, fill)], 1)

    return batch._replace(
        slates=Slates(
            item_ids=torch.cat([slates.item_ids, items * kept], 1),
            visible=torch.cat([slates.visible, batch.histories.lengths[:, None] * kept], 1),
            mask=torch.cat([slates.mask, kept], 1),
            watch_quantile=appended(slates.watch_quantile, torch.nan),
            dislike=appended(slates.dislike, 0),
            reward=appended(slates.reward, torch.nan),
            logp_behavior=appended(slates.logp_behavior, torch.nan),
            is_logged=appended(slates.is_logged, 0),
        )
    )


def without_shared_prefix(mask: Tensor, tokens: Tensor) -> Tensor:
    """Keeps of every rejected item the tokens from the first one on in which it differs from the chosen item.

    The chosen and a rejected item are generated through the same first codes, so pushing these down for one pushes them
    down for the other (RAD-DPO, arXiv 2602.23964).

    Args:
        mask: ``[B, S, T]`` or ``[B, S, 1]``, True keeps; the chosen item stands first in its list.
        tokens: ``[B, S, T]``.
    """
    shared = (tokens == tokens[:, :1]).long().cumprod(-1).bool()
    shared[:, 0] = False
    return mask & ~shared


def _first_position(mask: Tensor) -> Tensor:
    """The chosen items ``[B, S]``: preference lists hold theirs first."""
    chosen = torch.zeros_like(mask)
    chosen[:, 0] = mask[:, 0]
    return chosen

"""Computes the inputs that an objective declares in ``Objective.requires``, and no others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recpo.base.contracts import ReturnEstimator, StatePolicy, TokenAdvantageEstimator
from recpo.base.errors import RecpoError
from recpo.base.types import BatchPlan, FeedbackBatch, LogProbs, ObjectiveInputs, Slates
from recpo.objectives.advantages import whitened_advantage, whitening_sums
from recpo.objectives.health import masked_mean
from recpo.ops.kl import kl_shaped_rewards
from recpo.policies.sampling import plan_of_candidates
from recpo.training.contradictions import COMPARED, OF_STATES, requirements_of
from recpo.training.item_likelihood import item_log_prob
from recpo.training.kl_control import catalog_divergence
from recpo.training.networks import Networks
from recpo.training.options import LearningOptions
from recpo.training.planning import needed_positions
from recpo.training.rollout import Rollout, Rollouts, catalog_metrics, roll_out
from recpo.training.slate_edits import (
    items_of,
    side_by_side,
    with_hard_negatives,
    without_shared_prefix,
)


class StepInputs(NamedTuple):
    """All inputs of the loss of a batch.

    Attributes:
        objective: inputs of the objective.
        logged: inputs of the anchor: the log-probabilities of the logged slate. Equal to ``objective`` unless
            candidates replaced the slate.
        metrics: metrics of the slates.
        items: log-probabilities ``[B, S]`` of the logged items as a whole, for ``item_coef``.
    """

    objective: ObjectiveInputs
    logged: ObjectiveInputs
    metrics: dict[str, Tensor]
    items: Tensor | None = None


class _Values(NamedTuple):
    """State values ``[B, S]`` of the policy and of the old policy, and the states of the old policy."""

    values: Tensor | None = None
    old: Tensor | None = None
    old_states: Tensor | None = None


class InputBuilder:
    """Turns a batch into the inputs of an objective.

    Args:
        networks: the policy and the other networks.
        options: what the policy learns from.
        hard_negatives: number of the policy's top-ranked items that are appended to every slate.

    Attributes:
        rollouts: the candidates of the current phase; None without a rollout.
        step_sums: ``whitening_sums`` of the advantages of the current optimizer step, of all micro-batches and ranks;
            None = every batch is a step of its own.
        kl_coef: the current weight of the KL penalty in the rewards of a rollout.
    """

    step_sums: Tensor | None = None

    def __init__(self, networks: Networks, options: LearningOptions, hard_negatives: int = 0) -> None:
        self._networks, self._options, self._objective = networks, options, options.objective
        self._requires = requirements_of(options)
        self._hard_negatives, self._anchored = hard_negatives, options.anchor_coef != 0
        rollout = options.rollout
        self._catalog = rollout is not None and rollout.candidates == "catalog"
        self.kl_coef = 0.0 if rollout is None else rollout.kl_coef
        self._reads_snapshot = self._catalog and _reads_snapshot(options, self._requires)
        self._whitens = options.advantage is not None and options.advantage.whiten
        keep = rollout is not None and (rollout.epochs > 1 or self._whitens)  # whitening visits a batch once more
        self.rollouts = None if rollout is None else Rollouts(options.seed, keep)

    def __call__(self, batch: FeedbackBatch) -> StepInputs:
        """Computes slates, rewards, states, values, advantages and log-probabilities, in this order."""
        logged = batch.slates
        batch, rollout = self._learned_slates(batch)
        states = self._states(batch)
        values = self._values(states, batch, rollout)
        advantages, returns = self._advantages(batch, values.old)
        if self._whitens and advantages is not None:
            advantages = whitened_advantage(advantages, _kept(batch.slates, advantages), self.step_sums)
        needed = self._needed(batch, advantages)
        beside = logged if self._anchored and rollout is not None else None
        logp, logp_logged = self._logp(batch, needed, states, beside)
        log_probs = LogProbs(
            logp,
            self._token_mask(batch.slates).expand_as(logp),
            self._old_logp(batch, logp, needed, values.old_states) if rollout is None else rollout.logp,
            self._reference_logp(batch, needed) if rollout is None else rollout.reference,
        )
        inputs = self._from_slates(ObjectiveInputs(log_probs, advantages, returns=returns), batch.slates)
        inputs = inputs._replace(
            values=values.values, values_old=values.old, entropy=self._entropy(batch, needed, states, logp)
        )
        inputs = inputs._replace(divergence=self._divergence(batch, needed, states, logp, rollout))
        inputs = self._with_item_values(inputs, batch, states)
        of_log = inputs
        if logp_logged is not None:
            of_log = ObjectiveInputs(LogProbs(logp_logged, logged.mask[..., None].expand_as(logp_logged)))
        metrics = self._metrics(batch) if rollout is None else self._metrics_of(rollout, batch)
        if rollout is not None and rollout.logp is None:
            metrics |= catalog_metrics(rollout, logp.detach())
        elif self._catalog:
            metrics["approx_kl"] = catalog_divergence(inputs.logp) / inputs.logp.mask.any(1).sum().clamp(min=1)
        return StepInputs(inputs, of_log, metrics, self._items(states, batch.slates))

    @torch.no_grad()
    def whitening_sums(self, batch: FeedbackBatch) -> Tensor:
        """``advantages.whitening_sums`` of a micro-batch, with the advantages that ``__call__`` will compute.

        Without an old policy, values come from the policy itself: where it has dropout, the random numbers must be
        those of the later call.
        """
        batch, rollout = self._learned_slates(batch)
        states = None if rollout is not None or self._networks.old is not None else self._states(batch)
        advantages, _ = self._advantages(batch, self._old_values(states, batch, rollout)[0])
        assert advantages is not None
        return whitening_sums(advantages, _kept(batch.slates, advantages))

    def _learned_slates(self, batch: FeedbackBatch) -> tuple[FeedbackBatch, Rollout | None]:
        """The batch with the slates to learn from, and the rollout that they come from, if any."""
        if self.rollouts is None:
            return self._logged(batch), None
        rollout = self.rollouts.of(batch, self._roll_out)
        slates = _penalized(rollout, self.kl_coef) if self.kl_coef else rollout.slates
        return self._with_candidates(batch, slates), rollout

    def _logged(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The logged slates with the additions of training: hard negatives and rewards."""
        if self._hard_negatives:
            batch = with_hard_negatives(batch, self._networks.policy, self._hard_negatives)
        return self._rewarded(batch) if "rewards" in self._requires else batch

    def _with_candidates(self, batch: FeedbackBatch, candidates: Slates) -> FeedbackBatch:
        """With candidates in place of the logged slates, all scored after the complete history."""
        scored = None if self._catalog else plan_of_candidates(batch.histories, items_of(candidates))
        return batch._replace(slates=candidates, plan=BatchPlan(scored))

    def _rewarded(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The batch with rewards. A position with an unknown reward leaves its slate."""
        assert self._options.reward is not None
        slates = batch.slates
        reward = self._options.reward(batch, slates).detach()
        known = slates.mask & ~reward.isnan()
        slates = slates._replace(reward=torch.where(known, reward, 0.0), mask=known)
        return batch._replace(slates=slates, plan=None)

    @torch.no_grad()
    def _roll_out(self, batch: FeedbackBatch) -> Rollout:
        """Candidates, and their values that stay constant for the phase."""
        options, old = self._options, self._networks.old
        assert old is not None
        assert options.rollout is not None
        assert options.reward is not None
        rollout = roll_out(old.policy, batch, options.rollout, options.reward, self._reads_snapshot)
        batch = self._with_candidates(batch, rollout.slates)
        values = None if old.head is None else old.state_values(old.encode(batch.histories), batch.slates.visible)
        reference = (
            self._catalog_reference(batch, rollout.logp)
            if self._catalog
            else self._reference_logp(batch, self._needed(batch, None))
        )
        return rollout._replace(reference=reference, values=values)

    def _states(self, batch: FeedbackBatch) -> Tensor | None:
        """The policy's states ``[B, H + 1, d]`` if heads read them; without a gradient if heads do not train them."""
        policy = self._networks.policy
        shared = self._catalog and self._anchored  # shared by the catalog and the logged slate
        if not (self._requires & OF_STATES or shared or self._options.item_coef):
            return None
        assert isinstance(policy, StatePolicy)
        return policy.encode(batch.histories)

    def _items(self, states: Tensor | None, slates: Slates) -> Tensor | None:
        """Log-probabilities of the logged items as a whole, if ``item_coef`` is set."""
        if not self._options.item_coef:
            return None
        policy = self._networks.policy
        assert isinstance(policy, StatePolicy)
        assert states is not None
        return item_log_prob(policy, states, slates)

    def _values(self, states: Tensor | None, batch: FeedbackBatch, rollout: Rollout | None) -> _Values:
        critic = self._networks.critic
        if critic is None or critic.state_value is None:
            return _Values()
        assert states is not None
        values: Tensor = critic.state_value(critic.positions(states, batch))
        if rollout is None and self._networks.old is None:
            return _Values(values, values.detach())
        return _Values(values, *self._old_values(states, batch, rollout))

    def _old_values(
        self, states: Tensor | None, batch: FeedbackBatch, rollout: Rollout | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The values that advantages are computed from, and the states of the old policy, if there is one."""
        critic, old = self._networks.critic, self._networks.old
        if critic is None or critic.state_value is None:
            return None, None
        if rollout is not None:
            return rollout.values, None
        if old is not None:
            old_states = old.encode(batch.histories)
            return old.state_values(old_states, batch.slates.visible), old_states
        assert states is not None
        values: Tensor = critic.state_value(critic.positions(states, batch))
        return values.detach(), None

    def _advantages(self, batch: FeedbackBatch, values: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        estimator = self._options.advantage
        if estimator is None:
            return None, None
        if batch.plan is not None and batch.plan.advantages is not None:
            return batch.plan.advantages, None
        if isinstance(estimator, ReturnEstimator) and values is not None:
            return estimator.advantages_and_returns(batch, values)
        if isinstance(estimator, TokenAdvantageEstimator):
            return estimator.token_advantages(batch, self._networks.policy.tokens(batch.slates.item_ids)), None
        return estimator(batch, values), None

    def _needed(self, batch: FeedbackBatch, advantages: Tensor | None) -> Tensor:
        """Positions that must be scored. For candidates, all of them, because they measure the divergence."""
        if batch.plan is not None and batch.plan.scored is not None:
            return batch.plan.scored.needed
        inert = self._objective.zero_advantage_is_inert and not self._anchored and self.rollouts is None
        return needed_positions(batch, advantages if inert else None)

    def _logp(
        self, batch: FeedbackBatch, needed: Tensor, states: Tensor | None, beside: Slates | None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the batch's slates, and of the logged slates ``beside`` them."""
        policy, width = self._networks.policy, needed.shape[1]
        if self._catalog:
            assert isinstance(policy, StatePolicy)
            logp = policy.catalog_log_prob(batch, states)
            return logp, None if beside is None else policy.log_prob(batch._replace(slates=beside), None, states)
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

    def _token_mask(self, slates: Slates) -> Tensor:
        mask = items_of(slates)[..., None]
        if not self._options.mask_shared_prefix:
            return mask
        assert slates.chosen is not None
        return without_shared_prefix(mask, self._networks.policy.tokens(slates.item_ids), slates.chosen)

    def _old_logp(self, batch: FeedbackBatch, logp: Tensor, needed: Tensor, states: Tensor | None) -> Tensor | None:
        if self._networks.old is not None:
            return self._networks.old.log_prob(batch, needed, states)
        return logged_logp(batch, logp, needed) if self._options.old_policy == "logged" else None

    def _reference_logp(self, batch: FeedbackBatch, needed: Tensor) -> Tensor | None:
        networks = self._networks
        if "reference" not in self._requires:
            return None
        if networks.reference_cache is not None:
            return networks.reference_cache.log_prob(batch)
        if self._options.reference == "snapshot":
            assert networks.old is not None
            return networks.old.log_prob(batch, needed)
        return None if networks.reference is None else networks.reference.log_prob(batch, needed)

    def _catalog_reference(self, batch: FeedbackBatch, of_snapshot: Tensor | None) -> Tensor | None:
        if self._requires & COMPARED and self._options.reference == "snapshot":
            return of_snapshot
        reference = self._networks.reference
        return None if reference is None else reference.catalog_log_prob(batch)

    def _from_slates(self, inputs: ObjectiveInputs, slates: Slates) -> ObjectiveInputs:
        """Adds the inputs that are part of the slates."""
        if "labels" in self._requires:
            inputs = inputs._replace(label=slates.label, dislike=slates.dislike)
        if "grades" in self._requires:
            inputs = inputs._replace(grades=slates.grade)
        if "positives" in self._requires:
            inputs = inputs._replace(positive=slates.positive)
        if "behaviors" in self._requires:
            inputs = inputs._replace(behaviors=slates.behaviors)
        chosen = None
        if "chosen" in self._requires:
            assert slates.chosen is not None
            chosen = slates.chosen & slates.mask
        return inputs._replace(rewards=slates.reward, chosen=chosen)

    def _entropy(self, batch: FeedbackBatch, needed: Tensor, states: Tensor | None, logp: Tensor) -> Tensor | None:
        if "entropy" not in self._requires:
            return None
        if self._catalog:
            return -(logp.exp() * logp).sum((1, 2))[:, None].expand_as(needed)
        assert isinstance(self._networks.policy, StatePolicy)
        return self._networks.policy.entropy(batch, needed, states)

    def _divergence(
        self, batch: FeedbackBatch, needed: Tensor, states: Tensor | None, logp: Tensor, rollout: Rollout | None
    ) -> Tensor | None:
        if "divergence" not in self._requires:
            return None
        if self._catalog:
            assert rollout is not None
            assert rollout.reference is not None
            return (logp.exp() * (logp - rollout.reference)).sum(1, keepdim=True).expand_as(logp)
        policy = self._networks.policy
        compared = self._networks.old if self._options.reference == "snapshot" else self._networks.reference
        assert isinstance(policy, StatePolicy)
        assert compared is not None
        assert isinstance(compared.policy, StatePolicy)
        return policy.divergence(batch, compared.policy, needed, states)

    def _with_item_values(
        self, inputs: ObjectiveInputs, batch: FeedbackBatch, states: Tensor | None
    ) -> ObjectiveInputs:
        """Adds Q-values, their targets, and scores, if required."""
        critic, policy = self._networks.critic, self._networks.policy
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
    def _metrics_of(self, rollout: Rollout, batch: FeedbackBatch) -> dict[str, Tensor]:
        """The metrics of candidates, with their rewards before the KL penalty."""
        metrics = self._metrics(batch._replace(slates=rollout.slates)) | rollout.metrics
        if self.kl_coef:
            assert rollout.logp is not None
            assert rollout.reference is not None
            items = items_of(rollout.slates)[..., None].expand_as(rollout.logp)
            metrics["kl_in_reward"] = masked_mean(rollout.logp - rollout.reference, items)
        return metrics

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


def _penalized(rollout: Rollout, kl_coef: float) -> Slates:
    """The candidates with the KL penalty in their rewards; a draw that is not an item keeps its reward."""
    slates, logp, reference = rollout.slates, rollout.logp, rollout.reference
    assert slates.reward is not None
    assert logp is not None
    assert reference is not None
    items = items_of(slates)
    rewards = kl_shaped_rewards(slates.reward, logp, reference, items[..., None].expand_as(logp), kl_coef)
    return slates._replace(reward=torch.where(items, rewards.sum(-1), slates.reward), token_rewards=rewards)


def _kept(slates: Slates, advantages: Tensor) -> Tensor:
    """The mask of the items, in the shape of their advantages ``[B, S]`` or ``[B, S, T]``."""
    kept = items_of(slates)
    return kept if advantages.dim() == kept.dim() else kept[..., None].expand_as(advantages)


def _reads_snapshot(options: LearningOptions, requires: frozenset[str]) -> bool:
    """Whether anything depends on the snapshot's log-probabilities of the complete catalog.

    In a phase of one step, the policy equals the snapshot: its divergence is 0, so no limit applies.
    """
    rollout = options.rollout
    assert rollout is not None
    limited = rollout.max_kl is not None or rollout.collapse.max_kl is not None
    snapshot = bool(requires & COMPARED) and options.reference == "snapshot"
    return "old" in requires or snapshot or (limited and rollout.phase_steps > 1)


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

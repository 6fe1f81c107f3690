"""Computes the inputs that an objective declares in ``Objective.requires``, and no others.

Likelihood of whole items, in addition to the likelihood of their codes, for the states of a semantic-id policy.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recpo.base.contracts import Requirement, ReturnEstimator, StatePolicy, TokenAdvantageEstimator
from recpo.base.errors import RecpoError
from recpo.base.types import BatchPlan, FeedbackBatch, LogProbs, ObjectiveInputs, Slates
from recpo.objectives.advantages import whitened_advantage, whitening_sums
from recpo.objectives.inputs import masked_mean
from recpo.ops.kernels import take_rows
from recpo.ops.kl import kl_shaped_rewards
from recpo.ops.linear_logprob import linear_logprob
from recpo.policies.sampling import plan_of_candidates, shared_states
from recpo.training.contradictions import COMPARED, OF_STATES, requirements_of
from recpo.training.networks import Networks
from recpo.training.options import LearningOptions
from recpo.training.planning import needed_positions, validate_propensities, with_rewards
from recpo.training.rollout import (
    Rollout,
    Rollouts,
    catalog_divergence,
    catalog_metrics,
    items_of,
    roll_out,
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


class LearnedSlates(NamedTuple):
    """The slates to learn from, with their rewards.

    Attributes:
        batch: the contexts, with these slates.
        rollout: what a phase keeps for the batch, if the slates are candidates; None = they are those of the log.
    """

    batch: FeedbackBatch
    rollout: Rollout | None = None


class Advantages(NamedTuple):
    """The advantages of slates, and the state values that they are computed from; None = the objective needs none.

    Attributes:
        advantages: ``[B, S]``, or ``[B, S, T]`` if they differ between the tokens of an item.
        returns: ``[B, S]``, the targets of the critic.
        values: ``[B, S]`` of the policy's critic, with gradient.
        values_old: ``[B, S]`` of the old policy's critic.
        old_states: the states of the old policy, if they were computed.
    """

    advantages: Tensor | None = None
    returns: Tensor | None = None
    values: Tensor | None = None
    values_old: Tensor | None = None
    old_states: Tensor | None = None


class ScoredSlates(NamedTuple):
    """The log-probabilities of slates.

    Attributes:
        logp: under the policy, the old policy and the reference.
        needed: ``[B, S]``, the positions that were scored; the others are 0.
        logged: under the policy, of the logged slates beside candidates, if an anchor needs them.
    """

    logp: LogProbs
    needed: Tensor
    logged: LogProbs | None = None


class InputBuilder:
    """Turns a batch into the inputs of an objective. Its steps are methods, which a subclass can change.

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
        self._requires, self._columns = requirements_of(options), options.objective.requires
        self._hard_negatives, self._anchored = hard_negatives, options.anchor_coef != 0
        rollout = options.rollout
        self._catalog = rollout is not None and rollout.candidates == "catalog"
        self.kl_coef = 0.0 if rollout is None else rollout.kl_coef
        self._reads_snapshot = self._catalog and _reads_snapshot(options, self._requires)
        self._whitens = options.advantage is not None and options.advantage.whiten
        keep = rollout is not None and (rollout.epochs > 1 or self._whitens)  # whitening visits a batch once more
        self.rollouts = None if rollout is None else Rollouts(options.seed, keep)

    def __call__(self, batch: FeedbackBatch) -> StepInputs:
        """The steps in their order: slates and rewards, states, advantages, log-probabilities, everything else."""
        learned = self.slates(batch)
        states = self.states(learned.batch)
        advantages = self.advantages(learned, states)
        scored = self.log_probs(learned, batch.slates, states, advantages)
        inputs = self.inputs(learned, states, advantages, scored)
        logged = inputs if scored.logged is None else ObjectiveInputs(scored.logged)
        return StepInputs(inputs, logged, self.metrics(learned, scored.logp), self._items(states, learned.batch.slates))

    def slates(self, batch: FeedbackBatch) -> LearnedSlates:
        """The slates to learn from, with their rewards: those of the log, or the candidates of a rollout."""
        if self.rollouts is None:
            return LearnedSlates(self._logged(batch))
        rollout = self.rollouts.of(batch, self._roll_out)
        slates = _penalized(rollout, self.kl_coef) if self.kl_coef else rollout.slates
        return LearnedSlates(self._with_candidates(batch, slates), rollout)

    def states(self, batch: FeedbackBatch) -> Tensor | None:
        """The policy's states ``[B, H + 1, d]`` if more than its log-probabilities reads them."""
        policy = self._networks.policy
        shared = self._catalog and self._anchored  # shared by the catalog and the logged slate
        if not (self._requires & OF_STATES or shared or self._options.item_coef):
            return None
        assert isinstance(policy, StatePolicy)
        return policy.encode(batch.histories)

    def advantages(self, learned: LearnedSlates, states: Tensor | None) -> Advantages:
        """The advantages, whitened if their estimator says so, and what a critic learns from."""
        critic, values = self._networks.critic, None
        if critic is not None and critic.state_value is not None:
            assert states is not None
            values = critic.state_value(critic.positions(states, learned.batch))
        old_values, old_states = self._old_values(learned, states, values)
        advantages, returns = self._estimated(learned.batch, old_values)
        if self._whitens and advantages is not None:
            kept = _kept(learned.batch.slates, advantages)
            advantages = whitened_advantage(advantages, kept, self.step_sums)
        return Advantages(advantages, returns, values, old_values, old_states)

    def log_probs(
        self, learned: LearnedSlates, logged: Slates, states: Tensor | None, advantages: Advantages
    ) -> ScoredSlates:
        """The log-probabilities under the policy, the old policy and the reference; ``logged`` is the log's slate."""
        batch, rollout = learned
        needed = self._needed(batch, advantages.advantages)
        batch = _decided(batch, needed)
        beside = logged if self._anchored and rollout is not None else None
        logp, of_logged = self._logp(batch, needed, states, beside)
        log_probs = LogProbs(
            logp,
            self._token_mask(batch.slates).expand_as(logp),
            self._old_logp(batch, logp, needed, advantages.old_states) if rollout is None else rollout.logp,
            self._reference_logp(batch, needed) if rollout is None else rollout.reference,
        )
        if of_logged is None:
            return ScoredSlates(log_probs, needed)
        return ScoredSlates(log_probs, needed, LogProbs(of_logged, logged.mask[..., None].expand_as(of_logged)))

    def inputs(
        self, learned: LearnedSlates, states: Tensor | None, advantages: Advantages, scored: ScoredSlates
    ) -> ObjectiveInputs:
        """All inputs of the objective: the columns of the slates, and what its other requirements are computed from."""
        rollout, batch = learned.rollout, _decided(learned.batch, scored.needed)
        critic, logp, needed = self._networks.critic, scored.logp.policy, scored.needed
        inputs = ObjectiveInputs(
            scored.logp,
            advantages.advantages,
            returns=advantages.returns,
            values=advantages.values,
            values_old=advantages.values_old,
        )._replace(**_columns(batch.slates, self._columns))
        if Requirement.ENTROPY in self._requires:
            inputs = inputs._replace(entropy=self._entropy(batch, needed, states, logp))
        if Requirement.DIVERGENCE in self._requires:
            inputs = inputs._replace(divergence=self._divergence(batch, needed, states, logp, rollout))
        if Requirement.Q_VALUE in self._requires:
            assert critic is not None
            assert critic.q_value is not None
            assert states is not None
            assert batch.slates.reward is not None
            q_values = critic.q_value(critic.positions(states, batch), batch.slates.item_ids)
            inputs = inputs._replace(q_values=q_values, q_targets=critic.q_targets(states, batch, batch.slates.reward))
        if Requirement.SCORE in self._requires:
            assert critic is not None
            assert states is not None
            assert isinstance(self._networks.policy, StatePolicy)
            inputs = inputs._replace(scores=critic.scores(self._networks.policy, states, batch))
        return inputs

    @torch.no_grad()
    def metrics(self, learned: LearnedSlates, logp: LogProbs) -> dict[str, Tensor]:
        """Metrics of the slates; those of candidates with their rewards before the KL penalty."""
        batch, rollout = learned
        if rollout is None:
            return self._metrics_of(batch.slates)
        metrics = self._metrics_of(rollout.slates) | rollout.metrics
        if self.kl_coef:
            assert rollout.logp is not None
            assert rollout.reference is not None
            items = items_of(rollout.slates)[..., None].expand_as(rollout.logp)
            metrics["kl_in_reward"] = masked_mean(rollout.logp - rollout.reference, items)
        if rollout.logp is None:
            metrics |= catalog_metrics(rollout, logp.policy)
        elif self._catalog:
            metrics["approx_kl"] = catalog_divergence(logp) / logp.mask.any(1).sum().clamp(min=1)
        return metrics

    @torch.no_grad()
    def whitening_sums(self, batch: FeedbackBatch) -> Tensor:
        """``advantages.whitening_sums`` of a micro-batch, with the advantages that ``__call__`` will compute.

        Without an old policy, values come from the policy itself: where it has dropout, the random numbers must be
        those of the later call.
        """
        learned, of_policy = self.slates(batch), self.rollouts is None and self._networks.old is None
        states = self.states(learned.batch) if of_policy else None
        advantages, _ = self._estimated(learned.batch, self._old_values(learned, states)[0])
        assert advantages is not None
        return whitening_sums(advantages, _kept(learned.batch.slates, advantages))

    def _logged(self, batch: FeedbackBatch) -> FeedbackBatch:
        """The logged slates with the additions of training: hard negatives and rewards."""
        if self._hard_negatives:
            batch = with_hard_negatives(batch, self._networks.policy, self._hard_negatives)
        if Requirement.REWARDS in self._requires and batch.slates.reward is None:  # the planner did not give them
            assert self._options.reward is not None
            batch = with_rewards(batch, self._options.reward)
        return batch

    def _with_candidates(self, batch: FeedbackBatch, candidates: Slates) -> FeedbackBatch:
        """With candidates in place of the logged slates, all scored after the complete history."""
        scored = None if self._catalog else plan_of_candidates(batch.histories, items_of(candidates))
        return batch._replace(slates=candidates, plan=BatchPlan(scored))

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
        reference = None
        if not self._catalog:
            reference = self._reference_logp(batch, self._needed(batch, None))
        elif self._requires & COMPARED and options.reference == "snapshot":
            reference = rollout.logp
        elif self._networks.reference is not None:
            frozen = self._networks.reference.policy
            assert isinstance(frozen, StatePolicy)
            reference = frozen.catalog_log_prob(batch)
        return rollout._replace(reference=reference, values=values)

    def _items(self, states: Tensor | None, slates: Slates) -> Tensor | None:
        """Log-probabilities of the logged items as a whole, if ``item_coef`` is set."""
        if not self._options.item_coef:
            return None
        policy = self._networks.policy
        assert isinstance(policy, StatePolicy)
        assert states is not None
        return item_log_prob(policy, states, slates)

    def _old_values(
        self, learned: LearnedSlates, states: Tensor | None, values: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The values that advantages are computed from, and the states of the old policy, if it was encoded.

        They are those of the rollout, of the old policy, or of the policy itself (``values``, if already known).
        """
        critic, old, batch = self._networks.critic, self._networks.old, learned.batch
        if critic is None or critic.state_value is None:
            return None, None
        if learned.rollout is not None:
            return learned.rollout.values, None
        if old is not None:
            old_states = old.encode(batch.histories)
            return old.state_values(old_states, batch.slates.visible), old_states
        if values is None:
            assert states is not None
            values = critic.state_value(critic.positions(states, batch))
        return values.detach(), None

    def _estimated(self, batch: FeedbackBatch, values: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
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
        return needed_positions(batch, advantages if self._options.skips_zero_advantages else None)

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
        if Requirement.REFERENCE not in self._requires:
            return None
        if networks.reference_cache is not None:
            return networks.reference_cache.log_prob(batch)
        if self._options.reference == "snapshot":
            assert networks.old is not None
            return networks.old.log_prob(batch, needed)
        return None if networks.reference is None else networks.reference.log_prob(batch, needed)

    def _entropy(self, batch: FeedbackBatch, needed: Tensor, states: Tensor | None, logp: Tensor) -> Tensor:
        if self._catalog:
            return -(logp.exp() * logp).sum((1, 2))[:, None].expand_as(needed)
        assert isinstance(self._networks.policy, StatePolicy)
        return self._networks.policy.entropy(batch, needed, states)

    def _divergence(
        self, batch: FeedbackBatch, needed: Tensor, states: Tensor | None, logp: Tensor, rollout: Rollout | None
    ) -> Tensor:
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

    def _metrics_of(self, slates: Slates) -> dict[str, Tensor]:
        metrics = {}
        if slates.reward is not None:
            metrics["reward_mean"] = masked_mean(slates.reward, slates.mask)
        if Requirement.CHOSEN in self._requires:
            assert slates.chosen is not None
            rejected = slates.mask & ~slates.chosen
            metrics["rejected_per_list"] = rejected.sum() / (slates.mask & slates.chosen).sum().clamp(min=1)
            if slates.is_logged is not None:
                metrics["logged_rejected_share"] = masked_mean(slates.is_logged, rejected)
        return metrics


def _columns(slates: Slates, requires: frozenset[str]) -> dict[str, Any]:
    """The columns of slates that are inputs of an objective: rewards, if there are any, and those that it requires."""
    asked = [requirement for requirement in Requirement if requirement in requires | {Requirement.REWARDS}]
    pairs = [pair for requirement in asked for pair in requirement.fields.items()]
    columns = {name: getattr(slates, column) for name, column in pairs if column is not None}
    if Requirement.CHOSEN in requires:
        assert slates.chosen is not None
        columns["chosen"] = slates.chosen & slates.mask
    return columns


def _penalized(rollout: Rollout, kl_coef: float) -> Slates:
    """The candidates with the KL penalty in their rewards; a draw that is not an item keeps its reward."""
    slates, logp, reference = rollout.slates, rollout.logp, rollout.reference
    assert slates.reward is not None
    assert logp is not None
    assert reference is not None
    items = items_of(slates)
    rewards = kl_shaped_rewards(slates.reward, logp, reference, items[..., None].expand_as(logp), kl_coef)
    return slates._replace(reward=torch.where(items, rewards.sum(-1), slates.reward), token_rewards=rewards)


def _decided(batch: FeedbackBatch, needed: Tensor) -> FeedbackBatch:
    """The batch with the plan of the positions that the device has chosen, if it has a plan to choose from."""
    plan = batch.plan
    if plan is None or plan.scorable is None:
        return batch
    return batch._replace(plan=plan._replace(scored=plan.scorable._replace(needed=needed)))


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
    return Requirement.OLD in requires or snapshot or (limited and rollout.phase_steps > 1)


def logged_logp(batch: FeedbackBatch, logp: Tensor, needed: Tensor) -> Tensor:
    """The logged propensities as old log-probabilities ``[B, S, 1]``.

    Raises:
        RecpoError: a needed position has none (``validate_propensities``; the planner has checked those of a plan), or
            the policy scores several tokens per item.
    """
    if batch.plan is None or batch.plan.scored is None:
        validate_propensities(batch, needed)
    if logp.shape[-1] > 1:
        raise RecpoError(
            "old_policy: logged gives one probability per item, this policy scores several tokens per item: set "
            "old_policy to snapshot",
            code="unsupported",
            field="old_policy",
        )
    assert batch.slates.logp_behavior is not None
    return torch.where(needed, batch.slates.logp_behavior, 0.0)[..., None].to(logp.dtype)


def item_log_prob(policy: StatePolicy, states: Tensor, slates: Slates) -> Tensor:
    """``log softmax_v(state · vector_v)`` over the catalog for the items of slates, ``[B, S]``; 0 where masked.

    The vectors are the ones that the encoder reads (``StatePolicy.item_vectors``), so this also trains the codes'
    vectors.

    Args:
        policy: the policy that has the vectors.
        states: ``[B, H + 1, d]`` of ``policy.encode``.
        slates: the items.
    """
    positions = slates.mask.reshape(-1).nonzero().squeeze(1)
    rows, state_index = shared_states(slates, positions, states.shape[1])
    vectors = policy.item_vectors(torch.arange(policy.num_items + 1, device=states.device))
    targets = slates.item_ids.reshape(-1)[positions]
    logp = linear_logprob(take_rows(states, rows), vectors, targets, state_index)
    return logp.new_zeros(slates.mask.numel()).index_copy(0, positions, logp).view(slates.mask.shape)

"""The one LightningModule: a policy, an objective, and only what the objective asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from recpo.contracts import AdvantageEstimator, Objective, Policy, RewardFunction
from recpo.errors import RecpoError
from recpo.objectives.likelihood import Likelihood
from recpo.training.contradictions import (
    refuse_feedback,
    refuse_old_policy,
    refuse_policy,
    refuse_rollout,
    refuse_shared_prefix,
    refuse_slates,
    refuse_snapshot_reference,
)
from recpo.training.critic import CriticOptions
from recpo.training.health import IN_TERMINAL
from recpo.training.inputs import InputBuilder, InputSources, OldPolicy, ReferencePolicy
from recpo.training.item_scores import ScoreMetrics
from recpo.training.kl_control import KLControl, KLTarget
from recpo.training.optimizers import (
    OptimizerFactory,
    SchedulerFactory,
    block_weights,
    build_optimizer,
    clip_gradients,
    needs_own_clipping,
    scale_gradients,
)
from recpo.training.rollout import RolloutOptions
from recpo.training.snapshots import ReferenceCache
from recpo.training.validation import ValidationMetrics
from recpo.types import EvaluationBatch, FeedbackBatch, SlateTraits


class PreferenceModule(LightningModule):
    """Trains a policy with one objective; pre-training is the ``Likelihood`` objective.

    The loss of every micro-batch on every rank is divided by the denominator of the whole optimizer step, so that
    accumulation and data parallelism only split the work.

    Args:
        policy: the trained policy.
        objective: what is minimized.
        advantage: turns the feedback of a batch into advantages; needed by objectives that weigh by them.
        reward: turns the feedback of a batch into rewards; needed by advantages and objectives that read them.
        optimizer: makes the optimizer of the dense parameters.
        sparse_optimizer: makes the optimizer of sparse embedding tables.
        lr_scheduler: makes the learning-rate schedule, stepped once per optimizer step.
        old_policy: where the old log-probabilities come from: ``current`` (there are none: every ratio is 1),
            ``logged`` (the propensity column of the log) or ``snapshot`` (a frozen copy).
        snapshot_every: optimizer steps between two refreshes of the snapshot; with ``rollout``, a phase.
        reference: ``frozen`` keeps a copy of the policy that training starts from; ``cached`` computes its
            log-probabilities once before training; ``snapshot`` takes the old policy, the previous iterate.
        rollout: learn from candidates that the snapshot draws, instead of the logged slates.
        judge: a second reward of the candidates, which is only logged: if it falls while the reward rises, the policy
            has learned the faults of the reward.
        adaptive_kl: move the objective's ``kl_coef`` towards a divergence from the reference policy.
        critic: the heads that some objectives train beside the policy; they are not a part of it.
        slates: what the data says about its slates.
        anchor_coef: weight of the likelihood of every kept position of the logged slates, added to the loss on the same
            batches and divided by the same denominator; 0 = none.
        mask_shared_prefix: leave codes that a rejected item shares with the chosen one out of its side (RAD-DPO).
        validation_k: length of the lists whose NDCG, HitRate and dislikes are reported on the validation split.
        item_counts: ``[V]`` training events of the items 1..V, which tell head from tail in the validation.
        seed: of dropout and sampling.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        *,
        advantage: AdvantageEstimator | None = None,
        reward: RewardFunction | None = None,
        optimizer: OptimizerFactory = torch.optim.Adam,
        sparse_optimizer: OptimizerFactory = torch.optim.SparseAdam,
        lr_scheduler: SchedulerFactory | None = None,
        old_policy: OldPolicy = "current",
        snapshot_every: int = 100,
        reference: ReferencePolicy = "frozen",
        rollout: RolloutOptions | None = None,
        judge: RewardFunction | None = None,
        adaptive_kl: KLTarget | None = None,
        critic: CriticOptions = CriticOptions(),  # noqa: B008  frozen
        slates: SlateTraits = SlateTraits(),  # noqa: B008  immutable
        anchor_coef: float = 0.0,
        mask_shared_prefix: bool = False,
        validation_k: int = 10,
        item_counts: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_policy(policy, objective)
        refuse_feedback(objective, advantage, reward)
        refuse_old_policy(objective, old_policy)
        if rollout is not None:
            refuse_rollout(objective, rollout, slates, reward, old_policy)
            slates = SlateTraits(is_preference_list=rollout.preference is not None, resampled=True)
        refuse_slates(objective, slates, reference, 0.0 if rollout else anchor_coef)
        refuse_snapshot_reference(objective, reference, old_policy)
        if mask_shared_prefix:
            refuse_shared_prefix(policy, objective)
        self.policy, self.objective = policy, objective
        self.validated: dict[str, Tensor] = {}
        self._optimizer, self._sparse_optimizer, self._lr_scheduler = optimizer, sparse_optimizer, lr_scheduler
        self._snapshot_every, self._reference = snapshot_every, reference
        self._anchor, self._anchor_coef, self._seed = Likelihood(), anchor_coef, seed
        self._rollout = rollout
        self._reads_step_labels = advantage is not None and advantage.reads_step_labels
        self._kl = KLControl(objective, adaptive_kl, None if rollout is None else rollout.max_kl)
        self._step_count: Tensor | None = None
        sources = InputSources(
            advantage,
            reward,
            old_policy,
            reference,
            critic,
            slates.hard_negatives,
            anchored=anchor_coef != 0,
            mask_shared_prefix=mask_shared_prefix,
            rollout=rollout,
            judge=judge,
            seed=seed,
        )
        self.inputs = InputBuilder(policy, objective, sources)
        head = None if self.inputs.critic is None else self.inputs.critic.score
        self._validation = (
            ValidationMetrics(validation_k, policy.num_items, item_counts)
            if head is None
            else ScoreMetrics(objective, head)
        )

        if not (objective.reads_log_prob or critic.shares_encoder or anchor_coef):
            policy.requires_grad_(False)  # the heads only read it, and a parallel strategy would wait for its gradients
        # every rank makes the same ones; broadcasting a trie in every step would take longer than the step
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    @property
    def monitor(self) -> str:
        """The validation metric whose largest value marks the best policy, or the best reward model."""
        return f"val/{self._validation.names[0]}"

    def setup(self, stage: str) -> None:
        """Makes the reference cache before any checkpoint is restored, from the weights that training starts with."""
        if stage == "fit" and self._reads_step_labels:
            self.trainer.datamodule.step_labels = True  # type: ignore[attr-defined]
        if stage == "fit" and self._reference == "cached" and "reference" in self.objective.requires:
            if any(weight.is_meta for weight in self.policy.parameters()):
                raise RecpoError(
                    "reference: cached needs whole tables before training begins: with sharded ones set reference: "
                    "frozen, whose copy is sharded like the policy"
                )
            batches = self.trainer.datamodule.every_context()  # type: ignore[attr-defined]
            device = self.trainer.strategy.root_device
            self.inputs.cache = ReferenceCache(self.policy, batches, batches.num_contexts, device)

    def configure_optimizers(self) -> Any:
        """Dense and sparse parameters under one optimizer; the schedule steps with it."""
        optimizer = build_optimizer(self, self._optimizer, self._sparse_optimizer)
        if self._lr_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._lr_scheduler(optimizer), "interval": "step"},
        }

    def on_train_batch_start(self, batch: FeedbackBatch, batch_idx: int) -> None:
        """Seeds the step, so that a resumed run draws the same dropout, and refreshes frozen copies when due."""
        key = [self._seed, self.current_epoch, batch_idx]
        torch.manual_seed(_seed_of([*key, self.global_rank]))
        # of the whole step: neither ranks nor micro-batches may make a difference
        self.policy.begin_step(_seed_of([self._seed, self.global_step]))
        if self._step_count is None:  # the first micro-batch of the step
            self._begin_step(batch_idx)

    def _begin_step(self, batch_idx: int) -> None:
        """Refreshes frozen copies when due; the phases of rollouts are counted from the start of the epoch."""
        if self._rollout is None or self.inputs.rollouts is None:
            self.inputs.refresh(self.policy, self.global_step, self._snapshot_every)
            return
        step, length = batch_idx // self.trainer.accumulate_grad_batches, self._rollout.phase_steps
        if step % length == 0:
            self._kl.begin_phase()
        self.inputs.rollouts.begin(self.current_epoch, step // length)
        self.inputs.refresh(self.policy, step, length)

    def training_step(self, batch: FeedbackBatch, batch_idx: int) -> Tensor:
        """One micro-batch; see the class for the denominator."""
        if self._kl.stopped:
            self._step_count = torch.zeros((), device=self.device)
            self._log_control(batch)
            return self._no_loss()
        inputs, slate_metrics, logged = self.inputs(self.policy, batch)
        inputs = inputs._replace(denominator=self._nominal_denominator(self.objective.count(inputs)))
        loss, metrics = self._kl.objective(inputs)
        self._kl.measure(inputs.logp, metrics)
        metrics = metrics | slate_metrics
        if self._anchor_coef:
            anchor = self._anchor(logged._replace(denominator=inputs.denominator))
            loss = loss + self._anchor_coef * anchor.loss
            metrics = {**metrics, **{f"anchor_{name}": value for name, value in anchor.metrics.items()}}
        if not loss.requires_grad:  # nothing to learn here, but every parameter must see a gradient on every rank
            loss = loss + self._no_loss()
        size = int(batch.context_ids.shape[0])
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=size, sync_dist=True)
        for name, value in metrics.items():
            self.log(f"train/{name}", value, prog_bar=name in IN_TERMINAL, batch_size=size)
        self._log_control(batch)
        return loss * self.trainer.accumulate_grad_batches  # Lightning divides by it; the denominator is right already

    def _log_control(self, batch: FeedbackBatch) -> None:
        size = int(batch.context_ids.shape[0])
        self.log_dict({f"train/{name}": value for name, value in self._kl.metrics.items()}, batch_size=size)

    def _no_loss(self) -> Tensor:
        """0, with a gradient of 0 for every parameter but the blocks of sharded tables, which wait for no rank."""
        blocks = block_weights(self)
        return 0.0 * torch.stack([p.sum() for p in self.parameters() if p.requires_grad and id(p) not in blocks]).sum()

    def _nominal_denominator(self, count: Tensor) -> Tensor:
        """The denominator of this rank's micro-batches: an equal share of the first micro-batch's total over the ranks.

        ``on_before_optimizer_step`` corrects it to the total of the whole step, which is known only then.
        """
        total = count.detach()
        if self.trainer.world_size > 1:
            gathered = self.all_gather(total)
            assert isinstance(gathered, Tensor)
            total = gathered.sum()
        if self._step_count is None:
            self._step_count = torch.zeros_like(total)
            self._nominal = (total / self.trainer.world_size).clamp(min=1.0)
        self._step_count = self._step_count + total
        return self._nominal

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turns the nominal denominator into the true one."""
        assert self._step_count is not None
        self._kl.end_step(self._sum_over_ranks)
        if self._kl.stopped:  # an optimizer leaves parameters without a gradient as they are, momentum and all
            for parameter in self.parameters():
                parameter.grad = None
        elif self.trainer.accumulate_grad_batches > 1:
            true = (self._step_count / self.trainer.world_size).clamp(min=1.0)
            scale_gradients(self, self._nominal / true)
        self._step_count = None

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Lightning's clipping, and the same for sparse gradients and sharded tables, which PyTorch's own refuses."""
        if gradient_clip_val and needs_own_clipping(self):
            clip_gradients(self, gradient_clip_val, gradient_clip_algorithm or "norm", self._sum_over_ranks)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Ranks the catalog for a batch of held-out users, or scores what they were shown."""
        self._validation.update(self.policy, batch)

    def on_validation_epoch_end(self) -> None:
        """Logs the means over the users of all ranks."""
        metrics = self._validation.compute(self._sum_over_ranks)
        self.validated = {f"val/{name}": value for name, value in metrics.items()}
        self.log_dict(self.validated, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what is neither a weight nor the optimizer's."""
        checkpoint["kl_control"] = self._kl.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what ``on_save_checkpoint`` added."""
        if "kl_control" in checkpoint:  # a run from before there was any has nothing to restore
            self._kl.load_state_dict(checkpoint["kl_control"])

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        # some sums are kept on the CPU, and NCCL adds up what lies on a GPU only
        total: Tensor = self.trainer.strategy.reduce(value.to(self.device), reduce_op="sum")
        return total.to(value.device)


def _seed_of(key: list[int]) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0])

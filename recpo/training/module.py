"""The LightningModule of recpo: a policy, an objective, and only what the objective requires."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.optim import Optimizer

from recpo.base.contracts import Policy, Requirement
from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch, FeedbackBatch, LossOutput, ObjectiveInputs, SlateTraits
from recpo.batches.datamodule import Contents
from recpo.objectives.likelihood import Likelihood
from recpo.training import optimizers
from recpo.training.contradictions import validate_options
from recpo.training.inputs import InputBuilder, StepInputs
from recpo.training.kl_control import KLControl
from recpo.training.networks import Networks, ReferenceCache
from recpo.training.options import LearningOptions, reads_of
from recpo.training.planning import StepPlanner
from recpo.training.validation import LOWER_IS_BETTER, ScoreMetrics, ValidationMetrics

IN_TERMINAL = frozenset(
    {
        "reward_mean",
        "monitor_reward_mean",
        "approx_kl",
        "clip_fraction",
        "unique_share",
        "zero_group_share",
        "draw_entropy",
    }
)
"""Training metrics that the progress bar shows beside the loss. The loggers get all metrics."""


class PreferenceModule(LightningModule):
    """Trains a policy with one objective. Pre-training is the ``Likelihood`` objective.

    The loss of every micro-batch on every rank is divided by the denominator of the complete optimizer step, so
    accumulation and data parallelism only split the work. Training changes the weights of ``policy`` itself; creating a
    module does not.

    A subclass can change a step of training: ``step_inputs`` makes what the objective reads, ``loss`` the loss, and
    ``builder`` is the class whose methods are the single steps (slates, advantages, log-probabilities). Give it to
    ``recpo.train(module=...)``, or as ``module: my_package.MyModule`` in YAML (docs/training.md).

    Args:
        policy: the trained policy.
        options: what it learns, from which data, and how.
        slates: properties of the data's slates.
        item_counts: ``[V]`` training events of the items 1..V, which define head and tail in the validation.

    Attributes:
        policy: the trained policy.
        reference: frozen copy of the initial policy, or None.
        old: frozen copy of the policy, updated every ``snapshot_every`` steps, or None.
        critic: heads on the policy's states, or None.
        networks: these four together.
        objective: the loss.
        validated: the metrics of the last validation.
        results: the metrics at the time of the checkpoint that training was resumed from.
    """

    builder: ClassVar[type[InputBuilder]] = InputBuilder

    def __init__(
        self,
        policy: Policy,
        options: LearningOptions,
        *,
        slates: SlateTraits = SlateTraits(),  # noqa: B008  immutable
        item_counts: Tensor | None = None,
    ) -> None:
        super().__init__()
        validate_options(policy, options, slates)
        self.networks = Networks.of(policy, options)
        self.policy, self.reference = policy, self.networks.reference
        self.old, self.critic = self.networks.old, self.networks.critic
        self.objective, self._options = options.objective, options
        self.validated: dict[str, Tensor] = {}
        self.results: dict[str, float] = {}
        self._inputs = self.builder(self.networks, options, slates.hard_negatives)
        self._whitens = options.advantage is not None and options.advantage.whiten
        self._planner = StepPlanner(policy, options, slates.hard_negatives)
        self._anchor, self._anchor_coef, self._seed = Likelihood(), options.anchor_coef, options.seed
        self._kl = KLControl(options)
        self._step_count: Tensor | None = None
        self._frozen: list[nn.Parameter] = []
        head = None if self.critic is None else self.critic.score
        self._validation = (
            ValidationMetrics(options, policy.num_items, item_counts)
            if head is None
            else ScoreMetrics(options.objective, head)
        )
        # every rank makes the same ones; broadcasting a trie in every step would take longer than the step
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    @property
    def monitor(self) -> str:
        """The name under which the validation metric that selects the best checkpoint is logged."""
        asked = self._options.monitor
        names = self._validation.names
        return f"val/{names[0] if asked is None else next(n for n in names if n.partition('@')[0] == asked)}"

    @property
    def monitor_mode(self) -> Literal["min", "max"]:
        """Whether its smallest or its largest value is the best."""
        return "min" if self._options.monitor in LOWER_IS_BETTER else "max"

    @property
    def ranking_metric(self) -> str:
        """The first validation metric, NDCG of a policy, whatever the monitor is."""
        return f"val/{self._validation.names[0]}"

    def setup(self, stage: str) -> None:
        """Creates the reference cache from the initial weights, before any checkpoint is restored.

        A policy whose states are only read is frozen during training; otherwise a parallel strategy would wait for its
        gradients.
        """
        if self.trainer.datamodule is not None:  # type: ignore[attr-defined]
            advantage = self._options.advantage
            self.trainer.datamodule.contents = Contents(  # type: ignore[attr-defined]
                reads_of(self.policy, self._options),
                step_labels=advantage is not None and Requirement.STEP_LABELS in advantage.requires,
                whole_steps=self._whitens and self.trainer.accumulate_grad_batches > 1,
                planner=self._planner,
            )
        if stage != "fit":
            return
        if self._options.reference == "cached" and "reference" in self.objective.requires:
            if any(weight.is_meta for weight in self.policy.parameters()):
                raise RecpoError(
                    "reference: cached needs whole tables before training begins: with sharded ones set reference: "
                    "frozen, whose copy is sharded like the policy",
                    code="conflicting_options",
                    field="reference",
                )
            batches = self.trainer.datamodule.every_context()  # type: ignore[attr-defined]
            device = self.trainer.strategy.root_device
            self.networks.reference_cache = ReferenceCache(self.policy, batches, batches.num_contexts, device)
        if not (self.objective.reads_log_prob or self._options.critic.shares_encoder or self._anchor_coef):
            self._frozen = [weight for weight in self.policy.parameters() if weight.requires_grad]
            self.policy.requires_grad_(False)

    def teardown(self, stage: str) -> None:
        """Restores the caller's policy."""
        for weight in self._frozen:
            weight.requires_grad_(True)
        self._frozen = []

    def configure_optimizers(self) -> Any:
        """Dense and sparse parameters under one optimizer; the schedule steps with it."""
        optimizer = optimizers.build_optimizer(self, self._options.optimizer, self._options.sparse_optimizer)
        if self._options.lr_scheduler is None:
            return optimizer
        scheduler = self._options.lr_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Tells a schedule in shares of the training how long the training is, also after a resume."""
        scheduler = self.lr_schedulers()
        if isinstance(scheduler, optimizers.LinearDecay):
            scheduler.set_length(self.trainer.estimated_stepping_batches)

    def on_train_batch_start(self, batch: FeedbackBatch, batch_idx: int) -> None:
        """Seeds the step, so that a resumed run draws the same dropout, and refreshes frozen copies when due."""
        # of the whole step: neither ranks nor micro-batches may make a difference
        self.policy.begin_step(_seed_of([self._seed, self.global_step]))
        if self._step_count is None:  # the first micro-batch of the step
            self._begin_step(batch_idx)
            self._inputs.kl_coef = self._kl.reward_coef
            if self._whitens and not self._kl.stopped:
                self._inputs.step_sums = self._whitening_sums(batch, batch_idx)
        self._seed_batch(batch_idx)

    def _seed_batch(self, batch_idx: int) -> None:
        seed = _seed_of([self._seed, self.current_epoch, batch_idx, self.global_rank])
        if self.device.type == "cpu":  # the other one notes the call stack for every accelerator that is not in use
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _whitening_sums(self, batch: FeedbackBatch, batch_idx: int) -> Tensor:
        """The sums over the advantages of the complete step: all micro-batches, with their own seeds, and all ranks."""
        sums = []
        for number, part in enumerate([batch, *batch.later_micro_batches]):
            self._seed_batch(batch_idx + number)
            sums.append(self._inputs.whitening_sums(part))
        return self._sum_over_ranks(torch.stack(sums).sum(0))

    def _begin_step(self, batch_idx: int) -> None:
        """Refreshes frozen copies when due; the phases of rollouts are counted from the start of the epoch."""
        rollout, rollouts = self._options.rollout, self._inputs.rollouts
        if rollout is None or rollouts is None:
            self.networks.refresh(self.global_step, self._options.snapshot_every)
            return
        step, length = batch_idx // self.trainer.accumulate_grad_batches, rollout.phase_steps
        if step % length == 0:
            self._kl.stopped = False
        rollouts.begin(self.current_epoch, step // length)
        self.networks.refresh(step, length)

    def training_step(self, batch: FeedbackBatch, batch_idx: int) -> Tensor:
        """One micro-batch: what the objective reads, its loss, the losses beside it, and their health.

        Every loss is divided by the same denominator; see the class.
        """
        if self._kl.stopped:
            return self._skipped(batch)
        inputs = self.step_inputs(batch)
        denominator = self._nominal_denominator(self.objective.count(inputs.objective))
        loss, metrics = self.loss(inputs.objective._replace(denominator=denominator))
        self._kl.measure(inputs.objective.logp, metrics)
        metrics = metrics | inputs.metrics
        for further in self._losses_beside(inputs, batch, denominator):
            loss, metrics = loss + further.loss, metrics | further.metrics
        if not loss.requires_grad:  # nothing to learn here, but every parameter must see a gradient on every rank
            loss = loss + self._no_loss()
        self._log_step(batch, metrics, loss.detach())
        return loss * self.trainer.accumulate_grad_batches  # Lightning divides by it; the denominator is right already

    def step_inputs(self, batch: FeedbackBatch) -> StepInputs:
        """Slates or candidates -> rewards -> advantages -> log-probabilities (policy, old, reference).

        Override it to change what the objective reads: ``super().step_inputs(batch)``, and ``_replace`` a part. Where
        an advantage is 0 and the objective ignores such positions, their log-probabilities are not computed.
        """
        return self._inputs(batch)

    def loss(self, inputs: ObjectiveInputs) -> LossOutput:
        """The loss of a micro-batch, divided by ``inputs.denominator``, and its metrics. Override it to add a term."""
        return self._kl.objective(inputs)

    def _losses_beside(self, inputs: StepInputs, batch: FeedbackBatch, denominator: Tensor) -> Iterator[LossOutput]:
        """The weighted losses that are added to that of the objective: the anchor and the items as a whole."""
        if self._anchor_coef:
            anchor = self._anchor(inputs.logged._replace(denominator=denominator))
            metrics = {f"anchor_{name}": value for name, value in anchor.metrics.items()}
            yield LossOutput(self._anchor_coef * anchor.loss, metrics)
        if inputs.items is not None:
            total = inputs.items.sum()
            mean = -total.detach() / batch.slates.mask.sum().clamp(min=1)
            yield LossOutput(-(self._options.item_coef * total / denominator), {"item_nll": mean})

    def _skipped(self, batch: FeedbackBatch) -> Tensor:
        """A micro-batch of a phase that ended early: nothing is learned, but every rank takes part."""
        self._step_count = torch.zeros((), device=self.device)
        self._log_step(batch, {})
        return self._no_loss()

    def _log_step(self, batch: FeedbackBatch, metrics: dict[str, Tensor], loss: Tensor | None = None) -> None:
        size = int(batch.context_ids.shape[0])
        if loss is not None:
            self.log("train/loss", loss, prog_bar=True, batch_size=size, sync_dist=True)
        for name, value in metrics.items():
            self.log(f"train/{name}", value, prog_bar=name in IN_TERMINAL, batch_size=size)
        self.log_dict({f"train/{name}": value for name, value in self._kl.metrics.items()}, batch_size=size)

    def _no_loss(self) -> Tensor:
        """0, with a zero gradient for every parameter except blocks of sharded tables, which wait for no rank."""
        blocks = optimizers.block_weights(self)
        return 0.0 * torch.stack([p.sum() for p in self.parameters() if p.requires_grad and id(p) not in blocks]).sum()

    def _nominal_denominator(self, count: Tensor) -> Tensor:
        """The denominator of this rank's micro-batches: an equal share of the first micro-batch's total over the ranks.

        ``on_before_optimizer_step`` corrects it to the total of the complete step, which is known only then.
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
        """Replaces the nominal denominator by the true one."""
        assert self._step_count is not None
        self._kl.end_step(self._sum_over_ranks)
        if self._kl.stopped:  # an optimizer leaves parameters without a gradient as they are, momentum and all
            for parameter in self.parameters():
                parameter.grad = None
        elif self.trainer.accumulate_grad_batches > 1:
            true = (self._step_count / self.trainer.world_size).clamp(min=1.0)
            optimizers.scale_gradients(self, self._nominal / true)
        self._step_count = None

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Lightning's clipping, and the same where that refuses: sparse gradients, sharded tables, fused with bfloat16.

        Raises:
            RecpoError: the gradients are scaled for float16, and a fused optimizer would undo that after clipping.
        """
        plugin = self.trainer.precision_plugin
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if gradient_clip_val and fused and getattr(plugin, "scaler", None) is not None:
            raise RecpoError(
                f"trainer.precision: {plugin.precision} scales gradients, and a fused optimizer undoes that only after "
                "they are clipped: set it to bf16-mixed, optimizer.init_args.fused to false, or clip no gradients",
                code="unsupported",
                field="trainer.precision",
            )
        if gradient_clip_val and ((fused and plugin.precision == "bf16-mixed") or optimizers.needs_own_clipping(self)):
            optimizers.clip_gradients(self, gradient_clip_val, gradient_clip_algorithm or "norm", self._sum_over_ranks)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Ranks the catalog for a batch of held-out users, or scores what they were shown."""
        self._validation.update(self.policy, batch)

    def on_validation_epoch_end(self) -> None:
        """Logs the means over the users of all ranks."""
        metrics = self._validation.compute(self._sum_over_ranks)
        self.validated = {f"val/{name}": value for name, value in metrics.items()}
        if self.monitor not in self.validated and not self.trainer.sanity_checking:
            instead = "raise" if "score" in self.objective.requires else "set monitor to NDCG, raise"
            raise RecpoError(
                f"{self.monitor}, by which the best checkpoint is chosen, is undefined on the validation users: none "
                f"has the events it needs; {instead} data.max_validation_users, or prepare the log with a longer "
                "validation period",
                code="empty",
                field="monitor",
            )
        self.log_dict(self.validated, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the state that belongs to neither the weights nor the optimizer."""
        checkpoint["kl_control"] = self._kl.state_dict()
        checkpoint["results"] = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        checkpoint["world_size"] = self.trainer.world_size

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores what ``on_save_checkpoint`` added, and what Lightning forgets.

        Lightning restores neither that early stopping has ended the run, so it would train one epoch more, nor the
        number of batches on another number of ranks, so an accumulation would begin in the middle of a step.
        """
        self._kl.load_state_dict(checkpoint["kl_control"])
        self.results = checkpoint["results"]
        stopping = [hook for hook in self.trainer.callbacks if isinstance(hook, EarlyStopping)]  # type: ignore[attr-defined]
        states = [checkpoint["callbacks"].get(hook.state_key, {}) for hook in stopping]
        self.trainer.should_stop = any(state.get("stopping_reason") for state in states)
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        _recount_batches(progress, checkpoint["world_size"], self.trainer.world_size)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return value
        # some sums are kept on the CPU, and NCCL adds up what lies on a GPU only
        total: Tensor = self.trainer.strategy.reduce(value.to(self.device), reduce_op="sum")
        return total.to(value.device)


def _seed_of(key: list[int]) -> int:
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def _recount_batches(progress: dict[str, Any], before: int, now: int) -> None:
    """Adjusts Lightning's batch counts, which are per rank: the same number of events is more batches on fewer ranks.

    Within an epoch, the last batch of a checkpoint is done but not yet counted as completed.
    """
    for counts in (progress["total"], progress["current"]):
        further = counts["ready"] * before // now - counts["ready"]
        counts.update({name: count + further for name, count in counts.items()})

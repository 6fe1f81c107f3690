"""``recpo train``: pre-training and alignment are the same verb with another objective."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch.nn import Parameter
from torch.optim import Adam, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

import recpo.advantages
import recpo.data.preference_lists
import recpo.evaluation.true_rewards
import recpo.objectives
import recpo.policies.catalog_softmax
import recpo.policies.semantic_id
import recpo.rewards
import recpo.training.learned_reward  # noqa: F401  these imports are why a class path may be the bare class name
from recpo.cli.config import write_resolved
from recpo.contracts import AdvantageEstimator, Objective, Policy, RewardFunction
from recpo.data.datamodule import FeedbackDataModule, Phases
from recpo.errors import RecpoError
from recpo.policies.item_table import tables_on_meta
from recpo.training.allocator import tune_allocator
from recpo.training.critic import CriticOptions
from recpo.training.health import CollapseGuard, CollapseLimits
from recpo.training.inputs import OldPolicy, ReferencePolicy
from recpo.training.kl_control import KLTarget
from recpo.training.module import PreferenceModule
from recpo.training.rollout import RolloutOptions
from recpo.training.run import (
    FINISHED,
    RESOLVED,
    checkpoint_path,
    load_weights,
    mark_finished,
    refuse_other_items,
)
from recpo.training.trainer import TrainerOptions


def train(
    data: FeedbackDataModule,
    policy: Callable[[int], Policy],
    objective: Objective,
    trainer: TrainerOptions,
    out: Path,
    advantage: AdvantageEstimator | None = None,
    reward: RewardFunction | None = None,
    init_from: Path | None = None,
    optimizer: Callable[[Iterable[Parameter]], Optimizer] = Adam,
    sparse_optimizer: Callable[[Iterable[Parameter]], Optimizer] = SparseAdam,
    lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    old_policy: OldPolicy = "current",
    snapshot_every: int = 100,
    reference: ReferencePolicy = "frozen",
    rollout: RolloutOptions | None = None,
    judge: RewardFunction | None = None,
    adaptive_kl: KLTarget | None = None,
    collapse: CollapseLimits = CollapseLimits(),  # noqa: B008  frozen
    critic: CriticOptions = CriticOptions(),  # noqa: B008  frozen
    anchor_coef: float = 0.0,
    mask_shared_prefix: bool = False,
    validation_k: int = 10,
    checkpoint_every: int | None = None,
    allocator: bool = True,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Trains a policy on prepared data, or aligns a trained one.

    The result is a run directory: checkpoints, logs, the resolved configuration that repeats it, and run.json, which
    says that it is finished. A run that was killed goes on with --resume true, to the same result.

    Args:
        data: the batches.
        policy: the policy to train; the catalog size comes from the data.
        objective: what is minimized: Likelihood pre-trains, every other objective aligns.
        trainer: options of lightning.Trainer.
        out: run directory to write.
        advantage: turns feedback into advantages, for the objectives that weigh by them.
        reward: turns feedback into rewards, for the advantages and objectives that read them.
        init_from: run directory whose best policy training starts from; the same policy options and the same items.
        optimizer: optimizer of the dense parameters.
        sparse_optimizer: optimizer of sparse embedding tables.
        lr_scheduler: learning-rate schedule, stepped once per optimizer step.
        old_policy: where old log-probabilities come from: there are none, every ratio is 1 (current), the propensity
            column of the log (logged), or a frozen copy (snapshot).
        snapshot_every: optimizer steps between two refreshes of the snapshot; with a rollout it is refreshed at the
            start of every phase instead.
        reference: keep a frozen copy of the starting policy, or its cached log-probabilities of the training rows, or
            take the snapshot (of old_policy): the previous iterate.
        rollout: learn from candidates that the snapshot draws for every request and the reward scores; null = from what
            the log shows.
        judge: a second reward of the candidates that is only logged, to see whether the policy learns the faults of the
            reward.
        adaptive_kl: move the objective's kl_coef towards a divergence from the reference policy.
        collapse: where a run with a rollout counts as collapsed and stops.
        critic: heads that the objective trains beside the policy (state values, Q-values, scores).
        anchor_coef: weight of the likelihood of all logged positions of the same batches, trained jointly; divided by
            the same denominator as the objective (the number of candidates, with a rollout).
        mask_shared_prefix: of semantic ids, leave codes that a rejected item shares with the chosen one out of its side
            of a preference list (RAD-DPO, arXiv 2602.23964).
        validation_k: list length of the validation metrics.
        checkpoint_every: also write last.ckpt every so many optimizer steps, not only after every epoch.
        allocator: keep freed memory in the process (glibc only): up to a third faster on CPU, some more memory.
        seed: of initialization, dropout and sampling; the order of the data has its own (data.seed).
        resume: go on from last.ckpt in out.
        overwrite: replace out if it exists.
    """
    if allocator:
        tune_allocator()
    torch.manual_seed(seed)
    with tables_on_meta() if trainer.shards_tables else nullcontext():
        model = policy(data.prepared.num_items)
    _refuse_other_items(model, reward, data)
    item_counts = torch.from_numpy(data.prepared.item_counts())
    model.set_item_counts(item_counts)
    if init_from is not None:
        _start_from(model, init_from, data)
    module = PreferenceModule(
        model,
        objective,
        advantage=advantage,
        reward=reward,
        optimizer=optimizer,
        sparse_optimizer=sparse_optimizer,
        lr_scheduler=lr_scheduler,
        old_policy=old_policy,
        snapshot_every=snapshot_every,
        reference=reference,
        rollout=rollout,
        judge=judge,
        adaptive_kl=adaptive_kl,
        critic=critic,
        slates=data.layout.traits,
        anchor_coef=anchor_coef,
        mask_shared_prefix=mask_shared_prefix,
        validation_k=validation_k,
        item_counts=item_counts,
        seed=seed,
    )
    last = _open_run(out, resume=resume, overwrite=overwrite)
    _refuse_other_strategy(last, sharded=trainer.shards_tables)
    guards = []
    if rollout is not None:
        data.phases = Phases(rollout.batches, rollout.epochs)
        guards = [CollapseGuard(collapse, module.monitor)]
    lightning_trainer = trainer.build(out, module.monitor, checkpoint_every, guards)
    with _faults_of_ranks(out):
        lightning_trainer.fit(module, datamodule=data, ckpt_path=last, weights_only=True)
    if lightning_trainer.interrupted:
        raise KeyboardInterrupt
    if lightning_trainer.is_global_zero:
        results = {name: float(value) for name, value in lightning_trainer.callback_metrics.items()}
        mark_finished(out, model, data.prepared.catalog_checksum, results)
        best = lightning_trainer.checkpoint_callback
        score = None if best is None else getattr(best, "best_model_score", None)
        print(
            f"{out}: {lightning_trainer.global_step} steps"
            + ("" if score is None else f", {module.monitor} {score:.4f}")
        )


@contextmanager
def _faults_of_ranks(out: Path) -> Iterator[None]:
    """Says in one line what a run over ranks died of: a rank is gone, or waits for gradients that do not come."""
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters" in str(error):
            raise RecpoError(
                "this objective leaves some parameters without a gradient, which the strategy has to be told: set "
                "trainer.strategy to ddp_find_unused_parameters_true, or ShardedStrategy's find_unused_parameters: true"
            ) from error
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RecpoError(
            f"rank {getattr(rank_zero_only, 'rank', 0)} has lost another rank of this run, which ended or does not "
            "answer (see what that one wrote, or whether its machine ran out of memory); once it is fixed, go on from "
            f"the last checkpoint: recpo train --config {out}/{RESOLVED} --resume true "
            f"({str(error).strip().splitlines()[0]})"
        ) from error


def _refuse_other_items(model: Policy, reward: RewardFunction | None, data: FeedbackDataModule) -> None:
    if reward is not None and reward.catalog_checksum not in (None, data.prepared.catalog_checksum):
        raise RecpoError(
            f"reward: it was made for other items than {data.prepared.root} holds (items.parquet differs); use the "
            "prepared directory it was made with"
        )
    if model.catalog_checksum not in (None, data.prepared.catalog_checksum):
        raise RecpoError(
            f"policy: its codes were made for other items than {data.prepared.root} holds (items.parquet differs); "
            "make them for this directory with `recpo tokenize`"
        )


def _refuse_other_strategy(last: Path | None, *, sharded: bool) -> None:
    if last is not None and last.is_dir() != sharded:
        made = "with ShardedStrategy" if last.is_dir() else "without ShardedStrategy"
        raise RecpoError(
            f"{last} was written {made}: resume the run with the trainer.strategy it was started with, or start "
            "another one from its policy with --init_from"
        )


def _start_from(model: Policy, run: Path, data: FeedbackDataModule) -> None:
    refuse_other_items(run, data.prepared.catalog_checksum, data.prepared.root)
    load_weights(model, checkpoint_path(run))


def _open_run(out: Path, *, resume: bool, overwrite: bool) -> Path | None:
    """Makes the run directory; returns the checkpoint to go on from, None to start anew."""
    last = checkpoint_path(out, "last")
    goes_on = last if resume and last.exists() else None
    if getattr(rank_zero_only, "rank", 0):  # another process of the same run makes it
        return goes_on
    if out.exists() and resume:
        (out / FINISHED).unlink(missing_ok=True)
        return goes_on
    if out.exists():
        if not overwrite:
            raise RecpoError(f"{out} exists already: pass --resume true to go on, --overwrite true to start anew")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    write_resolved(out / RESOLVED)
    return None

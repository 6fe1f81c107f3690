"""The module: exact denominators, exact resume, plain checkpoints, clear errors."""

from functools import partial

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import SGD, Adam

from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import SequenceLayout
from recpo.objectives.advantages import TernaryAdvantage
from recpo.objectives.gae import GAEAdvantage
from recpo.objectives.grpo import GBPO
from recpo.objectives.likelihood import Likelihood
from recpo.objectives.policy_gradient import PPO
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.rewards.rewards import LoggedReward
from recpo.training.inputs import logged_logp
from recpo.training.module import PreferenceModule
from recpo.training.networks import ReferenceCache, Snapshot
from recpo.training.options import LearningOptions
from recpo.training.run import checkpoint_path, load_weights
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import simulate
from tests.refusals import refused

LAYOUT = SequenceLayout(history_length=12)


def sgd(parameters):
    return SGD(parameters, lr=0.5)


def adam(parameters):
    return Adam(parameters, lr=0.01)


def new_policy(data, **options):
    torch.manual_seed(0)
    return CatalogSoftmaxPolicy(data.prepared.num_items, dim=8, layers=1, heads=1, max_history=12, **options)


def fit(prepared, objective, *, batch_size=16, policy=None, module=None, resume=None, callbacks=(), **trainer):
    data = FeedbackDataModule(prepared, batch_size=batch_size, layout=LAYOUT)
    model = new_policy(data, **(policy or {"dropout": 0.0}))
    learner = PreferenceModule(model, LearningOptions(objective=objective, **{"optimizer": sgd, **(module or {})}))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"max_epochs": 1, "enable_checkpointing": bool(callbacks), "num_sanity_val_steps": 0, **quiet, **trainer}
    lightning_trainer = Trainer(callbacks=list(callbacks), **options)
    lightning_trainer.fit(learner, datamodule=data, ckpt_path=resume, weights_only=True)
    return model, lightning_trainer


def assert_same_weights(one, other, **tolerance):
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


TERNARY = {"advantage": TernaryAdvantage()}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A prepared log of about seven batches, the last one not full."""
    out = tmp_path_factory.mktemp("few")
    simulate(out / "simulated", users=20, items=60, events=1200, days=10)
    prepare(str(out / "simulated" / "log"), out / "prepared")
    return out / "prepared"


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "module"), [(Likelihood(), {}), (GBPO(), TERNARY)], ids=["likelihood", "gbpo"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
def test_accumulation_only_splits_the_work(few, objective, module, clip):
    whole, _ = fit(few, objective, module=module, batch_size=16, gradient_clip_val=clip)
    split, trainer = fit(few, objective, module=module, batch_size=4, accumulate_grad_batches=4, gradient_clip_val=clip)
    assert trainer.global_step > 3
    assert_same_weights(whole, split, rtol=1e-4, atol=1e-6)


WHITENED = {
    "critic": (
        PPO(entropy_coef=0.1),
        {"advantage": GAEAdvantage(whiten=True), "reward": LoggedReward(), "old_policy": "snapshot"},
    ),
    # values of the policy itself, with its dropout
    "critic without a snapshot": (
        PPO(),
        {"advantage": GAEAdvantage(whiten=True), "reward": LoggedReward(), "old_policy": "logged"},
    ),
    "planned": (GBPO(), {"advantage": TernaryAdvantage(whiten=True)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_are_those_of_the_whole_step(few, monkeypatch, name):
    (objective, module), dropout = WHITENED[name], 0.3 if name == "critic without a snapshot" else 0.0
    seen, call = {}, type(objective).__call__

    def noted(self, inputs):
        kept = inputs.advantages[inputs.logp.mask.any(-1)]
        seen.setdefault(parts, []).append(kept.double())
        return call(self, inputs)

    monkeypatch.setattr(type(objective), "__call__", noted)
    runs = {}
    for parts in (1, 2, 4):
        options = {"batch_size": 16 // parts, "accumulate_grad_batches": parts, "policy": {"dropout": dropout}}
        runs[parts], trainer = fit(few, objective, module=module, **options)
    for parts, advantages in seen.items():
        for step in range(trainer.global_step):
            of_step = torch.cat(advantages[step * parts : (step + 1) * parts])
            assert of_step.mean() == pytest.approx(0.0, abs=1e-6)
            assert of_step.std(unbiased=False) == pytest.approx(1.0, abs=1e-5)
    for parts in () if dropout else (2, 4):
        assert_same_weights(runs[1], runs[parts], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_naive_mean_of_micro_batches_would_differ(few, monkeypatch):
    monkeypatch.setattr(PreferenceModule, "_nominal_denominator", lambda self, count: count.clamp(min=1.0))
    monkeypatch.setattr(PreferenceModule, "on_before_optimizer_step", lambda self, optimizer: None)
    # the same test with each micro-batch divided by its own count: Lightning's division by 4 is needed again
    monkeypatch.setattr(
        PreferenceModule, "training_step", lambda self, b, i, step=PreferenceModule.training_step: step(self, b, i) / 4
    )
    naive, _ = fit(few, Likelihood(), batch_size=4, accumulate_grad_batches=4)
    monkeypatch.undo()
    whole, _ = fit(few, Likelihood(), batch_size=16)
    difference = max((a - b).abs().max() for a, b in zip(naive.parameters(), whole.parameters(), strict=True))
    assert difference > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [3, 9])
def test_resuming_equals_not_having_stopped(few, tmp_path, stop_after):
    options = {"policy": {"dropout": 0.3}, "module": {"optimizer": adam, "seed": 3}, "max_epochs": 2}
    whole, trainer = fit(few, Likelihood(), **options)
    assert trainer.global_step > 9
    keep = ModelCheckpoint(tmp_path, filename="state", every_n_train_steps=stop_after, save_top_k=-1)
    fit(few, Likelihood(), **{**options, "max_epochs": -1}, max_steps=stop_after, callbacks=[keep])
    (state,) = tmp_path.glob("*.ckpt")
    resumed, again = fit(few, Likelihood(), resume=state, **options)
    assert again.global_step == trainer.global_step
    assert_same_weights(whole, resumed, rtol=0, atol=0)


@pytest.mark.slow
def test_one_seed_gives_one_result(few):
    options = {"policy": {"dropout": 0.3}, "module": {"seed": 1}}
    first, second = (fit(few, Likelihood(), **options)[0] for _ in range(2))
    assert_same_weights(first, second, rtol=0, atol=0)
    other, _ = fit(few, Likelihood(), policy={"dropout": 0.3}, module={"seed": 2})
    assert not torch.equal(first.state_dict()["item_table.weight"], other.state_dict()["item_table.weight"])


@pytest.mark.slow
def test_the_likelihood_falls_and_validation_is_logged(prepared):
    _, trainer = fit(prepared, Likelihood(), module={"optimizer": adam}, max_epochs=2)
    metrics = trainer.callback_metrics
    assert metrics["train/loss"] < 0.97 * torch.tensor(60.0).log()
    assert {"val/NDCG@10", "val/HitRate@10", "val/disliked@10"} <= metrics.keys()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_sampled_normalizer_with_sparse_tables_clipped(few, precision):
    policy = {"normalizer": "sampled", "num_negatives": 16, "sparse": True, "dropout": 0.0}
    module = {"optimizer": adam, "sparse_optimizer": lambda p: torch.optim.SparseAdam(list(p), lr=0.01)}
    model, trainer = fit(
        few, Likelihood(), policy=policy, module=module, precision=precision, gradient_clip_val=1.0, max_epochs=3
    )
    assert all(p.isfinite().all() for p in model.parameters())
    assert trainer.callback_metrics["train/loss"].isfinite()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_fused_optimizer_is_clipped_under_bfloat16_as_one_that_is_not(few, algorithm):
    clip = {"precision": "bf16-mixed", "gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    models = [
        fit(few, Likelihood(), module={"optimizer": partial(torch.optim.SGD, lr=1.0, fused=fused)}, **clip)[0]
        for fused in (True, False)
    ]
    assert_same_weights(*models, rtol=1e-5, atol=1e-6)


def test_a_fused_optimizer_is_not_clipped_where_gradients_are_scaled(few):
    learner = PreferenceModule(
        new_policy(FeedbackDataModule(few, batch_size=16, layout=LAYOUT)),
        LearningOptions(objective=Likelihood(), optimizer=partial(torch.optim.AdamW, fused=True)),
    )
    learner.trainer = Trainer(
        accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu")], logger=False, enable_checkpointing=False
    )
    optimizer = learner.configure_optimizers()
    with refused("unsupported", "trainer.precision"):
        learner.configure_gradient_clipping(optimizer, 1.0)


def test_the_anchor_adds_the_likelihood_of_every_exposure(prepared):
    alone, _ = fit(prepared, GBPO(), module={**TERNARY})
    anchored, trainer = fit(prepared, GBPO(), module={**TERNARY, "anchor_coef": 1.0})
    assert "train/anchor_nll" in trainer.callback_metrics
    assert not torch.equal(alone.state_dict()["item_table.weight"], anchored.state_dict()["item_table.weight"])


def test_logged_propensities_are_the_old_policy(prepared):
    _, trainer = fit(prepared, GBPO(), module={**TERNARY, "old_policy": "logged"})
    assert trainer.callback_metrics["train/loss"].isfinite()


def test_a_snapshot_is_refreshed_when_due(prepared):
    data = FeedbackDataModule(prepared, batch_size=16, layout=LAYOUT)
    options = LearningOptions(objective=GBPO(), **TERNARY, old_policy="snapshot", snapshot_every=2, optimizer=sgd)
    learner = PreferenceModule(new_policy(data), options)
    seen = []
    learner.old.refresh = lambda policy, head: seen.append(learner.global_step)
    trainer = Trainer(
        max_steps=5, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.fit(learner, datamodule=data)
    assert seen == [0, 2, 4]


def test_the_reference_cache_equals_a_frozen_copy(prepared):
    data = FeedbackDataModule(prepared, batch_size=16, layout=LAYOUT)
    policy = new_policy(data)
    batches = data.every_context()
    cache = ReferenceCache(policy, batches, batches.num_contexts, torch.device("cpu"))
    frozen = Snapshot(policy)
    for batch in data.every_context():
        torch.testing.assert_close(cache.log_prob(batch), frozen.log_prob(batch))


def test_checkpoints_hold_plain_tensors_and_load_into_a_policy(prepared, tmp_path):
    keep = ModelCheckpoint(tmp_path / "checkpoints", filename="best")
    model, _ = fit(prepared, Likelihood(), callbacks=[keep])
    saved = torch.load(checkpoint_path(tmp_path), weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in saved["state_dict"].values())
    fresh = new_policy(FeedbackDataModule(prepared, layout=LAYOUT))
    load_weights(fresh, checkpoint_path(tmp_path))
    assert_same_weights(model, fresh, rtol=0, atol=0)
    wider = CatalogSoftmaxPolicy(model.num_items, dim=16, layers=1, heads=1, max_history=12)
    with refused("mismatch", "best.ckpt"):
        load_weights(wider, checkpoint_path(tmp_path))


def test_missing_propensities_are_counted_not_guessed(prepared):
    data = FeedbackDataModule(prepared, batch_size=16, layout=LAYOUT)
    learner = PreferenceModule(new_policy(data), LearningOptions(objective=GBPO(), **TERNARY, old_policy="logged"))
    batch = next(iter(data.train_dataloader()))
    spoiled = batch.slates.logp_behavior.clone()
    spoiled[0, 0] = float("nan")
    needed = batch.slates.mask
    logp = learner.policy.log_prob(batch)
    with refused("missing_value", "old_policy"):
        logged_logp(batch._replace(slates=batch.slates._replace(logp_behavior=spoiled)), logp, needed)

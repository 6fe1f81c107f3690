"""A run that stops anywhere and resumes from its last checkpoint ends with the weights of an uninterrupted run."""

from functools import cache

import pytest
import torch
from lightning import Callback, Trainer

from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import SequenceLayout
from recpo.objectives.likelihood import Likelihood
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.callbacks import LastCheckpoint
from recpo.training.module import PreferenceModule
from recpo.training.options import LearningOptions

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class KilledError(Exception):
    """Stands for a signal that nobody handles."""


class Contexts(Callback):
    """Remembers the contexts of every batch."""

    def __init__(self):
        self.epochs = {}

    def on_train_batch_start(self, trainer, module, batch, index):
        self.epochs.setdefault(trainer.current_epoch, []).append(tuple(batch.context_ids.tolist()))


class Kill(Callback):
    """Ends the process, as far as training can tell.

    Args:
        where: "step", "batch", "before validation", "after validation" or "after epoch".
        number: of the step, the batch of all epochs, or the epoch; from 0.
    """

    def __init__(self, where, number):
        self._where, self._number, self._validated = where, number, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._where == "step" and trainer.global_step == self._number:
            raise KilledError
        if self._where == "batch" and trainer.fit_loop.total_batch_idx == self._number:
            raise KilledError
        if self._where == "before validation" and last and trainer.current_epoch == self._number:
            raise KilledError

    def on_validation_end(self, trainer, module):
        if self._where == "after validation" and trainer.current_epoch == self._number:
            raise KilledError

    def on_train_epoch_start(self, trainer, module):
        if self._where == "after epoch" and trainer.current_epoch == self._number + 1:
            raise KilledError


def fit(prepared, directory, callbacks=(), resume=None, every=2, batch_size=32, **options):
    torch.manual_seed(0)
    data = FeedbackDataModule(
        prepared, batch_size=batch_size, layout=SequenceLayout(12), seed=5, max_validation_users=16
    )
    policy = CatalogSoftmaxPolicy(data.prepared.num_items, dim=8, layers=1, heads=1, max_history=12, dropout=0.2)
    module = PreferenceModule(policy, LearningOptions(objective=Likelihood(), seed=5))
    contexts = Contexts()
    # the callbacks that kill come first: what a checkpoint of this very moment would hold is lost
    trainer = Trainer(
        callbacks=[contexts, *callbacks, LastCheckpoint(directory, every)],
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **QUIET, **options},
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return policy, trainer, contexts.epochs


OPTIONS = {
    "whole epochs": {},
    "limited": {"limit_train_batches": 4},
    "limited to a share": {"limit_train_batches": 0.5},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "reloaded and limited": {"reload_dataloaders_every_n_epochs": 2, "limit_train_batches": 4},
    "counted in steps": {"max_epochs": -1, "max_steps": 11, "limit_train_batches": 4},
    "without validation": {"limit_val_batches": 0, "limit_train_batches": 4},
}
STEP, BEFORE_VALIDATION, AFTER_EPOCH = ("step", 7), ("before validation", 1), ("after epoch", 0)
CASES = [
    ("whole epochs", STEP),
    ("whole epochs", BEFORE_VALIDATION),
    ("whole epochs", AFTER_EPOCH),
    ("limited", STEP),
    ("limited", AFTER_EPOCH),
    ("limited", ("after validation", 0)),
    ("limited to a share", STEP),
    ("reloaded", AFTER_EPOCH),
    ("reloaded and limited", STEP),
    ("counted in steps", BEFORE_VALIDATION),
    ("counted in steps", AFTER_EPOCH),
    ("without validation", AFTER_EPOCH),
]


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """What a run that was not killed comes to, by the name of its options."""
    return cache(lambda name: fit(prepared, tmp_path_factory.mktemp("whole"), **OPTIONS[name]))


@pytest.mark.slow
@pytest.mark.parametrize(("options", "stop"), CASES, ids=lambda part: part if isinstance(part, str) else part[0])
def test_a_killed_run_resumes_to_the_weights_of_one_that_was_not(prepared, whole, tmp_path, options, stop):
    policy, trainer, epochs = whole(options)
    with pytest.raises(KilledError):
        fit(prepared, tmp_path / "cut", [Kill(*stop)], **OPTIONS[options])
    resumed, again, later = fit(prepared, tmp_path / "cut", resume=tmp_path / "cut/last.ckpt", **OPTIONS[options])
    assert again.global_step == trainer.global_step
    assert later, "it had not ended"
    for epoch, batches in later.items():
        assert batches == epochs[epoch][-len(batches) :]
    for (name, a), b in zip(policy.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("options", [OPTIONS["limited"], OPTIONS["reloaded and limited"]], ids=["limited", "reloaded"])
def test_epochs_that_are_cut_short_hold_different_batches(prepared, tmp_path, options):
    _, _, epochs = fit(prepared, tmp_path, **options)
    assert len(epochs) == 3
    assert all(len(batches) == 4 for batches in epochs.values())
    assert len({tuple(batches) for batches in epochs.values()}) == 3


@pytest.fixture(scope="module")
def accumulated(prepared, tmp_path_factory):
    return fit(prepared, tmp_path_factory.mktemp("accumulated"), **ACCUMULATED)


ACCUMULATED = {"batch_size": 8, "accumulate_grad_batches": 3, "max_epochs": 2, "every": 1, "limit_val_batches": 0}
ACCUMULATED |= {"limit_train_batches": 10}  # the last step of an epoch has one micro-batch


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(4, 4), (4, 5), (7, 8)])
def test_a_run_killed_twice_between_micro_batches_loses_no_gradient(prepared, tmp_path, accumulated, first, second):
    whole, trainer, _ = accumulated
    last, resume = tmp_path / "last.ckpt", None
    for batch in (first, second):
        with pytest.raises(KilledError):
            fit(prepared, tmp_path, [Kill("batch", batch)], resume, **ACCUMULATED)
        resume = last
    resumed, again, _ = fit(prepared, tmp_path, resume=last, **ACCUMULATED)
    assert again.global_step == trainer.global_step
    assert again.fit_loop.total_batch_idx == trainer.fit_loop.total_batch_idx
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name

"""Training that is killed anywhere and resumed ends with the weights of an uninterrupted run, bit for bit.

A kill is an exception that nobody handles: nothing is written after it. ``test_train_cli.py`` has a real one.
"""

import shutil
from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from recpo.base.errors import RecpoError
from recpo.training.callbacks import FiniteGuard, LastCheckpoint
from recpo.training.run import Run, checkpoint_path
from recpo.verbs.train import train
from tests.refusals import refused

POLICY = {"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 8, "layers": 1, "heads": 1, "max_history": 12}}
LAYOUT = {"class_path": "SequenceLayout", "init_args": {"history_length": 12}}
OPTIONS = {
    "policy": POLICY,
    "data.layout": LAYOUT,
    "data.batch_size": 32,
    "data.max_validation_users": 16,
    "trainer": {
        "max_epochs": 3,
        "limit_train_batches": 4,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
        "logger": False,
    },
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
    "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 12}},
    "allocator": False,
}


class KilledError(BaseException):
    """Stands for SIGKILL."""


class Kill(Callback):
    """Ends training at a hook of the second epoch; 0 is the first batch, -1 the last one."""

    def __init__(self, hook, batch=None):
        def die(trainer, module, *rest):
            at_batch = batch is None or rest[-1] == batch % trainer.num_training_batches
            if trainer.current_epoch == 1 and at_batch and not trainer.sanity_checking:
                raise KilledError

        setattr(self, hook, die)


def state(run, name="last"):
    return torch.load(checkpoint_path(run, name), weights_only=True)["state_dict"]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    return train(prepared, out=tmp_path_factory.mktemp("whole") / "run", **OPTIONS)


CASES = [
    ("on_train_batch_end", 0, None),
    ("on_train_batch_end", -1, 1),
    ("on_validation_start", None, None),
    ("on_validation_end", None, 1),
    ("on_train_epoch_end", None, None),
    ("on_train_epoch_end", None, 1),
    ("on_train_epoch_start", None, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "batch", "every"), CASES, ids=str)
def test_a_run_killed_at_a_hook_resumes_to_the_same_weights(prepared, whole, tmp_path, hook, batch, every):
    options = {"out": tmp_path / "run", "checkpoint_every": every, **OPTIONS}
    with pytest.raises(KilledError):
        train(prepared, callbacks=[Kill(hook, batch)], **options)
    assert not (tmp_path / "run" / "run.json").exists()
    run = train(prepared, resume=True, **options)
    for name in ("last", "best"):
        assert_equal(state(whole.root, name), state(run.root, name))
    validated = {name: value for name, value in whole.results.items() if name.startswith("val/")}
    assert validated.items() <= run.results.items()


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_run_killed_after_a_checkpoint_of_an_epoch_resumes_to_the_same_weights(
    prepared, whole, tmp_path, monkeypatch, epoch
):
    options = {"out": tmp_path / "run", **OPTIONS}
    save = LastCheckpoint._save_checkpoint

    def save_and_die(self, trainer, path):
        save(self, trainer, path)
        if trainer.current_epoch == epoch:
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(LastCheckpoint, "_save_checkpoint", save_and_die)
        with pytest.raises(KilledError):
            train(prepared, **options)
    run = train(prepared, resume=True, **options)
    for name in ("last", "best"):
        assert_equal(state(whole.root, name), state(run.root, name))
    assert {n: v for n, v in whole.results.items() if n.startswith("val/")}.items() <= run.results.items()


STANDSTILL = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1e-9}}  # no validation is better than the first
THRESHOLD = {"monitor": "val/NDCG@10", "mode": "max", "stopping_threshold": 0.0}
ENDS = {
    "patience": ({"patience": 1, "trainer.max_epochs": 9, "optimizer": STANDSTILL}, 6),
    "patience within an epoch": ({"patience": 1, "trainer.val_check_interval": 2, "optimizer": STANDSTILL}, 5),
    "a threshold": ({"trainer.callbacks": [{"class_path": "EarlyStopping", "init_args": THRESHOLD}]}, 3),
    "max_epochs": ({"trainer.max_epochs": 1}, 3),
    "max_steps": ({"trainer.max_steps": 4}, 4),
    "max_steps at the end of an epoch": ({"trainer.max_steps": 3}, 3),
}


SHORT = {**OPTIONS, "trainer": {**OPTIONS["trainer"], "limit_train_batches": 3}}


def values(run):
    """The results, without those that depend on the clock and the memory."""
    clocked = ("train/positions_per_second", "train/peak_memory_mib")
    return {name: value for name, value in run.results.items() if name not in clocked}


@pytest.fixture(scope="module")
def ended(prepared, tmp_path_factory):
    """The run of every end, by its name."""

    @cache
    def run(end):
        return train(prepared, out=tmp_path_factory.mktemp("ended") / "run", **{**SHORT, **ENDS[end][0]})

    return run


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_has_ended_takes_no_further_step_when_it_is_resumed(prepared, tmp_path, ended, end):
    options, steps = ENDS[end]
    before = Run.open(shutil.copytree(ended(end).root, tmp_path / "run"))
    checkpoints = {name: checkpoint_path(before.root, name).read_bytes() for name in ("best", "last")}
    assert torch.load(checkpoint_path(before.root, "last"), weights_only=True)["global_step"] == steps
    (before.root / "run.json").unlink()  # a kill after the last checkpoint
    resumed = train(prepared, out=before.root, resume=True, **{**SHORT, **options})
    assert {name: checkpoint_path(resumed.root, name).read_bytes() for name in checkpoints} == checkpoints
    assert values(resumed) == values(before)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["patience", "patience within an epoch", "max_steps"])
def test_a_run_killed_during_its_last_validation_ends_the_same(prepared, tmp_path, ended, end):
    options, steps = ENDS[end]
    options, whole = {"checkpoint_every": 1, **SHORT, **options}, ended(end)

    class KillLastValidation(Callback):
        def on_validation_end(self, trainer, module):
            if trainer.global_step == steps:
                raise KilledError

    with pytest.raises(KilledError):
        train(prepared, out=tmp_path / "run", callbacks=[KillLastValidation()], **options)
    run = train(prepared, out=tmp_path / "run", resume=True, **options)
    for name in ("last", "best"):
        assert_equal(state(whole.root, name), state(run.root, name))
    assert values(run) == values(whole)


@pytest.mark.slow
def test_a_validation_within_the_epoch_is_not_skipped_by_a_resumed_run(prepared, tmp_path):
    options = {**OPTIONS, "trainer.val_check_interval": 3, "trainer.max_epochs": 2, "checkpoint_every": 1}
    validated = {"whole": [], "run": []}

    class Validations(Callback):
        def __init__(self, name):
            self.steps = validated[name]

        def on_validation_end(self, trainer, module):
            self.steps.append(trainer.global_step)

    train(prepared, out=tmp_path / "whole", callbacks=[Validations("whole")], **options)
    with pytest.raises(KilledError):
        train(prepared, out=tmp_path / "run", callbacks=[Kill("on_validation_start"), Validations("run")], **options)
    run = train(prepared, out=tmp_path / "run", resume=True, callbacks=[Validations("run")], **options)
    assert validated["run"] == validated["whole"]
    for name in ("last", "best"):
        assert_equal(state(tmp_path / "whole", name), state(run.root, name))


@pytest.mark.slow
def test_a_collapsed_run_collapses_again_when_it_is_resumed(prepared, tmp_path, monkeypatch):
    def collapse(self, trainer, module):
        if trainer.global_step == 6:
            raise RecpoError("collapsed at step 6", code="diverged", field="step 6")

    monkeypatch.setattr(FiniteGuard, "on_validation_end", collapse)
    for resume in (False, True):
        with refused("diverged", "step 6"):
            train(prepared, out=tmp_path / "run", checkpoint_every=1, resume=resume, **SHORT)

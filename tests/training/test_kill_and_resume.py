"""Training that is killed anywhere and resumed ends with the weights of an uninterrupted run, bit for bit.

A kill is an exception that nobody handles: nothing is written after it. ``test_train_cli.py`` has a real one.
"""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from recpo.training.checkpoints import LastCheckpoint
from recpo.training.run import checkpoint_path
from recpo.verbs.train import train

POLICY = {"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 8, "layers": 1, "heads": 1, "max_history": 12}}
LAYOUT = {"class_path": "SequenceLayout", "init_args": {"history_length": 12}}
OPTIONS = {
    "policy": POLICY,
    "data.layout": LAYOUT,
    "data.batch_size": 32,
    "data.max_validation_users": 16,
    "trainer": {"max_epochs": 3, "accelerator": "cpu", "num_sanity_val_steps": 0, "logger": False},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
    "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 60}},
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


HOOKS = [
    ("on_train_batch_end", 0),
    ("on_train_batch_end", -1),
    ("on_validation_start", None),
    ("on_validation_end", None),
    ("on_train_epoch_end", None),
    ("on_train_epoch_start", None),
]


CASES = [(hook, batch, None) for hook, batch in HOOKS]
CASES += [("on_train_batch_end", -1, 1), ("on_validation_end", None, 1), ("on_train_epoch_end", None, 1)]


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


@pytest.mark.parametrize("epoch", [0, 1, 2])
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

"""Moving averages of the weights: the recursion, validation and checkpoints, and resuming."""

import functools

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import recpo
from recpo.training.callbacks import TRAINED
from recpo.training.options import WeightAverage
from tests.refusals import refused

DECAY = 0.6


class Weights(Callback):
    """Remembers the weights before the first and after every step, and those that are validated."""

    def __init__(self, kill_at=None):
        self.steps, self.validated, self._kill_at = [], [], kill_at

    def on_train_start(self, trainer, module):
        self.steps.append(copied(module))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.steps.append(copied(module))
        if trainer.global_step == self._kill_at:
            raise KeyError("killed")

    def on_validation_batch_start(self, trainer, module, batch, index, loader=0):
        if index == 0:
            self.validated.append(copied(module))


def copied(module):
    return {name: weight.detach().numpy().copy() for name, weight in module.policy.named_parameters()}


def train(prepared, out, callback, **options):
    policy = functools.partial(recpo.CatalogSoftmaxPolicy, dim=8, layers=1, heads=1, max_history=12)
    trainer = {"max_epochs": 2, "limit_train_batches": 4, "num_sanity_val_steps": 0}
    data = {"data.batch_size": 16, "data.layout": {"class_path": "SequenceLayout", "init_args.history_length": 12}}
    options = {"weight_averaging": {"decay": DECAY}, "checkpoint_every": 3, "data.max_validation_users": 16, **options}
    return recpo.train(prepared, policy=policy, out=out, trainer=trainer, callbacks=[callback], **data, **options)


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    weights = Weights()
    return train(prepared, tmp_path_factory.mktemp("averaged") / "run", weights), weights


def averages(steps):
    """The recursion as it is written, over weights by step."""
    result = [steps[0]]
    for number, weights in enumerate(steps[1:], 1):
        decay = min(DECAY, number / (number + 9))
        result.append({name: decay * result[-1][name] + (1 - decay) * weights[name] for name in weights})
    return result


def saved(run, name, entry="state_dict"):
    weights = torch.load(run.root / "checkpoints" / f"{name}.ckpt", weights_only=True)[entry]
    return {key.removeprefix("policy."): value.numpy() for key, value in weights.items() if key.startswith("policy.")}


def assert_close(found, expected):
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_validation_and_checkpoints_have_the_averages(whole):
    run, weights = whole
    expected = averages(weights.steps)
    assert len(expected) == 9
    for validated, step in zip(weights.validated, (4, 8), strict=True):
        assert_close(validated, expected[step])
    assert_close(saved(run, "last"), expected[8])
    assert_close(saved(run, "last", TRAINED), weights.steps[8])
    assert_close({name: weight.detach().numpy() for name, weight in run.policy("last").named_parameters()}, expected[8])
    name = "item_table.weight"
    assert np.abs(expected[8][name] - weights.steps[8][name]).max() > 1e-4, "an average that is not the weights"


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_averages_of_one_that_was_not(prepared, whole, tmp_path):
    run, _ = whole
    with pytest.raises(KeyError, match="killed"):
        train(prepared, tmp_path / "run", Weights(kill_at=5))
    resumed = train(prepared, tmp_path / "run", Weights(), resume=True)
    for entry in ("state_dict", TRAINED):
        expected, found = saved(run, "last", entry), saved(resumed, "last", entry)
        assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_what_cannot_be_averaged_is_refused(prepared, tmp_path):
    with refused("out_of_range", "weight_averaging.decay"):
        WeightAverage(1.0)
    with refused("conflicting_options", "weight_averaging"):
        train(
            prepared,
            tmp_path / "run",
            Weights(),
            **{"trainer.strategy": {"class_path": "recpo.sharding.ShardedStrategy"}},
        )

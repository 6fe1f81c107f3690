"""LinearDecay: a schedule in shares of the training, the same on every log and after a resume."""

import math

import pytest
import torch

import recpo
from recpo.training.optimizers import LinearDecay
from tests.refusals import refused


def rates(length, steps=None, rate=0.5, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = LinearDecay(optimizer, **options)
    schedule.set_length(length)
    found = []
    for _ in range(steps or length + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_it_equals_the_linear_schedule_of_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 40)
    for rate in rates(40, 60, final=0.05):
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("length", [10, 1000])
def test_its_shape_does_not_depend_on_the_length(length):
    found = rates(length, final=0.2, warmup=0.3, rate=1.0)
    top = max(found)
    assert top == pytest.approx(1.0)
    assert found.index(top) == round(0.3 * length)
    assert found[0] == pytest.approx(1 / (0.3 * length + 1))
    assert found[-1] == pytest.approx(0.2)
    assert found[round(0.65 * length)] == pytest.approx(0.6, abs=0.8 / length)


@pytest.mark.parametrize(("name", "value"), [("final", 1.1), ("final", -0.1), ("final", math.nan), ("warmup", 1.0)])
def test_shares_outside_their_range_are_refused(name, value):
    with refused("out_of_range", name):
        rates(10, **{name: value})


@pytest.mark.parametrize("length", [math.inf, 0])
def test_training_without_a_known_end_is_refused(length):
    with refused("missing_option", "trainer.max_epochs"):
        rates(length, 1)


def test_a_resumed_training_may_have_another_length():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    first = LinearDecay(optimizer)
    first.set_length(10)
    for _ in range(5):
        optimizer.step()
        first.step()
    again = LinearDecay(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    again.set_length(20)
    again.load_state_dict(first.state_dict())
    again.optimizer.step()
    again.step()
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(1 - 6 / 20)


@pytest.mark.slow
def test_training_sets_the_length(prepared, tmp_path):
    small = {"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 8, "heads": 1, "layers": 1, "max_history": 50}}
    run = recpo.train(
        prepared,
        policy=small,
        out=tmp_path / "run",
        lr_scheduler={"class_path": "recpo.LinearDecay", "init_args": {"final": 0.1}},
        trainer={"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "enable_progress_bar": False},
    )
    state = torch.load(run.root / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.1 * 0.001)

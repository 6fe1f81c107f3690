"""Sharded tables on a GPU and over NCCL, against the same on a CPU. One GPU is enough."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from recpo.policies.item_table import ItemTable
from recpo.training.optimizers import clip_gradients
from tests.sharding.ranks import Ranks
from tests.sharding.tables import Model, shard
from tests.sharding.test_row_updates import BETAS, EPS, LR, Steps
from tests.sharding.test_sharded_training import SMALL, train, weights

pytestmark = pytest.mark.gpu

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
GPU = "cuda:0"


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Ranks]:
    """One rank whose collectives are NCCL's."""
    with Ranks(1, "nccl", timeout=240) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[Ranks]:
    with Ranks(1, timeout=240) as ranks:
        yield ranks


def check_steps(optimizer: Any, kind: str) -> None:
    from recpo.sharding.lookup_tables import TableOptions, row_gradient

    model = shard(Model(table=(1000, 32)), kind, TableOptions(optimizer, LR, EPS, BETAS), device=GPU).to(GPU)
    table, own = model.table, model.table.optimizer
    assert table.weight.is_cuda
    assert (own._fused(table) is table) == (kind == "row_wise")  # on a GPU Adam is fused too
    steps = Steps(optimizer, table.weight.detach().cpu())
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        own.zero_grad()
        lr = own.param_groups[0]["lr"] = LR / (1 + number)
        ids = torch.randint(0, 1000, (8, 50), generator=generator)
        scale = torch.randn(8, 50, 32, generator=generator)
        (table(ids.to(GPU)) * scale.to(GPU)).sum().backward()
        if kind == "row_wise":
            table.collect_gradients()
        rows, gradient = row_gradient(table.weight.grad)
        steps(rows.cpu(), gradient.cpu(), lr)
        own.step()
        torch.testing.assert_close(table.weight.detach().cpu(), steps.weight, rtol=1e-4, atol=1e-4)
    assert not table.weight[0].any()
    held = own.state_dict()["tables"]["table"].values()
    states = [state.local_shards()[0].tensor if kind == "row_wise" else state for state in held]
    for got, wanted in zip(states, steps.state, strict=True):
        assert got.is_cuda
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_steps_as_on_the_cpu(on_gpu: Ranks, optimizer: str, kind: str) -> None:
    on_gpu.run(check_steps, optimizer, kind)


def check_empty() -> None:
    table = shard(Model(table=(10, 8)), "row_wise", device=GPU).to(GPU).table
    before = table.weight.detach().clone()
    assert table(torch.zeros(2, 0, dtype=torch.long, device=GPU)).shape == (2, 0, 8)
    table(torch.zeros(3, dtype=torch.long, device=GPU)).sum().backward()
    table.collect_gradients()
    table.optimizer.step()
    assert torch.equal(table.weight, before)
    with pytest.raises(IndexError, match="ids outside of the table of 10 rows"):
        table(torch.tensor([10], device=GPU))


def test_nothing_to_look_up_or_to_learn(on_gpu: Ranks) -> None:
    on_gpu.run(check_empty)


def check_row_table() -> None:
    from recpo.sharding.row_tables import RowTable

    torch.manual_seed(0)
    whole = ItemTable(999, 32, std=1.0, use="softmax")
    source = copy.deepcopy(whole)
    source.initial = whole.weight.detach().clone()  # type: ignore[assignment]
    table: Any = RowTable(source, init_device_mesh("cuda", (1,))).to(GPU)
    assert table.weight.to_local().is_cuda
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (table, whole)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(1, 1000, (40,), generator=generator)
        states = torch.randn(40, 32, generator=generator)
        losses = []
        for one, device in ((table, GPU), (whole, "cpu")):
            logp = one.log_prob(states.to(device), ids.to(device)).sum()
            losses.append(one(ids.to(device)).square().sum() - logp)
        torch.testing.assert_close(losses[0].cpu(), losses[1], rtol=1e-4, atol=1e-3)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        torch.testing.assert_close(table.weight.grad.to_local().cpu(), whole.weight.grad, rtol=1e-3, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():  # Adam makes much of gradients that are nothing but rounding
            assert (table.weight.to_local().cpu() - whole.weight).abs().max() < 0.05
            whole.weight.copy_(table.weight.to_local().cpu())
    best = [one.top_k(states.to(device), 5, None) for one, device in ((table, GPU), (whole, "cpu"))]
    torch.testing.assert_close(best[0].scores.cpu(), best[1].scores, rtol=1e-4, atol=1e-4)


def test_a_table_cut_into_rows_trains_as_on_the_cpu(on_gpu: Ranks) -> None:
    on_gpu.run(check_row_table)


def check_clipping() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.dense, self.table = nn.Linear(8, 1), ItemTable(9, 8)

    net: Any = shard(Net(), "row_wise", device=GPU).to(GPU)
    net.dense(net.table(torch.arange(10, device=GPU))).sum().backward()
    net.table.collect_gradients()

    def norm() -> float:
        parts = [p.grad.to_dense().norm() for p in net.parameters()]
        return float(torch.stack(parts).norm())

    def add_up(value: torch.Tensor) -> torch.Tensor:
        assert value.is_cuda  # NCCL adds up nothing else
        dist.all_reduce(value)
        return value

    assert norm() > 0.1
    clip_gradients(net, 0.1, "norm", add_up)
    assert norm() == pytest.approx(0.1, rel=1e-3)


def test_gradients_are_clipped(on_gpu: Ranks) -> None:
    on_gpu.run(check_clipping)


TRAINER = {"max_epochs": 2, "limit_train_batches": 8, "limit_val_batches": 2, "gradient_clip_val": 1.0}


def run(out: Path, prepared: Path, accelerator: str, optimizer: str, options: dict[str, Any], trainer: Any) -> None:
    """A table that is looked up and one that an exact softmax runs over; nothing random."""
    how = {"trainer": {**TRAINER, "accelerator": accelerator, **trainer}, "lr": 0.05, **options}
    policy = SMALL | {"tie_weights": False}
    train(out, prepared, policy, {"sharding": "row_wise", "optimizer": optimizer}, how)
    assert torch.cuda.is_available()
    assert dist.get_backend() == ("nccl" if accelerator == "gpu" else "gloo")


def close(one: Path, other: Path, tolerance: float) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        difference = (value - second[name]).norm()
        assert difference <= tolerance * max(1.0, float(value.norm())), f"{name}: {difference}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_ends_where_that_on_the_cpu_ends(
    on_gpu: Ranks, on_cpu: Ranks, prepared: Path, tmp_path: Path, optimizer: str
) -> None:
    for ranks, accelerator in ((on_gpu, "gpu"), (on_cpu, "cpu")):
        ranks.run(run, tmp_path / accelerator, prepared, accelerator, optimizer, {}, {})
    close(tmp_path / "gpu", tmp_path / "cpu", 1e-3 if optimizer == "sgd" else 2e-2)


def test_mixed_precision_stays_close_to_single(on_gpu: Ranks, prepared: Path, tmp_path: Path) -> None:
    for precision in ("32-true", "bf16-mixed"):
        on_gpu.run(run, tmp_path / precision, prepared, "gpu", "sgd", {}, {"precision": precision})
    close(tmp_path / "32-true", tmp_path / "bf16-mixed", 0.02)
    assert all(not value.is_floating_point() or value.dtype == torch.float32
               for value in weights(tmp_path / "bf16-mixed").values())  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_checkpoint_of_a_gpu_continues_on_a_cpu_and_the_other_way_round(
    on_gpu: Ranks, on_cpu: Ranks, prepared: Path, tmp_path: Path, optimizer: str
) -> None:
    first, then = {"max_epochs": 1}, {"resume": True}
    on_cpu.run(run, tmp_path / "whole", prepared, "cpu", optimizer, {}, {})
    for name, (one, start), (other, end) in (
        ("gpu first", (on_gpu, "gpu"), (on_cpu, "cpu")),
        ("cpu first", (on_cpu, "cpu"), (on_gpu, "gpu")),
    ):
        one.run(run, tmp_path / name, prepared, start, optimizer, {}, first)
        half = weights(tmp_path / name)
        assert all(value.device.type == "cpu" for value in half.values())
        other.run(run, tmp_path / name, prepared, end, optimizer, then, {})
        close(tmp_path / name, tmp_path / "whole", 2e-2)

"""An exact softmax over a row-sharded table, against the whole table on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from recpo.base.types import SamplingOptions
from recpo.policies.item_table import ItemTable, SavedRows, tables_on_meta
from recpo.sharding.row_tables import RowTable
from tests.sharding.ranks import Ranks

DIM = 6


def tables(rows: int, *, learns: bool = True) -> tuple[RowTable, ItemTable]:
    """The table cut into rows and the whole one."""
    torch.manual_seed(rows)
    whole = ItemTable(rows - 1, DIM, std=1.0)
    with tables_on_meta():
        table = ItemTable(rows - 1, DIM, use="softmax").requires_grad_(learns)
    table.initial = SavedRows(whole.weight.detach())
    return RowTable(table, init_device_mesh("cpu", (dist.get_world_size(),))), whole


def batch(rows: int, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids to look up, states, and targets of them; every rank has others, and other numbers of them."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, rows, (2, rank + step), generator=generator)
    count = 3 * rank + step
    states = torch.randn(count, DIM, generator=generator)
    return ids, states, torch.randint(1, rows, (count, 2), generator=generator)


def loss_of(table: ItemTable, ids: Tensor, states: Tensor, targets: Tensor) -> Tensor:
    entropy = table.entropy(states)
    divergence = table.divergence(states, table, states.flip(-1))
    table.cosine = True
    rest = table.log_prob(states / 0.3, targets).sum() + entropy.sum() + divergence.sum()
    table.cosine = False
    return table(ids).square().sum() - table.log_prob(states, targets).sum() + rest


def check_steps(rows: int) -> None:
    table, whole = tables(rows)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight: Any = table.weight
    assert weight.shape == whole.weight.shape
    assert len(weight.to_local()) <= -(-rows // ranks)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (table, whole)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids, states, targets = batch(rows, rank, step)
        assert torch.equal(table(ids), whole(ids))
        states.requires_grad_()
        loss = loss_of(table, ids, states, targets)
        loss.backward()
        own = states.detach().clone().requires_grad_()
        expected = loss_of(whole, ids, own, targets)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        (of_states,) = torch.autograd.grad(expected, own)
        torch.testing.assert_close(states.grad, of_states, rtol=1e-4, atol=1e-5)
        for of_rank in range(ranks):  # what DistributedDataParallel leaves: the mean over the ranks
            (loss_of(whole, *batch(rows, of_rank, step)) / ranks).backward()
        torch.testing.assert_close(weight.grad.full_tensor(), whole.weight.grad, rtol=1e-4, atol=1e-5)
        assert not whole.weight.grad[0].any()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(weight.full_tensor(), whole.weight, rtol=1e-4, atol=1e-4)
        with torch.no_grad():  # Adam makes much of a gradient that is nothing but rounding
            whole.weight.copy_(weight.full_tensor())


def check_search(rows: int) -> None:
    table, whole = tables(rows)
    _, states, _ = batch(rows, dist.get_rank(), 2)
    for cosine in (False, True):
        table.cosine = whole.cosine = cosine
        best, expected = (one.top_k(states, min(4, rows - 1), None) for one in (table, whole))
        assert torch.equal(best.item_ids, expected.item_ids)
        drawn = []
        for one in (table, whole):
            torch.manual_seed(0)
            drawn.append(one.draw(states, 3, SamplingOptions())[0])
        assert torch.equal(*drawn)


def check_refusal(rows: int) -> None:
    """What one rank asks for wrongly, all hear of."""
    table, _ = tables(rows)
    with pytest.raises(IndexError, match="ids outside of the table"):
        table(torch.tensor([rows if dist.get_rank() == 0 else 1]))
    table(torch.tensor([1]))


def check_frozen(rows: int) -> None:
    table, whole = tables(rows, learns=False)
    assert not table.weight.requires_grad
    assert not table(torch.tensor([1])).requires_grad
    assert torch.equal(table.weight.full_tensor(), whole.weight)


@pytest.mark.parametrize("rows", [23, 2])
def test_values_gradients_and_steps_are_those_of_the_whole_table(two: Ranks, rows: int) -> None:
    two.run(check_steps, rows)
    two.run(check_search, rows)


def test_refusals_and_frozen_tables(two: Ranks) -> None:
    two.run(check_refusal, 23)
    two.run(check_frozen, 23)


def test_one_rank_does_the_same(alone: None) -> None:
    check_steps(9)
    check_search(9)

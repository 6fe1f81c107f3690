"""Lookups in a sharded table: values and gradients, against the whole table on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.types import SamplingOptions
from recpo.policies.item_table import ItemTable
from tests.refusals import refused
from tests.sharding.ranks import Ranks
from tests.sharding.tables import Model, shard

pytestmark = pytest.mark.slow

ROWS, DIM = 23, 8
KINDS = ["row_wise", "table_wise", "column_wise"]


def options(optimizer: Any = "sgd", lr: float = 0.5) -> Any:
    from recpo.sharding.lookup_tables import TableOptions

    return TableOptions(optimizer, lr)


def tables(kind: str, optimizer: str = "sgd") -> tuple[Any, ItemTable]:
    """The sharded table and the whole one."""
    from recpo.sharding.lookup_tables import LookupTable

    whole = Model(table=(ROWS, DIM)).table
    table = shard(Model(table=(ROWS, DIM)), kind, options(optimizer)).table
    assert isinstance(table, LookupTable)
    assert sum(table.weight.shape) < sum(whole.weight.shape) or dist.get_world_size() == 1 or kind == "table_wise"
    return table, whole


def ids_of(number: int) -> list[Tensor]:
    """Ids that each rank looks up, of any shape, other ones for each ``number``."""
    generator = torch.Generator().manual_seed(number)
    shapes = [(3, 4), (7,), (), (2, 1, 3), (0,), (2, 0), (1, 50)]
    drawn = [torch.randint(0, ROWS, shapes[(rank + number) % len(shapes)], generator=generator) for rank in range(4)]
    return [*drawn[:3], torch.tensor([[0, 5, 5], [0, 22, 1]])] if number else [*drawn[:2], drawn[3], drawn[2]]


def assembled(table: Any, local: Tensor | None) -> Tensor:
    """The whole of what the ranks have blocks of."""
    whole, own = torch.zeros(ROWS, DIM), table._own
    if local is not None and own is not None:
        columns = slice(own.first_column, own.first_column + own.num_columns)
        whole[own.first_row : own.first_row + own.num_rows, columns] = local.detach().to_dense()
    dist.all_reduce(whole)
    return whole


def check_vectors(kind: str) -> None:
    table, whole = tables(kind)
    assert torch.equal(assembled(table, table.weight), whole.weight)
    for number in range(8):
        ids = ids_of(number)[dist.get_rank()]
        expected = whole(ids)
        for mode in (True, False):
            got = table.train(mode)(ids)
            assert got.shape == (*ids.shape, DIM)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_the_whole_table(two: Ranks, kind: str) -> None:
    two.run(check_vectors, kind)


def check_gradients(kind: str, parts: int) -> None:
    """Several lookups, one of which nobody uses, in two micro-batches."""
    table, whole = tables(kind)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number in range(4):
        table.weight.grad = whole.weight.grad = None
        for micro_batch in range(2):
            for of_rank in range(ranks):
                generator = torch.Generator().manual_seed(of_rank)
                loss = []
                for part in range(parts):
                    ids = ids_of(number + 10 * part + micro_batch)[of_rank]
                    vectors = (table if of_rank == rank else whole)(ids)
                    expected = whole(ids)
                    if part == 1:
                        continue  # looked up, and not used
                    weights = torch.randn(vectors.shape, generator=generator)
                    if of_rank == rank:
                        loss.append((vectors.square() * weights).sum())
                    (expected.square() * weights / ranks).sum().backward()
                if of_rank == rank:
                    torch.stack(loss).sum().backward()
            table.collect_gradients()
        torch.testing.assert_close(assembled(table, table.weight.grad), whole.weight.grad, rtol=1e-5, atol=1e-5)
        assert not table._pending


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_mean_over_the_ranks_of_those_of_the_whole_table(two: Ranks, kind: str, parts: int) -> None:
    two.run(check_gradients, kind, parts)


def check_idle_rank(kind: str) -> None:
    """One rank asks for nothing, then one does not use what it gets, then nobody does."""
    table, whole = tables(kind)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.tensor([3, 0, 22, 3])
    vectors = table(ids if rank == 0 else ids[:0])
    vectors.sum().backward()
    table.collect_gradients()
    whole(ids).sum().div(ranks).backward()
    torch.testing.assert_close(assembled(table, table.weight.grad), whole.weight.grad)
    table.weight.grad = None
    vectors = table(ids)
    if rank == 0:
        vectors.sum().backward()
    table.collect_gradients()
    torch.testing.assert_close(assembled(table, table.weight.grad), whole.weight.grad)
    table.weight.grad = None
    table(ids)
    table.collect_gradients()
    assert not assembled(table, table.weight.grad).any()
    table.collect_gradients()  # there was no lookup since


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_may_have_nothing_to_ask_for_or_to_learn(two: Ranks, kind: str) -> None:
    two.run(check_idle_rank, kind)


def check_no_gradient(kind: str) -> None:
    table, _ = tables(kind)
    ids = torch.tensor([1, 2])
    with torch.no_grad():
        assert not table(ids).requires_grad
    assert not table.eval()(ids).requires_grad
    assert not table._pending
    table.train()(ids)
    assert table._pending
    table.eval()
    assert not table._pending  # lookups that nobody learned from are forgotten
    table.collect_gradients()
    assert table.weight.grad is None
    frozen = Model(table=(ROWS, DIM)).requires_grad_(False)
    expected = frozen.table(ids)
    table = shard(frozen, kind, options()).table.train()
    assert not table.weight.requires_grad
    assert table.optimizer is None
    assert not table(ids).requires_grad
    assert torch.equal(table(ids), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_learned_without_gradient_in_evaluation_or_of_frozen_tables(two: Ranks, kind: str) -> None:
    two.run(check_no_gradient, kind)


def same_scores(table: Any, whole: ItemTable) -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    states = torch.randn(3 + rank, DIM, generator=generator)
    targets = torch.randint(1, ROWS, (3 + rank, 2), generator=generator)
    barred = torch.randint(0, ROWS, (3 + rank, 4), generator=generator)
    for cosine in (False, True):
        table.cosine = whole.cosine = cosine
        with torch.no_grad():
            one, other = ((t.log_prob(states, targets), t.entropy(states)) for t in (table, whole))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        best, expected = (t.top_k(states, 5, barred) for t in (table, whole))
        assert torch.equal(best.item_ids, expected.item_ids)
        torch.testing.assert_close(best.scores, expected.scores, rtol=1e-4, atol=1e-5)
        drawn = []
        for t in (table, whole):
            torch.manual_seed(rank)
            drawn.append(t.draw(states, 4, SamplingOptions()))
        assert torch.equal(drawn[0][0], drawn[1][0])
        torch.testing.assert_close(drawn[0][1], drawn[1][1], rtol=1e-4, atol=1e-4)


def check_scores(kind: str) -> None:
    table, whole = tables(kind)
    same_scores(table, whole)
    kept = table._rows
    same_scores(table, whole)
    assert table._rows is kept  # moved once
    for _ in range(2):
        table.optimizer.zero_grad()
        table(torch.tensor([1, 22, 7])).square().sum().backward()
        table.collect_gradients()
        table.optimizer.step()
        with torch.no_grad():
            whole.weight[[1, 22, 7]] -= 0.5 * 2 * whole.weight[[1, 22, 7]]
            whole.weight += 0.1
            whole.weight[0] = 0
        table.fill(whole.weight.detach())  # and what a frozen copy does
        same_scores(table, whole)
    table.optimizer.zero_grad()
    table(torch.tensor([4])).sum().backward()
    table.collect_gradients()
    table.optimizer.step()
    with torch.no_grad():
        whole.weight[4] -= 0.5
    same_scores(table, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_softmax_is_that_of_the_whole_table_before_and_after_a_step(two: Ranks, kind: str) -> None:
    two.run(check_scores, kind)


def check_more_ranks_than_rows() -> None:
    from recpo.sharding.lookup_tables import LookupTable

    whole = Model(table=(3, 4)).table
    table = shard(Model(table=(3, 4)), "row_wise", options("adagrad")).table
    assert isinstance(table, LookupTable)
    assert len(table.weight) == (dist.get_rank() < 3)
    ids = torch.tensor([2, 1, 0, 2])
    vectors = table(ids)
    assert torch.equal(vectors, whole(ids))
    vectors.sum().backward()
    table.collect_gradients()
    table.optimizer.step()
    step = 0.5 * torch.tensor([0.0, 1, 1])[:, None]
    (state,) = table.optimizer.state_dict()["tables"]["table"].values()
    assert state.size() == (3, 4)
    assert len(state.local_shards()) == (dist.get_rank() < 3)
    torch.testing.assert_close(table(ids).detach(), F.embedding(ids, whole.weight.detach() - step))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_does_the_same(alone: None, kind: str) -> None:
    check_vectors(kind)
    check_gradients(kind, 3)
    check_scores(kind)


def test_says_what_it_does_not_do(alone: None) -> None:
    table, _ = tables("row_wise")
    states = torch.zeros(1, DIM)
    for of_table in (lambda: table.log_prob(states, torch.tensor([1])), lambda: table.entropy(states)):
        with refused("conflicting_options", "policy.normalizer"):
            of_table()
    for ids in ([1, ROWS], [-1, 3]):
        with pytest.raises(IndexError, match=f"ids outside of the table of {ROWS} rows"):
            table(torch.tensor(ids))

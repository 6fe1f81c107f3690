"""Item features with sharded id rows: every rank encodes the items it needs; gradients equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from recpo.policies.item_features import ItemFeatureOptions, ItemFeatures
from recpo.policies.item_table import ItemTable, SavedRows, tables_on_meta
from recpo.sharding.row_tables import RowTable
from tests.policies.synthetic_features import FEATURES, random_features
from tests.sharding.ranks import Ranks
from tests.sharding.tables import Model, shard

ROWS, DIM = 23, 8


def features_of() -> ItemFeatures:
    """The same on every rank; the last two items are untrained, and id rows are left out."""
    torch.manual_seed(2)
    features = ItemFeatures(FEATURES, ROWS - 1, DIM, ItemFeatureOptions(hidden=6, id_dropout=0.3))
    torch.nn.init.normal_(features.encoder.output.weight)
    features.assign(random_features(FEATURES, ROWS))
    features.trained[-2:] = False
    return features


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = 3 + 2 * rank
    ids = torch.randint(0, ROWS, (2, 4 + rank), generator=generator)
    return ids, torch.randn(count, DIM, generator=generator), torch.randint(1, ROWS, (count,), generator=generator)


def check_gradients(table: ItemTable, whole: ItemTable, loss_of: Any, weight_gradient: Any) -> None:
    """One step of both; what DistributedDataParallel leaves of the encoder's gradients is their mean over the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for one in (table, whole):
        one.begin_step(7)
    loss = loss_of(table, *batch(rank))
    torch.testing.assert_close(loss, loss_of(whole, *batch(rank)), rtol=1e-4, atol=1e-4)
    loss.backward()
    for of_rank in range(ranks):
        (loss_of(whole, *batch(of_rank)) / ranks).backward()
    assert table.features is not None
    assert whole.features is not None
    for own, expected in zip(table.features.encoder.parameters(), whole.features.encoder.parameters(), strict=True):
        mean = own.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / ranks, expected.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight_gradient(), whole.weight.grad, rtol=1e-4, atol=1e-4)
    table.eval()
    whole.eval()
    states = batch(rank)[1]
    best, other = table.top_k(states, 4, None), whole.top_k(states, 4, None)
    assert torch.equal(best.item_ids, other.item_ids)
    torch.testing.assert_close(best.scores, other.scores, rtol=1e-4, atol=1e-4)


def of_softmax(table: ItemTable, ids: Tensor, states: Tensor, targets: Tensor) -> Tensor:
    logp = table.log_prob(states, targets).sum()
    table.cosine = True
    logp = logp + table.log_prob(states, targets).sum()
    table.cosine = False
    return table(ids).square().sum() - logp + table.entropy(states).sum()


def check_rows() -> None:
    torch.manual_seed(1)
    whole = ItemTable(ROWS - 1, DIM, std=1.0, use="softmax")
    with tables_on_meta():
        table = ItemTable(ROWS - 1, DIM, use="softmax")
    table.initial = SavedRows(whole.weight.detach())
    table.features, whole.features = features_of(), features_of()
    sharded = RowTable(table, init_device_mesh("cpu", (dist.get_world_size(),)))
    weight: Any = sharded.weight
    check_gradients(sharded, whole, of_softmax, lambda: weight.grad.full_tensor())


def of_lookups(table: ItemTable, ids: Tensor, states: Tensor, targets: Tensor) -> Tensor:
    return table(ids).square().sum() + (table(targets) * states).sum()


def check_lookups(kind: str) -> None:
    from recpo.sharding.lookup_tables import TableOptions
    from tests.sharding.test_lookup_table import assembled

    model, whole = Model(table=(ROWS, DIM)), Model(table=(ROWS, DIM)).table
    model.table.features, whole.features = features_of(), features_of()
    table = shard(model, kind, TableOptions("sgd", 0.5)).table

    def gradient() -> Tensor:
        table.collect_gradients()
        return assembled(table, table.weight.grad)

    check_gradients(table, whole, of_lookups, gradient)


@pytest.mark.parametrize("kind", ["softmax", "row_wise", "column_wise"])
def test_gradients_and_searches_are_those_of_one_process(two: Ranks, kind: str) -> None:
    if kind == "softmax":
        two.run(check_rows)
    else:
        two.run(check_lookups, kind)

"""Dropout by bytes is dropout; the item table keeps its padding row."""

from __future__ import annotations

import pytest
import torch

from recpo.policies.blocks import ByteDropout
from recpo.policies.item_table import ItemTable
from tests.refusals import refused


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5, 0.9])
def test_dropout_rate_expectation_and_gradient(rate: float) -> None:
    torch.manual_seed(0)
    layer, values = ByteDropout(rate), torch.ones(1001, 401, requires_grad=True)
    dropped = layer(values)
    kept = dropped != 0
    assert abs(float(kept.float().mean()) - (1 - layer.threshold / 256)) < 0.003
    assert abs(float(dropped.detach().mean()) - 1) < 0.03
    # every byte of a random word decides alike
    by_byte = kept.flatten()[: kept.numel() // 8 * 8].view(-1, 8).float().mean(0)
    assert (by_byte.max() - by_byte.min()) < 0.015
    dropped.sum().backward()
    torch.testing.assert_close(values.grad, dropped.detach())
    assert layer.eval()(values) is values


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.5, 0.998, 0.9981, 0.999999])
def test_dropout_at_its_extremes(rate: float) -> None:
    """Rates that round to 0 or 1 drop something, but not everything: 1 has no survivors that could be scaled."""
    torch.manual_seed(0)
    layer, values = ByteDropout(rate), torch.ones(100_000, requires_grad=True)
    dropped = layer(values)
    assert dropped.isfinite().all()
    assert float((dropped == 0).float().mean()) == pytest.approx(rate, abs=0.01)
    assert (dropped == 0).any() == (rate > 0)
    assert dropped.detach().mean().item() == pytest.approx(1.0, abs=0.2)
    dropped.sum().backward()
    assert values.grad is not None
    assert values.grad.isfinite().all()


def test_dropout_follows_the_seed_and_refuses_nonsense() -> None:
    layer, values = ByteDropout(0.3), torch.ones(1000)
    torch.manual_seed(3)
    first = layer(values)
    torch.manual_seed(3)
    assert torch.equal(layer(values), first)
    for rate in (1.0, -0.1, 1.5, float("nan")):
        with refused("out_of_range", "dropout"):
            ByteDropout(rate)


@pytest.mark.parametrize("sparse", [False, True])
def test_item_table(sparse: bool) -> None:
    table = ItemTable(10, 4, sparse=sparse)
    assert list(table.state_dict()) == ["weight"]
    vectors = table(torch.tensor([[0, 3], [3, 10]]))
    assert (vectors[0, 0] == 0).all()
    vectors.sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse == sparse
    assert gradient.to_dense().sum(1).tolist() == [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 4]

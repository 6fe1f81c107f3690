"""Updates of table rows: against loops over weights, torch's optimizers, and FBGEMM's fused kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from recpo.sharding import lookup_tables
from tests.reference import row_updates_loops

LR, EPS, BETAS = 0.3, 1e-3, (0.8, 0.95)


@st.composite
def problems(draw: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A table, rows that are each there once, in any order, and their gradients of three steps."""
    size, dim = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(0, size - 1), unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    gradients = [torch.randn(len(rows), dim, generator=generator) for _ in range(3)]
    return torch.randn(size, dim, generator=generator), torch.tensor(rows, dtype=torch.long), gradients


class Steps:
    """A table that ``TableOptions`` updates, with its state."""

    def __init__(self, optimizer: Any, weight: Tensor, eps: float = EPS) -> None:
        self._options = lookup_tables.TableOptions(optimizer, eps=eps, betas=BETAS)
        self.weight, self._state, self._step = weight.clone(), self._options.empty_state(weight), 0
        self.state = list(self._state.values())

    def __call__(self, rows: Tensor, gradient: Tensor, lr: float = LR) -> None:
        self._step += 1
        self._options.update(self.weight, self._state, rows, gradient, lr, self._step)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@given(problems())
def test_rows_move_as_by_loops_and_the_others_stay(optimizer: str, problem: Any) -> None:
    weight, rows, gradients = problem
    steps = Steps(optimizer, weight)
    expected = [weight.numpy(), *(state.clone().numpy() for state in steps.state)]
    for number, gradient in enumerate(gradients, 1):
        before = steps.weight.clone()
        steps(rows, gradient)
        more = {"sgd": (), "adam": (BETAS, EPS, number)}.get(optimizer, (EPS,))
        moved = getattr(row_updates_loops, optimizer)(*expected, rows.numpy(), gradient.numpy(), LR, *more)
        expected = [moved] if optimizer == "sgd" else list(moved)
        still = torch.ones(len(weight), dtype=torch.bool).index_fill_(0, rows, False)
        assert torch.equal(steps.weight[still], before[still])
    for got, wanted in zip([steps.weight, *steps.state], expected, strict=True):
        close(got, wanted)


@pytest.mark.parametrize(
    ("optimizer", "peer", "options"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("adagrad", torch.optim.Adagrad, {"eps": EPS}),
        # SparseAdam adds eps before it corrects the bias of the denominator
        ("adam", torch.optim.SparseAdam, {"eps": 1e-12, "betas": BETAS}),
    ],
)
def test_rows_move_as_with_the_sparse_optimizers_of_torch(optimizer: str, peer: Any, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Embedding.from_pretrained(torch.randn(9, 4, generator=generator), freeze=False, sparse=True)
    steps, other = (
        Steps(optimizer, table.weight.detach(), options.get("eps", EPS)),
        peer(table.parameters(), lr=LR, **options),
    )
    for _ in range(4):
        ids = torch.randint(0, 9, (6,), generator=generator)
        other.zero_grad()
        (table(ids) * torch.randn(6, 4, generator=generator)).sum().backward()
        steps(*lookup_tables.row_gradient(table.weight.grad))
        other.step()
        torch.testing.assert_close(steps.weight, table.weight.detach(), rtol=1e-5, atol=1e-5)


def test_gradients_have_the_same_rows_whether_sparse_or_dense() -> None:
    ids = torch.tensor([[5, 2, 5, 0, 3, 3]])
    values = torch.tensor([[1.0, 2], [0, 3], [4, 5], [0, 0], [7, 1], [-7, -1]])
    sparse = torch.sparse_coo_tensor(ids, values, (7, 2))
    for gradient in (sparse, sparse.to_dense()):
        rows, found = lookup_tables.row_gradient(gradient)
        # row 0 was looked up to no effect, and what row 3 learned came to nothing
        assert rows.tolist() == [2, 5]
        assert found.tolist() == [[0, 3], [5, 7]]
    rows, found = lookup_tables.row_gradient(torch.zeros(7, 2))
    assert (rows.shape, found.shape) == ((0,), (0, 2))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_table_steps_as_the_functions_do_by_fused_kernels_or_without(alone: None, optimizer: Any) -> None:
    from recpo.sharding.lookup_tables import TableOptions
    from tests.sharding.tables import Model, shard

    options = TableOptions(optimizer, LR, EPS, BETAS)
    model = shard(Model(table=(9, 8)), "row_wise", options)
    table, own = model.table, model.table.optimizer
    fused = optimizer != "adam"
    assert (own._fused(table) is table) == fused
    steps = Steps(optimizer, table.weight.detach())
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        own.zero_grad()
        lr = own.param_groups[0]["lr"] = LR / (1 + number)
        ids = torch.tensor([0, 4, 4]) if number == 2 else torch.randint(0, 9, (2, 5), generator=generator)
        (table(ids) * torch.randn(*ids.shape, 8, generator=generator)).sum().backward()
        table.collect_gradients()
        steps(*lookup_tables.row_gradient(table.weight.grad), lr)
        own.step()
        torch.testing.assert_close(table.weight.detach(), steps.weight, rtol=1e-5, atol=1e-5)
    assert not table.weight[0].any()
    state = {name: whole.local_shards()[0].tensor for name, whole in own.state_dict()["tables"]["table"].items()}
    for got, wanted in zip(state.values(), steps.state, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_step_without_rows_changes_nothing(alone: None) -> None:
    from recpo.sharding.lookup_tables import TableOptions
    from tests.sharding.tables import Model, shard

    table = shard(Model(table=(9, 8)), "row_wise", TableOptions("adagrad", LR)).table
    before = table.weight.detach().clone()
    table(torch.tensor([0])).sum().backward()
    table.collect_gradients()
    table.optimizer.step()  # what arrived is zero
    table.optimizer.zero_grad()
    table.optimizer.step()  # nothing arrived
    assert np.array_equal(table.weight.detach().numpy(), before.numpy())

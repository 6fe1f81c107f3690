"""Gradients of every kind are clipped as torch clips those of the whole model on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recpo.policies.item_table import ItemTable
from recpo.training.optimizers import build_optimizer, clip_gradients, scale_gradients
from tests.sharding.ranks import Ranks
from tests.sharding.tables import shard


class Net(nn.Module):
    """Every kind of parameter, and one that has learned nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.idle = nn.Linear(4, 3), nn.Linear(2, 2)
        self.sparse = ItemTable(10, 4, sparse=True, use="whole")
        self.looked_up, self.scored = ItemTable(10, 4), ItemTable(10, 4, use="softmax")


def add_up(value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value


def with_gradients(ids: Tensor, scale: float) -> tuple[Any, Net]:
    """The sharded model and the whole one, with the same gradients: those of all ranks."""
    whole = Net()
    net: Any = shard(copy.deepcopy(whole), "row_wise")
    for model in (net, whole):
        states = torch.linspace(-1, 1, 4 * len(ids)).view(-1, 4)
        vectors = model.looked_up(ids)
        logp = model.scored.log_prob(states, ids.clamp_min(1))
        (scale * (model.dense(states).sum() + (model.sparse(ids) * states).sum() - logp.sum() + vectors.square().sum()
                  + vectors.sum())).backward()  # fmt: skip
    net.looked_up.collect_gradients()
    return net, whole


def whole_gradients(net: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in net.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        if name == "scored.weight" and hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        if name == "looked_up.weight" and hasattr(net.looked_up, "_own"):
            whole, own = torch.zeros(11, 4), net.looked_up._own
            whole[own.first_row : own.first_row + own.num_rows] = gradient
            gradient = add_up(whole)
        found[name] = gradient
    return found


def check(value: float, scale: float) -> None:
    ids = torch.tensor([1, 10, 3, 3, 0, 7])
    for algorithm, peer in (("norm", nn.utils.clip_grad_norm_), ("value", nn.utils.clip_grad_value_)):
        net, whole = with_gradients(ids, scale)
        for parameter in whole.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
        torch.testing.assert_close(whole_gradients(net), whole_gradients(whole), rtol=1e-4, atol=1e-6)
        peer(whole.parameters(), value)
        clip_gradients(net, value, algorithm, add_up)
        torch.testing.assert_close(whole_gradients(net), whole_gradients(whole), rtol=1e-4, atol=1e-6)
    scale_gradients(net, torch.tensor(0.5))
    halves = {name: 0.5 * gradient for name, gradient in whole_gradients(whole).items()}
    torch.testing.assert_close(whole_gradients(net), halves, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("value", "scale"), [(0.3, 1.0), (5.0, 1e-3), (1e-3, 100.0)])
def test_gradients_are_clipped_as_on_one_process(two: Ranks, alone: None, value: float, scale: float) -> None:
    two.run(check, value, scale)
    check(value, scale)


def check_nothing_learned() -> None:
    net: Any = shard(Net(), "row_wise")
    clip_gradients(net, 1.0, "norm", add_up)
    clip_gradients(net, 1.0, "value", add_up)
    assert not whole_gradients(net)


def test_without_a_gradient_there_is_nothing_to_clip(two: Ranks) -> None:
    two.run(check_nothing_learned)


def test_every_parameter_has_one_optimizer(alone: None) -> None:
    net: Any = shard(Net(), "row_wise")
    made = {"dense": [], "sparse": []}

    def optimizer_of(kind: str, factory: Any) -> Any:
        def make(parameters: Any) -> Any:
            parameters = list(parameters)
            made[kind].append({id(parameter) for parameter in parameters})
            return factory(parameters, lr=0.1)

        return make

    joint = build_optimizer(
        net, optimizer_of("dense", torch.optim.Adam), optimizer_of("sparse", torch.optim.SparseAdam)
    )
    plain = {id(p) for part in (net.dense, net.idle) for p in part.parameters()}
    assert made == {"dense": [plain, {id(net.scored.weight)}], "sparse": [{id(net.sparse.weight)}]}
    stepped = [id(p) for group in joint.param_groups for p in group["params"]]
    assert sorted(stepped) == sorted(id(p) for p in net.parameters())

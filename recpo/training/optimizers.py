"""Dense and sparse parameters under one optimiser, as Lightning's automatic optimisation wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpo.policies.item_table import ItemTable

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], torch.optim.lr_scheduler.LRScheduler]


class JointOptimizer(Optimizer):
    """Steps several optimisers as one; their parameter groups are shared, so schedules and loggers see them all."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        super().__init__([group for o in optimizers for group in o.param_groups], {})
        self._optimizers = optimizers
        # the base class copied the groups; a schedule must reach the ones that the members step with
        self.param_groups = [group for o in optimizers for group in o.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure`` once, then steps every member."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every member."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The members' states in order."""
        return {"members": [optimizer.state_dict() for optimizer in self._optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict()``."""
        for optimizer, state in zip(self._optimizers, state_dict["members"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for o in self._optimizers for group in o.param_groups]


def build_optimizer(model: nn.Module, dense: OptimizerFactory, sparse: OptimizerFactory) -> Optimizer:
    """Gives the weights of sparse item tables to ``sparse`` and every other trainable parameter to ``dense``."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, ItemTable) and m.sparse}
    trainable = [p for p in model.parameters() if p.requires_grad]
    sparse_parameters = [p for p in trainable if id(p) in tables]
    dense_parameters = [p for p in trainable if id(p) not in tables]
    if not sparse_parameters:
        return dense(dense_parameters)
    return JointOptimizer([dense(dense_parameters), sparse(sparse_parameters)])


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies every gradient in place, sparse ones included."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clip_gradients(parameters: Iterable[nn.Parameter], clip_value: float, algorithm: str) -> None:
    """``torch.nn.utils.clip_grad_{norm,value}_`` that also takes sparse gradients (by "norm" or "value")."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    if algorithm == "value":
        for gradient in gradients:
            gradient.clamp_(-clip_value, clip_value)
        return
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    factor = (clip_value / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)

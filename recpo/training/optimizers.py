"""Dense and sparse parameters under one optimizer, as Lightning's automatic optimization requires."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recpo.base.errors import RecpoError, validate_range
from recpo.policies.item_table import ItemTable, PlacedTable
from recpo.training.options import OptimizerFactory


class JointOptimizer(Optimizer):
    """Steps several optimizers as one; their parameter groups are shared, so schedules and loggers see them all.

    Attributes:
        members: the optimizers.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        super().__init__([group for o in optimizers for group in o.param_groups], {})
        self.members = optimizers
        # the base class copied the groups; a schedule must change the ones that the members use
        self.param_groups = [group for o in optimizers for group in o.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure`` once, then steps every member."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.members:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The members' states in order."""
        return {"members": [optimizer.state_dict() for optimizer in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict()``."""
        for optimizer, state in zip(self.members, state_dict["members"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for o in self.members for group in o.param_groups]


class LinearDecay(LRScheduler):
    """Raises the learning rate over a share of the training, then lowers it on a straight line until the last step.

    Lengths are shares of the training, not steps: a configuration means the same on every log. In step ``t`` of ``n``,
    with ``w = warmup n``, the rate is the optimizer's rate times ``(t + 1) / (w + 1)`` while ``t < w``, then times
    ``1 + (final - 1) (t - w) / (n - w)``.

    Args:
        optimizer: the optimizer.
        final: factor of the rate after the last step, in [0, 1].
        warmup: share of the steps until the whole rate is reached, in [0, 1).

    Raises:
        RecpoError: an option outside its range.
    """

    def __init__(self, optimizer: Optimizer, final: float = 0.0, warmup: float = 0.0) -> None:
        validate_range(0.0 <= final <= 1.0, "final", "of LinearDecay is a share", final)
        validate_range(0.0 <= warmup < 1.0, "warmup", "of LinearDecay is a share below 1", warmup)
        self.final, self.warmup = final, warmup
        self._length = 1
        super().__init__(optimizer)

    def set_length(self, steps: float) -> None:
        """Tells how many optimizer steps the training has; ``PreferenceModule`` does it before the first one.

        Raises:
            RecpoError: the training has no known end.
        """
        if not 0 < steps < float("inf"):
            raise RecpoError(
                "LinearDecay needs the length of the training: set trainer.max_epochs or trainer.max_steps",
                code="missing_option",
                field="trainer.max_epochs",
            )
        self._length = int(steps)
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def get_lr(self) -> list[float | Tensor]:
        """The rates of this step, one per parameter group."""
        step, rising = min(self.last_epoch, self._length), self.warmup * self._length
        if step < rising:
            factor = (step + 1) / (rising + 1)
        else:
            factor = 1 + (self.final - 1) * (step - rising) / max(self._length - rising, 1)
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Without the length, which a resumed training may change."""
        return {name: value for name, value in super().state_dict().items() if name != "_length"}


def build_optimizer(model: nn.Module, dense: OptimizerFactory, sparse: OptimizerFactory) -> Optimizer:
    """Assigns the weights of sparse item tables to ``sparse`` and all other trainable parameters to ``dense``.

    Tables with their own optimizer keep it. The blocks of a sharded table get a separate ``dense`` optimizer, because
    distributed and plain tensors cannot be updated together.
    """
    tables = [module for module in model.modules() if isinstance(module, ItemTable) and module.weight.requires_grad]
    own = {id(t.optimizer): t.optimizer for t in tables if isinstance(t, PlacedTable) and t.optimizer is not None}
    kinds = {id(table.weight): _kind(table) for table in tables}
    parameters: dict[str, list[nn.Parameter]] = {"dense": [], "block": [], "sparse": [], "own": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameters[kinds.get(id(parameter), "dense")].append(parameter)
    members = [dense(parameters[kind]) for kind in ("dense", "block") if parameters[kind]]
    members += [sparse(parameters["sparse"])] if parameters["sparse"] else []
    members += own.values()
    return members[0] if len(members) == 1 else JointOptimizer(members)


def _kind(table: ItemTable) -> str:
    if isinstance(table, PlacedTable):
        return "own" if table.optimizer is not None else "block" if table.is_block else "dense"
    return "sparse" if table.sparse else "dense"


def block_weights(module: nn.Module) -> set[int]:
    """Identities of the weights that are distributed over the ranks."""
    return {id(m.weight) for m in module.modules() if isinstance(m, PlacedTable) and m.is_block}


def needs_own_clipping(module: nn.Module) -> bool:
    """Whether there are sparse gradients or blocks of sharded tables, which PyTorch's clipping does not support."""
    tables = [table for table in module.modules() if isinstance(table, ItemTable)]
    return any(table.sparse or (isinstance(table, PlacedTable) and table.is_block) for table in tables)


def local_gradients(module: nn.Module, *, of_blocks: bool | None = None) -> list[Tensor]:
    """The tensors of all gradients on this rank; for sparse gradients, their values.

    Args:
        module: the trained module.
        of_blocks: True: only parameters that are distributed over the ranks; False: only the others; None: all.
    """
    blocks = block_weights(module)
    gradients = []
    for parameter in module.parameters():
        if parameter.grad is None or of_blocks not in (None, id(parameter) in blocks):
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            gradients.append(parameter.grad.values())
        else:
            gradients.append(parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)
    return gradients


def scale_gradients(module: nn.Module, factor: Tensor | float) -> None:
    """Multiplies every gradient in place."""
    for gradient in local_gradients(module):
        gradient.mul_(factor)


def clip_gradients(
    module: nn.Module, clip_value: float, algorithm: str, sum_over_ranks: Callable[[Tensor], Tensor]
) -> None:
    """``torch.nn.utils.clip_grad_{norm,value}_`` that also supports sparse gradients and sharded tables.

    Args:
        module: the trained module.
        clip_value: maximum norm of all gradients together, or maximum value of each.
        algorithm: "norm" or "value".
        sum_over_ranks: sums a number over the ranks.
    """
    if algorithm == "value":
        for gradient in local_gradients(module):
            gradient.clamp_(-clip_value, clip_value)
        return
    device = next(module.parameters()).device
    of_blocks = sum_over_ranks(_square_norm(local_gradients(module, of_blocks=True), device))
    norm = (_square_norm(local_gradients(module, of_blocks=False), device) + of_blocks).sqrt()
    scale_gradients(module, (clip_value / (norm + 1e-6)).clamp(max=1.0))


def _square_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    squares = [torch.linalg.vector_norm(gradient).square() for gradient in gradients]
    return torch.stack([torch.zeros((), device=device), *squares]).sum()

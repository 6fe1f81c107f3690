"""The single optimizer of all tables, whichever kernel updates each table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recpo.base.errors import RecpoError
from recpo.policies.item_table import ItemTable
from recpo.sharding import row_updates
from recpo.sharding.costs import TableOptimizerName
from recpo.sharding.lookup_table import LookupTable

STATE_NAMES: Final[dict[TableOptimizerName, list[str]]] = {
    "sgd": [],
    "adagrad": ["momentum1"],
    "rowwise_adagrad": ["momentum1"],
    "adam": ["momentum1", "momentum2"],
}
_FUSED: Final = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}


@dataclass(frozen=True)
class TableOptions:
    """The optimizer of sharded tables. Only rows that were looked up change.

    Attributes:
        optimizer: ``rowwise_adagrad`` keeps one number per row, ``adagrad`` one per weight, ``adam`` two per weight,
            ``sgd`` none.
        lr: learning rate of the tables.
        eps: added to the denominator (not for ``sgd``).
        betas: for ``adam``.
    """

    optimizer: TableOptimizerName = "rowwise_adagrad"
    lr: float = 0.02
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if not self.lr >= 0 or not self.eps >= 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise RecpoError(f"table_optimizer: lr and eps must not be negative, betas lie in [0, 1), got {self}")

    def is_fused(self, device: torch.device) -> bool:
        """Whether FBGEMM has a fused kernel for it. FBGEMM has no fused Adam on CPUs."""
        return self.optimizer != "adam" or device.type == "cuda"

    def fused_params(self, device: torch.device, *, frozen: bool) -> dict[str, Any]:
        """The setting for torchrec's sharder. Tables without a fused optimizer get one without state."""
        name = "sgd" if frozen or not self.is_fused(device) else self.optimizer
        options = {"optimizer": _FUSED[name], "learning_rate": self.lr, "eps": self.eps}
        return options | {"beta1": self.betas[0], "beta2": self.betas[1]} if name == "adam" else options


class _Table:
    """A table with its optimizer state.

    Args:
        table: sharded for lookups, or complete on every rank.
        options: the optimizer.
    """

    def __init__(self, table: ItemTable, options: TableOptions) -> None:
        self.table, self._options = table, options
        self._names, self._per_row = STATE_NAMES[options.optimizer], options.optimizer == "rowwise_adagrad"
        weight = table.weight
        self._fused: LookupTable | None = None
        if isinstance(table, LookupTable) and options.is_fused(weight.device):
            self._fused = table
            self._state = table.fused_state(self._names)
        else:
            self._state = row_updates.empty_state(weight.detach(), self._names, per_row=self._per_row)

    def state(self) -> dict[str, Any]:
        """The states by name: sharded like the table, and without copying."""
        if not isinstance(self.table, LookupTable):
            return dict(self._state)
        return {name: self.table.whole(self._state.get(name), per_row=self._per_row) for name in self._names}

    @torch.no_grad()
    def step(self, lr: float, steps_before: int) -> None:
        """Updates the rows that have a gradient, after ``steps_before`` earlier steps."""
        if self.table.weight.grad is None:
            return
        rows, gradient = row_updates.row_gradient(self.table.weight.grad)
        if self._fused is not None:
            self._fused.fused_step(rows, gradient, lr, steps_before)
        else:
            self._plain_step(rows, gradient, lr, steps_before)

    def _plain_step(self, rows: Tensor, gradient: Tensor, lr: float, steps_before: int) -> None:
        weight, state, options = self.table.weight.detach(), list(self._state.values()), self._options
        if options.optimizer == "sgd":
            row_updates.sgd(weight, rows, gradient, lr)
        elif options.optimizer == "adagrad":
            row_updates.adagrad(weight, state[0], rows, gradient, lr, options.eps)
        elif options.optimizer == "rowwise_adagrad":
            row_updates.rowwise_adagrad(weight, state[0], rows, gradient, lr, options.eps)
        else:
            moments, step = (state[0], state[1]), steps_before + 1
            row_updates.adam(weight, moments, rows, gradient, lr=lr, betas=options.betas, eps=options.eps, step=step)


class TableOptimizer(Optimizer):
    """Updates tables from their gradients, with fused kernels if available.

    Args:
        tables: by name; sharded for lookups, or complete on every rank.
        options: see ``TableOptions``.
        scheduler: creates a learning-rate schedule for the tables, which steps with this optimizer; None = the tables
            follow the schedule of the run.
    """

    def __init__(
        self,
        tables: Mapping[str, ItemTable],
        options: TableOptions,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__([table.weight for table in tables.values()], {"lr": options.lr})
        self._tables = {name: _Table(table, options) for name, table in tables.items()}
        self._steps = 0
        # a schedule needs an optimizer; this one has no parameters to update
        self._rate = SGD([nn.Parameter(torch.zeros(()))], lr=options.lr)
        self._schedule = None if scheduler is None else scheduler(self._rate)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the rows that have a gradient."""
        assert closure is None
        lr = (self if self._schedule is None else self._rate).param_groups[0]["lr"]
        for table in self._tables.values():
            table.step(float(lr), self._steps)
            if isinstance(table.table, LookupTable):
                table.table.changed()
        self._steps += 1
        if self._schedule is not None:
            self._rate.step()
            self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """The states by table and name (not copied), and the learning rate. The result does not depend on the plan."""
        return {
            "tables": {name: table.state() for name, table in self._tables.items()},
            "steps": self._steps,
            "lr": self.param_groups[0]["lr"],
            "initial_lr": self.param_groups[0].get("initial_lr"),
            "rate": self._rate.param_groups[0]["lr"],
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores all but the tables' states, which a checkpoint reads into the tensors of ``state_dict``."""
        self._steps = state_dict["steps"]
        self.param_groups[0]["lr"] = state_dict["lr"]
        if state_dict["initial_lr"] is not None:
            self.param_groups[0]["initial_lr"] = state_dict["initial_lr"]
        self._rate.param_groups[0]["lr"] = state_dict["rate"]
        if self._schedule is not None:
            self._schedule.load_state_dict(state_dict["schedule"])
        for table in self._tables.values():
            if isinstance(table.table, LookupTable):
                table.table.changed()

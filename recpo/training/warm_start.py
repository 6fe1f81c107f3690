"""What a run takes over from an earlier run, whose catalog had fewer items.

Items are only ever appended, so that item v of the earlier run is item v of this one. Rows of known items are copied,
those of new items start from the mean of the known ones, or from zero where encoded features carry them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from recpo.artifacts.semantic_codes import Codes
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.log.prepared import Prepared
from recpo.policies.item_table import Rows
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.training.checkpoints import LazyRows, load_plain
from recpo.training.module import PreferenceModule
from recpo.training.optimizers import JointOptimizer
from recpo.training.run import Run, load_weights

_BLOCK_ROWS = 1 << 16
_CHECKSUM, _TRAINED = "codes_checksum", "features.trained"


class Growth(NamedTuple):
    """How many items there were and are; equal where nothing was added."""

    before: int
    now: int

    @property
    def grows(self) -> bool:
        """Whether there are new items."""
        return self.now > self.before


def growth_of(base: Run, data: Prepared) -> Growth:
    """The growth from the items of ``base`` to those of ``data``.

    Raises:
        RecpoError: the items of the run are not the first items of ``data``, or its definition of feedback differs.
    """
    base.feedback.validate_same(data.feedback, base.root, data.root)
    before, now = base.items, data.item_ids()
    numbers = np.arange(1, len(before) + 1)
    if len(before) > len(now):
        raise RecpoError(
            f"{base.root} was trained on {len(before)} items, {data.root} holds {len(now)}: training starts from the "
            "same catalog or an earlier one; name the prepared directory it was trained on, or an extension of it",
            code="mismatch",
            field="init_from",
        )
    if not np.array_equal(now.to_internal(before.to_external(numbers)), numbers):
        raise RecpoError(
            f"{base.root} was trained on other items than {data.root} holds (items.parquet differs): name the "
            "prepared directory it was trained on, or one that `recpo prepare --extends` made from it",
            code="mismatch",
            field=Run.ITEMS,
        )
    return Growth(len(before), len(now))


def grown_rows(rows: Rows, count: int, total: int, first: int, *, zero: bool = False) -> LazyRows:
    """The rows of a saved table, and one row for all that came after them.

    Args:
        rows: of the saved table.
        count: how many of them count.
        total: rows of the grown table.
        first: the first row that stands for an item, of whose rows the new ones are the mean.
        zero: new rows are zero.
    """
    kept = rows[0:1]
    new = torch.zeros(kept.shape[1:], dtype=torch.float64)
    for begin in range(count if zero else first, count, _BLOCK_ROWS):
        new += rows[begin : min(begin + _BLOCK_ROWS, count)].double().sum(0)
    new = (new / max(1, count - first)).to(kept.dtype)

    def read(begin: int, end: int) -> Tensor:
        known = rows[begin : max(begin, min(end, count))]
        return torch.cat([known, new.expand(max(0, end - max(begin, count)), *new.shape)])

    return LazyRows(torch.Size([total, *new.shape]), read)


def trained_rows(rows: Tensor | LazyRows, trained: Tensor) -> LazyRows:
    """The id rows of a saved table beside features, zero where no training event ever counted them.

    Such a row is as it was drawn. From the item's first training event on it counts, and starts as that of a new item.

    Args:
        rows: of the table.
        trained: ``[V + 1]`` bool, which items had training events in the earlier run.
    """
    return LazyRows(rows.shape, lambda begin, end: rows[begin:end] * trained[begin:end, None])


def grown(
    saved: Mapping[str, Tensor | LazyRows], own: Mapping[str, Tensor], growth: Growth, *, zero: bool = False
) -> dict[str, Tensor | LazyRows]:
    """The saved tensors, those with a row per item in the size of the module's own.

    A table ``[V + 1, ...]`` keeps its row 0, that of no item; ``[V]`` or ``[1, ...]`` per item grow in the same way.
    Others are left alone: whoever loads them says what does not fit. Where a codebook has grown, its rows are grown.

    Args:
        saved: of the earlier run.
        own: of the module that takes them over.
        growth: of the catalog.
        zero: new rows are zero instead of the mean of the known ones.
    """
    tensors: dict[str, Tensor | LazyRows] = dict(saved)
    if not growth.grows:
        return tensors
    for name, value in saved.items():
        if (
            name not in own
            or value.shape == own[name].shape
            or not value.shape
            or value.shape[1:] != own[name].shape[1:]
        ):
            continue
        rows, total = value.shape[0], own[name].shape[0]
        extra = rows - growth.before
        if extra in (0, 1) and total == growth.now + extra:
            tensors[name] = grown_rows(value, rows, total, extra, zero=zero)
        elif name.rpartition(".")[0].startswith(("code_table", "decoder")) and rows < total:
            tensors[name] = grown_rows(value, rows, total, 0)
    return tensors


class WarmStart:
    """Takes over weights, critic heads and optimizer state of an earlier run.

    Args:
        base: the earlier run, whose items are the first of today's.
        growth: from its items to today's.
        with_training: critic heads and optimizer state are taken over as well.
    """

    def __init__(self, base: Run, growth: Growth, with_training: bool = False) -> None:
        self._base, self._growth, self.with_training = base, growth, with_training
        self._zero = False
        self._checkpoint = base.checkpoint()

    def load_policy(self, policy: Policy) -> None:
        """Copies the weights of the policy; see ``grown`` and, beside features, ``trained_rows``.

        Args:
            policy: knows its features.

        Raises:
            RecpoError: they do not fit, or known items have other codes than in the earlier run.
        """
        self._validate_codes(policy)
        self._zero = policy.reads_item_features
        load_weights(policy, self._checkpoint, adapt=self._adapted)

    def validate_features(self, policy: Policy, data: Prepared) -> None:
        """Raises ``RecpoError`` where a feature that the policy reads is encoded otherwise than in the earlier run."""
        others = self._base.features_that_differ(policy, data)
        if others:
            raise RecpoError(
                f"{data.root}: {', '.join(others)} were fitted otherwise than those that {self._base.root} was trained "
                "with, so that its encoders would read other values: make the data with `recpo prepare --extends`, "
                "which keeps what was fitted",
                code="mismatch",
                field="features",
            )

    def load_critic(self, module: PreferenceModule) -> None:
        """Copies the weights of the critic heads, where there are any.

        Raises:
            RecpoError: the earlier run had other heads.
        """
        if module.critic is not None:
            load_weights(module.critic, self._checkpoint, "critic.", self._adapted)

    def load_optimizer(self, trainer: Trainer, module: LightningModule) -> None:
        """Gives the optimizer its state before the first step; of a run that is resumed, nothing."""
        if trainer.global_step == 0:
            (optimizer,) = trainer.optimizers
            optimizer.load_state_dict(self.optimizer_state(optimizer))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The saved state for ``optimizer``: that of new rows is zero, learning rates are the optimizer's own.

        Raises:
            RecpoError: it is that of other parameters.
        """
        saved = load_plain(self._checkpoint)["optimizer_states"][0]
        if not isinstance(optimizer, JointOptimizer):
            return self._grown_state(saved, optimizer)
        members = saved.get("members", [])
        if len(members) != len(optimizer.members):
            raise self._other_parameters()
        return {"members": [self._grown_state(*pair) for pair in zip(members, optimizer.members, strict=True)]}

    def _grown_state(self, saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if sum(len(group["params"]) for group in saved.get("param_groups", [])) != len(parameters):
            raise self._other_parameters()
        state = {
            index: {name: self._grown_values(value, parameters[index]) for name, value in values.items()}
            for index, values in saved["state"].items()
        }
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

    def _grown_values(self, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape == parameter.shape:
            return value
        more = parameter.shape[0] - value.shape[0]
        if more < 0 or value.shape[1:] != parameter.shape[1:]:
            raise self._other_parameters()
        return torch.cat([value, value.new_zeros(more, *value.shape[1:])])

    def _other_parameters(self) -> RecpoError:
        return RecpoError(
            f"init_training: {self._base.root} trained other parameters than this run does: train with the objective, "
            "the critic and the optimizers of that run, or set init_training to false",
            code="mismatch",
            field="init_training",
        )

    def _adapted(self, saved: dict[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
        taken: dict[str, Any] = grown(saved, own, self._growth, zero=self._zero)
        for name in taken:
            if name.endswith(_CHECKSUM) and name in own and self._growth.grows:  # the codes were compared
                taken[name] = own[name]
        for name in [one for one in taken if one.endswith(_TRAINED)]:
            table = name.removesuffix(_TRAINED) + "weight"
            mask = taken[name] if isinstance(taken[name], Tensor) else taken[name].whole()
            if table in own and taken[table].shape == own[table].shape:
                taken[table] = trained_rows(taken[table], mask)
        return taken

    def _validate_codes(self, policy: Policy) -> None:
        if not isinstance(policy, SemanticIdPolicy) or not self._growth.grows:
            return
        before = Codes.open(self._base.root / Run.CODES).codes
        now = policy.tokens(torch.arange(1, len(before) + 1)).cpu().numpy()
        if not np.array_equal(before, now):
            raise RecpoError(
                f"{self._base.root}: its items have other codes than policy.codes gives them: make today's codes from "
                "its own with `recpo tokenize --extends`",
                code="mismatch",
                field="codes",
            )


def same_training(base: Run, growth: Growth, configuration: Mapping[str, Any]) -> bool:
    """Whether a run continues the training of ``base`` on a catalog that has grown.

    Args:
        base: the earlier run.
        growth: from its items to today's.
        configuration: every option of this run: objective and optimizers must be of the same classes.
    """
    parts = ("objective", "optimizer", "sparse_optimizer")
    same = all(_class_of(base.configuration.get(part)) == _class_of(configuration.get(part)) for part in parts)
    return growth.grows and same


def _class_of(part: Any) -> str:
    name = part.get("class_path") if isinstance(part, Mapping) else part
    return str(name).rpartition(".")[2]

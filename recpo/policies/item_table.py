"""The item embedding table: the only module that sharding replaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import Optimizer

from recpo.base.types import Recommendations, SamplingOptions
from recpo.ops.linear_logprob import linear_divergence, linear_entropy, linear_log_softmax, linear_logprob
from recpo.policies import catalog_search, sampling
from recpo.policies.item_features import ItemFeatures

#: How training uses a table: it looks rows up ("lookup"), multiplies states with the full table ("softmax"), or reads
#: the weight itself ("whole"), which must then be complete on every rank.
TableUse = Literal["lookup", "softmax", "whole"]

_ON_META: ContextVar[bool] = ContextVar("tables_on_meta", default=False)
_BLOCK_ROWS = 1 << 16
# If a step looks up at least one item per this many catalog items, it reads them from the matrix of its softmax.
LOOKUPS_WORTH = 8


@contextmanager
def tables_on_meta() -> Iterator[None]:
    """Creates tables without memory: each rank later fills its part from ``ItemTable.initial``."""
    token = _ON_META.set(True)
    try:
        yield
    finally:
        _ON_META.reset(token)


class Rows(Protocol):
    """The rows of a complete table. Any range can be read without the rest."""

    def __getitem__(self, rows: slice) -> Tensor:
        """Rows ``[stop - start, d]``."""


class RandomRows:
    """Normally distributed rows that depend only on the seed and the row, not on the range that is read.

    Args:
        seed: of the table.
        dim: d.
        std: standard deviation; row 0 is zero.
    """

    def __init__(self, seed: int, dim: int, std: float) -> None:
        self._seed, self._dim, self._std = seed, dim, std

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomRows:
        return self

    def __getitem__(self, rows: slice) -> Tensor:
        first = rows.start // _BLOCK_ROWS
        blocks = [self._block(number) for number in range(first, -(-rows.stop // _BLOCK_ROWS))]
        values = torch.cat(blocks) if blocks else torch.empty(0, self._dim)
        return values[rows.start - first * _BLOCK_ROWS : rows.stop - first * _BLOCK_ROWS]

    def _block(self, number: int) -> Tensor:
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1, np.uint64)[0] >> 1)
        values = torch.randn(_BLOCK_ROWS, self._dim, generator=torch.Generator().manual_seed(seed)).mul_(self._std)
        if number == 0:
            values[0] = 0
        return values


class SavedRows:
    """The rows of a saved table, read on demand.

    Args:
        rows: the complete table ``[V + 1, d]``: a tensor mapped from a file, or an object that reads slices of one.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __deepcopy__(self, memo: dict[int, Any]) -> SavedRows:
        return self

    def __getitem__(self, rows: slice) -> Tensor:
        return self._rows[rows]


class _StepMatrix:
    """The vectors of all items in a training step, with their gradient, kept until the backward pass has used them.

    Attributes:
        announced: a step has started; otherwise nothing is shared.
    """

    def __init__(self) -> None:
        self.announced = False
        self._matrix: Tensor | None = None
        self._state: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _StepMatrix:
        return _StepMatrix()

    def renew(self) -> None:
        """Starts a step."""
        self.announced, self._matrix = True, None

    def of(self, weight: Tensor, features: ItemFeatures) -> Tensor:
        """The matrix for the current id rows and features."""
        state = (weight._version, *(parameter._version for parameter in features.encoder.parameters()))
        if self._matrix is None or state != self._state:
            matrix = features.matrix(weight)
            if not self.announced:
                return matrix
            self._matrix, self._state = matrix, state
            if matrix.requires_grad:
                matrix.register_hook(self._used)
        return self._matrix

    def _used(self, grad: Tensor) -> None:
        self._matrix = None


class ItemTable(nn.Module):
    """Vectors of the items 1..V. Row 0 is the padding item; it is zero and stays zero.

    A policy looks up its items once per step through ``forward``, and a softmax over the catalog uses the rows 1..V. A
    sharded table replaces this module for both. With ``features``, a vector is the sum of an id row (a row of
    ``weight``) and the encoded features of the item. Sharding splits only the id rows.

    Args:
        num_items: catalog size V.
        dim: width d of the vectors.
        sparse: lookups give sparse gradients, for optimizers that support them (``SparseAdam``, ``Adagrad``): steps on
            large tables are 2 to 3 times faster.
        std: standard deviation of the initial values.
        use: how training uses the table; it determines the possible kinds of sharding.
        cosine: the softmax over the catalog reads vectors of length 1.

    Attributes:
        weight: ``[V + 1, d]``, the id rows.
        features: the features of the items; None = none.
        initial: the initial values of a table that was created inside ``tables_on_meta``; otherwise None.
    """

    features: ItemFeatures | None
    initial: Rows | None = None

    def __init__(
        self,
        num_items: int,
        dim: int,
        *,
        sparse: bool = False,
        std: float = 0.02,
        use: TableUse = "lookup",
        cosine: bool = False,
    ) -> None:
        super().__init__()
        self.num_items, self.dim, self.sparse, self.use, self.cosine = num_items, dim, sparse, use, cosine
        self.features, self._of_step = None, _StepMatrix()
        if _ON_META.get() and use != "whole":
            self.weight = nn.Parameter(torch.empty(num_items + 1, dim, device="meta"))
            self.initial = RandomRows(int(torch.randint(2**62, ())), dim, std)
            return
        self.weight = nn.Parameter(torch.empty(num_items + 1, dim))
        with torch.no_grad():
            nn.init.normal_(self.weight, std=std)
            self.weight[0] = 0

    def begin_step(self, seed: int) -> None:
        """Starts a training step. ``seed`` determines the id rows that the step drops."""
        if self.features is not None:
            self.features.begin_step(seed)
            self._of_step.renew()

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors ``[..., d]`` of item ids ``[...]``; zero, without gradient, for id 0."""
        if self.features is None:
            return self.id_rows(ids)
        if self._shares_matrix(ids.numel()):
            return F.embedding(ids, self.vectors(), padding_idx=0)
        return self.id_rows(ids) * self.features.kept(ids)[..., None] + self.features(ids)

    def id_rows(self, ids: Tensor) -> Tensor:
        """``forward`` without the features."""
        return F.embedding(ids, self.weight, padding_idx=0, sparse=self.sparse)

    def vectors(self) -> Tensor:
        """The vectors of all items, ``[V + 1, d]``; row 0 is not an item.

        With features, this method computes the matrix. In a training step that ``begin_step`` announced, it computes it
        once and shares it until the backward pass.
        """
        if self.features is None:
            return self.weight
        if not (self.training and torch.is_grad_enabled()):
            return self.features.matrix(self.weight)
        return self._of_step.of(self.weight, self.features)

    def _shares_matrix(self, lookups: int) -> bool:
        """Whether this many lookups justify the matrix of all items, which the softmax of the step needs as well."""
        if not (self.training and torch.is_grad_enabled()) or self.use != "softmax":
            return False
        return self._of_step.announced and lookups * LOOKUPS_WORTH >= self.num_items

    def scored_rows(self) -> Tensor:
        """The vectors ``[V + 1, d]`` that the softmax multiplies with states; row 0 is not an item."""
        return F.normalize(self.vectors(), dim=-1) if self.cosine else self.vectors()

    def log_prob(self, states: Tensor, targets: Tensor, state_index: Tensor | None = None) -> Tensor:
        """See ``recpo.ops.linear_logprob``. In this and the next methods, states are divided by the temperature."""
        return linear_logprob(states, self.scored_rows(), targets, state_index)

    def entropy(self, states: Tensor) -> Tensor:
        """See ``recpo.ops.linear_logprob.linear_entropy``."""
        return linear_entropy(states, self.scored_rows())

    def divergence(self, states: Tensor, reference: ItemTable, reference_states: Tensor) -> Tensor:
        """See ``recpo.ops.linear_logprob.linear_divergence``; ``reference`` is a table of the same kind."""
        with torch.no_grad():
            other = reference.scored_rows()
        return linear_divergence(states, self.scored_rows(), reference_states, other)

    def catalog_log_prob(self, states: Tensor) -> Tensor:
        """See ``recpo.ops.linear_logprob.linear_log_softmax``."""
        return linear_log_softmax(states, self.scored_rows())

    def top_k(self, states: Tensor, k: int, exclude: Tensor | None) -> Recommendations:
        """See ``recpo.policies.catalog_search.top_k``."""
        return catalog_search.top_k(states, self.scored_rows(), k, exclude)

    def draw(self, states: Tensor, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
        """See ``recpo.policies.sampling.draw``."""
        return sampling.draw(states, self.scored_rows(), group_size, options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.initial is not None and prefix + "weight" in state_dict:
            self.initial = SavedRows(state_dict[prefix + "weight"])
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """The text that ``repr`` shows."""
        return f"{self.num_items}, {self.dim}, sparse={self.sparse}, use={self.use!r}"


class PlacedTable(ItemTable):
    """A table with which sharding replaced an ``ItemTable``, and the facts about it that training needs.

    Attributes:
        is_block: ``weight`` is this rank's part of the table, not the complete table.
        optimizer: the optimizer that updates ``weight`` if the training module's own optimizer does not; otherwise
            None.
    """

    is_block: bool
    optimizer: Optimizer | None = None

    def __init__(self, table: ItemTable, *, sparse: bool = False) -> None:
        nn.Module.__init__(self)
        self.num_items, self.dim, self.sparse, self.use = table.num_items, table.dim, sparse, table.use
        self.cosine, self.features, self._of_step = table.cosine, table.features, _StepMatrix()

    def changed(self) -> None:
        """Call it after the weights were changed in place, because a table may cache values derived from them."""

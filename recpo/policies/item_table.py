"""The item embedding table: the one seam that sharding replaces."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class ItemTable(nn.Module):
    """Vectors of the items 1..V; row 0 is the padding item, which is zero and stays zero.

    A policy looks its items up once per step through ``forward``; a sharded table takes the place of this module there.

    Args:
        num_items: catalogue size V.
        dim: d.
        sparse: lookups give sparse gradients, for optimisers that take them (``SparseAdam``, ``Adagrad``): 2 to 3 times
            faster steps on large tables.
        std: standard deviation of the initial values.
    """

    def __init__(self, num_items: int, dim: int, *, sparse: bool = False, std: float = 0.02) -> None:
        super().__init__()
        self.num_items, self.dim, self.sparse = num_items, dim, sparse
        self.weight = nn.Parameter(torch.empty(num_items + 1, dim))
        with torch.no_grad():
            nn.init.normal_(self.weight, std=std)
            self.weight[0] = 0

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors ``[..., d]`` of item ids ``[...]``; zero, without gradient, for id 0."""
        return F.embedding(ids, self.weight, padding_idx=0, sparse=self.sparse)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"{self.num_items}, {self.dim}, sparse={self.sparse}"

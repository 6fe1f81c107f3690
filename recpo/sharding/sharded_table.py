"""What tables that are cut over the ranks have in common: a softmax over rows of which each rank holds some."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from recpo.ops.sharded_logprob import RowShard, sharded_entropy, sharded_logprob
from recpo.policies.item_table import ItemTable, Rows
from recpo.sharding import search
from recpo.types import Recommendations, SamplingOptions

_ROWS_AT_ONCE = 1 << 18


def copy_rows(block: Tensor, rows: Rows, first: int, columns: slice = slice(None)) -> None:
    """Sets a block to rows from ``first`` on, a piece at a time.

    Args:
        block: ``[h, w]``, changed in place.
        rows: of the whole table.
        first: number of the block's first row.
        columns: which of the table's columns are the block's.
    """
    for begin in range(0, len(block), _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, len(block))
        block[begin:end] = rows[first + begin : first + end][:, columns]


class ShardedTable(ItemTable):
    """Takes the place of an ``ItemTable``; every method is called by all ranks together."""

    is_block = True

    @abstractmethod
    def row_shard(self, *, learns: bool, cosine: bool = False) -> RowShard:
        """This rank's rows.

        Args:
            learns: what is made of them may be asked for their gradient.
            cosine: with length 1.
        """

    def log_prob(
        self,
        states: Tensor,
        targets: Tensor,
        state_index: Tensor | None = None,
        *,
        temperature: float = 1.0,
        cosine: bool = False,
    ) -> Tensor:
        """See ``ItemTable.log_prob``."""
        shard = self.row_shard(learns=True, cosine=cosine)
        return sharded_logprob(states, shard, targets, state_index, temperature=temperature)

    def entropy(self, states: Tensor, *, temperature: float = 1.0, cosine: bool = False) -> Tensor:
        """See ``ItemTable.entropy``."""
        return sharded_entropy(states, self.row_shard(learns=True, cosine=cosine), temperature=temperature)

    def top_k(self, states: Tensor, k: int, exclude: Tensor | None, *, cosine: bool = False) -> Recommendations:
        """See ``ItemTable.top_k``."""
        return search.top_k(states.detach(), self.row_shard(learns=False, cosine=cosine), k, exclude)

    def draw(
        self, states: Tensor, group_size: int, options: SamplingOptions, *, cosine: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See ``ItemTable.draw``."""
        return search.draw(states, self.row_shard(learns=False, cosine=cosine), group_size, options)

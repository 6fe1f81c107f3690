"""Heads on the states of a policy: state values, action values, and the scores of a reward model."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.ops.kernels import take_rows
from recpo.policies.item_table import ItemTable

# Bytes of the values of one block of states and items. Larger catalogs are searched block by block.
BLOCK_BYTES = 64 << 20
_ITEMS_PER_BLOCK = 8192


def states_at(states: Tensor, visible: Tensor) -> Tensor:
    """The state of every slate position.

    Args:
        states: ``[B, H + 1, d]``, state v after the first v events.
        visible: ``[B, S]``, number of events that a position sees.

    Returns:
        ``[B, S, d]``.
    """
    batch, width, _ = states.shape
    rows = torch.arange(batch, device=states.device)[:, None] * width + visible
    return take_rows(states, rows)


class StateValue(nn.Module):
    """``V(s)``: one hidden layer on the state. The initial value is 0 for every state.

    Args:
        dim: width of the states.
        hidden: width of the hidden layer.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, hidden)
        self.output = nn.Linear(hidden, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Values ``[...]`` float32 of states ``[..., d]``."""
        values: Tensor = self.output(F.gelu(self.hidden(states))).squeeze(-1)
        return values.float()


class ItemValue(nn.Module):
    """``f(s, item) = <g(s), vector_item> + bias_item`` with one hidden layer ``g`` and its own item vectors.

    This is Q(s, item) of Q-learning. The initial values are close to 0.

    Args:
        num_items: catalog size V.
        dim: width of the states and of the vectors.
        hidden: width of the hidden layer.
    """

    def __init__(self, num_items: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, hidden)
        self.output = nn.Linear(hidden, dim)
        self.item_table = ItemTable(num_items, dim, use="whole")
        self.bias = nn.Parameter(torch.zeros(num_items + 1))

    def forward(self, states: Tensor, item_ids: Tensor) -> Tensor:
        """Values ``[...]`` of the items ``[...]`` in states ``[..., d]``; one item per state."""
        return (self.project(states) * self.item_table(item_ids)).sum(-1) + self.bias[item_ids]

    def project(self, states: Tensor) -> Tensor:
        """``g(s)``, in the shape of ``states``."""
        return self.output(F.gelu(self.hidden(states)))

    @torch.no_grad()
    def best_items(self, states: Tensor) -> Tensor:
        """The item ``[N]`` with the largest value in each of the states ``[N, d]``; of equal values the smallest id.

        States and catalog are processed in blocks, so ``BLOCK_BYTES`` bounds the memory.
        """
        count = max(1, BLOCK_BYTES // (4 * _ITEMS_PER_BLOCK))
        best = [self._best_items(self.project(part)) for part in states.split(count)]
        return torch.cat(best) if best else torch.zeros(0, dtype=torch.long, device=states.device)

    def _best_items(self, projected: Tensor) -> Tensor:
        weight, bias = self.item_table.weight, self.bias
        best = projected.new_full((len(projected),), -torch.inf)
        ids = torch.zeros(len(projected), dtype=torch.long, device=projected.device)
        for start in range(1, len(weight), _ITEMS_PER_BLOCK):
            stop = min(start + _ITEMS_PER_BLOCK, len(weight))
            top, index = torch.addmm(bias[start:stop], projected, weight[start:stop].T).max(1)
            ids = torch.where(top > best, index + start, ids)
            best = torch.maximum(best, top)
        return ids


class ItemScore(nn.Module):
    """``f_k(s, item) = <g_k(s), v> + h_k(v) + bias_k[item]``: the K scores of a reward model.

    ``v = A e / |e| + own vector``, where ``e`` is the vector that the policy reads for the item. A log shows each item
    to only a few users, so an item with little feedback is scored like the items that the policy considers similar.
    ``g`` and ``h`` have one hidden layer. The initial scores are close to 0.

    Args:
        num_items: catalog size V.
        dim: width of the states and of the vectors.
        hidden: width of the hidden layers.
        num_scores: K.
    """

    def __init__(self, num_items: int, dim: int, hidden: int, num_scores: int) -> None:
        super().__init__()
        self.of_state = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, num_scores * dim))
        self.of_item = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, num_scores))
        self.adapt = nn.Linear(dim, dim)
        self.item_table = ItemTable(num_items, dim)
        self.bias = nn.Parameter(torch.zeros(num_items + 1, num_scores))

    def forward(self, states: Tensor, item_ids: Tensor, vectors: Tensor) -> Tensor:
        """Scores ``[..., K]`` of the items ``[...]`` in states ``[..., d]``; one item per state.

        Args:
            states: ``[..., d]``.
            item_ids: ``[...]``.
            vectors: ``[..., d]``, the vectors that the policy reads for the items.
        """
        items = self.adapt(F.normalize(vectors, dim=-1)) + self.item_table(item_ids)
        match = self.of_state(states).unflatten(-1, (-1, items.shape[-1])) * items.unsqueeze(-2)
        return match.sum(-1) + self.of_item(items) + F.embedding(item_ids, self.bias)

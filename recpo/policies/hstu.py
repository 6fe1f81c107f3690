"""Pointwise-aggregated attention blocks: HSTU (Zhai et al., arXiv 2402.17152)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.policies.layers import ByteDropout, Linear
from recpo.policies.packing import Packing, rows_of

# Gaps in milliseconds fall into buckets of their logarithm to base 2: 2^42 ms is 139 years.
TIME_BUCKETS = 44


class HSTUBlock(nn.Module):
    """``x + W (norm(SiLU(q kᵀ + bias) v) ⊙ u)`` with ``u, v, q, k = SiLU(W' norm(x))``.

    The attention weights are pointwise: they do not sum to one, so the strength of an interest survives. The bias has a
    relative-position part and, where timestamps are given, a part by the logarithm of the time between the events.

    Departure from the paper: the sum over events is divided by the number of visible events of the position instead of
    by the maximal length, so that padding to another length changes nothing.

    Args:
        dim: d, divisible by ``heads``.
        heads: attention heads.
        max_history: the largest relative position.
        dropout: probability on the output.
    """

    def __init__(self, dim: int, heads: int, *, max_history: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.gate_value_query_key = Linear(dim, 4 * dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.output = Linear(dim, dim)
        self.position_bias = nn.Parameter(torch.zeros(heads, max_history))
        self.time_bias = nn.Parameter(torch.zeros(heads, TIME_BUCKETS))
        self.dropout = ByteDropout(dropout)

    def forward(self, states: Tensor, time_gaps: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Maps ``[B, H, d]`` to ``[B, H, d]``; position j depends on positions <= j.

        Args:
            states: ``[B, H, d]``.
            time_gaps: ``[B, H, H]`` int64, bucket of the time from event k (last axis) to event j, or None.
            packing: not used.
        """
        attended, gate = self._attended(states, time_gaps)
        return self._gated(states, attended, gate)

    def at(
        self, states: Tensor, places: Tensor, time_gaps: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """The rows ``places [B]`` of what ``forward`` gives, flattened: ``[B, d]``, without the cost of the others."""
        return self._gated(*(rows_of(part, places) for part in (states, *self._attended(states, time_gaps))))

    def _attended(self, states: Tensor, time_gaps: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the events before a position say of it, and the gate, ``[B, H, d]`` each."""
        batch, length, dim = states.shape
        mixed = F.silu(self.gate_value_query_key(self.norm(states)))
        gate, rest = mixed[..., :dim], mixed[..., dim:]
        heads = rest.reshape(batch, length, 3, self.heads, dim // self.heads)
        value, query, key = heads.permute(2, 0, 3, 1, 4).unbind(0)
        positions = torch.arange(length, device=states.device)
        distance = positions[:, None] - positions
        weights = query @ key.transpose(-1, -2) + self.position_bias[:, distance.clamp_min(0)]
        if time_gaps is not None:
            weights = weights + self.time_bias[:, time_gaps].transpose(0, 1)
        weights = F.silu(weights) * (distance >= 0) / (positions + 1)[:, None]
        return (weights @ value).transpose(1, 2).reshape(batch, length, dim), gate

    def _gated(self, states: Tensor, attended: Tensor, gate: Tensor) -> Tensor:
        return states + self.dropout(self.output(self.attention_norm(attended) * gate))


def time_gap_buckets(timestamps: Tensor) -> Tensor:
    """Buckets ``floor(log2(1 + gap))`` of the milliseconds between events, ``[B, H, H]``; 0 for gaps into the past."""
    # in floating point: ONNX Runtime clips int64 wrongly from 2^31 on; the half keeps powers of 2 on their side
    gaps = (timestamps[:, :, None] - timestamps[:, None, :]).double().clamp_min(0)
    return (gaps + 1.5).log2().long().clamp_max(TIME_BUCKETS - 1)

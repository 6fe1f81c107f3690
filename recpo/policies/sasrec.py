"""Pre-norm causal transformer blocks: SASRec (Kang and McAuley, arXiv 1808.09781)."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.policies.layers import ByteDropout, Linear
from recpo.policies.packing import Packing, rows_of


class SASRecBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``, each with dropout on its output.

    Departures from the paper: normalization precedes both sub-layers, the feed-forward layer is ``expansion`` times
    wider and uses GELU, attention weights are not dropped (the fused kernels have no dropout on a CPU).

    Args:
        dim: d, divisible by ``heads``.
        heads: attention heads.
        expansion: width of the feed-forward layer over d.
        dropout: probability on the output of each sub-layer.
    """

    def __init__(self, dim: int, heads: int, *, expansion: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = Linear(dim, 3 * dim)
        self.attention_output = Linear(dim, dim)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.expand = Linear(dim, expansion * dim)
        self.contract = Linear(expansion * dim, dim)
        self.dropout = ByteDropout(dropout)

    def forward(self, states: Tensor, time_gaps: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """Maps ``[B, H, d]`` to ``[B, H, d]``; position j depends on positions <= j. ``time_gaps`` are not used.

        With ``packing`` it maps the events alone, ``[N, d]`` to ``[N, d]``; only the attention sees padding.
        """
        return self._feed_forward(states, self._attended(states, packing))

    def at(
        self, states: Tensor, places: Tensor, time_gaps: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """The rows ``places [B]`` of what ``forward`` gives, flattened: ``[B, d]``, without the cost of the others."""
        return self._feed_forward(rows_of(states, places), rows_of(self._attended(states, packing), places))

    def _attended(self, states: Tensor, packing: Packing | None) -> Tensor:
        split = self.query_key_value(self.attention_norm(states))
        split = split if packing is None else packing.unpack(split)
        batch, length, width = split.shape
        heads = split.view(batch, length, 3, self.heads, width // (3 * self.heads))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, width // 3)
        return attended if packing is None else packing.pack(attended)

    def _feed_forward(self, states: Tensor, attended: Tensor) -> Tensor:
        states = states + self.dropout(self.attention_output(attended))
        hidden = self.contract(F.gelu(self.expand(self.feed_forward_norm(states))))
        return states + self.dropout(hidden)

"""The causal history encoder: events in, one state per number of visible events out."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from recpo.errors import RecpoError
from recpo.policies.layers import ByteDropout, HSTUBlock, Packing, SASRecBlock, time_gap_buckets
from recpo.types import Histories


class HistoryEncoder(nn.Module):
    """Sums item vector, position and feedback level of every event and runs causal blocks over them.

    State ``v`` is what is known after the first ``v`` events: state 0 is a learned start state, state v > 0 the output
    at event v - 1. It depends on no later event and, histories being padded on the right, on no padding.

    Args:
        dim: d.
        blocks: "sasrec" or "hstu" (see ``recpo.policies.layers``).
        layers: number of blocks.
        heads: attention heads per block.
        max_history: the most events of a history.
        dropout: probability, on the summed inputs and in the blocks.
        feedback_levels: number of feedback levels, 0 (unknown) included; 0 = feedback is not an input.
    """

    def __init__(
        self,
        dim: int,
        *,
        blocks: Literal["sasrec", "hstu"],
        layers: int,
        heads: int,
        max_history: int,
        dropout: float,
        feedback_levels: int,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise RecpoError(f"dim must be divisible by heads, got {dim} and {heads}")
        self.reads_time = blocks == "hstu"
        # item vectors start as short as positions are and have to outweigh them: twice the progress per step (measured)
        self.item_scale = dim**0.5
        self.position = nn.Parameter(torch.empty(max_history, dim))
        self.start = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.start, std=0.02)
        self.feedback = nn.Embedding(feedback_levels, dim, padding_idx=0) if feedback_levels else None
        if self.feedback is not None:
            nn.init.normal_(self.feedback.weight[1:], std=0.02)
        self.dropout = ByteDropout(dropout)
        self.blocks = nn.ModuleList(
            SASRecBlock(dim, heads, dropout=dropout)
            if blocks == "sasrec"
            else HSTUBlock(dim, heads, max_history=max_history, dropout=dropout)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(
        self,
        items: Tensor,
        feedback: Tensor | None = None,
        timestamps: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """States ``[B, H + 1, d]`` of histories.

        Args:
            items: ``[B, H, d]`` item vectors.
            feedback: ``[B, H]`` feedback levels; None = unknown.
            timestamps: ``[B, H]`` milliseconds; HSTU blocks read them, None = no time bias.
            lengths: ``[B]`` numbers of events; SASRec blocks then skip the padding, HSTU blocks do not.
        """
        packing = self._packing(items, lengths)
        states, gaps = self._embedded(items, feedback, timestamps, packing)
        for block in self.blocks:
            states = block(states, gaps, packing)
        states = states if packing is None else packing.unpack(states)
        return self.norm(torch.cat([self.start.expand(items.shape[0], 1, -1), states], 1))

    def last(self, items: Tensor, feedback: Tensor | None, timestamps: Tensor | None, lengths: Tensor) -> Tensor:
        """The state after the whole history, ``[B, d]``: row ``lengths`` of ``forward``, at less cost."""
        packing = self._packing(items, lengths)
        states, gaps = self._embedded(items, feedback, timestamps, packing)
        for block in self.blocks[:-1]:
            states = block(states, gaps, packing)
        behind = torch.arange(items.shape[0], device=lengths.device) * items.shape[1] + lengths
        final = self.blocks[-1]
        assert isinstance(final, SASRecBlock | HSTUBlock)
        last = final.at(states, ((behind if packing is None else lengths.cumsum(0)) - 1).clamp_min(0), gaps, packing)
        return self.norm(torch.where(lengths[:, None] > 0, last, self.start))

    def _packing(self, items: Tensor, lengths: Tensor | None) -> Packing | None:
        return None if self.reads_time or lengths is None else Packing.of(lengths, items.shape[1])

    def _embedded(
        self, items: Tensor, feedback: Tensor | None, timestamps: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the first block reads, and the buckets of the time between events."""
        states = items * self.item_scale + self.position[: items.shape[1]]
        if self.feedback is not None and feedback is not None:
            states = states + self.feedback(feedback)
        gaps = time_gap_buckets(timestamps) if self.reads_time and timestamps is not None else None
        return self.dropout(states if packing is None else packing.pack(states)), gaps


def readable_ids(histories: Histories, max_history: int) -> Tensor:
    """The item ids ``[B, H]`` of histories that an encoder of ``max_history`` positions can read.

    Raises:
        RecpoError: they are longer.
    """
    length = histories.item_ids.shape[1]
    if length > max_history:
        raise RecpoError(
            f"a history has {length} events and the policy reads {max_history}: keep the most recent ones, "
            f"or build the policy with max_history={length}"
        )
    return histories.item_ids

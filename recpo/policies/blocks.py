"""Blocks of the causal encoders, over histories with or without padding, and their parts.

State-dict keys of ``Linear`` and ``ByteDropout`` equal those of the corresponding classes in ``torch.nn``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import validate_range
from recpo.base.types import EventIndices
from recpo.ops import kernels

# Time gaps in milliseconds are grouped by their base-2 logarithm: 2^42 ms is 139 years.
TIME_BUCKETS = 44
# If at least this share of the places holds an event, packing costs more than the padding.
_NOT_WORTH_IT = 0.75


class Linear(nn.Linear):
    """``torch.nn.Linear`` through ``recpo.ops.kernels.linear``."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return kernels.linear(inputs, self.weight, self.bias)


class ByteDropout(nn.Module):
    """Inverted dropout that uses one random byte per element.

    See ``recpo.ops.kernels``. The rate is rounded to a multiple of 1/256; a rate above 0 becomes at least 1/256 and at
    most 255/256. Surviving elements are scaled by the reciprocal of the rounded keep rate, so the expectation does not
    change. On other devices this is ``torch.nn.functional.dropout`` with the rounded rate.

    Args:
        rate: probability that an element is set to zero, in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        validate_range(0.0 <= rate < 1.0, "dropout", "must be in [0, 1)", rate)
        self.threshold = min(max(round(rate * 256), 1), 255) if rate else 0

    def forward(self, values: Tensor) -> Tensor:
        """``values`` in evaluation mode; in training mode, with elements dropped."""
        if not self.training or self.threshold == 0:
            return values
        return kernels.dropout(values, self.threshold)

    def extra_repr(self) -> str:
        """The text that ``repr`` shows."""
        return f"rate={self.threshold / 256:g}"


class Packing(NamedTuple):
    """The places of the events in right-padded histories.

    Most users have few events, and a batch is as wide as its longest history, so most of it is padding: 86 % on Amazon
    Beauty with 50 events, where an encoder that skips the padding is several times faster.

    Attributes:
        places: ``[N]``, the places of the events in the flattened ``[B, H]``, behind them places of padding up to a
            multiple (``kernels.row_multiple``): what is computed for those is never read.
        batch: B.
        length: H.
    """

    places: Tensor
    batch: int
    length: int

    @classmethod
    def of(cls, lengths: Tensor, length: int, indices: EventIndices | None = None) -> Self | None:
        """The packing of histories with ``lengths [B]`` events, padded to ``length``; None if it would not be faster.

        ``indices`` are those of the events if they were computed before.

        An exported program keeps the padding, because its shapes must not depend on values.
        """
        if torch.compiler.is_exporting():
            return None
        if indices is None or indices.width != length:
            indices = event_indices(lengths, length)
        return cls(indices.indices, len(lengths), length) if len(indices.indices) else None

    def pack(self, padded: Tensor) -> Tensor:
        """``[B, H, d]`` to ``[N, d]``."""
        return kernels.take_rows(padded, self.places)

    def unpack(self, packed: Tensor) -> Tensor:
        """``[N, d]`` to ``[B, H, d]``; at padded places zero, or a value that is never read."""
        padded = packed.new_zeros(self.batch * self.length, packed.shape[-1])
        return padded.index_copy(0, self.places, packed).view(self.batch, self.length, -1)


def event_indices(lengths: Tensor, width: int) -> EventIndices:
    """The indices of the events of histories with ``lengths [B]`` events, padded to ``width``."""
    is_event = (torch.arange(width, device=lengths.device) < lengths[:, None]).reshape(-1)
    indices = is_event.nonzero().squeeze(1)
    if len(indices) >= _NOT_WORTH_IT * len(is_event):
        return EventIndices(indices[:0], width)
    missing = -len(indices) % kernels.row_multiple(len(indices))
    if missing:
        indices = torch.cat([indices, (~is_event).nonzero().squeeze(1)[:missing]])
    return EventIndices(indices, width)


class Block(nn.Module, ABC):
    """One causal layer of a ``HistoryEncoder``. A block of your own is a subclass.

    An encoder creates ``layers`` blocks and calls them in order. What the interface asks for:

    - The constructor takes ``dim``, ``heads``, ``max_history`` and ``dropout``, in this order. Parameters behind these
      are options of the block itself; they need defaults, and a configuration sets them as ``init_args`` of ``block``.
    - ``forward`` maps ``[B, H, d]`` to ``[B, H, d]``, for every H up to ``max_history``. Row j must depend on rows
      <= j only: slates are scored from all states of one pass, and histories are padded on the right.
    - ``recpo export`` traces ``forward`` with symbolic B, so its shapes and branches must not depend on values or on B.

    Args:
        dim: d, width of the states.
        heads: attention heads of the encoder; ``dim`` is divisible by it.
        max_history: the largest H.
        dropout: dropout probability.

    Attributes:
        reads_time: ``forward`` reads the time between events, so batches and served histories need timestamps.
        skips_padding: ``forward`` takes ``packing``: with it, only the events, ``[N, d]``.
    """

    reads_time: ClassVar[bool] = False
    skips_padding: ClassVar[bool] = False

    @abstractmethod
    def forward(self, states: Tensor, time_gaps: Tensor | None = None, packing: Packing | None = None) -> Tensor:
        """States after this layer, in the shape of ``states``.

        Args:
            states: ``[B, H, d]``; with ``packing`` the events only, ``[N, d]``.
            time_gaps: ``[B, H, H]`` int64, bucket of the time from event k (last axis) to event j
                (``time_gap_buckets``). None without ``reads_time``, and for histories without timestamps.
            packing: places of the events. None without ``skips_padding`` in all blocks, and where it would not pay.
        """

    def at(
        self, states: Tensor, places: Tensor, time_gaps: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Rows ``places [B]`` of the flattened result of ``forward``: ``[B, d]``.

        The last block computes no other row when only the state after the whole history is needed. Override it where
        that saves time.
        """
        return kernels.take_rows(self(states, time_gaps, packing), places)


BlockFactory = Callable[[int, int, int, float], Block]
"""A class derived from ``Block``, or ``functools.partial`` of one with its own options."""


class SASRecBlock(Block):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``, each with dropout on its output.

    Differences from the paper: both sub-layers are pre-normalized; the feed-forward layer is ``expansion`` times wider
    and uses GELU; attention weights are not dropped, because the fused CPU kernels have no dropout.

    Args:
        dim: d, divisible by ``heads``.
        heads: attention heads.
        max_history: not used.
        dropout: dropout probability on the output of each sub-layer.
        expansion: width of the feed-forward layer relative to d.
    """

    skips_padding = True

    def __init__(self, dim: int, heads: int, max_history: int, dropout: float, expansion: int = 4) -> None:
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
        """Maps ``[B, H, d]`` to ``[B, H, d]``. Position j depends on positions <= j. ``time_gaps`` are not used.

        With ``packing`` it maps only the events, ``[N, d]`` to ``[N, d]``; only the attention sees padding.
        """
        return self._feed_forward(states, self._attended(states, packing))

    def at(
        self, states: Tensor, places: Tensor, time_gaps: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Rows ``places [B]`` of the flattened result of ``forward``: ``[B, d]``, without the cost of the rest."""
        return self._feed_forward(
            kernels.take_rows(states, places), kernels.take_rows(self._attended(states, packing), places)
        )

    def _attended(self, states: Tensor, packing: Packing | None) -> Tensor:
        split = self.query_key_value(self.attention_norm(states))
        split = split if packing is None else packing.unpack(split)
        batch, length, width = split.shape
        heads = split.view(batch, length, 3, self.heads, width // (3 * self.heads))
        # this way their gradients are put together where the projection reads them, without another copy
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, width // 3)
        return attended if packing is None else packing.pack(attended)

    def _feed_forward(self, states: Tensor, attended: Tensor) -> Tensor:
        states = states + self.dropout(self.attention_output(attended))
        hidden = self.contract(F.gelu(self.expand(self.feed_forward_norm(states))))
        return states + self.dropout(hidden)


class HSTUBlock(Block):
    """``x + W (norm(SiLU(q kᵀ + bias) v) ⊙ u)`` with ``u, v, q, k = SiLU(W' norm(x))``.

    The attention weights are pointwise. They do not sum to one, so the intensity of an interest is preserved. The bias
    has a part for the relative position and, if timestamps are given, a part for the logarithm of the time between the
    events.

    Difference from the paper: the sum over events is divided by the number of visible events of the position and not by
    the maximum length, so that the amount of padding does not matter.

    Args:
        dim: d, divisible by ``heads``.
        heads: attention heads.
        max_history: the largest relative position.
        dropout: dropout probability on the output.
    """

    reads_time = True

    def __init__(self, dim: int, heads: int, max_history: int, dropout: float) -> None:
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
        """Maps ``[B, H, d]`` to ``[B, H, d]``. Position j depends on positions <= j.

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
        """Rows ``places [B]`` of the flattened result of ``forward``: ``[B, d]``, without the cost of the rest."""
        return self._gated(*(kernels.take_rows(part, places) for part in (states, *self._attended(states, time_gaps))))

    def _attended(self, states: Tensor, time_gaps: Tensor | None) -> tuple[Tensor, Tensor]:
        """The attention output of every position, and its gate, ``[B, H, d]`` each."""
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
    """Buckets ``floor(log2(1 + gap))`` of the milliseconds between events, ``[B, H, H]``; 0 for negative gaps."""
    return logarithmic_buckets(timestamps[:, :, None] - timestamps[:, None, :])


def logarithmic_buckets(gaps: Tensor) -> Tensor:
    """``floor(log2(1 + gap))``, at most ``TIME_BUCKETS - 1``; 0 for negative gaps."""
    # in floating point: ONNX Runtime clips int64 incorrectly from 2^31 on; adding a half keeps powers of 2 in place
    return (gaps.double().clamp_min(0) + 1.5).log2().long().clamp_max(TIME_BUCKETS - 1)

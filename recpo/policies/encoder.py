"""The causal history encoder: events in, one state per number of visible events out; its blocks and layers.

State-dict keys of ``Linear`` and ``ByteDropout`` equal those of the corresponding classes in ``torch.nn``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import RecpoError
from recpo.base.feedback import GRADES, HIGHEST
from recpo.base.types import EventPlaces, Histories
from recpo.ops import kernels
from recpo.ops.linear_algebra import solve_by_cholesky, solve_positive_definite

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
        if not 0.0 <= rate < 1.0:
            raise RecpoError(f"a dropout rate lies in [0, 1), got {rate}", code="out_of_range", field="dropout")
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
    def of(cls, lengths: Tensor, length: int, given: EventPlaces | None = None) -> Packing | None:
        """The packing of histories with ``lengths [B]`` events, padded to ``length``; None if it would not be faster.

        ``given`` are the places of the events where they were counted before.

        An exported program keeps the padding, because its shapes must not depend on values.
        """
        if torch.compiler.is_exporting():
            return None
        if given is None or given.width != length:
            given = event_places(lengths, length)
        return cls(given.places, len(lengths), length) if len(given.places) else None

    def pack(self, padded: Tensor) -> Tensor:
        """``[B, H, d]`` to ``[N, d]``."""
        return kernels.take_rows(padded, self.places)

    def unpack(self, packed: Tensor) -> Tensor:
        """``[N, d]`` to ``[B, H, d]``; at padded places zero, or a value that is never read."""
        padded = packed.new_zeros(self.batch * self.length, packed.shape[-1])
        return padded.index_copy(0, self.places, packed).view(self.batch, self.length, -1)


def event_places(lengths: Tensor, width: int) -> EventPlaces:
    """The places of the events of histories with ``lengths [B]`` events, padded to ``width``."""
    is_event = (torch.arange(width, device=lengths.device) < lengths[:, None]).reshape(-1)
    places = is_event.nonzero().squeeze(1)
    if len(places) >= _NOT_WORTH_IT * len(is_event):
        return EventPlaces(places[:0], width)
    missing = -len(places) % kernels.row_multiple(len(places))
    if missing:
        places = torch.cat([places, (~is_event).nonzero().squeeze(1)[:missing]])
    return EventPlaces(places, width)


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
    # in floating point: ONNX Runtime clips int64 incorrectly from 2^31 on; adding a half keeps powers of 2 in place
    gaps = (timestamps[:, :, None] - timestamps[:, None, :]).double().clamp_min(0)
    return (gaps + 1.5).log2().long().clamp_max(TIME_BUCKETS - 1)


class Profile(nn.Module):
    """Long-term taste: the mean over all events of item vectors weighed by their feedback, through a small network.

    ``MLP(sum_{j < v} gain[feedback_j] * item_j / (v + 5))``, with products by coordinate. Attention sums an item and
    its feedback, so it takes layers to weigh one by the other; here they are multiplied, and the cost is linear in the
    history. The last layer starts at zero: an untrained profile adds nothing.

    Args:
        dim: d.
        feedback_levels: number of feedback levels; 0 = all events weigh alike.
    """

    #: events of prior weight, which keep the profile of a short history small
    prior_events = 5.0

    def __init__(self, dim: int, feedback_levels: int) -> None:
        super().__init__()
        self.gain = nn.Embedding(max(1, feedback_levels), dim)
        nn.init.normal_(self.gain.weight, std=0.3)
        self.expand, self.contract = Linear(dim, dim), Linear(dim, dim)
        nn.init.zeros_(self.contract.weight)
        nn.init.zeros_(self.contract.bias)

    def forward(self, items: Tensor, feedback: Tensor | None) -> Tensor:
        """Profiles ``[B, H + 1, d]`` after every number of events, of scaled item vectors ``[B, H, d]``."""
        total = F.pad(self._weighed(items, feedback).cumsum(1), (0, 0, 1, 0))
        counts = torch.arange(items.shape[1] + 1, device=items.device)[:, None]
        return self._transformed(total, counts)

    def last(self, items: Tensor, feedback: Tensor | None, lengths: Tensor) -> Tensor:
        """The profile of the whole history, ``[B, d]``: row ``lengths`` of ``forward``; padding has zero vectors."""
        return self._transformed(self._weighed(items, feedback).sum(1), lengths[:, None])

    def _weighed(self, items: Tensor, feedback: Tensor | None) -> Tensor:
        if feedback is None or self.gain.num_embeddings == 1:
            return items * self.gain.weight[0]
        return items * self.gain(feedback)

    def _transformed(self, total: Tensor, counts: Tensor) -> Tensor:
        transformed: Tensor = self.contract(F.gelu(self.expand(total / (counts + self.prior_events))))
        return transformed


class FoldIn(nn.Module):
    """Long-term taste: a ridge regression of every event's feedback on its item vector, through one linear layer.

    With ``a_j = [P item_j, 1]``, a learned grade ``t`` and weight ``w`` per feedback level, and a learned ridge:
    ``C argmin_u [sum_{j < v} w_j (t_j - a_j · u)^2 + sum_k ridge_k u_k^2]``, which is how a factorization folds a user
    in; here the factors are learned with the rest of the policy. The mean of a ``Profile`` cannot tell an item that the
    user liked from one that everybody likes; a regression explains the feedback with all items at once. The cost is
    linear in the history. ``C`` starts at zero: an untrained fold-in adds nothing.

    Args:
        dim: d.
        rank: width of ``P item``.
        feedback_levels: number of feedback levels.
    """

    def __init__(self, dim: int, rank: int, feedback_levels: int) -> None:
        super().__init__()
        # of so few columns the kernels of ``Linear`` are ten times as slow
        self.project, self.contract = nn.Linear(dim, rank), nn.Linear(rank + 1, dim)
        nn.init.normal_(self.project.weight, std=dim**-0.5)
        nn.init.zeros_(self.contract.weight)
        nn.init.zeros_(self.contract.bias)
        grades = torch.tensor(GRADES).nan_to_num(0.0) - 0.5
        self.grade = nn.Parameter(grades[:feedback_levels].clone())
        # nothing is known of the first level
        self.log_weight = nn.Parameter(torch.zeros(feedback_levels - 1))
        self.log_ridge = nn.Parameter(torch.zeros(rank + 1))

    def forward(self, items: Tensor, feedback: Tensor) -> Tensor:
        """What is known after every number of events, ``[B, H + 1, d]``, of scaled item vectors ``[B, H, d]``."""
        with torch.autocast(items.device.type, enabled=False):
            return self._after_every_event(*self._rows(items, feedback))

    def _after_every_event(self, rows: Tensor, targets: Tensor) -> Tensor:
        left = F.pad((rows[..., :, None] * rows[..., None, :]).cumsum(1), (0, 0, 0, 0, 1, 0))
        right = F.pad((rows * targets).cumsum(1), (0, 0, 1, 0))
        return self._solved(left.flatten(0, 1), right.flatten(0, 1)).view(*right.shape[:2], -1)

    def last(self, items: Tensor, feedback: Tensor) -> Tensor:
        """The same after the whole history, ``[B, d]``; padding has feedback level 0 and counts nothing."""
        with torch.autocast(items.device.type, enabled=False):
            rows, targets = self._rows(items, feedback)
            transposed = rows.transpose(1, 2)
            return self._solved(transposed @ rows, (transposed @ targets).squeeze(-1))

    def _rows(self, items: Tensor, feedback: Tensor) -> tuple[Tensor, Tensor]:
        """``sqrt(w) a`` and ``sqrt(w) t`` of the events."""
        weight = F.pad((0.5 * self.log_weight).exp(), (1, 0))[feedback][..., None]
        rows = F.pad(self.project(items.to(weight.dtype)), (0, 1), value=1.0)
        return rows * weight, self.grade[feedback][..., None] * weight

    def _solved(self, left: Tensor, right: Tensor) -> Tensor:
        solve = solve_positive_definite if torch.compiler.is_exporting() else solve_by_cholesky
        users = solve(left + self.log_ridge.exp().diag(), right)
        folded: Tensor = self.contract(users)
        return folded


class HistoryEncoder(nn.Module):
    """Sums item vector, position, feedback level and further parts of every event and runs causal blocks over them.

    State ``v`` is what is known after the first ``v`` events: state 0 is a learned start state, state v > 0 the output
    at event v - 1. It depends on no later event and, histories being padded on the right, on no padding.

    The blocks may read only the last ``attention_length`` events of a longer history, and a profile all of them: then
    the cost of a long history is that of a short one, and only the state after all of it is computed.

    Args:
        dim: d.
        block: class of the blocks, derived from ``Block``.
        layers: number of blocks.
        heads: attention heads per block.
        max_history: the most events of a history.
        dropout: probability, on the summed inputs and in the blocks.
        feedback_levels: number of feedback levels, 0 (unknown) included; 0 = feedback is not an input.
        attention_length: the most events that the blocks read; None = ``max_history``, which caps it.
        profile: add a ``Profile`` of all events to every state.
        fold_in: rank of a ``FoldIn`` of all events to add to every state; 0 = none.
    """

    def __init__(
        self,
        dim: int,
        *,
        block: BlockFactory = SASRecBlock,
        layers: int,
        heads: int,
        max_history: int,
        dropout: float,
        feedback_levels: int,
        attention_length: int | None = None,
        profile: bool = False,
        fold_in: int = 0,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise RecpoError(f"dim must be divisible by heads, got {dim} and {heads}", code="mismatch", field="heads")
        if attention_length is not None and attention_length < 1:
            raise RecpoError(
                f"attention_length must be at least 1, got {attention_length}",
                code="out_of_range",
                field="attention_length",
            )
        if feedback_levels != 0 and feedback_levels <= HIGHEST:
            raise RecpoError(
                f"policy.feedback_levels must be 0 (feedback is not read) or at least {HIGHEST + 1} (prepared data has "
                f"the levels 0 to {HIGHEST}), got {feedback_levels}",
                code="out_of_range",
                field="policy.feedback_levels",
            )
        if fold_in < 0 or (fold_in and feedback_levels < 2):
            raise RecpoError(
                f"fold_in is {fold_in} and feedback_levels {feedback_levels}: a fold-in is a regression of feedback, "
                "so its rank is above 0 only with feedback_levels of at least 2; 0 = none",
                code="out_of_range",
                field="fold_in",
            )
        self.attention_length = max_history if attention_length is None else min(attention_length, max_history)
        # item vectors start as short as positions are and have to outweigh them: twice the progress per step (measured)
        self.item_scale = dim**0.5
        self.position = nn.Parameter(torch.empty(self.attention_length, dim))
        self.start = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.start, std=0.02)
        self.feedback = nn.Embedding(feedback_levels, dim, padding_idx=0) if feedback_levels else None
        if self.feedback is not None:
            nn.init.normal_(self.feedback.weight[1:], std=0.02)
        self.dropout = ByteDropout(dropout)
        self.blocks = nn.ModuleList(block(dim, heads, self.attention_length, dropout) for _ in range(layers))
        made = [one for one in self.blocks if isinstance(one, Block)]
        if not made or len(made) < layers:
            raise RecpoError(
                f"an encoder has at least one block, each derived from recpo.Block; got {list(self.blocks)}",
                code="wrong_class" if layers > 0 else "out_of_range",
                field="block" if layers > 0 else "layers",
            )
        self.reads_time = any(one.reads_time for one in made)
        self.skips_padding = all(one.skips_padding for one in made)
        self.norm = nn.LayerNorm(dim)
        self.profile = Profile(dim, feedback_levels) if profile else None
        self.fold_in = FoldIn(dim, fold_in, feedback_levels) if fold_in else None

    def forward(
        self,
        items: Tensor,
        feedback: Tensor | None = None,
        timestamps: Tensor | None = None,
        lengths: Tensor | None = None,
        parts: Tensor | None = None,
        places: EventPlaces | None = None,
    ) -> Tensor:
        """States ``[B, H + 1, d]`` of histories.

        Args:
            items: ``[B, H, d]`` item vectors.
            feedback: ``[B, H]`` feedback levels; None = unknown.
            timestamps: ``[B, H]`` milliseconds, for blocks with ``reads_time``; None = unknown.
            lengths: ``[B]`` numbers of events; blocks with ``skips_padding`` then skip the padding.
            parts: ``[B, min(H, attention_length), d]``, what else is known of the events that the blocks read
                (``recpo.policies.feature_policy``); None = nothing.
            places: of the events that the blocks read, where they were counted before (``Histories.places``).

        Raises:
            RecpoError: H exceeds ``attention_length`` and ``lengths`` are missing. With them, only the rows 0 and
                ``lengths`` of a longer history are computed, and the others are nan.
        """
        if items.shape[1] > self.attention_length:
            return self._last_only(items, feedback, timestamps, lengths, parts, places)
        packing = self._packing(items, lengths, places)
        states, gaps = self._embedded(items, feedback, timestamps, packing, parts)
        for block in self.blocks:
            states = block(states, gaps, packing)
        states = states if packing is None else packing.unpack(states)
        states = self.norm(torch.cat([self.start.expand(items.shape[0], 1, -1), states], 1))
        scaled = items * self.item_scale
        states = states if self.profile is None else states + self.profile(scaled, feedback)
        return states if self.fold_in is None or feedback is None else states + self.fold_in(scaled, feedback)

    def last(
        self,
        items: Tensor,
        feedback: Tensor | None,
        timestamps: Tensor | None,
        lengths: Tensor,
        parts: Tensor | None = None,
        places: EventPlaces | None = None,
    ) -> Tensor:
        """The state after the whole history, ``[B, d]``: row ``lengths`` of ``forward``, at less cost."""
        recent = self._recent(items, feedback, timestamps, lengths)
        state = self._last_attended(*recent, parts, places)
        scaled = items * self.item_scale
        state = state if self.profile is None else state + self.profile.last(scaled, feedback, lengths)
        return state if self.fold_in is None or feedback is None else state + self.fold_in.last(scaled, feedback)

    def _last_only(
        self,
        items: Tensor,
        feedback: Tensor | None,
        timestamps: Tensor | None,
        lengths: Tensor | None,
        parts: Tensor | None,
        places: EventPlaces | None,
    ) -> Tensor:
        if lengths is None:
            raise RecpoError(
                f"the blocks read {self.attention_length} events, and of histories of {items.shape[1]} only the last "
                "state is computed: that takes their lengths",
                code="missing_option",
                field="lengths",
            )
        last = self.last(items, feedback, timestamps, lengths, parts, places)
        first = self.norm(self.start)
        if self.profile is not None:
            first = first + self.profile.last(items.new_zeros(1, 1, items.shape[2]), None, lengths.new_zeros(1))
        if self.fold_in is not None and feedback is not None:
            first = first + self.fold_in.last(items.new_zeros(1, 1, items.shape[2]), feedback.new_zeros(1, 1))[0]
        # state 0 is that of padded positions: with nan there, their gradients would be nan though they are masked
        states = torch.cat([first.expand(items.shape[0], 1, -1), torch.full_like(items, torch.nan)], 1)
        return states.scatter(1, lengths[:, None, None].expand(-1, 1, items.shape[2]), last[:, None])

    def _recent(
        self, items: Tensor, feedback: Tensor | None, timestamps: Tensor | None, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """The last ``attention_length`` events of every history, padded on the right, and how many they are."""
        kept = self.attention_length
        if items.shape[1] <= kept:
            return items, feedback, timestamps, lengths
        place = most_recent_places(lengths, kept)
        near = items.gather(1, place[..., None].expand(-1, -1, items.shape[2]))
        levels, times = (None if column is None else column.gather(1, place) for column in (feedback, timestamps))
        return near, levels, times, lengths.clamp_max(kept)

    def _last_attended(
        self,
        items: Tensor,
        feedback: Tensor | None,
        timestamps: Tensor | None,
        lengths: Tensor,
        parts: Tensor | None,
        places: EventPlaces | None,
    ) -> Tensor:
        """The blocks' state after the whole of a history that they can read, ``[B, d]``."""
        packing = self._packing(items, lengths, places)
        states, gaps = self._embedded(items, feedback, timestamps, packing, parts)
        for block in self.blocks[:-1]:
            states = block(states, gaps, packing)
        behind = torch.arange(items.shape[0], device=lengths.device) * items.shape[1] + lengths
        final = self.blocks[-1]
        assert isinstance(final, Block)
        last = final.at(states, ((behind if packing is None else lengths.cumsum(0)) - 1).clamp_min(0), gaps, packing)
        return self.norm(torch.where(lengths[:, None] > 0, last, self.start))

    def _packing(self, items: Tensor, lengths: Tensor | None, places: EventPlaces | None) -> Packing | None:
        return None if not self.skips_padding or lengths is None else Packing.of(lengths, items.shape[1], places)

    def _embedded(
        self,
        items: Tensor,
        feedback: Tensor | None,
        timestamps: Tensor | None,
        packing: Packing | None,
        parts: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the first block reads, and the buckets of the time between events."""
        states = items * self.item_scale + self.position[: items.shape[1]]
        states = states if parts is None else states + parts
        if self.feedback is not None and feedback is not None:
            states = states + self.feedback(feedback)
        gaps = time_gap_buckets(timestamps) if self.reads_time and timestamps is not None else None
        return self.dropout(states if packing is None else packing.pack(states)), gaps


def most_recent_places(lengths: Tensor, size: int) -> Tensor:
    """Where the last ``size`` events of every history stand, ``[B, size]``; of a shorter one its first places."""
    return (lengths - size).clamp_min(0)[:, None] + torch.arange(size, device=lengths.device)


def readable_ids(histories: Histories, max_history: int) -> Tensor:
    """The item ids ``[B, H]`` of histories that an encoder of ``max_history`` positions can read.

    Raises:
        RecpoError: they are longer.
    """
    length = histories.item_ids.shape[1]
    if length > max_history:
        raise RecpoError(
            f"a history has {length} events and the policy reads {max_history}: keep the most recent ones, "
            f"or build the policy with max_history={length}",
            code="out_of_range",
            field="max_history",
        )
    return histories.item_ids

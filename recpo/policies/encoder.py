"""The causal history encoder: events in, one state per number of visible events out."""

# Annotations are not postponed: the command line reads the types of options from the fields of dataclasses.

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import NonNegativeInt, PositiveInt, RecpoError, validate_ranges
from recpo.base.feedback import GRADES, HIGHEST
from recpo.base.types import Histories
from recpo.ops import kernels
from recpo.ops.small_systems import solve_positive_definite
from recpo.policies.blocks import Block, BlockFactory, ByteDropout, Linear, Packing, SASRecBlock, time_gap_buckets


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
        with kernels.without_autocast(items.device):
            rows, targets = self._rows(items, feedback)
            left = F.pad((rows[..., :, None] * rows[..., None, :]).cumsum(1), (0, 0, 0, 0, 1, 0))
            right = F.pad((rows * targets).cumsum(1), (0, 0, 1, 0))
            return self._solved(left.flatten(0, 1), right.flatten(0, 1)).view(*right.shape[:2], -1)

    def last(self, items: Tensor, feedback: Tensor) -> Tensor:
        """The same after the whole history, ``[B, d]``; padding has feedback level 0 and counts nothing."""
        with kernels.without_autocast(items.device):
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


def solve_by_cholesky(matrix: Tensor, right: Tensor) -> Tensor:
    """Equal to ``solve_positive_definite``, several times as fast forward and backward; not for exported programs.

    With ``v = matrix^-1 dx``, the gradient of the matrix is ``-v xᵀ`` and the gradient of the right side is ``v``. A
    matrix that is not positive definite gives nan.
    """
    solution: Tensor = _CholeskySolve.apply(matrix, right)
    return solution


class _CholeskySolve(torch.autograd.Function):
    """Keeps the factor of the forward pass. Autograd through ``torch.linalg.cholesky`` takes three times as long."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor) -> Tensor:
        factor, _ = torch.linalg.cholesky_ex(matrix)
        solution = torch.cholesky_solve(right[..., None], factor)
        ctx.save_for_backward(factor, solution)
        return solution[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        factor, solution = ctx.saved_tensors
        adjoint = torch.cholesky_solve(gradients[0][..., None], factor)
        return -adjoint @ solution.transpose(-2, -1), adjoint[..., 0]


@dataclass(eq=False, repr=False, kw_only=True)
class EncoderOptions:
    """The options of a history encoder. A policy with an encoder has them as its own."""

    dim: PositiveInt = 64
    """width d of item vectors and states"""
    block: BlockFactory = SASRecBlock
    """class of the encoder's blocks: ``SASRecBlock`` (transformer, arXiv 1808.09781), ``HSTUBlock`` (pointwise
    attention that also reads the time between events, arXiv 2402.17152), or your own subclass of ``Block``"""
    layers: int = 2
    """number of blocks"""
    heads: PositiveInt = 2
    """attention heads per block; must divide ``dim``"""
    max_history: PositiveInt = 50
    """H, the number of most recent events that the policy reads"""
    dropout: float = 0.2
    """dropout probability, on the summed inputs and in the blocks"""
    feedback_levels: int = HIGHEST + 1
    """number of levels of ``Histories.feedback`` that the encoder reads, including 0 (unknown); 0 = none"""
    profile: bool = False
    """add to every state a profile of all events (``recpo.policies.encoder.Profile``). It represents long-term taste at
    a cost that is linear in the history."""
    fold_in: NonNegativeInt = 0
    """add to every state a ridge regression of all feedback on this many projections of the item vectors
    (``recpo.policies.encoder.FoldIn``), as a factorization folds users in; 0 = none"""

    def __post_init__(self) -> None:
        """Validates the ranges of the options, and of those that a subclass adds."""
        validate_ranges(self, "policy.")


class HistoryEncoder(nn.Module):
    """Sums item vector, position, feedback level and further parts of every event and runs causal blocks over them.

    State ``v`` is what is known after the first ``v`` events: state 0 is a learned start state, state v > 0 the output
    at event v - 1. It depends on no later event and, histories being padded on the right, on no padding.

    The blocks may read only the last ``attention_length`` events of a longer history, and a profile all of them: then
    the cost of a long history is that of a short one, and only the state after all of it is computed.

    Args:
        options: the options of the policy that it belongs to.
        attention_length: number of most recent events that the blocks read; None = ``max_history``, which caps it.

    Raises:
        RecpoError: options that contradict each other.
    """

    def __init__(self, options: EncoderOptions, *, attention_length: int | None = None) -> None:
        super().__init__()
        dim, heads, layers, max_history = options.dim, options.heads, options.layers, options.max_history
        feedback_levels, block, dropout = options.feedback_levels, options.block, options.dropout
        if dim % heads:
            raise RecpoError(
                f"policy.dim must be divisible by policy.heads, got {dim} and {heads}",
                code="mismatch",
                field="policy.heads",
            )
        if feedback_levels != 0 and feedback_levels <= HIGHEST:
            raise RecpoError(
                f"policy.feedback_levels must be 0 (feedback is not read) or at least {HIGHEST + 1} (prepared data has "
                f"the levels 0 to {HIGHEST}), got {feedback_levels}",
                code="out_of_range",
                field="policy.feedback_levels",
            )
        if options.fold_in and feedback_levels < 2:
            raise RecpoError(
                f"policy.fold_in is {options.fold_in} and feedback_levels {feedback_levels}: a fold-in is a "
                "regression of feedback, so its rank is above 0 only with feedback_levels of at least 2; 0 = none",
                code="out_of_range",
                field="policy.fold_in",
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
                field="policy.block" if layers > 0 else "policy.layers",
            )
        self.reads_time = any(one.reads_time for one in made)
        self.skips_padding = all(one.skips_padding for one in made)
        self.norm = nn.LayerNorm(dim)
        self.profile = Profile(dim, feedback_levels) if options.profile else None
        self.fold_in = FoldIn(dim, options.fold_in, feedback_levels) if options.fold_in else None

    def forward(self, items: Tensor, histories: Histories, parts: Tensor | None = None) -> Tensor:
        """States ``[B, H + 1, d]`` of histories. Of those that the blocks cannot read, only rows 0 and ``lengths``.

        The other rows of such histories are nan. Blocks with ``skips_padding`` skip the padding.

        Args:
            items: ``[B, H, d]`` item vectors.
            histories: the histories; blocks with ``reads_time`` read their times, and ``places`` are those of the
                events that the blocks read.
            parts: ``[B, min(H, attention_length), d]``, what else is known of the events that the blocks read
                (``recpo.policies.feature_policy``); None = nothing.
        """
        if items.shape[1] > self.attention_length:
            return self._last_only(items, histories, parts)
        states, gaps, packing = self._embedded(items, histories, parts)
        for block in self.blocks if items.shape[1] else ():
            states = block(states, gaps, packing)
        states = states if packing is None else packing.unpack(states)
        states = self.norm(torch.cat([self.start.expand(items.shape[0], 1, -1), states], 1))
        scaled, feedback = items * self.item_scale, histories.feedback
        states = states if self.profile is None else states + self.profile(scaled, feedback)
        return states if self.fold_in is None or feedback is None else states + self.fold_in(scaled, feedback)

    def last(self, items: Tensor, histories: Histories, parts: Tensor | None = None) -> Tensor:
        """The state after the whole history, ``[B, d]``: row ``lengths`` of ``forward``, at less cost."""
        state = self._last_attended(*self._recent(items, histories), parts)
        scaled, feedback = items * self.item_scale, histories.feedback
        state = state if self.profile is None else state + self.profile.last(scaled, feedback, histories.lengths)
        return state if self.fold_in is None or feedback is None else state + self.fold_in.last(scaled, feedback)

    def _last_only(self, items: Tensor, histories: Histories, parts: Tensor | None) -> Tensor:
        last, lengths, feedback = self.last(items, histories, parts), histories.lengths, histories.feedback
        first = self.norm(self.start)
        if self.profile is not None:
            first = first + self.profile.last(items.new_zeros(1, 1, items.shape[2]), None, lengths.new_zeros(1))
        if self.fold_in is not None and feedback is not None:
            first = first + self.fold_in.last(items.new_zeros(1, 1, items.shape[2]), feedback.new_zeros(1, 1))[0]
        # state 0 is that of padded positions: with nan there, their gradients would be nan though they are masked
        states = torch.cat([first.expand(items.shape[0], 1, -1), torch.full_like(items, torch.nan)], 1)
        return states.scatter(1, lengths[:, None, None].expand(-1, 1, items.shape[2]), last[:, None])

    def _recent(self, items: Tensor, histories: Histories) -> tuple[Tensor, Histories]:
        """The last ``attention_length`` events of every history, padded on the right."""
        kept = self.attention_length
        if items.shape[1] <= kept:
            return items, histories
        # of a shorter history its first places
        place = (histories.lengths - kept).clamp_min(0)[:, None] + torch.arange(kept, device=items.device)
        near = items.gather(1, place[..., None].expand(-1, -1, items.shape[2]))
        return near, histories.recent(kept)._replace(event_indices=histories.event_indices)

    def _last_attended(self, items: Tensor, histories: Histories, parts: Tensor | None) -> Tensor:
        """The blocks' state after the whole of a history that they can read, ``[B, d]``."""
        if not items.shape[1]:  # nobody has an event
            return self.norm(self.start).expand(items.shape[0], -1)
        lengths, (states, gaps, packing) = histories.lengths, self._embedded(items, histories, parts)
        for block in self.blocks[:-1]:
            states = block(states, gaps, packing)
        behind = torch.arange(items.shape[0], device=lengths.device) * items.shape[1] + lengths
        final = self.blocks[-1]
        assert isinstance(final, Block)
        last = final.at(states, ((behind if packing is None else lengths.cumsum(0)) - 1).clamp_min(0), gaps, packing)
        return self.norm(torch.where(lengths[:, None] > 0, last, self.start))

    def _embedded(
        self, items: Tensor, histories: Histories, parts: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Packing | None]:
        """What the first block reads, the buckets of the time between events, and how padding is skipped."""
        states = items * self.item_scale + self.position[: items.shape[1]]
        states = states if parts is None else states + parts
        if self.feedback is not None and histories.feedback is not None:
            states = states + self.feedback(histories.feedback)
        times = histories.timestamps
        gaps = time_gap_buckets(times) if self.reads_time and times is not None else None
        packing = Packing.of(histories.lengths, items.shape[1], histories.event_indices) if self.skips_padding else None
        return self.dropout(states if packing is None else packing.pack(states)), gaps, packing


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

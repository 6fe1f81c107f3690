"""Sampling from a softmax, also over a catalog in blocks of items, and which positions of a batch are scored.

The CPU must wait for an accelerator whenever the size of a result is not known in advance (``nonzero``, ``unique``).
Training therefore plans a batch on the CPU, where the batch is gathered (``recpo.training.planning``). If a batch has
no plan, or a plan for other positions, the same functions run on the device of the batch.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.errors import RecpoError, validate_range
from recpo.base.types import FeedbackBatch, Histories, SamplingOptions, ScoringPlan, Slates
from recpo.ops.kernels import matmul_transposed
from recpo.policies import catalog_search

#: Number of histories that are encoded or folded in at once; every prefix of a history counts as one.
HISTORIES_AT_ONCE: Final = 1 << 10


def validate_sampling(group_size: int, options: SamplingOptions) -> None:
    """Raises if the options do not describe a distribution.

    Raises:
        RecpoError: a group size below 1, a temperature that is not above 0, or a ``top_p`` outside (0, 1].
    """
    validate_range(group_size >= 1, "group_size", "must be at least 1", group_size)
    validate_range(0 < options.temperature < float("inf"), "temperature", "must be above 0", options.temperature)
    validate_range(0 < options.top_p <= 1, "top_p", "must be above 0 and at most 1 (= draw from all)", options.top_p)


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """The distribution restricted to its nucleus: the smallest set of choices with a probability of ``top_p``.

    Holtzman et al., arXiv 1904.09751. Ties go to the smaller index. The most probable choice is always kept.

    Args:
        logp: ``[..., K]`` normalized log-probabilities; -inf for impossible choices.
        top_p: in (0, 1]; 1 returns ``logp`` itself.

    Returns:
        ``[..., K]`` normalized log-probabilities; -inf outside the nucleus.
    """
    if top_p >= 1:
        return logp
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().exp_()
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    outside[..., 0] = False
    kept = ordered.masked_fill(outside, -torch.inf).log_softmax(-1)
    return torch.empty_like(logp).scatter_(-1, order, kept)


def gumbel_like(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Independent standard Gumbel noise in the shape of ``values``, float64.

    Double precision, because the maximum of many float32 draws is cut off at about 16.6.
    """
    return torch.empty_like(values, dtype=torch.float64).exponential_(generator=generator).log_().neg_()


@torch.no_grad()
def draw(
    states: Tensor,
    table: Tensor,
    group_size: int,
    options: SamplingOptions,
) -> tuple[Tensor, Tensor]:
    """Draws ``group_size`` items per state.

    A nucleus (``top_p`` below 1) needs all scores of a context at once, so contexts are then processed in parts of at
    least one context.

    Args:
        states: ``[B, d]``, divided by the temperature of the policy.
        table: ``[V + 1, d]``; row 0 is padding and is never drawn.
        group_size: G.
        options: temperature, nucleus, with or without replacement.

    Returns:
        ids ``[B, G]`` and their log-probabilities ``[B, G]`` under the distribution that the options describe (without
        replacement: the first draw). Both are 0 if fewer than G items can be drawn.

    Raises:
        RecpoError: see ``validate_sampling``.
    """
    validate_sampling(group_size, options)
    states = states.float() / options.temperature
    if options.top_p < 1:
        parts = [
            draw_from_scores(matmul_transposed(part, table[1:].float()), group_size, options)
            for part in states.split(contexts_at_once(len(table)))
        ]
        return torch.cat([ids for ids, _ in parts]), torch.cat([logp for _, logp in parts])
    if options.replacement:
        uniform = torch.rand(len(states), group_size, dtype=torch.float64, device=states.device)
        return invert(states, table, log_normalizer(states, table), uniform)
    best = gumbel_best(states, table, group_size)
    missing = group_size - best.ids.shape[1]
    return F.pad(best.ids, (0, missing)), F.pad(best.scores - best.lse[:, None], (0, missing))


def contexts_at_once(num_rows: int) -> int:
    """Number of contexts per nucleus draw; it bounds the memory of their scores and of sorting them."""
    return max(1, catalog_search.SCORE_BYTES // (32 * num_rows))


def log_normalizer(states: Tensor, table: Tensor, padding_rows: int = 1) -> Tensor:
    """Log-sum-exp ``[B]`` of the scores of the item rows, block by block; -inf without items."""
    lse = states.new_full((len(states),), -torch.inf)
    for rows in catalog_search.score_blocks(states, table, padding_rows):
        lse = torch.logaddexp(lse, matmul_transposed(states, table[rows].float()).logsumexp(1))
    return lse


def invert(states: Tensor, table: Tensor, lse: Tensor, uniform: Tensor, padding_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative distribution at uniform numbers, block by block: draws with replacement.

    Args:
        states: ``[B, d]``, divided by all temperatures.
        table: ``[padding_rows + items, d]``.
        lse: ``[B]`` the log-normalizer.
        uniform: ``[B, G]`` in [0, 1), float64.
        padding_rows: rows of the table before the first item.

    Returns:
        row numbers ``[B, G]`` and their log-probabilities; both 0 if there is no item.
    """
    remaining = uniform
    ids = torch.full_like(uniform, -1, dtype=torch.long)
    logp = torch.zeros_like(uniform, dtype=states.dtype)
    for rows in catalog_search.score_blocks(states, table, padding_rows):
        log_probabilities = matmul_transposed(states, table[rows].float()) - lse[:, None]
        cdf = log_probabilities.double().exp_().cumsum_(1)
        index = torch.searchsorted(cdf, remaining, right=True)
        # rounding may leave the last total slightly below 1: such a draw takes the last item
        last = rows.stop == len(table)
        here = (ids < 0) & ((index < cdf.shape[1]) | last)
        index = index.clamp_max(cdf.shape[1] - 1)
        ids = torch.where(here, index + rows.start, ids)
        logp = torch.where(here, log_probabilities.gather(1, index), logp)
        remaining = remaining - cdf[:, -1:]
    return ids.clamp_min(0), logp


class GumbelBest(NamedTuple):
    """The rows with the largest scores after Gumbel noise.

    Attributes:
        perturbed: ``[B, at most G]`` scores with noise, float64, largest first.
        ids: their row numbers.
        scores: the scores without noise.
        lse: ``[B]`` log-sum-exp of the scores of all items.
    """

    perturbed: Tensor
    ids: Tensor
    scores: Tensor
    lse: Tensor


def gumbel_best(
    states: Tensor, table: Tensor, group_size: int, padding_rows: int = 1, generator: torch.Generator | None = None
) -> GumbelBest:
    """Draws without replacement: the G largest of the scores with Gumbel noise (Kool et al., arXiv 1903.06059)."""
    perturbed = states.new_empty((len(states), 0), dtype=torch.float64)
    ids, scores = perturbed.long(), perturbed.float()
    lse = states.new_full((len(states),), -torch.inf)
    for rows in catalog_search.score_blocks(states, table, padding_rows):
        scores_here = matmul_transposed(states, table[rows].float())
        lse = torch.logaddexp(lse, scores_here.logsumexp(1))
        noisy = gumbel_like(scores_here, generator).add_(scores_here)
        best, index = noisy.topk(min(group_size, noisy.shape[1]), 1)
        perturbed, order = torch.cat([perturbed, best], 1).sort(dim=1, descending=True)
        perturbed, order = perturbed[:, :group_size], order[:, :group_size]
        ids = torch.cat([ids, index + rows.start], 1).gather(1, order)
        scores = torch.cat([scores, scores_here.gather(1, index)], 1).gather(1, order)
    return GumbelBest(perturbed, ids, scores, lse)


def draw_from_scores(scores: Tensor, group_size: int, options: SamplingOptions) -> tuple[Tensor, Tensor]:
    """``draw`` from the nucleus of all scores ``[B, V]`` of some contexts."""
    logp = nucleus(scores.log_softmax(1), options.top_p)
    if options.replacement:
        cdf = logp.double().exp_().cumsum_(1)
        uniform = torch.rand(len(scores), group_size, dtype=torch.float64, device=scores.device)
        index = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).clamp_max(cdf.shape[1] - 1)
    else:
        index = gumbel_like(logp).add_(logp).topk(min(group_size, logp.shape[1]), 1).indices
    drawn = logp.gather(1, index)
    possible = drawn > -torch.inf
    missing = group_size - index.shape[1]
    return F.pad((index + 1) * possible, (0, missing)), F.pad(drawn.masked_fill(~possible, 0), (0, missing))


def scoring_plan(batch: FeedbackBatch, needed: Tensor | None, readable: int | None = None) -> ScoringPlan:
    """The plan of the batch if it is a plan for ``needed``, otherwise a new one.

    Args:
        batch: the batch.
        needed: ``[B, S]`` positions to score; None = all real positions. A plan is recognized by the identity of this
            tensor, ``ScoringPlan.needed``.
        readable: see ``check_visible``; an existing plan was checked when it was created.
    """
    slates, plan = batch.slates, None if batch.plan is None else batch.plan.scored
    if plan is not None and needed is plan.needed:
        return plan
    wanted = slates.mask if needed is None else slates.mask & needed
    if readable is not None:
        check_visible(batch.histories, slates, wanted, readable)
    return plan_of(slates, wanted, batch.histories.item_ids.shape[1] + 1)


def plan_of(slates: Slates, wanted: Tensor, num_states: int) -> ScoringPlan:
    """The plan of the positions ``wanted [B, S]``, with ``num_states`` states per context."""
    positions = wanted.reshape(-1).nonzero().squeeze(1)
    return ScoringPlan(wanted, positions, *shared_states(slates, positions, num_states))


def plan_of_candidates(histories: Histories, needed: Tensor) -> ScoringPlan:
    """The plan of candidates ``needed [B, S]`` that are all scored after the complete history, without counting.

    Every position is scored, so no shape depends on the number of needed positions. Candidates of a context share one
    state, so a position that is not needed only costs one row of the item table.
    """
    contexts = torch.arange(len(needed), device=needed.device)
    rows = contexts * (histories.item_ids.shape[1] + 1) + histories.lengths
    positions = torch.arange(needed.numel(), device=needed.device)
    state_index = contexts[:, None].expand(needed.shape).reshape(-1)
    return ScoringPlan(needed, positions, rows, state_index, has_extra_positions=True, max_per_context=needed.shape[1])


def planned_items(plan: ScoringPlan, slates: Slates) -> Tensor:
    """The items ``[P]`` of the plan's positions; an arbitrary item for positions that are not needed."""
    items = slates.item_ids.reshape(-1)[plan.positions]
    return items.clamp_min(1) if plan.has_extra_positions else items


def spread(plan: ScoringPlan, values: Tensor) -> Tensor:
    """``values [P, ...]`` of the plan's positions as ``[B, S, ...]``, 0 at all others."""
    rest, flat = values.shape[1:], values
    if len(values) < plan.needed.numel():
        flat = values.new_zeros(plan.needed.numel(), *rest).index_copy(0, plan.positions, values)
    placed = flat.view(*plan.needed.shape, *rest)
    if not plan.has_extra_positions:
        return placed
    return torch.where(plan.needed.view(*plan.needed.shape, *[1] * len(rest)), placed, 0.0)


def shared_states(slates: Slates, positions: Tensor, num_states: int) -> tuple[Tensor, Tensor | None]:
    """The states among the ``B x num_states`` that the positions need, and the index of each position's state.

    Adjacent positions with the same state are grouped, which covers impressions, lists and sequences. The second result
    is None if every position has its own state.
    """
    keys = positions // slates.mask.shape[1] * num_states + slates.visible.reshape(-1)[positions]
    rows, index = torch.unique_consecutive(keys, return_inverse=True)
    return rows, None if len(rows) == len(keys) else index


def check_visible(histories: Histories, slates: Slates, wanted: Tensor, readable: int) -> None:
    """Raises if a position needs a state that the encoder, whose blocks read ``readable`` events, does not compute."""
    if histories.item_ids.shape[1] <= readable:
        return
    if (wanted & (slates.visible != histories.lengths[:, None])).any():
        raise RecpoError(
            f"histories of {histories.item_ids.shape[1]} events exceed policy.attention_length ({readable}), "
            "so items are scored after the whole history only: set data.layout to class_path: ImpressionLayout, or "
            f"its history_length to at most {readable}",
            code="out_of_range",
            field="policy.attention_length",
        )


def prefixes(histories: Histories, context: Tensor, visible: Tensor) -> Iterator[Histories]:
    """The first ``visible [N]`` events of the histories ``context [N]``, a few histories at a time."""
    for rows, lengths in zip(context.split(HISTORIES_AT_ONCE), visible.split(HISTORIES_AT_ONCE), strict=True):
        yield histories.rows(rows).up_to(lengths)

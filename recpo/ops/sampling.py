"""Sampled softmax with the logQ correction, for tables too large to normalise over in every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def sampled_logprob(
    target_scores: Tensor,
    negative_scores: Tensor,
    target_ids: Tensor,
    negative_ids: Tensor,
    log_expected_count: Tensor,
) -> Tensor:
    """Estimates log-softmax of a target from negatives that the whole batch shares.

    ``logp = s_t - log(exp(s_t) + Σ_{j: id_j != t} exp(s_j - log E[count_j]))``: the sum is an unbiased estimate of the
    rest of the normaliser, whatever the proposal, since every item is weighed by the reciprocal of how often it is
    expected among the negatives. With every item as a negative once (expected count 1) it is exact. Negatives that are
    the target itself ("accidental hits") are left out. Bengio and Senécal 2008; Yi et al. 2019 (logQ correction).

    Args:
        target_scores: ``[M]`` scores of the targets, uncorrected.
        negative_scores: ``[M, K]`` scores of the shared negatives, uncorrected.
        target_ids: ``[M]``.
        negative_ids: ``[K]``.
        log_expected_count: ``[K]`` log of the expected number of times that each negative is drawn: ``log(K q)`` for K
            draws with replacement from q.

    Returns:
        ``[M]``; its normaliser is unbiased, its logarithm is not: the estimate of a peaked softmax is too high.

    Raises:
        ValueError: shapes that do not fit.
    """
    if negative_scores.shape != (*target_scores.shape, *negative_ids.shape) or target_ids.shape != target_scores.shape:
        raise ValueError(
            f"expected scores [M] and [M, K] for ids [M] and [K], got {tuple(target_scores.shape)} and "
            f"{tuple(negative_scores.shape)} for {tuple(target_ids.shape)} and {tuple(negative_ids.shape)}"
        )
    hits = target_ids[:, None] == negative_ids
    rest = (negative_scores - log_expected_count).masked_fill(hits, -torch.inf)
    return target_scores - torch.cat([target_scores[:, None], rest], 1).logsumexp(1)


def draw_uniform(num_items: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``count`` ids out of 1..num_items with replacement, and their log expected counts, both ``[count]``."""
    ids = torch.randint(1, num_items + 1, (count,), device=device)
    return ids, torch.full((count,), count / num_items, device=device).log()


def draw_from_cdf(cdf: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``count`` ids with replacement from a proposal, and their log expected counts, both ``[count]``.

    Args:
        cdf: ``[V + 1]`` float64, cumulative probability of the ids 0..V; ``cdf[0] = 0`` and ``cdf[V] = 1``.
        count: number of draws.
    """
    draws = torch.rand(count, dtype=cdf.dtype, device=cdf.device)
    ids = torch.searchsorted(cdf, draws, right=True).clamp_(1, len(cdf) - 1)
    return ids, (count * (cdf[ids] - cdf[ids - 1])).log().float()


def proposal_cdf(counts: Tensor, power: float) -> Tensor:
    """Cumulative probabilities ``[V + 1]`` of a proposal ``q_v ∝ (counts_v + 1)^power``, ids 1..V.

    Args:
        counts: ``[V]`` how often each item occurs in the training period.
        power: 0 = uniform, 1 = popularity, 0.75 as in word2vec.
    """
    cdf = torch.cat([counts.new_zeros(1, dtype=torch.float64), (counts.double() + 1).pow(power).cumsum(0)])
    return cdf / cdf[-1]


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """Log-probabilities renormalised over the smallest set of choices whose probability reaches ``top_p``.

    Nucleus sampling (arXiv 1904.09751). The likeliest choice is always kept.

    Args:
        logp: ``[..., C]`` normalised log-probabilities.
        top_p: in (0, 1]; 1 = all choices.

    Returns:
        ``[..., C]``, -inf outside the set.
    """
    if top_p >= 1.0:
        return logp
    descending, order = logp.sort(-1, descending=True)
    before = descending.exp().cumsum(-1) - descending.exp()
    kept = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before < top_p)
    return logp.masked_fill(~kept, -torch.inf).log_softmax(-1)


def draw_choices(logp: Tensor, count: int, *, replacement: bool = True) -> tuple[Tensor, Tensor]:
    """Draws ``count`` choices per row; without replacement by Gumbel top-k (arXiv 1903.06059), in the order of drawing.

    Args:
        logp: ``[N, C]`` log-probabilities, -inf = never.
        count: number of draws G.
        replacement: False = different choices.

    Returns:
        indices ``[N, G]`` and their ``logp``; where a row has fewer than G choices to draw, the latter is -inf.
    """
    if replacement:
        index = torch.multinomial(logp.exp(), count, replacement=True)
        return index, logp.gather(1, index)
    # -log of a standard exponential number is a standard Gumbel number
    perturbed = logp - torch.empty_like(logp).exponential_().log()
    index = perturbed.topk(min(count, logp.shape[1]), 1).indices
    index = F.pad(index, (0, count - index.shape[1]))
    drawn = logp.gather(1, index)
    drawn[:, logp.shape[1] :] = -torch.inf
    return index, drawn

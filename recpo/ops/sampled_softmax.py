"""Sampled softmax with the logQ correction, for tables too large to normalize over in every step."""

from __future__ import annotations

import torch
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
    rest of the normalizer, whatever the proposal, since every item is weighed by the reciprocal of how often it is
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
        ``[M]``; its normalizer is unbiased, its logarithm is not: the estimate of a peaked softmax is too high.

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


def draw_uniform(
    num_items: int, count: int, device: torch.device, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """``count`` ids out of 1..num_items with replacement, and their log expected counts, both ``[count]``."""
    ids = torch.randint(1, num_items + 1, (count,), device=device, generator=generator)
    return ids, torch.full((count,), count / num_items, device=device).log()


def draw_from_cdf(cdf: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """``count`` ids with replacement from a proposal, and their log expected counts, both ``[count]``.

    Args:
        cdf: ``[V + 1]`` float64, cumulative probability of the ids 0..V; ``cdf[0] = 0`` and ``cdf[V] = 1``.
        count: number of draws.
        generator: on the device of ``cdf``; None = the default one.
    """
    draws = torch.rand(count, dtype=cdf.dtype, device=cdf.device, generator=generator)
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

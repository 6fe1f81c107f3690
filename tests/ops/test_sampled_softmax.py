"""The sampled softmax is exact with every item as a negative, and its normalizer is unbiased otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recpo.ops.linear_logprob import draw_from_cdf, draw_uniform, proposal_cdf, sampled_logprob
from tests.refusals import refused

V = 50


def scores() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    all_scores = torch.randn(4, V + 1, generator=generator, dtype=torch.float64)
    all_scores[:, 0] = -torch.inf
    return all_scores, torch.tensor([1, 7, 7, 50])


def estimate(all_scores: torch.Tensor, targets: torch.Tensor, negatives: torch.Tensor, log_count: torch.Tensor):
    return sampled_logprob(
        all_scores.gather(1, targets[:, None])[:, 0], all_scores[:, negatives], targets, negatives, log_count
    )


def test_exact_when_every_item_is_a_negative() -> None:
    all_scores, targets = scores()
    got = estimate(all_scores, targets, torch.arange(1, V + 1), torch.zeros(V))
    exact = all_scores.log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("proposal", ["uniform", "popularity"])
def test_the_normalizer_is_unbiased_and_the_error_falls_with_k(proposal: str) -> None:
    torch.manual_seed(0)
    all_scores, targets = scores()
    cdf = proposal_cdf(torch.arange(V), 0.75)
    exact = all_scores.log_softmax(1).gather(1, targets[:, None])[:, 0]
    errors = []
    for k in (20, 500):
        inverse, squares = torch.zeros(4, dtype=torch.float64), 0.0
        for _ in range(150):
            negatives, log_count = (
                draw_uniform(V, k, torch.device("cpu")) if proposal == "uniform" else draw_from_cdf(cdf, k)
            )
            logp = estimate(all_scores, targets, negatives, log_count)
            inverse += torch.exp(-logp) / 150
            squares += float(((logp - exact) ** 2).mean()) / 150
        errors.append(squares**0.5)
        spread = 4 * errors[-1] / 150**0.5 + 1e-3
        assert ((inverse * exact.exp() - 1).abs() < 2 * spread + errors[-1] ** 2 / 10).all()
    assert errors[1] < errors[0] / 3


def test_a_negative_that_is_the_target_is_left_out() -> None:
    all_scores, targets = scores()
    negatives = torch.tensor([7, 3])
    got = estimate(all_scores, targets, negatives, torch.zeros(2))
    assert got[1] == pytest.approx(float(all_scores[1, [7, 3]].log_softmax(0)[0]))


def test_draws_follow_the_proposal() -> None:
    torch.manual_seed(1)
    counts = torch.tensor([0, 3, 100, 7])
    q = (counts + 1).double() ** 0.75
    q /= q.sum()
    ids, log_count = draw_from_cdf(proposal_cdf(counts, 0.75), 40_000)
    observed = torch.bincount(ids, minlength=5)[1:].double()
    assert (((observed - 40_000 * q) ** 2) / (40_000 * q)).sum() < 16.3  # chi-square, 3 degrees of freedom, 0.1 %
    torch.testing.assert_close(log_count, (40_000 * q[ids - 1]).log().float())


def test_uniform_draws_reach_every_item_alike() -> None:
    torch.manual_seed(2)
    ids, log_count = draw_uniform(4, 40_000, torch.device("cpu"))
    observed = torch.bincount(ids, minlength=5).double()
    assert observed[0] == 0
    assert len(observed) == 5
    assert (((observed[1:] - 10_000) ** 2) / 10_000).sum() < 16.3
    assert log_count.exp().allclose(torch.tensor(10_000.0))


def test_a_proposal_keeps_its_digits() -> None:
    counts = torch.arange(20_000)
    weights = (np.arange(20_000) + 1.0) ** 0.75
    want = np.concatenate([[0.0], weights.cumsum() / weights.sum()])
    np.testing.assert_allclose(proposal_cdf(counts, 0.75).numpy(), want, rtol=1e-12)


def test_refuses_shapes_that_do_not_fit() -> None:
    with refused("wrong_shape", "scores"):
        sampled_logprob(torch.zeros(3), torch.zeros(3, 5), torch.zeros(3), torch.zeros(4), torch.zeros(4))

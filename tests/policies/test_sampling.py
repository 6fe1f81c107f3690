"""Draws from the catalog softmax: frequencies, log-probabilities, closed-form distributions; in one or many blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from recpo.base.errors import Code
from recpo.base.types import Histories, SamplingOptions
from recpo.policies import catalog_search, sampling
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.sampling import gumbel_like, nucleus
from tests.refusals import refused

N = 20


@pytest.fixture(params=[1, 7], ids=["one block", "seven blocks"])
def problem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    blocks = list(catalog_search.column_blocks(N + 1, 1, -(-N // request.param)))
    monkeypatch.setattr(catalog_search, "score_blocks", lambda *_: blocks)
    # a nucleus is drawn from 99 contexts at a time
    monkeypatch.setattr(catalog_search, "SCORE_BYTES", 32 * (N + 1) * 99)
    return torch.randn(2, 4), torch.randn(N + 1, 4)


def distribution(states: Tensor, table: Tensor, options: SamplingOptions) -> np.ndarray:
    """``[B, V]`` in float64, the nucleus by a loop."""
    scores = (states.double() @ table[1:].double().T).numpy() / options.temperature
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    for row in p:
        total, kept = 0.0, []
        for item in sorted(range(len(row)), key=lambda item: (-row[item], item)):
            if kept and total >= options.top_p < 1:
                break
            total += row[item]
            kept.append(item)
        row[[item for item in range(len(row)) if item not in kept]] = 0
        row /= row.sum()
    return p


def fits(ids: Tensor, p: np.ndarray) -> bool:
    """Chi-square of ids 1..V against the probabilities of V items; items of probability 0 must not occur."""
    observed = np.bincount(ids.reshape(-1).numpy(), minlength=len(p) + 1)[1:]
    assert observed.sum() == ids.numel()
    assert not observed[p == 0].any()
    return (p > 0).sum() == 1 or stats.chisquare(observed[p > 0], ids.numel() * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.05, 0.7, 1.0])
def test_draws_with_replacement_follow_the_distribution(
    problem: tuple[Tensor, Tensor], temperature: float, top_p: float
) -> None:
    options = SamplingOptions(temperature, top_p)
    ids, logp = sampling.draw(*problem, 20_000, options)
    exact = distribution(*problem, options)
    for row in range(2):
        np.testing.assert_allclose(logp[row].exp().numpy(), exact[row][ids[row] - 1], atol=1e-5)
        assert fits(ids[row], exact[row])


@pytest.mark.parametrize("top_p", [0.7, 1.0])
def test_draws_without_replacement_follow_the_sequential_law(problem: tuple[Tensor, Tensor], top_p: float) -> None:
    options = SamplingOptions(1.3, top_p, replacement=False)
    states, table = problem[0][:1], problem[1]
    draws = [sampling.draw(states.expand(4000, -1), table, 2, options) for _ in range(5)]
    ids, logp = torch.cat([ids for ids, _ in draws]), torch.cat([logp for _, logp in draws])
    p = distribution(states, table, options)[0]
    np.testing.assert_allclose(logp.exp().numpy(), p[ids - 1], atol=1e-5)
    # the second is a draw from what the first has left: p_i p_j / (1 - p_i)
    pairs = p[:, None] * p / (1 - p)[:, None] * (1 - np.eye(N))
    expected = pairs.reshape(-1) * len(ids)
    observed = np.bincount((ids[:, 0] - 1) * N + ids[:, 1] - 1, minlength=N * N)
    assert not observed[expected == 0].any()
    rare = expected < 5
    observed, expected = (
        np.append(observed[~rare], observed[rare].sum()),
        np.append(expected[~rare], expected[rare].sum()),
    )
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_without_replacement_items_differ_and_run_out(problem: tuple[Tensor, Tensor]) -> None:
    ids, logp = sampling.draw(*problem, N + 3, SamplingOptions(replacement=False))
    assert (ids[:, :N].sort(1).values == torch.arange(1, N + 1)).all()
    assert not ids[:, N:].any()
    assert not logp[:, N:].any()
    p = distribution(*problem, SamplingOptions(top_p=0.5))
    ids, logp = sampling.draw(*problem, N, SamplingOptions(top_p=0.5, replacement=False))
    assert (ids > 0).sum(1).tolist() == (p > 0).sum(1).tolist()
    assert (logp[ids == 0] == 0).all()


def test_gumbel_noise_has_its_tail() -> None:
    torch.manual_seed(0)
    noise = gumbel_like(torch.empty(200_000, dtype=torch.float32))
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def test_nucleus_breaks_ties_by_index_and_keeps_the_best() -> None:
    quarters = torch.full((4,), 0.25).log()
    assert nucleus(quarters, 0.49).exp().tolist() == [0.5, 0.5, 0, 0]
    assert nucleus(quarters, 1e-9).exp().tolist() == [1, 0, 0, 0]
    assert nucleus(quarters, 1.0) is quarters


@pytest.mark.parametrize(
    ("group_size", "options", "refusal"),
    [
        (0, SamplingOptions(), ("out_of_range", "group_size")),
        (1, SamplingOptions(temperature=0.0), ("out_of_range", "temperature")),
        (1, SamplingOptions(temperature=float("nan")), ("out_of_range", "temperature")),
        (1, SamplingOptions(top_p=0.0), ("out_of_range", "top_p")),
        (1, SamplingOptions(top_p=1.1), ("out_of_range", "top_p")),
    ],
)
def test_options_that_describe_no_distribution_are_refused(
    group_size: int, options: SamplingOptions, refusal: tuple[Code, str]
) -> None:
    with refused(*refusal):
        sampling.draw(torch.zeros(1, 2), torch.zeros(3, 2), group_size, options)


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(0.5, 0.9), SamplingOptions(replacement=False)])
def test_sample_of_the_policy_gives_tokens(options: SamplingOptions) -> None:
    policy = CatalogSoftmaxPolicy(30, dim=8, max_history=4).eval()
    histories = Histories(torch.randint(1, 31, (3, 4)), torch.tensor([0, 2, 4]), torch.zeros(3, 4, dtype=torch.long))
    ids, logp = policy.sample(histories, 5, options)
    assert ids.shape == (3, 5)
    assert logp.shape == (3, 5, 1)
    assert ids.min() >= 1
    assert not logp.requires_grad

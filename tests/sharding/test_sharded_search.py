"""Lists and draws from a sharded table, against those from the whole table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor

from recpo.base.types import SamplingOptions
from recpo.ops.sharded_logprob import RowShard
from recpo.policies import catalog_search, sampling
from recpo.sharding import row_tables
from tests.refusals import refused
from tests.sharding.ranks import Ranks

pytestmark = pytest.mark.slow

Cut = tuple[int, ...]
DRAWS = [
    SamplingOptions(),
    SamplingOptions(0.7, replacement=False),
    SamplingOptions(1.3, 0.6),
    SamplingOptions(1.3, 0.6, replacement=False),
]


def problem(cut: Cut, contexts: Cut, seed: int, ties: bool = False) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The table, and the states and excluded ids of each rank."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(cut[-1], 3, generator=generator)
    states = [torch.randn(n, 3, generator=generator) for n in contexts]
    exclude = [torch.randint(0, cut[-1], (n, 2 + 3 * rank), generator=generator) for rank, n in enumerate(contexts)]
    if ties:  # small integers: exact scores and many ties, also at the last place
        return table.round(), [part.round() for part in states], exclude
    return table, states, exclude


def shard_of(table: Tensor, cut: Cut) -> RowShard:
    rank = dist.get_rank()
    return RowShard(table[cut[rank] : cut[rank + 1]], cut[rank], cut[-1])


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Many blocks of rows and many parts of contexts."""
    patch.setattr(
        catalog_search,
        "score_blocks",
        lambda states, table, padding_rows=1: list(catalog_search.column_blocks(len(table), padding_rows, 5)),
    )
    patch.setattr(catalog_search, "SCORE_BYTES", 32 * 40 * 3)


def check_top_k(cut: Cut, contexts: Cut, k: int, seed: int, ties: bool, exclude_on: Cut) -> None:
    table, states, exclude = problem(cut, contexts, seed, ties)
    rank = dist.get_rank()
    barred = exclude[rank] if rank in exclude_on else None
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        got = row_tables.top_k(states[rank], shard_of(table, cut), k, barred)
        expected = catalog_search.top_k(states[rank], table, min(k, cut[-1] - 1), barred)
    missing = k - expected.item_ids.shape[1]
    assert torch.equal(got.item_ids, torch.nn.functional.pad(expected.item_ids, (0, missing)))
    scores = torch.nn.functional.pad(expected.scores, (0, missing), value=-torch.inf)
    torch.testing.assert_close(got.scores, scores, rtol=1e-5, atol=1e-5)


def cuts(world_size: int) -> st.SearchStrategy[Cut]:
    inner = st.lists(st.integers(0, 40), min_size=world_size - 1, max_size=world_size - 1)
    return st.builds(lambda rows, inner: (0, *sorted(min(cut, rows) for cut in inner), rows), st.integers(2, 40), inner)


@given(
    cuts(2), st.tuples(*[st.integers(0, 5)] * 2), st.integers(1, 12), st.integers(0, 1000), st.booleans(),
    st.sampled_from([(), (0,), (0, 1)]),
)  # fmt: skip
def test_top_k_is_that_of_the_whole_table(
    two: Ranks, cut: Cut, contexts: Cut, k: int, seed: int, ties: bool, exclude_on: Cut
) -> None:
    two.run(check_top_k, cut, contexts, k, seed, ties, exclude_on)


def check_draws(cut: Cut, contexts: Cut, group_size: int, seed: int) -> None:
    """Draws are possible ones with their log-probabilities; with one seed, many are those from the whole table."""
    table, states, _ = problem(cut, contexts, seed)
    own = states[dist.get_rank()]
    for options in DRAWS:
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch)
            torch.manual_seed(seed)
            ids, logp = row_tables.draw(own, shard_of(table, cut), group_size, options)
            torch.manual_seed(seed)
            expected_ids, expected_logp = sampling.draw(own, table, group_size, options)
        assert ids.dtype == torch.long
        assert ids.shape == logp.shape == expected_ids.shape
        if options.replacement or options.top_p < 1:
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(logp, expected_logp, rtol=1e-4, atol=1e-4)
            continue
        exact = (own @ table[1:].T / options.temperature).log_softmax(1)
        torch.testing.assert_close(logp, (exact.gather(1, (ids - 1).clamp_min(0)) * (ids > 0)), rtol=1e-4, atol=1e-4)
        assert ((ids > 0).sum(1) == min(group_size, cut[-1] - 1)).all()
        drawn = ids.masked_fill(ids == 0, -1).sort(1).values
        assert ((drawn[:, 1:] != drawn[:, :-1]) | (drawn[:, 1:] == -1)).all()


@settings(max_examples=20)
@given(cuts(2), st.tuples(*[st.integers(0, 5)] * 2), st.integers(1, 12), st.integers(0, 1000))
def test_draws_are_those_from_the_whole_table(two: Ranks, cut: Cut, contexts: Cut, group_size: int, seed: int) -> None:
    two.run(check_draws, cut, contexts, group_size, seed)


def many_draws(cut: Cut, contexts: int, group_size: int, options: SamplingOptions) -> tuple[np.ndarray, ...]:
    """Ids, their log-probabilities and the distribution of a rank's only context; all ranks have the same seed."""
    table, states, _ = problem(cut, (1, 1), 3)
    own = states[dist.get_rank()]
    torch.manual_seed(1)
    ids, logp = row_tables.draw(own.expand(contexts, -1), shard_of(table, cut), group_size, options)
    p = (own[0].double() @ table[1:].double().T / options.temperature).softmax(0)
    return ids.numpy(), logp.numpy(), p.numpy()


@pytest.mark.parametrize("cut", [(0, 6, 13), (0, 13, 13)])
def test_draws_with_replacement_follow_the_distribution(two: Ranks, cut: Cut) -> None:
    for ids, logp, p in two.run(many_draws, cut, 2, 10_000, SamplingOptions(1.3)):
        observed = np.bincount(ids[0], minlength=13)
        np.testing.assert_allclose(np.exp(logp), p[ids - 1], rtol=1e-5)
        assert observed[0] == 0
        assert stats.chisquare(observed[1:], 10_000 * p).pvalue > 1e-3


def test_draws_without_replacement_follow_the_sequential_law(two: Ranks) -> None:
    for ids, logp, p in two.run(many_draws, (0, 7, 13), 20_000, 2, SamplingOptions(1.3, replacement=False)):
        np.testing.assert_allclose(np.exp(logp), p[ids - 1], rtol=1e-4)
        # the second is a draw from what the first has left: p_i p_j / (1 - p_i)
        pairs = p[:, None] * p / (1 - p)[:, None] * (1 - np.eye(12))
        observed = np.bincount((ids[:, 0] - 1) * 12 + ids[:, 1] - 1, minlength=144)
        expected = pairs.reshape(-1) * len(ids)
        assert not observed[expected == 0].any()
        rare = expected < 5
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def check_refusals() -> None:
    shard = RowShard(torch.zeros(5, 2), 5 * dist.get_rank(), 10)
    with refused("out_of_range", "top_p"):
        row_tables.draw(torch.zeros(1, 2), shard, 1, SamplingOptions(top_p=0.0))
    with refused("mismatch", "blocks"):
        row_tables.top_k(torch.zeros(1, 2), shard._replace(first=0), 1, None)


def test_refuses_what_describes_no_distribution_and_no_table(two: Ranks) -> None:
    two.run(check_refusals)

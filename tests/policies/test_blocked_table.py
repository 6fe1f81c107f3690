from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from recpo.policies.catalog_search import BlockedTable, RoundedRows, top_k
from tests.refusals import refused


def vectors_of(items, dim, seed, ties=False):
    vectors = torch.randn(items + 1, dim, generator=torch.Generator().manual_seed(seed))
    vectors = vectors.round() if ties else vectors
    vectors[0] = 0
    return vectors


def by_loops(states, vectors, k, exclude, variance_columns):
    """Ids and log-probabilities, item by item in float64; ties to the smaller id."""
    lists = []
    own = vectors.shape[1] - variance_columns
    for state, barred in zip(states.double(), exclude.tolist(), strict=True):
        scores = vectors[1:, :own].double() @ state[:own]
        if variance_columns:
            scores = scores - (vectors[1:, own:].double() @ state[own:]).clamp_min(0).sqrt()
        logp = scores - scores.logsumexp(0)
        order = sorted((i for i in range(1, len(vectors)) if i not in barred), key=lambda i: (-logp[i - 1].item(), i))
        listed = [(i, logp[i - 1].item()) for i in order[:k]]
        lists.append(listed + [(0, -np.inf)] * (k - len(listed)))
    return np.array([[i for i, _ in row] for row in lists]), np.array([[s for _, s in row] for row in lists])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_give_what_the_whole_catalog_gives(data):
    items = data.draw(st.integers(1, 40), "V")
    rows = data.draw(st.integers(2, 45), "block_rows")
    k = data.draw(st.integers(1, items), "k")
    users, width = data.draw(st.integers(1, 4), "B"), data.draw(st.integers(1, 6), "M")
    exclude = torch.tensor(data.draw(st.lists(st.integers(0, items), min_size=users * width, max_size=users * width)))
    exclude = exclude.view(users, width)
    ties, variance_columns = data.draw(st.booleans(), "ties"), data.draw(st.sampled_from([0, 2]), "variance_columns")
    vectors = vectors_of(items, 5, seed=items, ties=ties)
    states = torch.randn(users, 5, generator=torch.Generator().manual_seed(rows))
    states = states.round() if ties else states
    found = BlockedTable(vectors, variance_columns=variance_columns, block_rows=rows).top_k(states, k, exclude)
    expected_ids, expected = by_loops(states, vectors, k, exclude, variance_columns)
    np.testing.assert_allclose(found.scores.numpy(), expected, atol=1e-5)
    plain = top_k(states, vectors, k, exclude, variance_columns)
    np.testing.assert_allclose(found.scores.numpy(), plain.scores.numpy(), atol=1e-5)
    if not ties:
        np.testing.assert_array_equal(found.item_ids.numpy(), expected_ids)


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_a_rounded_table_is_the_plain_search_of_its_rounded_rows(precision):
    vectors = vectors_of(300, 8, seed=0)
    vectors[:, 6:] *= 100  # columns of another size lose no more than the others
    table = BlockedTable(vectors, precision, block_rows=70)
    rounded = table(torch.arange(301))
    assert table.values.dtype == getattr(torch, precision)
    assert torch.equal(rounded[0], torch.zeros(8))
    largest = {"float16": 2**-11, "int8": 0.02}[precision]
    spread = vectors.square().mean(0).sqrt()
    assert ((rounded - vectors).abs() / spread).max() < largest * 4
    states, exclude = torch.randn(3, 8) / spread, torch.tensor([[5, 0], [1, 300], [0, 0]])
    found, expected = table.top_k(states, 20, exclude), top_k(states, rounded, 20, exclude)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=0)
    assert torch.equal(found.item_ids, expected.item_ids)


@pytest.mark.slow
def test_an_exported_search_is_the_search_for_any_number_of_users():
    table = BlockedTable(vectors_of(100, 4, seed=1), "int8", block_rows=30)

    class Search(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        def forward(self, states, exclude):
            top = self.table.top_k(states, 7, exclude)
            return top.item_ids, top.scores

    states, exclude = torch.randn(5, 4), torch.randint(0, 101, (5, 6))
    users, width = torch.export.Dim("users", min=1), torch.export.Dim("exclude", min=1)
    shapes = ({0: users}, {0: users, 1: width})
    program = torch.export.export(Search(), (states[:2], exclude[:2]), dynamic_shapes=shapes).module()
    ids, scores = program(states, exclude)
    expected = table.top_k(states, 7, exclude)
    assert torch.equal(ids, expected.item_ids)
    torch.testing.assert_close(scores, expected.scores)


def test_looked_up_rows_are_the_first_columns_and_numbers_must_fit():
    vectors = vectors_of(9, 6, seed=2)
    rows = RoundedRows(BlockedTable(vectors, block_rows=4), 3)
    ids = torch.tensor([[0, 9], [4, 1]])
    assert torch.equal(rows(ids), vectors[ids][..., :3])
    vectors[3, 1] = 1e5
    with refused("out_of_range", "item_precision"):
        BlockedTable(vectors, "float16")
    with refused("unknown_name", "item_precision"):
        BlockedTable(vectors, "int4")

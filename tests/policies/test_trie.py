"""The flat trie against a dictionary, its errors and its size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from recpo.policies.semantic_search import Trie
from tests.reference.code_tries import children, dictionary_trie


def random_codes(items: int, sizes: tuple[int, ...], seed: int, clustered: bool = False) -> Tensor:
    """Different tuples in random order; clustered: small codes are much more frequent."""
    rng = np.random.default_rng(seed)
    places = rng.random((3 * items, len(sizes))) ** (8 if clustered else 1)
    tuples = np.unique((places * sizes).astype(np.int64), axis=0)
    return torch.from_numpy(rng.permutation(tuples)[:items])


@st.composite
def catalogs(draw: st.DrawFn) -> tuple[Tensor, tuple[int, ...]]:
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 8, 9, 40, 300, 40_000]), min_size=1, max_size=5)))
    return random_codes(draw(st.integers(1, 80)), sizes, draw(st.integers(0, 999)), draw(st.booleans())), sizes


@pytest.mark.slow
@given(catalogs())
def test_the_trie_is_the_dictionary(catalog: tuple[Tensor, tuple[int, ...]]) -> None:
    codes, sizes = catalog
    trie, root = Trie(codes, sizes), dictionary_trie(codes.tolist())
    ids = torch.arange(1, len(codes) + 1)
    nodes, paths = torch.zeros_like(ids), trie.paths(ids)
    for level, size in enumerate(sizes):
        assert torch.equal(paths[:, level], nodes)
        mask = trie.allowed(level, nodes)
        assert mask.shape == (len(codes), size)
        for row in range(len(codes)):
            assert mask[row].nonzero().squeeze(1).tolist() == sorted(children(root, codes[row, :level].tolist()))
        first, end = trie.leaf_ranges(level, nodes)
        below = [sum(codes[row, :level].equal(other[:level]) for other in codes) for row in range(len(codes))]
        assert (end - first).tolist() == below
        nodes, found = trie.find(level, nodes, codes[:, level])
        assert found.all()
    assert torch.equal(trie.items(nodes), ids)
    assert torch.equal(trie.leaves(ids), nodes)
    assert torch.equal(trie.codes(ids), codes)


@given(catalogs(), st.integers(0, 999))
def test_an_unknown_prefix_is_not_found(catalog: tuple[Tensor, tuple[int, ...]], seed: int) -> None:
    codes, sizes = catalog
    trie, root = Trie(codes, sizes), dictionary_trie(codes.tolist())
    rng = np.random.default_rng(seed)
    item, level = int(rng.integers(len(codes))), int(rng.integers(len(sizes)))
    prefix = codes[item, :level].tolist()
    node, code = trie.paths(torch.tensor([item + 1]))[:, level], int(rng.integers(-1, sizes[level] + 1))
    given_codes = torch.tensor([code])
    if code in children(root, prefix):
        child, found = trie.find(level, node, given_codes)
        assert found
        assert child > 0
    else:
        child, found = trie.find(level, node, given_codes)
        assert not found
        assert trie.last_codes(child).item() in children(root, prefix)


def test_padding_has_codes_0_and_shapes_are_kept() -> None:
    trie = Trie(torch.tensor([[1, 2], [2, 0], [1, 1]]), (3, 3))
    ids = torch.tensor([[0, 3], [2, 0]])
    assert trie.codes(ids).tolist() == [[[0, 0], [1, 1]], [[2, 0], [0, 0]]]
    assert trie.paths(ids).shape == (2, 2, 2)
    assert trie.allowed(1, trie.paths(ids)[..., 1])[0, 1].tolist() == [False, True, True]
    assert trie.codes(torch.zeros(0, dtype=torch.long)).shape == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("depth", [3, 4])
def test_a_million_items_take_less_than_30_megabytes(depth: int, clustered: bool) -> None:
    sizes = (256,) * depth
    keys = torch.randint(0, 256**depth, (1_100_000,), generator=torch.Generator().manual_seed(0))
    if clustered:  # the first million tuples: every node on the way has all its children
        keys = torch.arange(1_000_000)
    keys = keys.unique()
    keys = keys[torch.randperm(len(keys))[:1_000_000]]
    codes = torch.stack([keys // 256**place % 256 for place in reversed(range(depth))], 1)
    trie = Trie(codes, sizes)
    assert sum(buffer.numel() * buffer.element_size() for buffer in trie.buffers()) < 30e6


def test_it_is_not_part_of_a_checkpoint() -> None:
    assert not Trie(torch.tensor([[1, 2], [2, 0]]), (3, 3)).state_dict()

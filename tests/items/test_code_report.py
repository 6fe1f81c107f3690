"""Closed forms of the numbers in the report."""

import math

import pytest
import torch

from recpo.items.tokenization import collision_statistics, level_statistics
from tests.reference.code_loops import code_entropy


def test_uniform_and_single_codes():
    codes = torch.stack([torch.arange(8) % 4, torch.zeros(8, dtype=torch.int64)], 1)
    uniform, single = level_statistics(codes, (8, 4))
    assert uniform == pytest.approx(
        {"codebook_size": 8, "utilization": 0.5, "entropy": math.log(4), "perplexity": 4, "largest": 0.25}
    )
    assert single == pytest.approx(
        {"codebook_size": 4, "utilization": 0.25, "entropy": 0, "perplexity": 1, "largest": 1}
    )


def test_entropy_agrees_with_a_loop():
    codes = torch.randint(7, (100, 2), generator=torch.Generator().manual_seed(0))
    for level, column in zip(level_statistics(codes, (7, 7)), codes.T.tolist(), strict=True):
        assert level["entropy"] == pytest.approx(code_entropy(column))
        assert level["perplexity"] == pytest.approx(math.exp(code_entropy(column)))


def test_collisions_and_moves_are_counted_per_item():
    before = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 1], [1, 1], [1, 1]])
    after = torch.tensor([[0, 0], [0, 2], [2, 0], [0, 1], [1, 1], [1, 0]])
    assert collision_statistics(before, after, movable=4) == {
        "collisions": 3,
        "sharing": 5,
        "largest_tuple": 3,
        "largest_prefix": 4,
        "movable": 4,
        "moved": 3,
        "moved_share": 0.75,
        "prefix_changed": 1,
    }


def test_an_extra_code_moves_no_item():
    before = torch.tensor([[0], [0]])
    after = torch.tensor([[0, 0], [0, 1]])
    statistics = collision_statistics(before, after, movable=2)
    assert statistics["collisions"] == 1
    assert statistics["moved"] == 0
    assert statistics["largest_prefix"] == 2

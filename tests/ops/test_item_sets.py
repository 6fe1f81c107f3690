"""Rows of items as sets: against Python's sets, on both sides of the width that changes how an item is looked up."""

import pytest
import torch

from recpo.ops.ranking import NO_ITEM, first_allowed, first_places, found_in, is_member, sorted_members


def rows(width, seed=0, items=40, padding=0.3):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, items, (5, width), generator=generator)
    return drawn * (torch.rand(5, width, generator=generator) >= padding)


@pytest.mark.parametrize("width", [0, 1, 3, 32, 33, 70])
@pytest.mark.parametrize("masked", [False, True])
def test_membership_is_that_of_a_set(width, masked):
    items, of = rows(12, 1), rows(width, 2)
    mask = torch.rand(5, width, generator=torch.Generator().manual_seed(3)) < 0.5 if masked else None
    found = is_member(items, of, mask)
    for row in range(5):
        kept = of[row] if mask is None else of[row][mask[row]]
        members = set(kept.tolist()) - {0}
        assert found[row].tolist() == [item in members for item in items[row].tolist()]


def test_members_are_sorted_and_there_is_a_column_at_least():
    of, mask = torch.tensor([[5, 0, 3, 9], [1, 2, 2, 7]]), torch.tensor([[True, True, True, False], [False] * 4])
    none = NO_ITEM
    assert sorted_members(of, mask).tolist() == [[3, 5, none, none], [none] * 4]
    empty = sorted_members(of[:, :0], mask[:, :0])
    assert empty.tolist() == [[none], [none]]
    assert not found_in(of, empty).any()
    wide = torch.cat([empty] * 40, 1)  # a binary search runs past the end: no item is larger than what is there
    wide[:, 0] = 3
    assert found_in(of, wide).tolist() == [[False, False, True, False], [False] * 4]
    assert found_in(of.int(), wide).tolist() == found_in(of, wide).tolist()
    full = torch.arange(1, 41).repeat(2, 1)  # and past the last of a set without room
    assert found_in(torch.tensor([[41, 40], [1, 99]]), full).tolist() == [[False, True], [True, False]]


def test_first_places():
    items = torch.tensor([[4, 2, 4, 4], [7, 7, 0, 0]])
    mask = torch.tensor([[False, True, True, True], [True, True, True, True]])
    assert first_places(items, mask).tolist() == [[False, True, True, False], [True, False, True, False]]
    assert first_places(items.int(), torch.zeros_like(mask)).tolist() == [[False] * 4] * 2
    assert first_places(items[:, :0], mask[:, :0]).shape == (2, 0)
    wide = rows(70, 4, items=20, padding=0.0)
    kept = torch.ones_like(wide, dtype=torch.bool)
    for row, found in zip(wide.tolist(), first_places(wide, kept).tolist(), strict=True):
        assert found == [row.index(item) == place for place, item in enumerate(row)]


def test_first_allowed_pads_with_zero():
    assert first_allowed(torch.tensor([[4, 2, 1]]), 5, torch.tensor([[2]])).tolist() == [[4, 1, 0, 0, 0]]

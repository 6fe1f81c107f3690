"""Tables that are initialized lazily: every part of a table has the same values, whichever process fills it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st

from recpo.policies import item_table
from recpo.policies.item_table import ItemTable, RandomRows, SavedRows, tables_on_meta

BLOCK = item_table._BLOCK_ROWS


@settings(max_examples=15)
@given(st.integers(0, 2 * BLOCK + 5), st.integers(0, 2 * BLOCK + 5))
def test_any_range_of_random_rows_is_that_of_a_larger_one(first: int, second: int) -> None:
    start, stop = sorted((first, second))
    rows = RandomRows(7, 2, 0.5)
    part = rows[start:stop]
    assert part.shape == (stop - start, 2)
    assert torch.equal(part, rows[0 : 2 * BLOCK + 5][start:stop])


def test_random_rows_are_normal_and_the_padding_row_is_zero() -> None:
    rows = RandomRows(7, 3, 0.5)[0 : 2 * BLOCK]
    assert not rows[0].any()
    assert rows[BLOCK].any()
    assert rows[1:].std().item() == pytest.approx(0.5, rel=0.01)
    assert rows[1:].mean().item() == pytest.approx(0.0, abs=0.005)
    assert not torch.equal(rows[1:BLOCK], rows[BLOCK + 1 :])
    assert not torch.equal(rows, RandomRows(8, 3, 0.5)[0 : 2 * BLOCK])
    assert torch.equal(rows, RandomRows(7, 3, 0.5)[0 : 2 * BLOCK])


def test_tables_on_meta_hold_no_memory_and_their_copies_have_the_same_rows() -> None:
    torch.manual_seed(0)
    with tables_on_meta():
        table, other = ItemTable(9, 4, std=0.5), ItemTable(9, 4, std=0.5, use="softmax")
        huge = ItemTable(10**12, 64)
        whole = ItemTable(9, 4, use="whole")
    assert table.weight.is_meta
    assert huge.weight.shape == (10**12 + 1, 64)
    assert whole.initial is None
    assert not whole.weight.is_meta
    assert table.initial is not None
    assert other.initial is not None
    assert not torch.equal(table.initial[0:10], other.initial[0:10])
    copied = copy.deepcopy(table)
    assert copied.initial is table.initial
    assert not ItemTable(9, 4).weight.is_meta  # outside of the block again
    torch.manual_seed(0)
    with tables_on_meta():
        again = ItemTable(9, 4, std=0.5)
    assert again.initial is not None
    assert torch.equal(again.initial[0:10], table.initial[0:10])


def test_tables_are_made_as_ever_after_an_error() -> None:
    with pytest.raises(KeyError), tables_on_meta():
        raise KeyError
    assert not ItemTable(2, 2).weight.is_meta


def test_a_table_on_meta_takes_saved_weights_without_reading_them() -> None:
    class Unread:
        shape = (10, 4)

        def __getitem__(self, rows: slice) -> torch.Tensor:
            raise AssertionError("nobody asked for rows yet")

    with tables_on_meta():
        table = ItemTable(9, 4)
    unread = Unread()
    table.load_state_dict({"weight": unread})  # type: ignore[dict-item]
    assert isinstance(table.initial, SavedRows)
    assert copy.deepcopy(table).initial is table.initial
    with pytest.raises(AssertionError, match="nobody asked"):
        table.initial[0:1]
    saved = torch.arange(40.0).view(10, 4)
    table.load_state_dict({"weight": saved})
    assert torch.equal(table.initial[2:5], saved[2:5])
    with pytest.raises(RuntimeError, match="Missing key"):
        table.load_state_dict({})

"""Sizes of a training follow from the size of its log by stated rules."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from recpo.log.inspection import LogCounts
from recpo.training.recipes import sizes_of

STEPS = ("pretrain", "gbpo", "mpo", "ranking", "semantic")
SPARSE = LogCounts(events=198_502, users=22_363, items=12_101, requests=153_776, events_per_user=12, days=None)
DENSE = LogCounts(events=1_000_000, users=6_000, items=3_700, requests=988_000, events_per_user=400, days=1_000.0)
SMALL = LogCounts(events=3_000, users=60, items=80, requests=3_000, events_per_user=60, days=None)

counts = st.builds(
    LogCounts,
    events=st.integers(1, 10**9),
    users=st.integers(1, 10**8),
    items=st.integers(1, 10**7),
    requests=st.integers(1, 10**9),
    events_per_user=st.integers(1, 10**5),
    days=st.none(),
    is_whole=st.booleans(),
)


def test_histories_of_few_events_get_one_wide_layer_and_half_of_it_dropped():
    sizes = sizes_of("ranking", SPARSE)
    assert (sizes.history_length, sizes.max_history, sizes.dim, sizes.layers) == (50, 50, 128, 1)
    assert (sizes.dropout, sizes.batch_size, sizes.epochs, sizes.patience) == (0.5, 256, 30, 3)
    assert sizes.steps == 30 * 88
    assert sizes.averaging_decay == 0.99


def test_long_dense_histories_get_more_layers_less_dropout_and_fewer_contexts_in_a_batch():
    sizes = sizes_of("ranking", DENSE)
    assert (sizes.history_length, sizes.max_history, sizes.dim, sizes.layers) == (200, 200, 128, 2)
    assert (sizes.dropout, sizes.batch_size, sizes.epochs, sizes.patience) == (0.2, 16, 30, 4)
    assert sizes.averaging_decay == 0.995


def test_codes_read_shorter_histories_with_less_dropout():
    sizes = sizes_of("semantic", SPARSE)
    assert (sizes.history_length, sizes.dim, sizes.layers, sizes.dropout) == (20, 128, 1, 0.3)
    assert (sizes.batch_size, sizes.epochs, sizes.patience, sizes.averaging_decay) == (128, 20, 4, 0.99)


def test_policies_that_are_aligned_attend_to_fifty_events():
    sizes = sizes_of("pretrain", DENSE)
    assert (sizes.history_length, sizes.max_history, sizes.dim) == (50, 200, 64)
    assert sizes_of("pretrain", SMALL).dim == 32
    assert sizes_of("mpo", replace(DENSE, items=300_000)).batch_size == 32


def test_a_part_of_a_log_smaller_than_one_user_still_trains():
    part = LogCounts(events=1, users=1, items=1, requests=1, events_per_user=100, days=None, is_whole=False)
    assert sizes_of("ranking", part).steps == sizes_of("ranking", part).epochs


@given(counts, st.sampled_from(STEPS))
def test_sizes_are_bounded(found, step):
    sizes = sizes_of(step, found)
    assert sizes.history_length in (20, 50, 100, 200)
    assert sizes.history_length <= sizes.max_history <= 200
    assert sizes.dim in (32, 64, 128)
    assert 8 <= sizes.batch_size <= 256
    assert sizes.batch_size & (sizes.batch_size - 1) == 0
    assert 1 <= sizes.epochs <= 30
    assert sizes.steps >= sizes.epochs or sizes.max_steps == sizes.steps
    assert 0.99 <= sizes.averaging_decay <= 0.999
    assert 3 <= sizes.patience <= 11


@given(counts, st.sampled_from(("ranking", "semantic")), st.integers(1, 100))
def test_more_events_of_an_item_never_raise_dropout_and_longer_histories_never_shorten_what_is_read(
    found, step, factor
):
    sizes = sizes_of(step, found)
    assert sizes_of(step, replace(found, items=factor * found.items)).dropout >= sizes.dropout
    longer = sizes_of(step, replace(found, events_per_user=factor * found.events_per_user, is_whole=True))
    assert longer.history_length >= sizes.history_length
    whole = replace(found, is_whole=True)
    denser = sizes_of(step, replace(whole, events=factor * found.events))
    assert denser.layers >= sizes_of(step, whole).layers
    assert denser.dim >= sizes_of(step, whole).dim


@pytest.mark.parametrize(("events", "dropout"), [(16, 0.5), (23, 0.45), (32, 0.4), (128, 0.2), (4_000, 0.2), (2, 0.5)])
def test_every_doubling_of_the_events_of_an_item_takes_a_tenth_off_dropout(events, dropout):
    found = LogCounts(events=1_000 * events, users=500, items=1_000, requests=1, events_per_user=100, days=None)
    assert sizes_of("ranking", found).dropout == pytest.approx(dropout)

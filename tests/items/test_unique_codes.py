"""No two items share a tuple, no item moves without need, and capacities are kept."""

import numpy as np
import torch
from hypothesis import given, strategies as st

from recpo.items.residual_kmeans import Codebooks, rank_within, settle
from recpo.items.tokenization import extra_code, first_free, nearest_free, tuple_ids
from tests.reference.code_loops import first_come
from tests.refusals import refused


def codebooks(levels, size, dim=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.5**level for level in range(levels)])[:, None, None]
    centroids = torch.randn(levels, size, dim, generator=generator) * scale
    return Codebooks(centroids, torch.zeros(dim), torch.ones(dim), torch.tensor(False))


def crowd(items, clusters, seed, dim=3, spread=0.01):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(clusters, dim, generator=generator)
    which = torch.randint(clusters, (items,), generator=generator)
    return centers[which] + spread * torch.randn(items, dim, generator=generator)


def is_unique(codes):
    return len(np.unique(codes.numpy(), axis=0)) == len(codes)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_crowded_items_get_distinct_tuples(levels, size, clusters, data):
    items = data.draw(st.integers(1, size**levels))
    seed = data.draw(st.integers(0, 99))
    books, points = codebooks(levels, size, seed=seed), crowd(items, clusters, seed)
    wanted = books.encode(points)
    codes = nearest_free(points, books, wanted)
    assert is_unique(codes)
    assert codes.min() >= 0
    assert codes.max() < size
    counts = torch.bincount(tuple_ids(wanted))
    alone = counts[tuple_ids(wanted)] == 1
    prefixes = tuple_ids(wanted[:, :-1]) if levels > 1 else torch.zeros_like(wanted[:, 0])
    if levels == 1 or (torch.bincount(prefixes).max() <= size and levels == 2):
        assert torch.equal(codes[:, :-1], wanted[:, :-1])  # no prefix overflows, so none changes
        assert torch.equal(codes[alone], wanted[alone])
        assert int((codes != wanted).any(1).sum()) == items - len(counts)  # as few as can be
    assert torch.equal(codes, nearest_free(points, books, wanted))


@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_first_free_fills_every_tuple(levels, size, data):
    items = data.draw(st.integers(1, size**levels))
    rows = data.draw(
        st.lists(st.lists(st.integers(0, size - 1), min_size=levels, max_size=levels), min_size=items, max_size=items)
    )
    wanted = torch.tensor(rows)
    codes = first_free(wanted, (size,) * levels)
    assert is_unique(codes)
    assert codes.min() >= 0
    assert codes.max() < size


def test_exactly_full_and_one_too_many():
    points = crowd(64, 1, 0)
    books = codebooks(3, 4)
    codes = nearest_free(points, books, books.encode(points))
    assert len(np.unique(codes.numpy(), axis=0)) == 64
    with refused("out_of_range", "codebook_size"):
        nearest_free(crowd(65, 1, 0), books, torch.zeros(65, 3, dtype=torch.int64))
    with refused("out_of_range", "codebook_size"):
        first_free(torch.zeros(3, 1, dtype=torch.int64), (2,))


@given(st.integers(1, 12), st.integers(0, 50))
def test_the_last_level_agrees_with_placing_one_item_after_the_other(items, seed):
    books, points = codebooks(1, 12, seed=seed), crowd(items, 2, seed, spread=0.3)
    wanted = books.encode(points)
    distances = ((points[:, None].double() - books.centroids[0].double()) ** 2).sum(-1).numpy()
    expected = first_come(wanted[:, 0].tolist(), distances, 12)
    assert nearest_free(points, books, wanted)[:, 0].tolist() == expected


def test_a_full_prefix_overflows_to_the_nearest_one_with_room():
    centroids = torch.tensor([[[0.0], [10.0], [11.0], [-30.0]], [[0.0], [1.0], [2.0], [3.0]]])
    books = Codebooks(centroids, torch.zeros(1), torch.ones(1), torch.tensor(False))
    points = torch.tensor([10.0, 10.1, 10.2, 10.3, 9.0])[:, None]
    wanted = books.encode(points)
    assert wanted[:, 0].tolist() == [1] * 5
    codes = nearest_free(points, books, wanted)
    assert codes[:, 0].tolist() == [1, 1, 1, 1, 2]  # 9.0 is farthest from 10 and goes to 11, its nearest sibling
    assert codes[4, 1] == 0


def test_kept_items_stay_and_new_ones_move_around_them():
    books, points = codebooks(2, 4), crowd(12, 1, 3)
    old = nearest_free(points[:8], books, books.encode(points[:8]))
    wanted = torch.cat([old, books.encode(points[8:])])
    kept = torch.arange(12) < 8
    codes = nearest_free(points, books, wanted, kept)
    assert torch.equal(codes[:8], old)
    assert is_unique(codes)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
def test_an_extra_code_counts_the_items_of_a_tuple(rows):
    codes = torch.tensor(rows)
    extra = extra_code(codes)
    seen = {}
    for row, code in zip(rows, extra.tolist(), strict=True):
        assert code == seen.get(row, 0)
        seen[row] = code + 1


def test_new_items_count_on_from_the_largest_extra_code():
    codes = torch.tensor([[0], [0], [0], [1], [0], [2], [2]])
    given = torch.tensor([0, -1, 3, 0, -1, -1, -1])
    assert extra_code(codes, given).tolist() == [0, 4, 3, 0, 5, 0, 1]


def test_tuples_of_many_large_levels_do_not_overflow():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(2**16, (500, 12), generator=generator)
    codes[250:] = codes[:250]
    ids = tuple_ids(codes)
    assert torch.equal(ids[:250], ids[250:])
    assert ids.max() == 249


@given(st.integers(1, 6), st.integers(1, 60), st.integers(0, 50))
def test_no_code_takes_more_than_its_capacity_and_only_the_excess_moves(num_codes, items, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(items, num_codes, generator=generator)
    group = torch.randint(3, (items,), generator=generator)
    wanted = table.argmin(1)
    capacity = -(-int(torch.bincount(group).max()) // num_codes)
    code = settle(
        wanted, table.amin(1), group, num_codes=num_codes, capacity=capacity, distances=lambda rows: table[rows]
    )
    assert torch.bincount(group * num_codes + code).max() <= capacity
    crowded = torch.bincount(group * num_codes + wanted, minlength=3 * num_codes)
    assert int((code != wanted).sum()) <= int((crowded - capacity).clamp_min(0).sum())


def test_rank_within_breaks_ties_by_position():
    key, value = torch.tensor([1, 0, 1, 1, 0]), torch.tensor([2.0, 5.0, 1.0, 2.0, 5.0])
    assert rank_within(key, value).tolist() == [1, 0, 0, 2, 1]

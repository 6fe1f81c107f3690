"""Preference lists: rejected items come from their sources, are never liked items, and depend only on their row."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recpo.base.feedback import FeedbackRule
from recpo.batches.datamodule import TrainBatches
from recpo.batches.preference_lists import PreferenceListLayout, uniform
from recpo.batches.slates import Rank, Windows
from recpo.log.prepared import Events, Prepared, request_order, request_starts, run_offsets
from tests.refusals import refused

NONE = {"dislikes": 0, "skipped": 0, "uniform": 0, "popularity": 0}
NUM_ITEMS = 40


def catalog(num_items, counts=None):
    """The part of ``Prepared`` that layouts read."""
    return SimpleNamespace(num_items=num_items, item_counts=lambda: np.ones(num_items) if counts is None else counts)


def layout_of(**counts):
    return PreferenceListLayout(history_length=5, **{**NONE, **counts})


@pytest.fixture(scope="module")
def events():
    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(6), [30, 1, 40, 12, 25, 8]).astype(np.int32)
    total = len(user)
    quantile = rng.random(total).astype(np.float32)
    quantile[rng.random(total) < 0.1] = np.nan
    items = rng.integers(1, NUM_ITEMS + 1, total)
    dislike = (rng.random(total) < 0.2) & (user != 4)
    request_start = request_starts(user, np.arange(total) // 3)
    return Events(
        user_index=user,
        item_index=items,
        timestamp=np.arange(total, dtype=np.int64),
        label=quantile,
        dislike=dislike,
        positive=FeedbackRule().positive(quantile, dislike),
        skipped=FeedbackRule().skipped(quantile, dislike),
        feedback=np.zeros(total, np.int64),
        propensity=np.full(total, np.nan, np.float32),
        is_target=np.ones(total, bool),
        request_start=request_start,
        by_request=request_order(request_start),
        offsets=run_offsets(user),
    )


def batch_of(events, layout, rows=None, epoch=0, counts=None, seed=7):
    windows = layout.scoring_windows(events.keys)
    rows = np.arange(len(windows.slate_start)) if rows is None else rows
    return layout.batch_maker(catalog(NUM_ITEMS, counts), seed)(events, windows.take(rows), rows, epoch)


def sets_of(events, user):
    own = events.user_index == user
    liked = own & (events.label >= 0.75) & ~events.dislike
    positives = set(events.item_index[liked].tolist())
    disliked = set(events.item_index[own & events.dislike].tolist()) - positives
    left = set(events.item_index[own & (events.label < 0.25)].tolist()) - positives - disliked
    return positives, disliked, left


def users_of(events, layout):
    return events.user_index[layout.scoring_windows(events.keys).slate_start]


def test_every_positive_event_is_chosen_once_and_sees_what_preceded_its_request(events):
    layout = layout_of(uniform=3)
    batch = batch_of(events, layout)
    positive = np.flatnonzero((events.label >= 0.75) & ~events.dislike)
    assert batch.slates.item_ids[:, 0].tolist() == events.item_index[positive].tolist()
    for row, event in enumerate(positive):
        begin = events.request_start[event]
        start = max(begin - 5, events.offsets[events.user_index[event]])
        assert batch.histories.item_ids[row, : begin - start].tolist() == events.item_index[start:begin].tolist()
        assert batch.histories.lengths[row] == begin - start
        assert (batch.slates.visible[row][batch.slates.mask[row]] == begin - start).all()


def test_each_source_gives_what_it_is_named_after(events):
    layout = layout_of(dislikes=3, skipped=2, fill=False)
    slates = batch_of(events, layout).slates
    assert slates.is_logged[slates.mask].all()
    for row, user in enumerate(users_of(events, layout)):
        _, disliked, left = sets_of(events, user)
        first, second = slates.item_ids[row, 1:4], slates.item_ids[row, 4:6]
        assert set(first[first > 0].tolist()) <= disliked
        assert set(second[second > 0].tolist()) <= left
        # as many as there are, never one twice
        assert len(set(first[first > 0].tolist())) == int((first > 0).sum()) == min(3, len(disliked))
        assert int((second > 0).sum()) == min(2, len(left))
    rejected = slates.mask[:, 1:4]
    assert slates.dislike[:, 1:4][rejected].float().mean() > 0.9  # an item may have been left before it was disliked


def test_too_few_dislikes_are_filled_or_left_empty(events):
    rows = np.flatnonzero(users_of(events, layout_of(dislikes=2)) == 4)  # a user without any
    filled = batch_of(events, layout_of(dislikes=2), rows).slates
    assert filled.mask.all()
    assert not filled.is_logged[:, 1:].any()
    assert filled.label[:, 1:].isnan().all()
    empty = batch_of(events, layout_of(dislikes=2, fill=False), rows).slates
    assert not empty.mask[:, 1:].any()


@pytest.mark.parametrize("counts", [{"uniform": 12}, {"popularity": 12}, {"dislikes": 5, "skipped": 5, "uniform": 5}])
def test_nothing_that_the_user_likes_is_rejected_and_no_item_is_there_twice(events, counts):
    layout = layout_of(**counts)
    popularity = np.arange(NUM_ITEMS) % 3
    for epoch in range(5):
        slates = batch_of(events, layout, epoch=epoch, counts=popularity).slates
        for row, user in enumerate(users_of(events, layout)):
            items = slates.item_ids[row, 1:][slates.mask[row, 1:]].tolist()
            assert len(items) == len(set(items))
            assert not set(items) & sets_of(events, user)[0]
            if "popularity" in counts:
                assert all(popularity[item - 1] > 0 for item in items)
    assert (slates.item_ids[~slates.mask] == 0).all()


def test_a_draw_depends_on_seed_epoch_and_row_alone(events):
    layout = layout_of(dislikes=2, uniform=4, popularity=2)
    popularity = np.ones(NUM_ITEMS)
    whole = batch_of(events, layout, counts=popularity).slates.item_ids
    rows = np.array([11, 3, 7])
    assert torch.equal(batch_of(events, layout, rows, counts=popularity).slates.item_ids, whole[rows])
    for other in ({"epoch": 1}, {"seed": 8}):
        assert not torch.equal(batch_of(events, layout, counts=popularity, **other).slates.item_ids, whole)


def test_uniform_draws_are_uniform_and_popular_ones_follow_the_counts(events):
    everyone = layout_of(uniform=1)
    nobody = events._replace(
        item_index=np.zeros_like(events.item_index), dislike=np.zeros_like(events.dislike),
        label=np.ones_like(events.label), positive=np.ones(len(events.label), bool),
        skipped=np.zeros(len(events.label), bool),
    )  # fmt: skip
    drawn = torch.cat([batch_of(nobody, everyone, epoch=e).slates.item_ids[:, 1] for e in range(200)])
    share = torch.bincount(drawn, minlength=NUM_ITEMS + 1)[1:] / len(drawn)
    assert (share - 1 / NUM_ITEMS).abs().max() < 0.005
    popular = replace(everyone, uniform=0, popularity=1, popularity_power=0.5)
    counts = np.arange(NUM_ITEMS) ** 2
    drawn = torch.cat([batch_of(nobody, popular, epoch=e, counts=counts).slates.item_ids[:, 1] for e in range(200)])
    share = torch.bincount(drawn, minlength=NUM_ITEMS + 1)[1:] / len(drawn)
    expected = torch.arange(NUM_ITEMS) / sum(range(NUM_ITEMS))
    assert (share - expected).abs().max() < 0.006


def test_in_batch_items_are_chosen_by_other_rows(events):
    layout = layout_of(in_batch=4)
    rows = np.array([0, 12, 20, 25])
    slates = batch_of(events, layout, rows).slates
    chosen = slates.item_ids[:, 0]
    assert slates.mask[:, 1:].any()
    for row in range(len(rows)):
        others = set(chosen.tolist()) - {int(chosen[row])}
        assert set(slates.item_ids[row, 1:][slates.mask[row, 1:]].tolist()) <= others
    assert not batch_of(events, layout, rows[:1]).slates.mask[:, 1:].any()


def test_hard_negatives_bring_along_what_must_not_be_one(events):
    layout = layout_of(hard=2)
    batch = batch_of(events, layout)
    assert layout.traits.hard_negatives == 2
    for row, user in enumerate(users_of(events, layout)):
        assert set(batch.known_positives[row].tolist()) - {0} == sets_of(events, user)[0]
    assert batch_of(events, layout_of(uniform=1)).known_positives is None


def test_an_empty_window_is_an_empty_slate(events):
    layout = layout_of(uniform=2, in_batch=1)
    windows = Windows(*[np.zeros(1, np.int64)] * 4)
    batch = layout.batch_maker(catalog(NUM_ITEMS), 0)(events, windows, np.zeros(1, np.int64), 0)
    assert not batch.slates.mask.any()
    assert (batch.slates.item_ids == 0).all()


def test_exposed_items_are_the_own_labeled_or_disliked_ones_that_were_never_positive(events):
    layout = layout_of(exposed=NUM_ITEMS, fill=False)
    windows = layout.scoring_windows(events.keys)
    slates = layout.batch_maker(catalog(NUM_ITEMS), 0)(events, windows, np.arange(len(windows.slate_start)), 0).slates
    assert len(windows.slate_start) > 5
    known = events.dislike | ~np.isnan(events.label)
    for row, chosen in enumerate(events.by_request[windows.slate_start]):
        own = events.user_index == events.user_index[chosen]
        liked = set(events.item_index[own & events.positive].tolist())
        rejected = slates.item_ids[row][slates.mask[row] & ~slates.chosen[row]].tolist()
        assert sorted(rejected) == sorted(set(events.item_index[own & known].tolist()) - liked)
        assert slates.is_logged[row][slates.mask[row]].all()
        assert not slates.positive[row][slates.mask[row] & ~slates.chosen[row]].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (NONE, ("missing_option",)),
        ({"uniform": -1}, ("out_of_range", "uniform")),
        ({**NONE, "exposed": 2, "skipped": 1}, ("conflicting_options", "exposed")),
        ({"exposed": 2}, ("conflicting_options", "exposed")),
    ],
)
def test_impossible_lists_are_refused(options, message):
    with refused(*message):
        PreferenceListLayout(**options)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_neither_ranks_nor_workers_change_a_row(prepared, workers):
    opened, layout = Prepared.open(prepared), PreferenceListLayout(history_length=5)

    def rows(rank, batch_size):
        batches = TrainBatches(opened, layout, batch_size, 3, rank)
        loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=workers)
        return {
            int(row): items[items > 0].tolist()
            for batch in loader
            for row, items in zip(batch.context_ids, batch.slates.item_ids, strict=True)
            if len(items[items > 0])
        }

    whole = rows(Rank(), 64)
    split = rows(Rank(0, 2), 32) | rows(Rank(1, 2), 32)
    assert whole == split


def test_counter_random_numbers_are_uniform_and_unrelated():
    grid = uniform(3, np.arange(300)[:, None], np.arange(300))
    assert abs(grid.mean() - 0.5) < 0.003
    assert np.abs(np.histogram(grid, 20, (0, 1))[0] / grid.size - 0.05).max() < 0.003
    neighbors = [grid[:, 1:] * 1.0, grid[1:]], [grid[:, :-1], grid[:-1]]
    for one, other in zip(*neighbors, strict=True):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01
    assert not np.array_equal(uniform(0, np.arange(5)), uniform(np.arange(5), 0))
    assert (grid < 1).all()
    assert np.array_equal(uniform(-1, 2), uniform(np.array([-1]), 2))

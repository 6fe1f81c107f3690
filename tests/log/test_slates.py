"""Layouts and batches: every event is scored once, and no later event is visible."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from recpo.base.feedback import HIGHEST, FeedbackRule
from recpo.batches.preference_lists import PreferenceListLayout
from recpo.batches.slates import ImpressionLayout, SequenceLayout, evaluation_batch, feedback_batch
from recpo.log.prepared import Events, Prepared, request_order, request_starts, run_offsets
from tests.refusals import refused


def events_of(counts, requests=None, is_target=None, seed=0):
    """Events whose item index is their own position + 1, so that a batch tells where each entry came from."""
    total = int(np.sum(counts))
    user = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    request = np.arange(total) if requests is None else np.asarray(requests)
    rng = np.random.default_rng(seed)
    request_start = request_starts(user, request)
    label, dislike = rng.random(total).astype(np.float32), rng.random(total) < 0.1
    return Events(
        user_index=user,
        item_index=np.arange(1, total + 1, dtype=np.int64),
        timestamp=np.arange(total, dtype=np.int64) * 1000,
        label=label,
        dislike=dislike,
        positive=FeedbackRule().positive(label, dislike),
        skipped=FeedbackRule().skipped(label, dislike),
        feedback=rng.integers(0, HIGHEST + 1, total),
        propensity=rng.random(total).astype(np.float32),
        is_target=np.ones(total, bool) if is_target is None else np.asarray(is_target),
        request_start=request_start,
        by_request=request_order(request_start),
        offsets=run_offsets(user),
    )


def catalog(num_items):
    """The part of ``Prepared`` that layouts read."""
    return SimpleNamespace(num_items=num_items, item_counts=lambda: np.ones(num_items))


NO_PAST = np.zeros(2, int), np.zeros(0, int)


@st.composite
def logs(draw):
    """Users with requests of up to 9 events, some of which overlap in time with the one before."""
    counts, requests, number = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)), [], 0
    for count in counts:
        own = []
        while len(own) < count:
            own += [number] * draw(st.integers(1, 9))
            number += 1
        own = own[:count]
        for place in draw(st.lists(st.integers(0, count - 1), max_size=6)):
            other = min(count - 1, place + draw(st.integers(0, 12)))
            own[place], own[other] = own[other], own[place]
        requests += own
    return counts, requests


layouts = st.one_of(
    st.builds(SequenceLayout, st.just(7), st.one_of(st.none(), st.integers(1, 7))),
    st.builds(SequenceLayout, st.just(1)),
    st.builds(ImpressionLayout, st.just(7), st.just(3)),
)


def own_request(events, requests, event):
    """Places in time of the events of one event's request."""
    requests = np.asarray(requests)
    return np.flatnonzero((requests == requests[event]) & (events.user_index == events.user_index[event]))


@given(layout=layouts, log=logs())
def test_every_event_is_scored_once_and_sees_only_what_came_before_its_request(layout, log):
    events = events_of(*log)
    slates, histories, *_ = batch_of(events, layout)
    assert sorted(slates.item_ids[slates.mask].tolist()) == events.item_index.tolist()
    assert (slates.item_ids[~slates.mask] == 0).all()
    for row in range(len(slates.item_ids)):
        length = int(histories.lengths[row])
        assert length <= layout.history_length
        assert (histories.item_ids[row, length:] == 0).all()
        for place in np.flatnonzero(slates.mask[row]):
            event, visible = int(slates.item_ids[row, place]) - 1, int(slates.visible[row, place])
            own = own_request(events, log[1], event)
            user_start = int(events.offsets[events.user_index[event]])
            # all of it happened before the request, and nothing is missing between
            read = (histories.item_ids[row, :visible] - 1).tolist()
            assert read == list(range(own[0] - visible, own[0]))
            before = own[0] - user_start
            least = min(layout.least_history if isinstance(layout, SequenceLayout) else 7, before)
            assert least <= visible <= min(layout.history_length, before)
            assert (visible == 0) == (before == 0), "a warm user scored as a cold one"


def batch_of(events, layout):
    windows = layout.scoring_windows(events.keys)
    batch = feedback_batch(events, windows, np.arange(len(windows.slate_start)))
    return batch.slates, batch.histories, windows


@given(log=logs(), overlap=st.integers(1, 7))
def test_windows_hold_whole_requests_and_as_many_as_fit(log, overlap):
    """From the user's end each window takes requests while its history and its slate have room."""
    events, layout = events_of(*log), SequenceLayout(7, overlap)
    windows = layout.scoring_windows(events.keys)
    order, start = events.by_request, events.request_start
    for row in range(len(windows.slate_start)):
        first, stop = windows.slate_start[row], windows.slate_stop[row]
        user_start = events.offsets[events.user_index[order[first]]]
        assert stop - first <= 7
        if first == user_start:
            continue
        longer = first - np.flatnonzero(start[order[:first]] == start[order[first - 1]])[0]  # the request before
        if start[order[first - 1]] == start[order[first]]:
            assert len(set(start[order[first:stop]])) == 1, "only a request that fills a window alone is cut"
        else:
            read_from = max(windows.history_stop[row] - 7, user_start)
            room = read_from == user_start or start[order[first - 1]] - read_from >= overlap
            assert stop - first + longer > 7 or not room


def test_the_last_window_only_is_the_most_recent_one():
    events = events_of([4, 23, 9])
    windows = SequenceLayout(5, 2, last_window_only=True).scoring_windows(events.keys)
    everything = SequenceLayout(5, 2).scoring_windows(events.keys)
    assert windows.slate_stop.tolist() == [4, 27, 36]
    assert set(zip(*windows, strict=True)) <= set(zip(*everything, strict=True))


@pytest.mark.parametrize("overlap", [0, 6, -1])
def test_an_overlap_that_no_window_can_have_is_an_error(overlap):
    with refused("out_of_range", "overlap"):
        SequenceLayout(5, overlap)


def test_overlapping_windows_by_hand():
    """Requests of two; H = 4 and an overlap of two: the positions of the second window see at least two events."""
    slates, histories, _ = batch_of(events_of([8], requests=[0, 0, 1, 1, 2, 2, 3, 3]), SequenceLayout(4, 2))
    assert slates.item_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert histories.item_ids.tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    assert slates.visible.tolist() == [[0, 0, 2, 2], [2, 2, 4, 4]]


def test_a_request_longer_than_a_window_is_cut_with_the_same_history():
    slates, histories, _ = batch_of(events_of([9], requests=[0, 0, *[1] * 7]), SequenceLayout(4))
    assert slates.item_ids[slates.mask].tolist() == list(range(1, 10))
    assert histories.item_ids.tolist() == [[1, 2]] * 3 or histories.item_ids[-1].tolist() == [1, 2]
    assert (slates.visible[slates.mask] == torch.tensor([0, 0, *[2] * 7])).all()


@pytest.mark.parametrize(
    "layout", [SequenceLayout(10), ImpressionLayout(10, 3), PreferenceListLayout(history_length=10, uniform=2)]
)
def test_requests_that_overlap_in_time_do_not_see_themselves(layout):
    """a b a b: the second a knows nothing, and the second b only the first a."""
    events = events_of([4], requests=[0, 1, 0, 1])
    events = events._replace(positive=np.ones(4, bool))
    windows = layout.scoring_windows(events.keys)
    batch = layout.batch_maker(catalog(4), 0)(events, windows, np.arange(len(windows.slate_start)), 0)
    known = {}
    for row in range(len(windows.slate_start)):
        for item, visible, logged in zip(
            batch.slates.item_ids[row], batch.slates.visible[row], batch.slates.is_logged[row], strict=True
        ):
            if logged:
                known[int(item)] = batch.histories.item_ids[row, : int(visible)].tolist()
    assert known == {1: [], 2: [1], 3: [], 4: [1]}


def test_the_history_of_a_held_out_user_ends_before_the_first_request_of_the_period():
    events = events_of([5], requests=[0, 1, 2, 1, 3], is_target=[False, False, False, True, True])
    batch = evaluation_batch(events, np.array([0]), 4, np.zeros(1, int), np.zeros(0, int))
    assert batch.feedback.histories.item_ids.tolist() == [[1]]
    assert batch.feedback.slates.visible.tolist() == [[1, 1]]


def test_a_users_first_window_by_hand():
    slates, histories, _ = batch_of(events_of([4]), SequenceLayout(history_length=10))
    assert histories.item_ids.tolist() == [[1, 2, 3]]
    assert slates.item_ids.tolist() == [[1, 2, 3, 4]]
    assert slates.visible.tolist() == [[0, 1, 2, 3]]


def test_items_of_one_request_share_their_history():
    slates, *_ = batch_of(events_of([5], requests=[0, 0, 1, 1, 1]), SequenceLayout(history_length=10))
    assert slates.visible.tolist() == [[0, 0, 2, 2, 2]]


def test_a_long_request_is_cut_with_the_same_history():
    slates, histories, _ = batch_of(
        events_of([6], requests=[0, 0, 1, 1, 1, 1]), ImpressionLayout(history_length=4, slate_length=3)
    )
    assert slates.item_ids.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    assert histories.item_ids.tolist() == [[0, 0], [1, 2], [1, 2]]
    assert slates.visible.tolist() == [[0, 0, 0], [2, 2, 2], [2, 0, 0]]


def test_propensities_become_log_probabilities():
    events = events_of([3])._replace(propensity=np.array([0.5, np.nan, 1.0], np.float32))
    logp = batch_of(events, SequenceLayout(history_length=10))[0].logp_behavior[0].tolist()
    assert logp[0] == pytest.approx(np.log(0.5))
    assert np.isnan(logp[1])
    assert logp[2] == 0.0


def test_held_out_users_stand_at_the_start_of_the_period():
    events = events_of([5, 3], is_target=[False, False, False, True, True, False, True, True])
    batch = evaluation_batch(events, np.array([0, 1]), 2, np.array([4, 1]), np.array([1, 2, 3, 9, 6]))
    assert batch.feedback.histories.item_ids.tolist() == [[2, 3], [6, 0]]
    assert batch.feedback.histories.lengths.tolist() == [2, 1]
    assert batch.feedback.slates.item_ids.tolist() == [[4, 5], [7, 8]]
    assert batch.feedback.slates.visible.tolist() == [[2, 2], [1, 1]]
    assert batch.exclude.tolist() == [[1, 2, 3, 9], [6, 0, 0, 0]]
    assert batch.user_ids.tolist() == [0, 1]


def test_held_out_exposures_keep_their_propensity_and_say_whether_they_were_random():
    events = events_of([3, 2], is_target=[False, True, True, False, True])
    events = events._replace(propensity=np.array([0.1, 0.2, np.nan, 0.4, 0.5], np.float32))
    slates = evaluation_batch(events, np.array([0, 1]), 2, *NO_PAST).feedback.slates
    np.testing.assert_allclose(slates.logp_behavior.exp(), [[0.2, np.nan], [0.5, np.nan]], rtol=1e-6)
    assert slates.is_random is None, "the column was not read"
    events = events._replace(is_random=np.array([True, False, True, True, True]))
    slates = evaluation_batch(events, np.array([0, 1]), 2, *NO_PAST).feedback.slates
    assert slates.is_random.tolist() == [[False, True], [True, False]]


def test_random_exposures_are_read_for_held_out_periods_only(prepared):
    opened = Prepared.open(prepared)
    assert opened.load("train", 0).is_random is None
    held_out = opened.load("test", 0)
    assert held_out.is_random.dtype == bool
    assert 0 < held_out.is_random.mean() < 0.5


def test_grades_are_those_of_the_feedback_levels_in_every_kind_of_slate():
    events = events_of([6, 6])._replace(
        feedback=np.array([0, 1, 2, 5, 10, 17] * 2),
        positive=np.array([False] * 5 + [True] + [False] * 5 + [True]),
        dislike=np.array([False, True] + [False] * 4 + [False, True] + [False] * 4),
    )
    expected = [np.nan, 0.0, 0.03125, 0.21875, 0.53125, 0.96875]
    sequence = batch_of(events, SequenceLayout(history_length=10))[0]
    np.testing.assert_array_equal(sequence.grade, [expected, expected])
    held_out = evaluation_batch(events, np.array([0, 1]), 2, *NO_PAST).feedback.slates
    np.testing.assert_array_equal(held_out.grade, [expected, expected])
    lists = PreferenceListLayout(history_length=4, dislikes=1, skipped=0, uniform=1, popularity=0, in_batch=0)
    batch = lists.batch_maker(catalog(12), 0)(events, lists.scoring_windows(events.keys), np.arange(2), 0)
    np.testing.assert_array_equal(batch.slates.grade[:, :2], [[0.96875, 0.0], [0.96875, 0.0]])
    assert batch.slates.grade[:, 2].isnan().all(), "a sampled item has no feedback"

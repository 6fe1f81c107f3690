"""Layouts and batches: every event is scored once, and nothing later is ever visible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recpo.data.prepared import Events, Prepared, _run_offsets, _run_starts
from recpo.data.slates import ImpressionLayout, SequenceLayout, evaluation_batch, feedback_batch
from recpo.feedback import FeedbackRule


def events_of(counts, requests=None, is_target=None, seed=0):
    """Events whose item index is their own position + 1, so that a batch tells where each entry came from."""
    total = int(np.sum(counts))
    user = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    request = np.arange(total) if requests is None else np.asarray(requests)
    rng = np.random.default_rng(seed)
    label, dislike = rng.random(total).astype(np.float32), rng.random(total) < 0.1
    return Events(
        user_index=user,
        item_index=np.arange(1, total + 1, dtype=np.int64),
        timestamp=np.arange(total, dtype=np.int64) * 1000,
        label=label,
        dislike=dislike,
        positive=FeedbackRule().positive(label, dislike),
        skipped=FeedbackRule().skipped(label, dislike),
        feedback=rng.integers(0, 6, total),
        propensity=rng.random(total).astype(np.float32),
        is_target=np.ones(total, bool) if is_target is None else np.asarray(is_target),
        request_start=_run_starts(user, request),
        offsets=_run_offsets(user),
    )


def batch_of(events, layout):
    windows = layout.windows(events.user_index, events.request_start)
    return feedback_batch(events, windows, np.arange(len(windows.slate_start)))


user_counts = st.lists(st.integers(1, 23), min_size=1, max_size=6)
request_sizes = st.lists(st.integers(1, 5), min_size=30, max_size=40)


@st.composite
def logs(draw):
    counts = draw(user_counts)
    requests, number = [], 0
    for count in counts:
        left = count
        while left:
            size = min(left, draw(st.integers(1, 5)))
            requests += [number] * size
            number, left = number + 1, left - size
    return counts, requests


@pytest.mark.parametrize(
    "layout", [SequenceLayout(history_length=7), ImpressionLayout(history_length=7, slate_length=3)]
)
@given(log=logs())
def test_every_event_is_scored_once_and_sees_only_its_past(layout, log):
    events = events_of(*log)
    batch = batch_of(events, layout)
    slates, histories = batch.slates, batch.histories
    assert sorted(slates.item_ids[slates.mask].tolist()) == events.item_index.tolist()
    assert (slates.item_ids[~slates.mask] == 0).all()
    for row in range(len(slates.item_ids)):
        length = int(histories.lengths[row])
        assert length <= layout.history_length
        assert (histories.item_ids[row, length:] == 0).all()
        for position in range(slates.item_ids.shape[1]):
            if not slates.mask[row, position]:
                continue
            event = int(slates.item_ids[row, position]) - 1
            visible = int(slates.visible[row, position])
            assert 0 <= visible <= length
            seen = histories.item_ids[row, :visible] - 1
            own = events.user_index[event]
            assert all(events.user_index[i] == own for i in seen.tolist())
            assert all(i < events.request_start[event] for i in seen.tolist())
            # the visible part ends right before the request, unless the window's history ends earlier
            assert visible == 0 or int(seen[-1]) == events.request_start[event] - 1


@given(counts=user_counts)
def test_sequence_windows_are_full_from_the_end(counts):
    layout = SequenceLayout(history_length=5)
    events = events_of(counts)
    windows = layout.windows(events.user_index, events.request_start)
    assert len(windows.slate_start) == sum(-(-count // 5) for count in counts)
    last = SequenceLayout(history_length=5, last_window_only=True).windows(events.user_index, events.request_start)
    assert (last.slate_stop == np.cumsum(counts)).all()
    assert (last.slate_stop - last.slate_start == np.minimum(counts, 5)).all()


def test_a_users_first_window_by_hand():
    batch = batch_of(events_of([4]), SequenceLayout(history_length=10))
    assert batch.histories.item_ids.tolist() == [[1, 2, 3]]
    assert batch.slates.item_ids.tolist() == [[1, 2, 3, 4]]
    assert batch.slates.visible.tolist() == [[0, 1, 2, 3]]


def test_items_of_one_request_share_their_history():
    batch = batch_of(events_of([5], requests=[0, 0, 1, 1, 1]), SequenceLayout(history_length=10))
    assert batch.slates.visible.tolist() == [[0, 0, 2, 2, 2]]


def test_a_long_request_is_cut_with_the_same_history():
    batch = batch_of(events_of([6], requests=[0, 0, 1, 1, 1, 1]), ImpressionLayout(history_length=4, slate_length=3))
    assert batch.slates.item_ids.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    assert batch.histories.item_ids.tolist() == [[0, 0], [1, 2], [1, 2]]
    assert batch.slates.visible.tolist() == [[0, 0, 0], [2, 2, 2], [2, 0, 0]]


def test_propensities_become_log_probabilities():
    events = events_of([3])._replace(propensity=np.array([0.5, np.nan, 1.0], np.float32))
    logp = batch_of(events, SequenceLayout(history_length=10)).slates.logp_behavior[0].tolist()
    assert logp[0] == pytest.approx(np.log(0.5))
    assert np.isnan(logp[1])
    assert logp[2] == 0.0


def test_held_out_users_stand_at_the_start_of_the_period():
    events = events_of([5, 3], is_target=[False, False, False, True, True, False, True, True])
    batch = evaluation_batch(events, np.array([0, 1]), history_length=2)
    assert batch.feedback.histories.item_ids.tolist() == [[2, 3], [6, 0]]
    assert batch.feedback.histories.lengths.tolist() == [2, 1]
    assert batch.feedback.slates.item_ids.tolist() == [[4, 5], [7, 8]]
    assert batch.feedback.slates.visible.tolist() == [[2, 2], [1, 1]]
    assert batch.exclude.tolist() == [[1, 2, 3], [6, 0, 0]]
    assert batch.user_ids.tolist() == [0, 1]


def test_held_out_exposures_keep_their_propensity_and_say_whether_they_were_random():
    events = events_of([3, 2], is_target=[False, True, True, False, True])
    events = events._replace(propensity=np.array([0.1, 0.2, np.nan, 0.4, 0.5], np.float32))
    slates = evaluation_batch(events, np.array([0, 1]), history_length=2).feedback.slates
    np.testing.assert_allclose(slates.logp_behavior.exp(), [[0.2, np.nan], [0.5, np.nan]], rtol=1e-6)
    assert slates.is_random is None, "the column was not read"
    events = events._replace(is_random=np.array([True, False, True, True, True]))
    slates = evaluation_batch(events, np.array([0, 1]), history_length=2).feedback.slates
    assert slates.is_random.tolist() == [[False, True], [True, False]]


def test_random_exposures_are_read_for_held_out_periods_only(prepared):
    opened = Prepared.open(prepared)
    assert opened.load("train", 0).is_random is None
    held_out = opened.load("test", 0)
    assert held_out.is_random.dtype == bool
    assert 0 < held_out.is_random.mean() < 0.5

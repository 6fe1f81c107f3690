"""One definition of positive, skipped, disliked and unknown, and the feedback levels of raw events."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from recpo.base.feedback import (
    DEFAULT_DURATION_BASE,
    DEFAULT_MAX_WATCH_TIME,
    DISLIKED,
    GRADES,
    HIGHEST,
    LEAST_POSITIVE_LEVEL,
    LOWEST,
    UNKNOWN,
    UNKNOWN_BUCKET,
    FeedbackDefinition,
    FeedbackRule,
)
from tests.cutoffs import quarters
from tests.refusals import refused

LABELS = [0.75, np.nextafter(np.float32(0.75), 0, dtype=np.float32), 0.25, 0.2, math.nan, 0.9, 0.1, math.nan]
DISLIKES = [False, False, False, False, False, True, True, True]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_dislike_outranks_the_label_and_the_threshold_itself_is_positive(kind):
    label = kind(np.array(LABELS, np.float32).tolist())
    label = label.astype(np.float32) if isinstance(label, np.ndarray) else label
    dislike, rule = kind(DISLIKES), FeedbackRule()
    assert rule.positive(label, dislike).tolist() == [True] + [False] * 7
    assert rule.skipped(label, dislike).tolist() == [False, False, False, True] + [False] * 4
    assert rule.unknown(label, dislike).tolist() == [False] * 4 + [True] + [False] * 3


def test_counts_of_every_kind():
    """Each kind another number, so that none may be added, taken away or left out for another one."""
    label = np.array([0.8] * 3 + [0.5] * 4 + [0.1] * 2 + [0.9, math.nan] * 3 + [math.nan], np.float32)
    dislike = np.array([False] * 9 + [True] * 6 + [False])
    counts = FeedbackRule().counts(label, dislike)
    assert counts == {"positive": 3, "neutral": 4, "skipped": 2, "disliked": 6, "unknown": 1}
    assert FeedbackRule(positive_threshold=1.0).positive_threshold == 1.0


@given(st.lists(st.tuples(st.one_of(st.just(math.nan), st.floats(0, 1, width=32)), st.booleans())), st.data())
def test_every_event_is_one_thing_and_numpy_and_torch_agree(events, data):
    high = data.draw(st.floats(0.01, 1))
    rule = FeedbackRule(high, data.draw(st.floats(0, high)))
    label = np.array([q for q, _ in events], np.float32)
    dislike = np.array([d for _, d in events], bool)
    kinds = [rule.positive(label, dislike), rule.skipped(label, dislike), rule.unknown(label, dislike), dislike]
    assert (np.sum(kinds, 0) <= 1).all()
    there = torch.from_numpy(label), torch.from_numpy(dislike)
    for name, expected in zip(("positive", "skipped", "unknown"), kinds[:3], strict=True):
        np.testing.assert_array_equal(getattr(rule, name)(*there).numpy(), expected)


def test_a_threshold_that_float32_cannot_hold_is_compared_as_float32():
    rule = FeedbackRule(0.8, 0.1)
    label = np.array([0.8, 0.1], np.float32)
    no = np.zeros(2, bool)
    assert rule.positive(label, no).tolist() == [True, False]
    assert not rule.skipped(label, no).any()
    assert rule.positive(torch.from_numpy(label), torch.from_numpy(no)).tolist() == [True, False]


@pytest.mark.parametrize("thresholds", [(0.0, 0.0), (1.5, 0.2), (0.5, 0.6), (0.5, -0.1), (math.nan, 0.1)])
def test_impossible_thresholds_are_refused(thresholds):
    with refused("out_of_range", ...):
        FeedbackRule(*thresholds)


FITTED = FeedbackDefinition(FeedbackRule(), 2.0, {3: quarters(1.0, 2.5, 2.5), 5: quarters(0.0, 4.0, 9.0)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": FeedbackRule(0.5)}, r"positive_threshold 0\.75, not 0\.5"),
        ({"rule": FeedbackRule(0.75, 0.5)}, r"skip_threshold 0\.25, not 0\.5"),
        ({"duration_base": 3.0}, r"duration_base 2\.0, not 3\.0"),
        ({"max_watch_time": 60.0}, r"max_watch_time 86400\.0, not 60\.0"),
        ({"cutoffs": {}}, "levels from watch times, not labels"),
        ({"label": "EveryEvent()"}, r"label unknown, not EveryEvent\(\)"),
        ({"duration_exponent": 0.5}, r"duration_exponent 0\.0, not 0\.5"),
    ],
)
def test_another_definition_is_refused_with_what_differs(change, message):
    with refused("mismatch", "feedback"):
        FITTED.validate_same(replace(FITTED, **change), "runs/a", "prepared")
    FITTED.validate_same(replace(FITTED, cutoffs={3: quarters(1.5, 2.5, 3.0)}), "runs/a", "prepared")


def test_levels_by_hand():
    nan = math.nan
    rows = [  # watch time, duration, dislike, level
        (1.0, 8.0, False, 2),  # at the cutoff: not above it
        (1.001, 15.999, False, 6),
        (2.501, 8.0, False, 17),
        (2.501, 8.0, True, 1),
        (nan, nan, True, 1),
        (9.0, 16.0, False, 0),  # bucket 4 has no cutoffs
        (9.0, 64.0, False, 0),
        (0.0, 32.0, False, 2),
        (9.0004, 32.0, False, 10),  # 9.000 s in whole milliseconds
        (nan, 32.0, False, 0),
        (1.0, nan, False, 0),
        (1.0, 0.0, False, 0),
        (-1.0, 8.0, False, 0),
        (math.inf, 8.0, False, 0),
        (86_400.0, 8.0, False, 17),
        (86_400.001, 8.0, False, 0),  # longer than max_watch_time
    ]
    watch, duration, dislike, level = (np.array(column) for column in zip(*rows, strict=True))
    found = FITTED.levels(watch, duration, dislike, np.full(len(rows), 0.9))
    assert found.dtype == np.int8
    assert found.tolist() == level.tolist()


def test_levels_compare_watch_times_as_in_the_middle_of_the_bucket():
    watch, duration = np.array([2.0, 2.0, 2.0, math.nan, 2.0]), np.array([8.0, 11.314, 15.99, 8.0, math.nan])
    unknown, liked = np.full(5, math.nan), np.zeros(5, bool)  # from 8 to 16 s; the middle is 11.314 s
    as_shares = replace(FITTED, cutoffs={3: quarters(1.9, 2.1, 2.9)}, duration_exponent=1.0)
    # they are compared as 2.828 s, 2.000 s and 1.415 s
    assert as_shares.levels(watch, duration, liked, unknown).tolist() == [10, 6, 2, 0, 0]
    assert FeedbackDefinition.from_json(as_shares.to_json()) == as_shares


def test_levels_and_defaults_are_those_of_the_documentation():
    assert (UNKNOWN, DISLIKED, LOWEST, LEAST_POSITIVE_LEVEL, HIGHEST) == (0, 1, 2, 10, 17)
    assert GRADES[1:4] == (0.0, 1 / 32, 3 / 32)
    assert (len(GRADES), GRADES[HIGHEST]) == (18, 31 / 32)
    assert (DEFAULT_DURATION_BASE, DEFAULT_MAX_WATCH_TIME) == (2.0, 86_400.0)
    assert FeedbackRule() == FeedbackRule(0.75, 0.25)
    assert FeedbackDefinition() == FeedbackDefinition(FeedbackRule(), 2.0, {}, 86_400.0)


def test_buckets_by_hand():
    seconds = np.array([8.0, 7.999, 1.0, 0.5, 0.001, 0.0006, 3600.0, 0.0004, 0.0, -1.0, math.nan, math.inf])
    unknown = [UNKNOWN_BUCKET] * 5
    of_two = FeedbackDefinition().buckets(seconds)
    assert of_two.dtype == np.int64
    assert of_two.tolist() == [3, 2, 0, -1, -10, -10, 11, *unknown]  # 0.6 ms are one, 0.4 ms are none
    assert FeedbackDefinition(duration_base=10.0).buckets(seconds).tolist() == [0, 0, 0, -1, -3, -3, 3, *unknown]
    assert UNKNOWN_BUCKET == -1001
    fine = FeedbackDefinition(duration_base=1.007).buckets(np.array([0.001, 86_400.0]))  # what is known is never it
    assert (fine > UNKNOWN_BUCKET).all()


def test_without_watch_times_the_levels_come_from_the_label():
    label = np.array([0.0, 0.25, 0.5, 0.75, math.nan, 1.0])
    dislike = np.array([False] * 5 + [True])
    nothing = np.full(6, math.nan)
    assert FeedbackDefinition().levels(nothing, nothing, dislike, label).tolist() == [2, 6, 10, 14, 0, 1]
    places = np.arange(33) / 32
    assert labeled(FeedbackRule(), places) == [*np.repeat(np.arange(2, 18), 2), 17]
    # stars from one to five
    assert labeled(FeedbackRule(), np.arange(5) / 4) == [2, 6, 10, 14, 17]


def labeled(rule, label):
    """The levels of labels without watch times."""
    unknown = np.full(len(label), math.nan)
    return FeedbackDefinition(rule).levels(unknown, unknown, np.zeros(len(label), bool), np.asarray(label)).tolist()


@given(st.floats(0.0625, 1, width=32), st.floats(0, 1, width=32), st.lists(st.floats(0, 1, width=32), min_size=1))
def test_levels_of_labels_ascend_with_them_and_say_what_is_positive_and_skipped(high, share, labels):
    rule = FeedbackRule(high, high * share)
    label, no = np.sort(np.array(labels, np.float32)), np.zeros(len(labels), bool)
    levels = np.array(labeled(rule, label))
    assert (np.diff(levels) >= 0).all()
    np.testing.assert_array_equal(levels >= 14, rule.positive(label, no))
    np.testing.assert_array_equal(levels < 6, rule.skipped(label, no))


def test_a_definition_survives_json():
    text = json.dumps(FITTED.to_json())
    assert FeedbackDefinition.from_json(json.loads(text)) == FITTED
    read = FeedbackDefinition.from_json(FITTED.to_json() | {"positive_threshold": 1, "skip_threshold": 0})
    assert isinstance(read.rule.positive_threshold, float)
    assert isinstance(read.rule.skip_threshold, float)
    assert FeedbackDefinition.from_json(FITTED.to_json() | {"max_watch_time": 0.5}).max_watch_time == 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"cutoffs": {"3": quarters(1.0, 0.5, 2.0)}},
        {"cutoffs": {"3": [1.0, 2.0]}},
        {"cutoffs": {"three": quarters(1.0, 2.0, 3.0)}},
        {"cutoffs": {"3": quarters(1.0, math.nan, 3.0)}},
        {"cutoffs": {"3": quarters(1.0, 2.0, math.inf)}},
        {"cutoffs": {"3": quarters(-1.0, 2.0, 3.0)}},
        {"cutoffs": None},
        {"duration_base": 1.0},
        {"duration_base": "two"},
        {"positive_threshold": 2.0},
        {"skip_threshold": None},
        {"max_watch_time": 0.0},
        {"max_watch_time": None},
        {"levels": 6},
    ],
)
def test_a_damaged_definition_is_refused(change):
    with refused(("damaged", "out_of_range"), ...):
        FeedbackDefinition.from_json(FITTED.to_json() | change, "manifest.json, feedback")


@pytest.mark.parametrize("content", [None, [], {}, "x"])
def test_no_definition_at_all_is_refused(content):
    with refused("damaged", "feedback"):
        FeedbackDefinition.from_json(content)


def test_events_without_a_label_are_positive_where_every_event_was():
    nothing, label = np.full(3, np.nan), np.array([np.nan, 0.2, 1.0])
    for every_event, expected in ((True, [HIGHEST, LOWEST, HIGHEST]), (False, [UNKNOWN, LOWEST, HIGHEST])):
        definition = FeedbackDefinition(FeedbackRule(0.75, 0.25), every_event=every_event)
        levels = definition.levels(nothing, nothing, np.zeros(3, bool), label)
        assert [int(levels[0]), int(levels[2])] == [expected[0], expected[2]]
        assert levels[1] < LEAST_POSITIVE_LEVEL
        assert FeedbackDefinition.from_json(definition.to_json()) == definition
    disliked = FeedbackDefinition(every_event=True).levels(nothing[:1], nothing[:1], np.ones(1, bool), nothing[:1])
    assert disliked.tolist() == [DISLIKED]

import json
from dataclasses import replace
from pathlib import Path

import ibis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from recpo.base.feedback import HIGHEST, FeedbackDefinition, FeedbackRule
from recpo.log.shaping import (
    D2Q,
    BinaryColumn,
    EveryEvent,
    NumericColumn,
    WatchQuantiles,
    WatchRatio,
    WatchTimeGain,
    bucket_counts,
    cutoff_table,
    definition,
    estimated_duration_exponent,
    quantile_table,
    quantiles_in_seconds,
    watch_ties,
)
from recpo.log.validate import tie_warnings, unit_warnings
from tests.cutoffs import quarters
from tests.reference import watch_labels as reference
from tests.refusals import refused

VECTORS = Path(__file__).parents[1] / "objectives" / "objectives.json"
TIES = st.sampled_from(["mid", "full"])
QUICK = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Few distinct values, so that ties, thin buckets and users without history are common.
EVENT = st.tuples(
    st.integers(0, 2),
    st.one_of(st.none(), st.integers(0, 12).map(lambda x: x * 500)),
    st.one_of(st.none(), st.sampled_from([300, 1000, 2000, 4000, 5000, 8000, 15_000, 16_000, 60_000])),
    st.integers(0, 2),
    st.booleans(),
)
EVENTS = st.lists(EVENT, min_size=5, max_size=60).map(lambda rows: [list(column) for column in zip(*rows, strict=True)])


def table(user, watch_ms, duration_ms, period, dislike=None, label=None):
    rows = len(user)
    return ibis.memtable(
        pa.table(
            {
                "row": pa.array(range(rows), pa.int64()),
                "user_index": pa.array(user, pa.int32()),
                "watch_ms": pa.array(watch_ms, pa.int64()),
                "duration_ms": pa.array(duration_ms, pa.int64()),
                "period": pa.array(period, pa.int8()),
                "dislike": pa.array(dislike or [False] * rows, pa.bool_()),
                "value": pa.array(label or [None] * rows, pa.float64()),
            }
        )
    )


def labeled(engine, method, *columns, **more):
    events = table(*columns, **more)
    result = engine.table(method.add(events, bucket_counts(events, method)).order_by("row"))
    return result["label"].to_numpy(zero_copy_only=False).astype(float)


def test_published_vector(engine):
    vector = next(v for v in json.loads(VECTORS.read_text())["vectors"] if v["id"] == "duration_reward.quantile")
    history, targets = vector["inputs"]["history_dur_play"], vector["inputs"]["targets"]
    duration, watch = zip(*[(1000 * d, 1000 * p) for d, p in history + targets], strict=True)
    period = [0] * len(history) + [1] * len(targets)
    found = labeled(
        engine, WatchQuantiles(min_history=1, ties="full"), [0] * len(watch), list(watch), list(duration), period
    )
    expected = [np.nan if q is None else q for q in vector["expected"]["q"]]
    np.testing.assert_allclose(found[len(history) :], expected, rtol=1e-12)


@QUICK
@given(
    events=EVENTS,
    min_history=st.integers(1, 6),
    base=st.sampled_from([2.0, 10.0, 1.5]),
    ties=TIES,
    smoothing=st.sampled_from([0.0, 0.5, 3.0, 10.0]),
    exponent=st.sampled_from([0.0, 0.73, 1.0]),
)
def test_watch_quantiles_equal_the_formula(engine, events, min_history, base, ties, smoothing, exponent):
    columns, options = events[:4], (base, min_history, ties, smoothing, exponent)
    found = labeled(engine, WatchQuantiles(*options), *columns)
    np.testing.assert_allclose(found, reference.watch_quantiles(*columns, *options), rtol=1e-12)


@pytest.mark.slow
@QUICK
@given(events=EVENTS, groups=st.integers(1, 5), min_history=st.integers(1, 4), ties=TIES)
def test_d2q_equals_the_formula(engine, events, groups, min_history, ties):
    found = labeled(engine, D2Q(groups, min_history, ties), *events[:4])
    expected = reference.duration_quantiles(*events[1:4], groups, min_history, ties)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.slow
@QUICK
@given(events=EVENTS, min_history=st.integers(1, 4), ties=TIES)
def test_watch_time_gain_equals_the_formula(engine, events, min_history, ties):
    found = labeled(engine, WatchTimeGain(2.0, min_history, ties), *events[:4])
    expected = reference.watch_time_gain(*events[1:4], 2.0, min_history, ties)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("label", [WatchQuantiles(), D2Q(), WatchTimeGain()])
def test_watch_times_a_millisecond_apart_are_not_equal(engine, label):
    columns = [0] * 5, [1000, 1001, 1002, 1003, 1004], [30_000] * 5, [0] * 5
    np.testing.assert_allclose(labeled(engine, label, *columns), [0.1, 0.3, 0.5, 0.7, 0.9])
    thin = [column[:4] for column in columns]  # one fewer than the least number of them
    assert np.isnan(labeled(engine, label, *thin)).all()


def test_duration_groups_have_equally_many_train_events(engine):
    duration = [10_000] * 3 + [20_000] * 3 + [30_000] * 3 + [40_000] * 3
    watch = list(range(1000, 13_000, 1000))
    found = labeled(engine, D2Q(groups=2), [0] * 12, watch, duration, [0] * 12)
    np.testing.assert_allclose(found, [(2 * rank - 1) / 12 for rank in range(1, 7)] * 2)
    # a later item that is longer than all falls into the last group, above three of its six
    later = labeled(engine, D2Q(groups=2), [0] * 13, [*watch, 9500], [*duration, 50_000], [0] * 12 + [1])
    assert later[-1] == pytest.approx(0.5)


def test_watch_time_gains_are_compared_across_buckets(engine):
    """In seconds: a mean of 3 and a deviation of 1.41 in the first bucket, of 20 and 7.48 in the second."""
    short, long = [1000, 2000, 3000, 4000, 5000], [10_000, 16_000, 18_000, 24_000, 32_000]
    rest = [4000] * 5 + [60_000] * 5, [0] * 10

    def gains(watch, *columns):
        return labeled(engine, WatchTimeGain(), [0] * len(watch), watch, *columns)

    places = np.array([1, 3, 6, 8, 9, 2, 4, 5, 7, 10])
    np.testing.assert_allclose(gains(short + long, *rest), (2 * places - 1) / 20)
    # gains of -0.5 four times and of 2 where the deviation is 0.4 milliseconds
    np.testing.assert_allclose(
        gains([1000] * 4 + [1001] + long, *rest), np.array([8] * 4 + [19, 1, 3, 13, 15, 17]) / 20
    )
    # without a deviation a later watch time gains its distance in milliseconds, 1 or 2: above nine of ten, above all
    later = gains([1000] * 5 + long + [1001, 1002], rest[0] + [4000] * 2, rest[1] + [1] * 2)
    assert later[-2:].tolist() == pytest.approx([0.9, 1.0])


def test_a_user_with_too_few_watch_times_has_the_place_among_all(engine):
    own, all_seven = [0.1, 0.3, 0.5, 0.7, 0.9], [1 / 14, 3 / 14]
    users, watch = [0] * 5 + [1] * 2, [11_000, 12_000, 13_000, 14_000, 15_000, 1000, 2000]
    found = labeled(engine, WatchQuantiles(min_history=5), users, watch, [30_000] * 7, [0] * 7)
    np.testing.assert_allclose(found, own + all_seven)
    thinner = [column[2:] for column in (users, watch, [30_000] * 7, [0] * 7)]  # five of two users
    found = labeled(engine, WatchQuantiles(min_history=5), *thinner)
    np.testing.assert_allclose(found, [0.5, 0.7, 0.9, 0.1, 0.3])


@pytest.mark.parametrize("label", [WatchQuantiles(), D2Q(), WatchTimeGain()])
def test_a_skip_after_zero_seconds_is_never_positive(engine, label):
    watch = [0] * 80 + list(range(1000, 21_000, 1000))  # 80 % of the watch times are zero seconds
    columns = [0] * 100, watch, [30_000] * 100, [0] * 100
    found = labeled(engine, label, *columns)
    assert (found[:80] == 0).all()
    assert (found[80:] > 0.8).all()
    full = labeled(engine, replace(label, ties="full"), *columns)
    assert (full[:80] >= 0.75).all()  # what the mid-ranks are for


def test_with_the_exponent_of_a_log_no_item_is_liked_for_its_length(engine):
    rng = np.random.default_rng(0)
    log_duration, taste = rng.uniform(np.log(8), np.log(64), 20_000), rng.standard_normal(20_000)
    duration = np.exp(log_duration)
    kept = rng.choice([0.02, 1.0], 20_000, p=[0.3, 0.7])  # three of ten are skipped
    watch = np.exp(0.7 * log_duration + taste) * kept
    exponent = estimated_duration_exponent(watch, duration)
    assert exponent == pytest.approx(0.7, abs=0.06)
    assert estimated_duration_exponent(1000 * watch, duration, base=4.0) == pytest.approx(0.7, abs=0.06)
    columns = [[0] * 20_000, (1000 * watch).astype(int).tolist(), (1000 * duration).astype(int).tolist(), [0] * 20_000]
    inside = log_duration / np.log(2) % 1

    def dependence(label):
        return np.corrcoef(labeled(engine, label, *columns), inside)[0, 1]

    assert dependence(WatchQuantiles()) > 0.05
    assert abs(dependence(WatchQuantiles(duration_exponent=exponent))) < 0.01
    # alike durations, watch times that fall or rise faster than the duration, and none
    assert estimated_duration_exponent(watch, np.full(20_000, 30.0)) == 0.0
    assert estimated_duration_exponent(np.exp(-log_duration), duration) == 0.0
    assert estimated_duration_exponent(np.exp(2 * log_duration), duration) == 1.0
    assert estimated_duration_exponent(np.array([0.0, np.nan]), np.array([5.0, 6.0])) == 0.0


def test_many_ties_are_warned_of(engine):
    def warnings(watch, label=None):
        rows = table([0] * len(watch), watch, [30_000] * len(watch), [0] * len(watch))
        return tie_warnings(
            label or WatchQuantiles(), engine.row(watch_ties(quantile_table(bucket_counts(rows, WatchQuantiles()))))
        )

    assert warnings([1000, 2000, 3000, 4000, 5000, 0]) == []
    assert "40% of the train watch times are zero seconds" in warnings([0, 0, 1000, 2000, 3000])[0]
    assert "40% of the train watch times equal the most frequent" in warnings([7, 7, 1000, 2000, 3000])[0]
    assert warnings([0, 0, 1000, 2000, 3000], BinaryColumn()) == []
    assert warnings([7, 7, 1000, 2000, 3000], WatchRatio()) == []
    assert warnings([None, None]) == []


def test_implausible_units_are_warned_of():
    def warned(*watched):
        return unit_warnings({bucket: quarters(0.0, seconds, 9e9) for bucket, seconds in enumerate(watched, 4)}, 2.0)

    assert unit_warnings({}, 2.0) == []
    assert warned(8.0, 16.0, 0.0) == []
    assert "about 0.0005 times the duration" in warned(0.008, 0.016, 0.032)[0]
    assert "about 500 times the duration" in warned(8_000.0, 16_000.0, 32_000.0)[0]


def test_ties_are_counted_by_bucket(engine):
    # of 10 s: two of zero seconds; of 100 s: none, and three that are alike
    rows = table([0] * 7, [0, 0, 1000, 5000, 5000, 5000, 7000], [10_000] * 3 + [100_000] * 4, [0] * 7)
    assert engine.row(watch_ties(quantile_table(bucket_counts(rows, WatchQuantiles())))) == {
        "watched": 7,
        "zero": 2,
        "tied": 5,
    }


def test_cutoffs_are_sixteenths_of_the_watch_times(engine):
    rows = table([0] * 32, [1000 * second for second in range(1, 33)], [40_000] * 32, [0] * 32)
    assert engine.table(cutoff_table(quantile_table(bucket_counts(rows, WatchQuantiles())))).to_pylist() == [
        {"bucket": 5, **{f"q{step}": 2000 * step for step in range(1, 16)}}
    ]


@QUICK
@given(events=EVENTS, exponent=st.sampled_from([0.0, 0.73]))
def test_feedback_levels_equal_the_formula(engine, events, exponent):
    label = WatchQuantiles(duration_exponent=exponent)
    cutoffs = quantiles_in_seconds(engine.table(cutoff_table(quantile_table(bucket_counts(table(*events), label)))))
    seconds = [np.array([np.nan if ms is None else ms / 1000 for ms in column]) for column in events[1:3]]
    unlabeled = np.full(len(events[0]), np.nan)
    found = definition(cutoffs, FeedbackRule(), label, 86_400.0).levels(*seconds, np.array(events[4]), unlabeled)
    assert found.tolist() == reference.feedback_levels(*events[1:3], events[4], events[3], exponent)


@pytest.mark.slow
@pytest.mark.parametrize("label", [WatchQuantiles(min_history=1), D2Q(3, 1), WatchTimeGain(min_history=1)])
@QUICK
@given(events=EVENTS, later=EVENTS)
def test_later_events_change_no_earlier_label(engine, label, events, later):
    train = [*events[:3], [0] * len(events[0])]
    both = [a + b for a, b in zip(train, [*later[:3], [2] * len(later[0])], strict=True)]
    found = labeled(engine, label, *both)[: len(train[0])]
    np.testing.assert_array_equal(found, labeled(engine, label, *train))


@pytest.mark.slow
@QUICK
@given(events=EVENTS)
def test_labels_lie_in_the_unit_interval_and_are_neutral_without_a_duration(engine, events):
    for label in (WatchQuantiles(min_history=1), WatchRatio(), D2Q(3, 1), WatchTimeGain(min_history=1)):
        found = labeled(engine, label, *events[:4])
        known = np.array([w is not None and d is not None for w, d in zip(events[1], events[2], strict=True)])
        assert np.isnan(found[~known]).all()
        assert ((found[~np.isnan(found)] >= 0) & (found[~np.isnan(found)] <= 1)).all()


def test_watch_ratio_is_clipped_at_its_cap(engine):
    columns = [0] * 4, [0, 5000, 10_000, 30_000], [10_000] * 4, [0] * 4
    np.testing.assert_allclose(labeled(engine, WatchRatio(), *columns), [0, 0.5, 1, 1])
    np.testing.assert_allclose(labeled(engine, WatchRatio(cap=2.0), *columns), [0, 0.25, 0.5, 1])


def test_levels_of_the_watch_ratio_are_those_of_its_labels(engine):
    watched, lasted = [0, 10_000, 29_000, 45_000, 80_000, 199_000, 200_000, 400_000, None], [200_000] * 8 + [100_000]
    short = [ms and ms * 3 // 5 for ms in watched], [120_000] * 8 + [None]  # the same shares of a shorter item
    for label in (WatchRatio(), WatchRatio(cap=2.0)):
        rows = table([0] * 18, [*watched, *short[0]], [*lasted, *short[1]], [0] * 18)
        quantiles = quantiles_in_seconds(engine.table(cutoff_table(quantile_table(bucket_counts(rows, label)))))
        by_watch = definition(quantiles, FeedbackRule(0.8, 0.3), label, 86_400.0)
        by_label = FeedbackDefinition(FeedbackRule(0.8, 0.3))
        seconds = [
            np.array([np.nan if ms is None else ms / 1000 for ms in column])
            for column in ([*watched, *short[0]], [*lasted, *short[1]])
        ]
        liked, nothing = np.minimum(seconds[0] / seconds[1] / label.cap, 1.0), np.zeros(18, bool)
        found = by_watch.levels(*seconds, nothing, np.full(18, np.nan))
        assert found.tolist() == by_label.levels(*seconds, nothing, liked).tolist()
        assert found[7] == HIGHEST


def test_column_labels(engine):
    columns = [0] * 4, [None] * 4, [None] * 4, [0] * 4
    ratings = [0.5, 3.0, 4.0, None]
    np.testing.assert_allclose(labeled(engine, EveryEvent(), *columns), [1, 1, 1, 1])
    line = labeled(engine, NumericColumn(0.5, 4.5), *columns, label=ratings)
    np.testing.assert_allclose(line, [0, 0.625, 0.875, np.nan])
    steep = labeled(engine, NumericColumn(1.0, 3.5), *columns, label=ratings)
    np.testing.assert_allclose(steep, [0, 0.8, 1, np.nan])
    unrated = labeled(engine, NumericColumn(1.0, 4.0, missing=0.5), *columns, label=ratings)
    np.testing.assert_allclose(unrated, [np.nan, 2 / 3, 1, np.nan])
    step = labeled(engine, NumericColumn(threshold=4), *columns, label=ratings)
    np.testing.assert_allclose(step, [0, 0, 1, np.nan])
    np.testing.assert_allclose(labeled(engine, BinaryColumn(), *columns, label=[0, 1, 1, None]), [0, 1, 1, np.nan])


def test_cutoffs_are_described_in_seconds(engine):
    rows = table([0] * 5, [1000, 2000, 3000, 4000, 999_000], [9000] * 5, [0, 0, 0, 0, 1])
    label = WatchQuantiles()
    cutoffs = quantiles_in_seconds(engine.table(cutoff_table(quantile_table(bucket_counts(rows, label)))))
    fitted = definition(cutoffs, FeedbackRule(), label, 86_400.0)
    assert fitted == FeedbackDefinition(FeedbackRule(), 2.0, {3: (1.0,) * 4 + (2.0,) * 4 + (3.0,) * 4 + (4.0,) * 3})


def test_defaults_of_labels_and_what_they_need():
    assert WatchQuantiles() == WatchQuantiles(2.0, 5, "mid")
    assert WatchTimeGain() == WatchTimeGain(2.0, 5, "mid")
    assert D2Q() == D2Q(30, 5, "mid")
    assert WatchRatio() == WatchRatio(1.0)
    assert NumericColumn() == NumericColumn(None, None, None)
    for label in (WatchQuantiles(base=3.0), WatchTimeGain(base=3.0)):
        assert label.base == 3.0
    assert WatchRatio().base == D2Q().base == 2.0
    assert WatchQuantiles(by_duration=False).needs == ("watch_time",)
    assert WatchQuantiles().needs == WatchTimeGain.needs == D2Q.needs == WatchRatio.needs == ("watch_time", "duration")
    assert BinaryColumn.needs == NumericColumn.needs == ("label",)
    assert EveryEvent.needs == ()


def test_what_a_label_cannot_read(engine):
    value = ibis.memtable(pa.table({"value": [0.0, 1.0, 0.5, 2.0, -1.0]}))
    found = engine.table(value.mutate(wrong=BinaryColumn().check(value["value"])[-1]))
    assert found["wrong"].to_pylist() == [False, False, True, True, True]
    assert WatchQuantiles().check(value["value"]) is None


def test_values_outside_the_ends(engine):
    value = ibis.memtable(pa.table({"value": [0.0, 1.0, -0.5, 2.0, None, float("nan"), float("inf")]}))
    found = engine.table(value.mutate(outside=NumericColumn(0, 1).check(value["value"])[-1].fill_null(False)))
    assert found["outside"].to_pylist() == [False, False, True, True, False, False, False]
    assert NumericColumn(threshold=4).check(value["value"]) is None


@pytest.mark.parametrize(
    ("make", "code", "field"),
    [
        (lambda: WatchQuantiles(base=1.0), "out_of_range", "base"),
        (lambda: WatchQuantiles(min_history=0), "out_of_range", "min_history"),
        (lambda: WatchTimeGain(base=0.5), "out_of_range", "base"),
        (lambda: WatchRatio(cap=0.0), "out_of_range", "cap"),
        (lambda: D2Q(groups=0), "out_of_range", "groups"),
        (lambda: NumericColumn(low=5, high=1), "bad_value", "low"),
        (lambda: NumericColumn(low=1, high=1), "bad_value", "low"),
        (lambda: NumericColumn(low=1), "missing_option", "high"),
        (lambda: NumericColumn(high=1), "missing_option", "low"),
        (lambda: NumericColumn(low=1, high=5, threshold=4), "conflicting_options", "threshold"),
    ],
)
def test_impossible_options_are_refused(make, code, field):
    with refused(code, field):
        make()

"""Slow NumPy versions of the watch-time labels; written from the formulas, event by event."""

import functools
import math

import numpy as np


@functools.cache
def bucket_of(duration_ms, base=2.0):
    return math.floor(math.log(duration_ms / 1000 + 1e-6) / math.log(base))


def _known(watch_ms, duration_ms):
    return watch_ms is not None and duration_ms is not None


def share_reached(value, values, ties):
    equal = sum(other == value for other in values)
    return (sum(other < value for other in values) + (equal if ties == "full" else equal / 2)) / len(values)


def label_of(watch_ms, value, values, ties):
    """The share, but 0 for a watch of zero seconds."""
    return 0.0 if ties == "mid" and watch_ms == 0 else share_reached(value, values, ties)


def at_the_middle(watch_ms, duration_ms, base, exponent):
    """The watch time that an item in the middle of the duration bucket would have had, in whole milliseconds."""
    if exponent == 0:
        return watch_ms
    middle = base ** (bucket_of(duration_ms, base) + 0.5)
    return math.floor(watch_ms * (middle / (duration_ms / 1000 + 1e-6)) ** exponent + 0.5)


def watch_quantiles(
    user, watch_ms, duration_ms, period, base=2.0, min_history=5, ties="mid", smoothing=0.0, exponent=0.0
):
    """nan = unknown. All arguments are lists of equal length; None = unknown; period 0 is train."""
    rows = range(len(user))
    known = [i for i in rows if _known(watch_ms[i], duration_ms[i])]
    label = np.full(len(user), np.nan)
    for i in known:
        bucket = bucket_of(duration_ms[i], base)
        alike = [j for j in known if period[j] == 0 and bucket_of(duration_ms[j], base) == bucket]
        times = {j: at_the_middle(watch_ms[j], duration_ms[j], base, exponent) for j in {*alike, i}}
        own = [times[j] for j in alike if user[j] == user[i]]
        everyone = [times[j] for j in alike]
        if smoothing and len(everyone) >= min_history and len(own) + smoothing >= min_history:
            shares = [label_of(watch_ms[i], times[i], pool, ties) if pool else 0 for pool in (own, everyone)]
            label[i] = (len(own) * shares[0] + smoothing * shares[1]) / (len(own) + smoothing)
            continue
        for pool in (own, everyone):
            if len(pool) >= min_history:
                label[i] = label_of(watch_ms[i], times[i], pool, ties)
                break
    return label


def duration_quantiles(watch_ms, duration_ms, period, groups, min_history=5, ties="mid"):
    """D2Q with groups of equally many train durations."""
    train = [i for i in range(len(watch_ms)) if period[i] == 0 and _known(watch_ms[i], duration_ms[i])]
    label = np.full(len(watch_ms), np.nan)
    if not train:
        return label

    def group(duration):
        below = sum(duration_ms[j] < duration for j in train)
        return min(groups - 1, groups * below // len(train))

    for i in range(len(watch_ms)):
        if _known(watch_ms[i], duration_ms[i]):
            pool = [watch_ms[j] for j in train if group(duration_ms[j]) == group(duration_ms[i])]
            if len(pool) >= max(1, min_history):
                label[i] = label_of(watch_ms[i], watch_ms[i], pool, ties)
    return label


def watch_time_gain(watch_ms, duration_ms, period, base=2.0, min_history=5, ties="mid"):
    known = [i for i in range(len(watch_ms)) if _known(watch_ms[i], duration_ms[i])]
    gain = {}
    for i in known:
        bucket = bucket_of(duration_ms[i], base)
        pool = [watch_ms[j] for j in known if period[j] == 0 and bucket_of(duration_ms[j], base) == bucket]
        if len(pool) >= max(1, min_history):
            deviation = np.std(pool)
            gain[i] = round((watch_ms[i] - np.mean(pool)) / (deviation if deviation > 0 else 1.0), 5)
    label = np.full(len(watch_ms), np.nan)
    train = [gain[i] for i in gain if period[i] == 0]
    for i, value in gain.items():
        label[i] = label_of(watch_ms[i], value, train, ties)
    return label


def feedback_levels(watch_ms, duration_ms, dislike, period, exponent=0.0, base=2.0):
    known = [i for i in range(len(watch_ms)) if _known(watch_ms[i], duration_ms[i])]
    times = {i: at_the_middle(watch_ms[i], duration_ms[i], base, exponent) for i in known}

    @functools.cache
    def cutoffs_of(bucket):
        pool = [times[j] for j in known if period[j] == 0 and bucket_of(duration_ms[j], base) == bucket]
        return [min(w for w in pool if 16 * sum(p <= w for p in pool) >= k * len(pool)) for k in range(1, 16) if pool]

    levels = []
    for i in range(len(watch_ms)):
        cutoffs = cutoffs_of(bucket_of(duration_ms[i], base)) if i in known else []
        if dislike[i]:
            levels.append(1)
        elif not cutoffs:
            levels.append(0)
        else:
            levels.append(2 + sum(times[i] > cutoff for cutoff in cutoffs))
    return levels

"""The sizes of a training, by stated rules from the size of the log.

``recpo init`` writes them into configurations, ``recpo fit`` trains with them, and so does ``benchmarks/published.py``
(docs/training.md). No rule names a data set: all that counts is how many events, users and items a log has, and how
many events most users have.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from recpo.log.inspection import LogCounts
from recpo.log.prepared import Prepared

_LENGTHS: Final = (20, 50, 100, 200)
_WINDOW: Final = 50  # events that the attention of a policy reads which is aligned and served
_SMALL_LOG: Final = 5_000  # events
_LARGE_CATALOG: Final = 200_000  # items
_HELD_IN: Final = 0.85  # share of the contexts in the training period
_STEPS: Final = {"pretrain": 2_000, "mpo": 850, "gbpo": 500}  # optimizer steps to reach with epochs of small logs
_MOST_EPOCHS: Final = {"pretrain": 12, "mpo": 8, "gbpo": 3}
_LEAST_EPOCHS: Final = {"pretrain": 3, "mpo": 1, "gbpo": 1}
_MOST_STEPS: Final = 3_000  # steps of MPO, each of which scores the full catalog
_RANKING_EPOCHS: Final = {"ranking": 30, "semantic": 20}
_BATCH_EVENTS: Final = {"ranking": 2_560, "semantic": 1_280}  # events of an optimizer step
_BATCHES: Final = (16, 256)  # contexts
_WIDE_LOG: Final = 50_000  # events
_FEW_EVENTS: Final = 20  # per user
_FULL_DROPOUT: Final = 16  # events per item
_DROPOUT: Final = {"ranking": (0.2, 0.5), "semantic": (0.1, 0.3)}
_PATIENCE: Final = (3, 10)
_AVERAGED_STEPS: Final = (100, 1_000)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one training configuration.

    Attributes:
        history_length: events of a window.
        max_history: events that the policy can read.
        dim: width of item vectors.
        layers: blocks of the encoder.
        dropout: probability of the encoder's dropout.
        batch_size: contexts of a batch.
        epochs: passes over the training period.
        steps: approximate number of optimizer steps.
        max_steps: training ends after this many steps; None = after the epochs.
        patience: validations without an improvement that end the training.
    """

    history_length: int
    max_history: int
    dim: int
    layers: int
    dropout: float
    batch_size: int
    epochs: int
    steps: int
    max_steps: int | None = None
    patience: int = _PATIENCE[0]

    @property
    def averaging_decay(self) -> float:
        """Decay of a moving average of the weights over half an epoch, but at least 100 steps and at most 1,000."""
        averaged = float(np.clip(self.steps / self.epochs / 2, *_AVERAGED_STEPS))
        return 1 - float(f"{1 / averaged:.0e}")  # one digit


def sizes_of(step: str, counts: LogCounts) -> Sizes:
    """Sizes of one training, from the size of the log.

    With E events, U users, V items and q, the 90th percentile of the events per user:

    - ``history_length``: the least of 20, 50, 100 and 200 that holds q events; "ranking": 2 q events. Policies that are
      aligned and served attend to at most 50.
    - ``layers``: 2; "ranking", "semantic": 1 if E / U < 20, since one layer relates what few events have to say.
    - ``dropout``: .2; none in "mpo", whose ratios it would disturb. "ranking": ``0.5 - 0.1 log2(E / 16 V)`` in steps of
      .05, from .2 to .5: a tenth less for every doubling of the events per item, because the vectors of items overfit
      first. "semantic": .2 less, from .1 to .3, as items share their codes.
    - ``dim``: 64, or 32 if E < 5,000. "ranking", "semantic": 128, or 64 if E < 50,000.
    - ``batch_size``: a power of two. "ranking": an optimizer step has up to 2,560 events ("semantic": 1,280), in 16 to
      256 contexts (8 to 128).
    - ``epochs``: "pretrain", "gbpo", "mpo": for about 2,000, 500 and 850 optimizer steps, within limits. "ranking": 30,
      "semantic": 20, of which ``patience`` leaves out what does not help.
    - ``patience``: 3; "ranking": ``300 / sqrt(U)`` from 3 to 10, because the mean over few held-out users is noisy;
      "semantic": one more.

    Args:
        step: "pretrain" and "gbpo" (windows of users) or "mpo" (requests), for a policy that is aligned and served;
            "ranking" (catalog softmax) and "semantic" (semantic ids): pre-training as an end in itself, for as long as
            validation improves.
        counts: size of the log.
    """
    return _ranking(step, counts) if step in _RANKING_EPOCHS else _aligned(step, counts)


def counts_of(data: Prepared) -> LogCounts:
    """The size of prepared data, as ``recpo init`` counts it in a log; requests and q are of the training period."""
    splits = data.manifest["counts"]["splits"]
    events = sum(int(counts["targets"]) for counts in splits.values())
    per_user, requests = [], 0
    for columns in data.train_columns(["user_index", "timestamp"]):
        user, moment = columns["user_index"], columns["timestamp"]
        per_user.append(np.unique(user, return_counts=True)[1])
        requests += int(len(user) and 1 + ((user[1:] != user[:-1]) | (moment[1:] != moment[:-1])).sum())
    found = np.concatenate(per_user) if per_user else np.zeros(1)
    return LogCounts(
        events,
        users=int(data.manifest["num_users"]),
        items=data.num_items,
        requests=requests,
        events_per_user=int(np.ceil(np.quantile(found, 0.9))),
        days=None,
    )


def _aligned(step: str, counts: LogCounts) -> Sizes:
    history = _at_least(min(counts.events_per_user, _LENGTHS[-1]))
    window = min(history, _WINDOW)
    windows = max(counts.events / window, min(_users(counts), counts.events / 2))
    contexts = max(1, int(_HELD_IN * (counts.requests if step == "mpo" else windows)))
    batch = _power_of_two(contexts / 16, 8, 128)
    if step == "mpo" and counts.items > _LARGE_CATALOG:
        batch = min(batch, 32)
    steps = -(-contexts // batch)
    epochs = max(_LEAST_EPOCHS[step], min(_MOST_EPOCHS[step], round(_STEPS[step] / steps)))
    most = _MOST_STEPS if step == "mpo" and epochs * steps > _MOST_STEPS else None
    return Sizes(
        history_length=window,
        max_history=history,
        dim=64 if counts.events >= _SMALL_LOG else 32,
        layers=2,
        dropout=0.0 if step == "mpo" else 0.2,
        batch_size=batch,
        epochs=epochs,
        steps=most or epochs * steps,
        max_steps=most,
    )


def _ranking(step: str, counts: LogCounts) -> Sizes:
    history = _at_least(counts.events_per_user * (2 if step == "ranking" else 1))
    users, events = _users(counts), max(1, counts.events)
    windows = max(users, events / (0.75 * history))  # windows overlap by a quarter; each user has at least one
    batch_events = _BATCH_EVENTS[step]
    scale = batch_events / _BATCH_EVENTS["ranking"]
    batch = _power_of_two(batch_events * windows / events, *(round(scale * size) for size in _BATCHES))
    epochs = _RANKING_EPOCHS[step]
    patience = int(np.clip(round(300 / math.sqrt(users)), *_PATIENCE))
    return Sizes(
        history_length=history,
        max_history=history,
        dim=128 if events >= _WIDE_LOG else 64,
        layers=2 if events >= _FEW_EVENTS * users else 1,
        dropout=_dropout(step, counts),
        batch_size=batch,
        epochs=epochs,
        steps=epochs * -(-int(windows) // batch),
        patience=patience + (step == "semantic"),
    )


def _users(counts: LogCounts) -> float:
    """The users of the whole log, at least one; only a part may have been inspected."""
    share = 1.0 if counts.is_whole else counts.events / max(1, counts.events_per_user)
    return max(1.0, counts.users * share)


def _dropout(step: str, counts: LogCounts) -> float:
    least, most = _DROPOUT[step]
    doublings = math.log2(max(counts.events, 1) / max(counts.items, 1) / _FULL_DROPOUT)
    return float(np.clip(round(20 * (most - 0.1 * doublings)) / 20, least, most))


def _at_least(events: float) -> int:
    return next((length for length in _LENGTHS if length >= events), _LENGTHS[-1])


def _power_of_two(value: float, least: int, most: int) -> int:
    power = least
    while power * 2 <= min(value, most):
        power *= 2
    return power

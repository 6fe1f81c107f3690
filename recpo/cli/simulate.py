"""`recpo simulate`: an interaction log with known truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recpo.simulation.log import write_simulation
from recpo.simulation.parameters import SimulationParameters
from recpo.simulation.preferences import Preferences
from recpo.simulation.truth import Truth

_SUMMARY_USERS = 500
_SUMMARY_LENGTH = 10


def simulate(
    out: Path,
    users: int = 2000,
    items: int = 1000,
    events: int = 200_000,
    days: int = 14,
    random_share: float = 0.1,
    topics: int = 16,
    drift: float = 0.03,
    dislike_cost: float = 2.0,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes.

    Args:
        out: directory to make.
        users: number of users.
        items: number of items in the catalog.
        events: number of rows of the log.
        days: length of the log.
        random_share: share of exposures drawn uniformly from the catalog.
        topics: number of topics.
        drift: speed at which tastes turn, radians per day.
        dislike_cost: what a dislike takes from the true reward ``P(satisfied) - dislike_cost P(dislike)``.
        seed: every random number follows from it.
        overwrite: replace ``out`` where it exists.
    """
    parameters = SimulationParameters(
        users=users,
        items=items,
        events=events,
        days=days,
        random_share=random_share,
        topics=topics,
        drift=drift,
        dislike_cost=dislike_cost,
        seed=seed,
    )
    truth = write_simulation(Preferences.draw(parameters), out, overwrite=overwrite)
    print(f"{out}: {events:,} events of {users:,} users and {items:,} items over {days} days")
    print(_values(truth, float(days - 1)))


def _values(truth: Truth, day: float) -> str:
    sample = truth.user_ids[:_SUMMARY_USERS]
    length = min(_SUMMARY_LENGTH, len(truth.item_ids))
    best = truth.top_k_value(sample, truth.oracle_top_k(sample, length, day), day)
    values = {
        "uniform": truth.uniform_value(sample, day),
        "logging policy": truth.logging_value(sample, day),
        f"best {length} items": best,
    }
    listed = ", ".join(f"{name} {np.mean(value):.3f}" for name, value in values.items())
    return f"true expected reward on the last day ({len(sample)} users): {listed}"

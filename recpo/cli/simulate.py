"""``recpo simulate``: an interaction log with known truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recpo.workflows.simulate import simulate as _simulate


def simulate(out: Path, progress: bool = True, **options: Any) -> None:
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes.

    Args:
        out: directory to make.
        progress: show a progress bar on a terminal.
        **options: those of ``recpo.workflows.simulate.simulate``.
    """
    world = _simulate(out, progress=progress, **options)
    parameters = world.truth.preferences.parameters
    print(
        f"{world.root}: {parameters.events:,} events of {parameters.users:,} users and {parameters.items:,} items over "
        f"{parameters.days} days"
    )
    users = 500
    listed = ", ".join(f"{name} {value:.3f}" for name, value in world.values(users=users).items())
    print(f"true expected reward on the last day ({min(users, parameters.users)} users): {listed}")

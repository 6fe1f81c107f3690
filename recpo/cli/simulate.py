"""``recpo simulate``: an interaction log with known truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from recpo.simulation.parameters import WORLDS, World
from recpo.workflows.simulate import simulate as _simulate


def simulate(out: Path, world: World = "default", progress: bool = True, **options: Any) -> None:
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes.

    Args:
        out: directory to make.
        world: preset of the options below: default, confounded (popularity knows nothing of quality, more clickbait),
            skewed (little exploration) or small (20,000 events of 500 users on 5,000 items). An option given beside it
            overrides it.
        progress: show a progress bar on a terminal.
        **options: those of ``recpo.workflows.simulate.simulate``.
    """
    simulated = _simulate(out, world=world, progress=progress, **options)
    parameters = simulated.truth.preferences.parameters
    print(
        f"{simulated.root}: {parameters.events:,} events of {parameters.users:,} users and {parameters.items:,} items "
        f"over {parameters.days} days"
    )
    users = 500
    listed = ", ".join(f"{name} {value:.3f}" for name, value in simulated.values(users=users).items())
    print(f"true expected reward on the last day ({min(users, parameters.users)} users): {listed}")


def defaults(chosen: Namespace) -> dict[str, Any]:
    """The defaults of the other options in the chosen world."""
    return dict(WORLDS[chosen.world])

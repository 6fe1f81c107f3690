"""The verb ``simulate``: an interaction log with known truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recpo.errors import RecpoError
from recpo.simulation.log import Simulation, write_simulation
from recpo.simulation.parameters import WORLDS, SimulationParameters, World
from recpo.simulation.preferences import Preferences


def simulate(
    out: Path | str, *, world: World = "default", overwrite: bool = False, progress: bool = False, **parameters: Any
) -> Simulation:
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes.

    Args:
        out: directory to make.
        world: preset of parameters: default, confounded (popularity knows nothing of quality, more clickbait), skewed
            (little exploration) or small (20,000 events of 500 users on 5,000 items). What is given beside it overrides
            it.
        overwrite: replace ``out`` where it exists.
        progress: show a progress bar on a terminal.
        **parameters: users, items, events, days, seed and the others of
            ``recpo.simulation.parameters.SimulationParameters``.

    Returns:
        The log's directory (``log``), the log as a frame (``to_pandas()``) and the ``truth``.

    Raises:
        RecpoError: ``out`` exists and ``overwrite`` is False, the world is unknown or a parameter is out of range.
    """
    if world not in WORLDS:
        raise RecpoError(f"simulate: world is {world!r}, expected one of {', '.join(WORLDS)}")
    parameters = {**WORLDS[world], **parameters}
    preferences = Preferences.draw(SimulationParameters(**parameters))
    return write_simulation(preferences, Path(out), world=world, overwrite=overwrite, progress=progress)

"""The verb ``simulate``: simulates an interaction log with known truth, and later days that a policy serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from recpo.artifacts import sha256
from recpo.errors import RecpoError, validate_seed
from recpo.exploration import Exploration
from recpo.simulation.log import Simulation, write_simulation
from recpo.simulation.parameters import WORLDS, SimulationParameters, World
from recpo.simulation.preferences import Preferences

if TYPE_CHECKING:
    from recpo.serving.bundle import Bundle


def simulate(
    out: Path | str,
    *,
    world: World = "default",
    policy: Path | str | Bundle | None = None,
    after: Path | str | Simulation | Sequence[Path | str | Simulation] | None = None,
    exploration: Exploration | None = None,
    repeat_after: float | None = None,
    overwrite: bool = False,
    progress: bool = False,
    **parameters: Any,
) -> Simulation:
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes. In the world ``living``, ``out/items.parquet`` and ``out/users.parquet``
    are the item table (each item from its birth on) and the user table.

    With ``policy`` and ``after``, a bundle replaces the simulator's own logging policy and serves the users of an
    existing world on the days after its log. ``out`` then also has ``served.json``: the true value of these days, of
    the logging policy and of the oracle (docs/exploration.md).

    Args:
        out: output directory.
        world: preset of parameters: default, confounded (popularity is independent of quality, more clickbait), skewed
            (little exploration), small (20,000 events of 500 users on 5,000 items) or living (items are born and fade;
            tables of items and users beside the log). Parameters override the preset.
        policy: bundle that serves, or the directory of one; it was trained on logs of this world.
        after: directory of the world that continues; or a list of the world and the days served since, in order.
        exploration: how the policy's slates are drawn; None = the best items in their order.
        repeat_after: days after which the policy may show a user an item again (its bundle was exported with
            ``repeats``); None = never. The oracle of the report follows the same rule.
        overwrite: replace ``out`` if it exists.
        progress: show a progress bar on a terminal.
        **parameters: users, items, events, days, seed and the others of
            ``recpo.simulation.parameters.SimulationParameters``. With a policy, only ``days`` (default 1) and ``seed``
            (default 0) can be given; they apply to the new days.

    Returns:
        The log's directory (``log``), the log as a frame (``to_pandas()``), the ``truth`` and what was ``served``.

    Raises:
        RecpoError: ``out`` exists and ``overwrite`` is False, the world is unknown or a parameter is out of range. With
            a policy: ``after`` is not a simulation or not consecutive days of one world, the bundle has another catalog
            or lists too few items.
    """
    if world not in WORLDS:
        raise RecpoError(f"simulate: world is {world!r}, expected one of {', '.join(WORLDS)}")
    if policy is not None and after is not None:
        return _serve(
            Path(out), policy, _opened(after), exploration, repeat_after, world, overwrite, progress, parameters
        )
    for name, value in (
        ("policy", policy),
        ("after", after),
        ("exploration", exploration),
        ("repeat_after", repeat_after),
    ):
        if value is not None:
            raise RecpoError(
                f"simulate: {name} is given, expected policy and after together: a bundle, and the world that it serves"
            )
    parameters = {**WORLDS[world], **parameters}
    preferences = Preferences.draw(SimulationParameters(**parameters))
    return write_simulation(preferences, Path(out), world=world, overwrite=overwrite, progress=progress)


def _serve(
    out: Path,
    policy: Path | str | Bundle,
    worlds: Sequence[Simulation],
    exploration: Exploration | None,
    repeat_after: float | None,
    world: str,
    overwrite: bool,
    progress: bool,
    parameters: Mapping[str, Any],
) -> Simulation:
    from recpo.serving.bundle import Bundle
    from recpo.serving.manifest import MANIFEST
    from recpo.simulation.next_days import write_next_days
    from recpo.workflows.simulated_service import BundleService

    options = {"days": 1, "seed": 0, **parameters}
    _validate_options(worlds[0], world, options)
    bundle = policy if isinstance(policy, Bundle) else Bundle.load(policy)
    users = None if worlds[0].users is None else pq.read_table(worlds[0].users)
    service = BundleService(bundle, exploration, users)
    service.validate(worlds[0].truth, repeat_after)
    who = {
        "bundle": bundle.root.resolve().name,
        "manifest": sha256(bundle.root / MANIFEST),
        "origin": dict(bundle.manifest.origin),
    }
    return write_next_days(
        worlds,
        out,
        service,
        days=options["days"],
        seed=options["seed"],
        policy=who,
        exploration=None if exploration is None else dataclasses.asdict(exploration),
        repeat_after=repeat_after,
        overwrite=overwrite,
        progress=progress,
        inputs=[bundle.root],
    )


def _opened(after: Path | str | Simulation | Sequence[Path | str | Simulation]) -> list[Simulation]:
    named = [after] if isinstance(after, Path | str | Simulation) else list(after)
    if not named:
        raise RecpoError("simulate: after is an empty list, expected the world to continue")
    return [one if isinstance(one, Simulation) else Simulation.open(one) for one in named]


def _validate_options(stands: Simulation, world: str, options: Mapping[str, Any]) -> None:
    """The parameters of an existing world cannot change; those of its next days can."""
    truth = stands.truth
    if world not in ("default", truth.world):
        raise RecpoError(
            f"simulate: world is {world}, {stands.root} is {truth.world}: leave world out when a policy is given"
        )
    known = dataclasses.asdict(truth.preferences.parameters)
    for name, value in options.items():
        if name in ("days", "seed"):
            least = 1 if name == "days" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RecpoError(f"simulate: {name} is {value!r}, expected a whole number from {least} on")
        elif name not in known:
            raise RecpoError(f"simulate: there is no option {name}; with a policy, give only days and seed")
        elif value != known[name]:
            raise RecpoError(
                f"simulate: {name} is {value!r}, {stands.root} has {known[name]!r}: a policy serves an "
                "existing world; give only days and seed"
            )
    validate_seed(options["seed"], "simulate: seed")

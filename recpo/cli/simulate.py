"""``recpo simulate``: simulates an interaction log with known truth, and later days that a policy serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from recpo.cli.verb_results import VerbResult, after_simulate
from recpo.simulation.log import Simulation
from recpo.simulation.parameters import WORLDS, World
from recpo.simulation.served import ServedDays
from recpo.simulation.truth import Truth
from recpo.workflows.simulate import simulate as _simulate


def simulate(
    out: Path,
    world: World = "default",
    policy: Path | None = None,
    after: list[Path] | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> VerbResult:
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes. With ``--world living``, ``out/items.parquet`` and ``out/users.parquet``
    are the item table (each item from its birth on) and the user table.

    With --policy and --after, a bundle replaces the simulator's own logging policy and serves the users of an existing
    world on the days after its log. ``out/served.json`` then has the true value of these days (docs/exploration.md).

    Args:
        out: output directory.
        world: preset of the options below: default, confounded (popularity is independent of quality, more clickbait),
            skewed (little exploration), small (20,000 events of 500 users on 5,000 items) or living (items are born and
            fade; tables of items and users beside the log). Other options override it.
        policy: bundle that serves, trained on logs of this world. --days (1) and --seed (0) then apply to the new days,
            and all other options are those of the world.
        after: directory of the world that continues; or a list of the world and the days served since, in order.
        progress: show a progress bar on a terminal.
        **options: those of ``recpo.workflows.simulate.simulate``.
    """
    simulated = _simulate(out, world=world, policy=policy, after=after, progress=progress, **options)
    if simulated.served is not None:
        _print_served(simulated, simulated.served)
        return after_simulate(simulated.root, {"days": [dataclasses.asdict(day) for day in simulated.served.days]})
    parameters = simulated.truth.preferences.parameters
    print(
        f"{simulated.root}: {parameters.events:,} events of {parameters.users:,} users and {parameters.items:,} items "
        f"over {parameters.days} days"
    )
    if parameters.lives:
        first, last = (int(simulated.truth.available(float(day)).sum()) for day in (0, parameters.days - 1))
        print(f"{simulated.items}: {first:,} items on day 0, {last:,} on day {parameters.days - 1}")
    users = 500
    listed = ", ".join(f"{name} {value:.3f}" for name, value in simulated.values(users=users).items())
    print(f"true expected reward on the last day ({min(users, parameters.users)} users): {listed}")
    sizes = {name: getattr(parameters, name) for name in ("events", "users", "items", "days")}
    return after_simulate(simulated.root, sizes)


def _print_served(simulated: Simulation, served: ServedDays) -> None:
    for day in served.days:
        print(
            f"{simulated.root}: day {day.day}: {day.exposures:,} exposures in {day.requests:,} requests "
            f"({day.short_slates:,} short), explored {day.explored:.1%}\n"
            f"  true value {day.value:.3f} (logging policy {day.logging_value:.3f}, oracle {day.oracle_value:.3f}, "
            f"regret {day.regret:.3f})\n"
            f"  dislikes {day.dislikes:.2%} (logging policy {day.logging_dislikes:.2%}), coverage {day.coverage:.1%} "
            f"(logging policy {day.logging_coverage:.1%})"
        )


def defaults(chosen: Namespace) -> dict[str, Any]:
    """The defaults of the other options in the chosen world, or the options of the world that continues."""
    if not chosen.after:  # an empty list is refused later
        return dict(WORLDS[chosen.world])
    stands = chosen.after if isinstance(chosen.after, Path) else chosen.after[0]
    parameters = dataclasses.asdict(Truth.load(stands).preferences.parameters)
    return {**parameters, "days": 1, "seed": 0}

"""``recpo simulate``: simulates an interaction log with known truth, and later days that a policy serves."""

from __future__ import annotations

import dataclasses

from recpo.cli.verb_results import VerbResult, command
from recpo.verbs.simulate import Simulate
from recpo.worlds.log import ServedDays, Simulation


def show(verb: Simulate, simulated: Simulation) -> VerbResult:
    """Prints what was simulated; the log is prepared next."""
    following = command("prepare", "--log", simulated.root / "log", "--out", "prepared")
    if simulated.served is not None:
        _print_served(simulated, simulated.served)
        days = [dataclasses.asdict(day) for day in simulated.served.days]
        return VerbResult((str(simulated.root),), following, {"days": days})
    parameters = simulated.truth.preferences.parameters
    print(
        f"{simulated.root}: {parameters.events:,} events of {parameters.users:,} users and {parameters.items:,} items "
        f"over {parameters.days} days"
    )
    if not (complete := simulated.truth.preferences.complete).all():
        print(f"{int(complete.sum()):,} users have a reward for every item; the others are only in the training period")
    if parameters.lives:
        first, last = (int(simulated.truth.available(float(day)).sum()) for day in (0, parameters.days - 1))
        print(f"{simulated.items}: {first:,} items on day 0, {last:,} on day {parameters.days - 1}")
    users = 500
    listed = ", ".join(f"{name} {value:.3f}" for name, value in simulated.values(users=users).items())
    print(f"true expected reward on the last day ({min(users, parameters.users)} users): {listed}")
    sizes = {name: getattr(parameters, name) for name in ("events", "users", "items", "days")}
    return VerbResult((str(simulated.root),), following, sizes)


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

"""The verb ``simulate``: simulates an interaction log with known truth, and later days that a policy serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq

from recpo.artifacts import sha256
from recpo.base.errors import RecpoError, validate_seed
from recpo.lists.exploration import Exploration
from recpo.serving.bundle import Bundle
from recpo.verbs.verb import Verb, function_of
from recpo.worlds.log import Simulation, write_simulation
from recpo.worlds.parameters import WORLDS, SimulationParameters, World
from recpo.worlds.preferences import Preferences


@dataclass(frozen=True)
class Simulate(SimulationParameters, Verb[Simulation]):
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes. In the world ``living``, ``out/items.parquet`` and ``out/users.parquet``
    are the item table (each item from its birth on) and the user table.

    With ``policy`` and ``after``, a bundle replaces the simulator's own logging policy and serves the users of an
    existing world on the days after its log. ``out`` then also has ``served.json``: the true value of these days, of
    the logging policy and of the oracle (docs/exploration.md).

    Raises:
        RecpoError: ``out`` exists and ``overwrite`` is False, the world is unknown or a parameter is out of range. With
            a policy: ``after`` is not a simulation or not consecutive days of one world, the bundle has another catalog
            or lists too few items.
    """

    first_day: ClassVar = ("out", "world", "users", "items", "events", "days", "seed", "policy", "after")

    out: Path | str
    """output directory"""
    _: KW_ONLY
    world: World = "default"
    """preset of parameters: default, confounded (popularity is independent of quality, more clickbait), skewed
    (little exploration), small (20,000 events of 500 users on 5,000 items) or living (items are born and fade; tables
    of items and users beside the log). Parameters override the preset"""
    policy: Path | str | Bundle | None = None
    """bundle that serves, or the directory of one; it was trained on logs of this world"""
    after: Path | str | Simulation | Sequence[Path | str | Simulation] | None = None
    """directory of the world that continues; or a list of the world and the days served since, in order"""
    exploration: Exploration | None = None
    """how the policy's slates are drawn; None = the best items in their order"""
    repeat_after: float | None = None
    """days after which the policy may show a user an item again (its bundle was exported with ``repeats``); None =
    never. The oracle of the report follows the same rule"""
    overwrite: bool = False
    """replace ``out`` if it exists"""
    progress: bool = False
    """show a progress bar on a terminal"""

    def __post_init__(self) -> None:
        validate_seed(self.seed, "simulate: seed")
        if self.after is None:  # the other parameters of a world that continues are known to be valid
            super().__post_init__()

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters of the named world, or of the world that continues."""
        after = given.get("after")
        if after is None:
            return WORLDS.get(given.get("world", "default"), {})
        parameters = dataclasses.asdict(_opened(after)[0].truth.preferences.parameters)
        return {**parameters, "days": 1, "seed": 0}

    def execute(self) -> Simulation:
        """Draws a world and its log, or lets a policy serve the next days of one."""
        if self.world not in WORLDS:
            raise RecpoError(
                f"simulate: world is {self.world!r}, expected one of {', '.join(WORLDS)}",
                field="world",
                code="unknown_name",
            )
        if self.policy is not None and self.after is not None:
            return self._serve(self.policy, _opened(self.after))
        for name in ("policy", "after", "exploration", "repeat_after"):
            if getattr(self, name) is not None:
                raise RecpoError(
                    f"simulate: {name} is given, expected policy and after together: a bundle, and the world that it "
                    "serves",
                    field=name,
                    code="missing_option",
                )
        preferences = Preferences.draw(self.part(SimulationParameters))
        return write_simulation(
            preferences, Path(self.out), world=self.world, overwrite=self.overwrite, progress=self.progress
        )

    def _serve(self, policy: Path | str | Bundle, worlds: Sequence[Simulation]) -> Simulation:
        from recpo.serving.manifest import MANIFEST
        from recpo.verbs.simulated_service import BundleService
        from recpo.worlds.next_days import write_next_days

        self._validate_world(worlds[0])
        bundle = policy if isinstance(policy, Bundle) else Bundle.load(policy)
        users = None if worlds[0].users is None else pq.read_table(worlds[0].users)
        service = BundleService(bundle, self.exploration, users)
        service.validate(worlds[0].truth, self.repeat_after)
        who = {
            "bundle": bundle.root.resolve().name,
            "manifest": sha256(bundle.root / MANIFEST),
            "origin": dict(bundle.manifest.origin),
        }
        return write_next_days(
            worlds,
            Path(self.out),
            service,
            days=self.days,
            seed=self.seed,
            policy=who,
            exploration=None if self.exploration is None else dataclasses.asdict(self.exploration),
            repeat_after=self.repeat_after,
            overwrite=self.overwrite,
            progress=self.progress,
            inputs=[bundle.root],
        )

    def _validate_world(self, stands: Simulation) -> None:
        """The parameters of an existing world cannot change; those of its next days can."""
        truth = stands.truth
        if self.world not in ("default", truth.world):
            raise RecpoError(
                f"simulate: world is {self.world}, {stands.root} is {truth.world}: leave world out when a policy is "
                "given",
                field="world",
                code="conflicting_options",
            )
        for name, known in dataclasses.asdict(truth.preferences.parameters).items():
            value = getattr(self, name)
            if name in ("days", "seed"):
                least = 1 if name == "days" else 0
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise RecpoError(
                        f"simulate: {name} is {value!r}, expected a whole number from {least} on",
                        code="out_of_range",
                        field=name,
                    )
            elif value != known:
                raise RecpoError(
                    f"simulate: {name} is {value!r}, {stands.root} has {known!r}: a policy serves an existing world; "
                    "give only days and seed",
                    field=name,
                    code="conflicting_options",
                )


def _opened(after: Path | str | Simulation | Sequence[Path | str | Simulation]) -> list[Simulation]:
    named = [after] if isinstance(after, Path | str | Simulation) else list(after)
    if not named:
        raise RecpoError(
            "simulate: after is an empty list, expected the world to continue", field="after", code="empty"
        )
    return [one if isinstance(one, Simulation) else Simulation.open(one) for one in named]


simulate = function_of(Simulate)

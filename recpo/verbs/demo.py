"""The verb ``demo``: ``fit`` on a simulated log, whose true values are known."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from recpo.artifacts.outputs import directory_of_steps
from recpo.base.errors import PositiveFloat, PositiveInt, Seed
from recpo.verbs.fit import Decision, fit
from recpo.verbs.simulate import simulate
from recpo.verbs.verb import PYTHON_ONLY, WritingVerb
from recpo.worlds.parameters import SimulationParameters

#: Directories of a demo: the simulated log with its truth, and the fit.
LOG: Final = "log"
FIT: Final = "fit"


@dataclass(frozen=True)
class Demo(WritingVerb[Decision]):
    """Simulates a log and runs ``recpo fit`` on it: prepare, train, align, compare, decide, export.

    Because the users are simulated, the leaderboard also has the true value of the lists: the probability that a user
    is satisfied, minus twice the probability of a dislike. The oracle has the maximum that any list can have. The truth
    never decides.
    """

    first_day: ClassVar = ("out", "minutes", "users", "items", "events")

    out: Path = Path("demo")
    """output directory for all files of the demo"""
    minutes: PositiveFloat = 3.0
    """budget of time for training and search"""
    users: PositiveInt = 2000
    """number of simulated users"""
    items: PositiveInt = 1000
    """number of simulated items"""
    events: PositiveInt = 200_000
    """number of simulated events"""
    seed: Seed = 0
    """seed of the simulation and of the training"""

    on_step: Callable[[str], None] = field(default=lambda text: None, metadata=PYTHON_ONLY)
    """called with a sentence about every step as it begins"""

    def execute(self) -> Decision:
        """Simulates, then fits."""
        sizes: dict[str, Any] = {name: getattr(self, name) for name in ("users", "items", "events")}
        SimulationParameters(**sizes)  # what would end the first step
        shared: dict[str, Any] = {"seed": self.seed, "progress": self.progress}
        with directory_of_steps(self.out, kind="demo", overwrite=self.overwrite):
            log, out = self.out / LOG, self.out / FIT
            flags = " ".join(f"--{name} {size}" for name, size in sizes.items())
            self.on_step(f"recpo simulate --out {log} {flags} --seed {self.seed}")
            simulate(log, **sizes, **shared)
            self.on_step(f"recpo fit {log} --out {out} --minutes {self.minutes:g} --seed {self.seed}")
            return fit(log, out, minutes=self.minutes, on_step=self.on_step, **shared)

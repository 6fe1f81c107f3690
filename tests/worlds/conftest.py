from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from recpo.worlds.log import write_simulation
from recpo.worlds.parameters import SimulationParameters
from recpo.worlds.preferences import Preferences
from recpo.worlds.truth import Truth


@pytest.fixture(scope="session")
def simulated(tmp_path_factory) -> tuple[Path, Truth, pd.DataFrame]:
    """A simulation of default size, the simulator's own truth, and the log."""
    out = tmp_path_factory.mktemp("simulation") / "out"
    truth = write_simulation(Preferences.draw(SimulationParameters()), out).truth
    return out, truth, pd.read_parquet(out / "log")

"""How a contender of ``benchmarks/pretrain.py`` trains: in time windows, in turns.

The parent writes one JSON line per window to the contender's standard input and reads one back from its standard
output. Between windows the contender waits and uses no processor, so contenders can take turns on a busy machine.
Between windows the parent may also ask for the lists that the policy recommends by then; making them is in no window.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, get_type_hints

import numpy as np


class Setting(NamedTuple):
    """The arguments of every contender: the folder of the data and the hyper-parameters."""

    folder: Path
    dim: int
    layers: int
    heads: int
    length: int
    batch: int
    dropout: float
    rate: float
    seed: int
    variant: str

    @classmethod
    def parse(cls) -> Setting:
        """Reads the command line."""
        parser = argparse.ArgumentParser()
        for name, kind in get_type_hints(cls).items():
            parser.add_argument(f"--{name}", required=True, type=kind)
        return cls(**vars(parser.parse_args()))


class Histories(NamedTuple):
    """Every user's events but the last: the last one of these is not trained on, all of them are recommended from.

    Attributes:
        items: flat items 1..V, oldest first.
        offsets: ``[U + 1]``, cuts ``items`` into users.
        num_items: V.
    """

    items: np.ndarray
    offsets: np.ndarray
    num_items: int

    @classmethod
    def read(cls, folder: Path) -> Histories:
        """Reads what the parent wrote."""
        with np.load(folder / "histories.npz") as file:
            return cls(file["items"], file["offsets"], int(file["num_items"]))

    def training(self, user: int) -> np.ndarray:
        """What may be trained on."""
        return self.items[self.offsets[user] : self.offsets[user + 1] - 1]

    def whole(self, user: int) -> np.ndarray:
        """What is recommended from, and left out of the recommendations."""
        return self.items[self.offsets[user] : self.offsets[user + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Pace:
    """Keeps a training loop to its turns.

    Call ``stepped`` after every optimizer step and stop training when it returns False; the first step warms up. Make
    it before anything is printed: from then on standard output belongs to the parent, and prints go to standard error.

    Attributes:
        lists: set before the first step: recommends ten items to every user, ``[U, 10]``, best first, and leaves the
            policy in training mode.
    """

    lists: Callable[[], np.ndarray]

    def __init__(self, setting: Setting) -> None:
        self._file = setting.folder / "lists.npy"
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._deadline: float | None = None
        self._clock, self._marks = time.perf_counter, (0.0, 0.0)
        self._positions = self._steps = 0

    def stepped(self, positions: int) -> bool:
        """Counts a step that scored this many next items; waits for the next turn if this one is over."""
        self._positions += positions
        self._steps += 1
        if self._deadline is None:
            self.answer(ready=True, setup_cpu_s=time.process_time())
            return self._turn()
        if self._clock() < self._deadline:
            return True
        seconds, cpu = time.perf_counter() - self._marks[0], time.process_time() - self._marks[1]
        done = {"positions": self._positions, "steps": self._steps, "seconds": seconds, "cpu_seconds": cpu}
        self.answer(**done, peak_rss_mib=peak_rss_mib())
        return self._turn()

    def answer(self, **values: object) -> None:
        """Tells the parent."""
        print(json.dumps(values), file=self._answers, flush=True)

    def _turn(self) -> bool:
        command = json.loads(sys.stdin.readline() or "{}")
        while command.get("recommend"):
            np.save(self._file, self.lists())
            self.answer(saved=True)
            command = json.loads(sys.stdin.readline() or "{}")
        if not command:
            return False
        self._clock = {"wall": time.perf_counter, "cpu": time.process_time}[command["clock"]]
        self._positions = self._steps = 0
        self._marks = time.perf_counter(), time.process_time()
        self._deadline = self._clock() + command["seconds"]
        return True

    def finish(self, packages: tuple[str, ...]) -> None:
        """Says what ran."""
        self.answer(versions={name: version(name) for name in packages})


def peak_rss_mib() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

"""A guard watches the published log, and ends a variant that is beyond doubt too bad.

It looks whenever rows are published, so its bounds are confidence sequences, which hold at all times together. A
variant ends, and its users get the control, when

- the lower end of its share of answers with a dislike is above ``Guard.dislikes`` (``EmpiricalBernstein``), or
- the upper end of its value minus that of the control is below ``Guard.value`` (``anytime_half_width``, over users).

The probability that any variant within its bounds is ever ended is at most ``Guard.alpha``: it is divided by the number
of bounds and of variants that may end. For dislikes this holds exactly, for values in the limit of many users.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc

from recpo.base.errors import RecpoError
from recpo.evaluation.sequences import EmpiricalBernstein
from recpo.evaluation.variants import PerUser, Slates, read_log, slates
from recpo.server.impressions import JOURNAL
from recpo.server.variants import EndedVariants, Guard

_LOCK: Final = "guard.lock"


class Watch:
    """The sums of one experiment, from all files of a log. Of all workers with this log, one watches.

    Args:
        root: directory of the log.
        guard: the bounds.
        names: names of the variants, the control first.
        experiment: name of the experiment.
        ended: where ends are kept.
    """

    def __init__(self, root: Path, guard: Guard, names: Sequence[str], experiment: str, ended: EndedVariants) -> None:
        self._root, self._guard, self._names, self._experiment, self._ended = root, guard, names, experiment, ended
        bounds = (guard.dislikes is not None) + (guard.value is not None)
        self._alpha = guard.alpha / (bounds * (len(names) - 1))
        self._values = {name: PerUser() for name in names}
        self._dislikes = {name: EmpiricalBernstein(alpha=self._alpha) for name in names}
        self._read: set[str] = set()
        self._lock: int | None = None

    def look(self) -> list[str]:
        """Adds the rows that were published since the last look, and ends variants. Returns the names of those.

        Raises:
            RecpoError: a file cannot be read, or an end cannot be written.
        """
        if not self._is_watching():
            return []
        new = sorted(file for file in self._root.glob("*.parquet") if file.name not in self._read)
        for file in new:
            for name, found in self._slates(file).items():
                if name in self._values:
                    self._values[name].add(found.user_id, found.value)
                    self._dislikes[name].update(found.disliked)
            self._read.add(file.name)
        ended: list[str] = []
        for name in self._names[1:] if new else ():
            reason = next(self._reasons(name), None)
            if reason is not None and name not in self._ended.names:
                self._ended.end(name, reason)
                ended.append(name)
        return ended

    def close(self) -> None:
        """Lets another worker watch."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_watching(self) -> bool:
        """Whether this process holds the lock, which ends with it."""
        if self._lock is None:
            handle = os.open(self._root / JOURNAL / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                return False
            self._lock = handle
        return True

    def _slates(self, file: Path) -> dict[str, Slates]:
        try:
            table = read_log(file)
        except RecpoError as error:
            if error.code == "missing_column":  # of a server without variants
                return {}
            raise
        own = table.filter(pc.equal(table["experiment"], self._experiment))
        return slates(own, dislike_cost=self._guard.dislike_cost)

    def _reasons(self, name: str) -> Iterator[dict[str, Any]]:
        """Why a variant ends, with the numbers."""
        guard, dislikes = self._guard, self._dislikes[name]
        if guard.dislikes is not None and dislikes.low > guard.dislikes:
            yield {"because": "dislikes", "bound": guard.dislikes, "low": float(dislikes.low), "alpha": self._alpha}
        if guard.value is not None:
            difference = self._values[name].mean() - self._values[self._names[0]].mean()
            half = difference.sequence_half_width(alpha=self._alpha, tightest=guard.tightest)
            if difference.mean + half < guard.value:
                high = difference.mean + half
                yield {"because": "value", "bound": guard.value, "high": high, "alpha": self._alpha}

"""Results of days on which a policy served the simulated users, as in ``served.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recpo.artifacts import read_json, write_json
from recpo.base.errors import RecpoError

SERVED: Final = "served.json"
FORMAT_VERSION: Final = 2
_REMEDY: Final = "simulate the day again"


@dataclass(frozen=True)
class DayReport:
    """A day in true values; means are over the requests that were shown an item, each request counting once.

    Attributes:
        day: its number; day 0 begins the world's log.
        requests: number of requests.
        short_slates: requests with fewer items than requested, because no more items could be listed.
        exposures: items shown, the rows of the log.
        value: realized value, the mean true expected reward of a slate's items.
        dislikes: mean true probability of a dislike of a slate's items.
        logged_dislikes: share of exposures that were disliked in the log.
        logging_value: exact expected reward of the simulator's own logging policy for the same requests.
        logging_dislikes: exact dislike probability of the logging policy for the same requests.
        oracle_value: mean true reward of the best slates of the same lengths, without the items that were excluded.
        regret: ``oracle_value - value``.
        coverage: share of the catalog that was shown.
        logging_coverage: expected share of the catalog that the logging policy would have shown in as many exposures.
        explored: share of exposures whose item is not one of the best, which would be shown without exploration.
        is_random: share of exposures on uniformly drawn slates.
    """

    day: int
    requests: int
    short_slates: int
    exposures: int
    value: float
    dislikes: float
    logged_dislikes: float
    logging_value: float
    logging_dislikes: float
    oracle_value: float
    regret: float
    coverage: float
    logging_coverage: float
    explored: float
    is_random: float


@dataclass(frozen=True)
class ServedDays:
    """Consecutive days under one policy.

    Attributes:
        policy: the policy that served; for a bundle ``bundle`` (name of its directory), ``manifest`` (SHA-256 of its
            manifest) and ``origin``.
        exploration: options of ``recpo.Exploration``; None = the best items in their order.
        seed: seed of sessions, draws and feedback.
        days: the reports, in the order of the days.
        repeat_after: days after which an item may be shown to a user again; None = never.
    """

    policy: Mapping[str, Any]
    exploration: Mapping[str, Any] | None
    seed: int
    days: tuple[DayReport, ...]
    repeat_after: float | None = None

    def save(self, root: Path) -> None:
        """Writes ``served.json`` into the directory ``root``."""
        write_json(root / SERVED, {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, root: Path) -> ServedDays | None:
        """Reads ``served.json``; None if the logging policy made the log, which has no such file.

        Raises:
            RecpoError: it is damaged or of another version.
        """
        file = root / SERVED
        if not file.exists():
            return None
        content = read_json(file, _REMEDY)
        if (found := content.pop("format_version", None)) != FORMAT_VERSION:
            raise RecpoError(f"{file}: format version {found}, expected {FORMAT_VERSION}: {_REMEDY}")
        try:
            days = tuple(DayReport(**day) for day in content.pop("days"))
            served = cls(**content, days=days)
        except (KeyError, TypeError) as error:
            raise RecpoError(f"{file} is damaged ({error}): {_REMEDY}") from error
        if not days or [day.day for day in days] != list(range(days[0].day, days[0].day + len(days))):
            raise RecpoError(f"{file} is damaged (its days are not consecutive): {_REMEDY}")
        return served

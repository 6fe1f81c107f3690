"""Variants: several policies that serve at once, each to its own share of the users.

The variant of a user is a pure function of the experiment's name and the user's id::

    u = (first 53 bits of SHA-256(JSON of [experiment, user_id])) / 2^53        uniform in [0, 1)
    variant = the first one whose cumulative share is above u

So it is the same in every worker, on every server and after every restart, and users of another experiment are assigned
independently. JSON tells the integer 17 from the string "17"; text is UTF-8.

A guard watches the published log, and ends a variant that is beyond doubt too bad.

It looks whenever rows are published, so its bounds are confidence sequences, which hold at all times together. A
variant ends, and its users get the control, when

- the lower end of its share of answers with a dislike is above ``Guard.dislikes`` (``EmpiricalBernstein``), or
- the upper end of its value minus that of the control is below ``Guard.value`` (``anytime_half_width``, over users).

The probability that any variant within its bounds is ever ended is at most ``Guard.alpha``: it is divided by the number
of bounds and of variants that may end. For dislikes this holds exactly, for values in the limit of many users.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow.compute as pc

from recpo.artifacts.documents import read_json
from recpo.artifacts.outputs import locked_parent, write_json
from recpo.base.errors import (
    NonNegativeFloat,
    OpenUnitInterval,
    PositiveInt,
    RecpoError,
    validate_range,
    validate_ranges,
)
from recpo.evaluation.variants import EmpiricalBernstein, PerUser, Slates, read_log, slates
from recpo.server.bundles import LoadedBundle, Versions, log_kind
from recpo.server.impressions import JOURNAL, validate_log_directory
from recpo.server.write_ahead import locked_handle

if TYPE_CHECKING:
    from recpo.server.options import ServerOptions


#: File in the directory of the log: the variants that a guard ended.
ENDED: Final = "_variants.json"
_SPELLING: Final = re.compile(r"([A-Za-z0-9][\w.-]{0,63})=(.+?)(?::(\d*\.?\d+))?")
_ROUNDING: Final = 1e-9
_LOG = logging.getLogger("recpo.server")


class Variant(NamedTuple):
    """A policy and its share of the users.

    Attributes:
        name: its name in answers, in the log and in metrics.
        path: a bundle, or a directory of bundles.
        share: share of the users, above 0.
    """

    name: str
    path: Path
    share: float


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Bounds of every variant but the control. The first one that is beyond doubt violated ends the variant.

    Raises:
        RecpoError: a bound is out of range, or there is none.
    """

    dislikes: OpenUnitInterval | None = None
    """maximum share of answers with a dislike; null = no such bound"""
    value: float | None = None
    """minimum value per answer minus that of the control, such as -0.05; the value of an answer is the sum over its
    items of the label, or of watch_time / duration up to 1, minus ``dislike_cost`` per dislike. null = no such bound"""
    dislike_cost: NonNegativeFloat = 1.0
    """what a dislike subtracts from the value"""
    alpha: OpenUnitInterval = 0.05
    """probability that any variant within its bounds is ever ended"""
    tightest: PositiveInt = 2000
    """number of users of a variant at which the bound of its value is tightest"""

    def __post_init__(self) -> None:
        validate_ranges(self)
        if self.dislikes is None and self.value is None:
            raise RecpoError("guard: set dislikes, value, or both", code="missing_option", field="guard")
        validate_range(math.isfinite(self.value or 0.0), "guard.value", "must be finite", self.value)


def parse_variants(texts: Sequence[str]) -> tuple[Variant, ...]:
    """Variants from ``NAME=BUNDLE:SHARE``; without any share, all are equal. The first one is the control.

    Raises:
        RecpoError: another spelling, a single variant, a name that occurs twice, or shares that do not sum to 1.
    """
    found = []
    for text in texts:
        match = _SPELLING.fullmatch(text)
        if match is None:
            message = f"variant: got {text!r:.80}, expected NAME=BUNDLE:SHARE such as new=bundles/new:0.1"
            raise RecpoError(message, code="bad_value", field="variant")
        found.append(match.groups())
    if len(found) == 1:
        message = f"variant: {texts[0]} is the only one: give a second one, or serve its bundle with --bundle"
        raise RecpoError(message, code="missing_option", field="variant")
    names = [name for name, _, _ in found]
    if len(set(names)) < len(names):
        raise RecpoError(f"variant: {', '.join(names)} has a name twice", code="duplicate", field="variant")
    given = [share for _, _, share in found]
    if any(given) and not all(given):
        message = "variant: give every variant a share (NAME=BUNDLE:SHARE), or none for equal shares"
        raise RecpoError(message, code="missing_value", field="variant")
    shares = [float(share) if share else 1 / len(found) for share in given]
    if found and (abs(sum(shares) - 1) > _ROUNDING or min(shares) <= 0):
        message = (
            f"variant: the shares {', '.join(map(str, given))} sum to {sum(shares):g}; expected positive shares, sum 1"
        )
        raise RecpoError(message, code="out_of_range", field="variant")
    return tuple(Variant(name, Path(path), share) for (name, path, _), share in zip(found, shares, strict=True))


def assigned(user_id: int | str, experiment: str, variants: Sequence[Variant]) -> str:
    """The name of the user's variant; the module describes the formula."""
    text = json.dumps([experiment, user_id], ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    place = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
    cumulative = accumulate(variant.share for variant in variants)
    return next((one.name for one, until in zip(variants, cumulative, strict=True) if place < until), variants[-1].name)


def open_variants(
    bundle: Path | None, options: ServerOptions, on_change: Callable[[str, LoadedBundle], None] = lambda *_: None
) -> dict[str, Versions]:
    """The versions of every variant by its name, the control first; without variants those of the bundle as "".

    Raises:
        RecpoError: a bundle cannot serve, its log and requests are not those of the control, or the log's directory
            cannot be one, or lies in a bundle that serves.
    """
    paths = {one.name: one.path for one in options.variants} or {"": bundle or Path()}
    if options.log is not None:
        validate_log_directory(options.log, paths.values())
    load = partial(LoadedBundle.load, threads=options.threads, reranking=options.reranking, provider=options.provider)
    found = {
        name: Versions(path, options.name, partial(on_change, name), options.shortlist, load)
        for name, path in paths.items()
    }
    kinds = {name: log_kind(one.current) for name, one in found.items()}
    control = next(iter(kinds))
    if other := next((name for name, kind in kinds.items() if kind != kinds[control]), None):
        message = (
            f"variant {other} has other item ids, feedback, features or behaviors than {control} ({kinds[other]}, not "
            f"{kinds[control]}): one log and one interface cannot serve both"
        )
        raise RecpoError(message, code="mismatch", field="variant")
    return found


class EndedVariants:
    """The variants of an experiment that were ended, in a file beside the log that proves it.

    Every worker of every server with this log reads the file every second, and at its start. Only a person can undo an
    end: by removing the variant from the file.

    Args:
        root: directory of the log.
        experiment: name of the experiment.

    Raises:
        RecpoError: the file is damaged.
    """

    def __init__(self, root: Path, experiment: str) -> None:
        self.root, self.experiment = root, experiment
        self._path = root / ENDED
        self.names: frozenset[str] = frozenset()
        self.follow()

    def follow(self) -> frozenset[str]:
        """The ended variants according to the file.

        Raises:
            RecpoError: the file is damaged. What was known before stays.
        """
        self.names = frozenset(self._read().get(self.experiment, {}))
        return self.names

    def end(self, name: str, reason: Mapping[str, Any]) -> None:
        """Ends a variant for good, in this and in every other worker.

        Args:
            name: the variant.
            reason: JSON values that say why, for people.

        Raises:
            RecpoError: the file is damaged or cannot be written.
        """
        with locked_parent(self._path):
            content = self._read()
            known = content.setdefault(self.experiment, {})
            known.setdefault(name, {"ended_at": int(time.time() * 1000), **reason})
            write_json(self._path, content)
        self.names |= {name}
        _LOG.warning("variant ended", extra={"fields": {"experiment": self.experiment, "variant": name, **reason}})

    def _read(self) -> dict[str, dict[str, Any]]:
        """Ended variants by experiment and name."""
        if not self._path.is_file():
            return {}
        remedy = "restore it, or remove it to serve every variant again"
        content = read_json(self._path, remedy)
        if not isinstance(content, dict) or not all(isinstance(one, dict) for one in content.values()):
            message = f"{self._path} is damaged, expected variants by experiment: {remedy}"
            raise RecpoError(message, code="damaged", field=ENDED)
        return content


_LOCK: Final = "guard.lock"


class Watch:
    """The sums of one experiment, from all files of a log. Of all workers with this log, one watches.

    Args:
        guard: the bounds.
        names: names of the variants, the control first.
        ended: where ends of this experiment are kept.
    """

    def __init__(self, guard: Guard, names: Sequence[str], ended: EndedVariants) -> None:
        self._guard, self._names, self._ended, self._root = guard, names, ended, ended.root
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
        if self._lock is None:  # of all processes, the one that holds the lock watches, until it ends
            self._lock = locked_handle(self._root / JOURNAL / _LOCK, os.O_CREAT | os.O_RDWR)
        if self._lock is None:
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

    def _slates(self, file: Path) -> dict[str, Slates]:
        try:
            table = read_log(file)
        except RecpoError as error:
            if error.code == "missing_column":  # of a server without variants
                return {}
            raise
        own = table.filter(pc.equal(table["experiment"], self._ended.experiment))
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

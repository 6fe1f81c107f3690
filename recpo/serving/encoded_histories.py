"""Histories as a policy reads them: padded arrays of some users, and the events of many users of which they are made.

Also the tensors that a bundle's program is given: which ones, in which order, and what they are of these histories.
Export, runtimes, manifest and metadata all come through here. NumPy and Arrow only; it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from recpo.base.errors import RecpoError
from recpo.base.features import Categories, Category, Feature, FeatureArrays, Number, Reads, Vector, of_type


class EncodedHistories(NamedTuple):
    """The input of a policy for some users, int64, padded with 0 on the right.

    Attributes:
        item_ids: ``[B, H]`` internal ids, oldest first.
        feedback: ``[B, H]`` feedback levels (``recpo.base.feedback``).
        exclude: ``[B, M]`` internal ids that must not be listed, in addition to ``item_ids``.
        timestamps: ``[B, H]`` milliseconds since the epoch; None if the policy does not read them.
        behaviors: ``[B, H]`` bit sets; None if the policy does not read them.
        user: features of the users, ``[B]``; None if the policy does not read them.
        context: features of requests, ``[B, H + 1]``, as in ``base.types.Histories``; None if the policy does not read
            them.
        allowed: ``[B, V + 1]`` bool, the items that may be listed; None = all.
    """

    item_ids: np.ndarray
    feedback: np.ndarray
    exclude: np.ndarray
    timestamps: np.ndarray | None = None
    behaviors: np.ndarray | None = None
    user: FeatureArrays | None = None
    context: FeatureArrays | None = None
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class ServingCounts:
    """Counts of what was served and what was left out. Events and items of users who are not served do not count.

    Attributes:
        users: number of users served.
        events: events of their histories, including the skipped ``unknown_items``.
        unknown_items: events whose item is not in the catalog.
        impossible_values: watch times and durations that cannot be true (negative, infinite); treated as missing.
        events_without_feedback: events of known items whose feedback level is 0 (unknown), because watch time, duration
            or label is missing.
        empty_histories: users without an event of a known item; they get the recommendations for an empty history.
        truncated_histories: users with more events than the policy reads. It reads the most recent ones; the older
            items are not listed either.
        unknown_excluded: items to exclude that are not in the catalog.
        unknown_candidates: candidates to score that are not in the catalog.
        short_lists: users with fewer than k items left.
    """

    users: int = 0
    events: int = 0
    unknown_items: int = 0
    impossible_values: int = 0
    events_without_feedback: int = 0
    empty_histories: int = 0
    truncated_histories: int = 0
    unknown_excluded: int = 0
    unknown_candidates: int = 0
    short_lists: int = 0

    def __add__(self, other: ServingCounts) -> ServingCounts:
        """The sum of two counts."""
        return ServingCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def to_dict(self) -> dict[str, int]:
        """By name, for JSON."""
        return dict(vars(self))


class PerUser(NamedTuple):
    """Columns of all users, concatenated: the values of user u are ``values[name][offsets[u] : offsets[u + 1]]``."""

    values: dict[str, np.ndarray]
    offsets: np.ndarray

    @classmethod
    def of(cls, num_users: int, user: np.ndarray, **values: np.ndarray) -> PerUser:
        """From values sorted by ``user [N]``."""
        return cls(values, np.concatenate([[0], np.cumsum(np.bincount(user, minlength=num_users))]))

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Number of values of the users ``begin .. end - 1``."""
        return self.offsets[begin + 1 : end + 1] - self.offsets[begin:end]

    def padded(self, begin: int, end: int, width: int | None = None) -> dict[str, np.ndarray]:
        """The last ``width`` values of the users ``begin .. end - 1``: ``[end - begin, width]`` of each column.

        Without a width all values, and at least one column.
        """
        first, last, lengths = self.offsets[begin], self.offsets[end], self.lengths(begin, end)
        width = max(1, int(lengths.max(initial=0))) if width is None else width
        begins = self.offsets[begin + 1 : end + 1] - np.minimum(lengths, width)
        place = np.arange(first, last) - begins.repeat(lengths)
        kept = place >= 0
        target = (np.arange(end - begin) * width).repeat(lengths)[kept] + place[kept]
        tables = {}
        for name, column in self.values.items():
            table = np.zeros((end - begin) * width, np.int64)
            table[target] = column[first:last][kept]
            tables[name] = table.reshape(end - begin, width)
        return tables


@dataclass(frozen=True)
class UserHistories:
    """The histories of a number of users, ready to be read in batches.

    Attributes:
        users: external ids, in the order in which they are served.
        counts: what was read and what was left out.
        events: ``item_ids`` and ``feedback`` of every known event, sorted by user and time; also its ``timestamps``,
            ``behaviors`` and row of ``context`` if the policy reads them.
        exclude: items that must not be listed, including items that are too old to be read; distinct and ascending.
        max_history: H.
        unlisted: items that are listed for no user.
        user: features of the users ``[U]``; None = the policy does not read them.
        context: features of requests: one row for no event, the rows of ``events``, and the rows of the users' current
            requests; None as above.
    """

    users: pa.Array
    counts: ServingCounts
    events: PerUser
    exclude: PerUser
    max_history: int
    unlisted: np.ndarray
    user: FeatureArrays | None = None
    context: FeatureArrays | None = None

    def batches(self, size: int) -> Iterator[tuple[slice, EncodedHistories]]:
        """Yields ``size`` users at a time: their indices, and the input of the policy."""
        for begin in range(0, len(self.users), size):
            end = min(begin + size, len(self.users))
            yield slice(begin, end), self._encoded(begin, end)

    def _encoded(self, begin: int, end: int) -> EncodedHistories:
        columns: dict[str, Any] = {**self.events.padded(begin, end, self.max_history)}
        if self.context is not None:
            columns["context"] = self.context.rows(self._requests(begin, end, columns["context"]))
        if self.user is not None:
            columns["user"] = self.user.rows(np.arange(begin, end))
        exclude = self.exclude.padded(begin, end)["item_ids"]
        if len(self.unlisted):
            exclude = np.concatenate([exclude, np.tile(self.unlisted, (end - begin, 1))], 1)
        return EncodedHistories(exclude=exclude, **columns)

    def _requests(self, begin: int, end: int, rows: np.ndarray) -> np.ndarray:
        """Rows of ``context``, ``[B, H + 1]``: of the events, ``rows``, followed by the user's current request."""
        rows = np.pad(rows, ((0, 0), (0, 1)))
        lengths = np.minimum(self.events.lengths(begin, end), self.max_history)
        now = 1 + self.events.offsets[-1] + np.arange(begin, end)
        np.put_along_axis(rows, lengths[:, None], now[:, None], 1)
        return rows


EXCLUDE: Final = "exclude"
ALLOWED: Final = "allowed"


@dataclass(frozen=True)
class ProgramReads:
    """What a program reads of a request beyond items, feedback and what is excluded.

    Attributes:
        timestamps: times of events.
        behaviors: behaviors, as a bit set of each event.
        user: features of the user.
        context: features of the requests of the events, and of the one that is answered.
        mask: number of places of a mask of the items that may be listed; 0 = it has none, and takes them as ids to
            exclude.
        repeats: items of the history may be listed again; only what is excluded is not.
    """

    timestamps: bool = False
    behaviors: bool = False
    user: tuple[Feature, ...] = ()
    context: tuple[Feature, ...] = ()
    mask: int = 0
    repeats: bool = False

    @property
    def batches(self) -> Reads:
        """The parts that batches of prepared data have to contain for the program."""
        return Reads(self.behaviors, bool(self.user), bool(self.context))


@dataclass(frozen=True)
class ProgramInput:
    """One tensor.

    Attributes:
        name: in the program.
        shape: behind the users; a word is a size that each request chooses.
        type: of its numbers.
        meaning: for those who run the program without recpo.
        value: returns the input of encoded histories; None if they do not have it.
    """

    name: str
    shape: tuple[int | str, ...]
    type: Literal["int64", "float32", "bool"]
    meaning: str
    value: Callable[[EncodedHistories], np.ndarray | None]

    def of(self, inputs: EncodedHistories) -> np.ndarray:
        """The tensor, checked.

        Raises:
            RecpoError: it is missing, or of another shape or type.
        """
        found = self.value(inputs)
        if found is None:
            raise RecpoError(
                f"this policy reads {self.name}, and {self.name} are missing: hand them over with the histories",
                code="missing_value",
                field=self.name,
            )
        sizes = [size if isinstance(size, int) else found.shape[-1] for size in self.shape]
        expected = (len(inputs.item_ids), *sizes)
        if found.dtype != self.type or found.shape != expected:
            raise RecpoError(
                f"{self.name}: expected {self.type} {list(expected)}, got {found.dtype} {list(found.shape)}",
                code="wrong_shape",
                field=self.name,
            )
        return found


def program_inputs(max_history: int, reads: ProgramReads, exclude: bool = True) -> tuple[ProgramInput, ...]:
    """The tensors of a program, in their order.

    Args:
        max_history: H.
        reads: what it reads.
        exclude: whether it lists items, of which some are excluded.
    """
    history = (max_history,)
    found = [
        ProgramInput(
            "item_ids", history, "int64", "item_index, oldest first, 0 pads on the right", lambda h: h.item_ids
        ),
        ProgramInput(
            "feedback", history, "int64", "feedback level 0..5 of each event, 0 unknown", lambda h: h.feedback
        ),
    ]
    if exclude:
        meaning = "item_index not to list, 0 pads"
        found.append(ProgramInput(EXCLUDE, (EXCLUDE,), "int64", meaning, lambda h: h.exclude))
    if reads.timestamps:
        meaning = "milliseconds since the epoch, 0 pads"
        found.append(ProgramInput("timestamps", history, "int64", meaning, lambda h: h.timestamps))
    if reads.behaviors:
        meaning = "bit b: the user did the b-th of the manifest's behaviors"
        found.append(ProgramInput("behaviors", history, "int64", meaning, lambda h: h.behaviors))
    found += _of_side("user", (), reads.user)
    found += _of_side("context", (max_history + 1,), reads.context)
    if exclude and reads.mask:
        meaning = "whether the item may be listed, place 0 is padding"
        found.append(ProgramInput(ALLOWED, (reads.mask,), "bool", meaning, lambda h: _mask(h, reads.mask)))
    return tuple(found)


def _mask(histories: EncodedHistories, places: int) -> np.ndarray:
    if histories.allowed is not None:
        return histories.allowed
    return np.ones((len(histories.item_ids), places), bool)


def _of_side(side: str, lead: tuple[int, ...], features: tuple[Feature, ...]) -> list[ProgramInput]:
    """Codes, lists, numbers and vectors of one side, those of which there are any."""
    at = "of the user" if side == "user" else "of the request of event j; behind the last one, of the one answered now"

    def part(name: str, width: int, kind: Literal["int64", "float32"], says: str, change: Any) -> ProgramInput:
        def value(histories: EncodedHistories) -> np.ndarray | None:
            arrays = getattr(histories, side)
            return None if arrays is None else change(arrays)

        return ProgramInput(f"{side}_{name}", (*lead, width), kind, f"{says}, {at}", value)

    categories, numbers = of_type(features, Category), of_type(features, Number)
    found: list[ProgramInput] = []
    if categories:
        names = ", ".join(one.name for one in categories)
        says = f"codes of {names}: 0 missing, 1 unknown, from 2 on the vocabulary"
        found.append(part("codes", len(categories), "int64", says, lambda a: a.codes))
    for place, listed in enumerate(of_type(features, Categories)):
        says = f"codes of {listed.name}, 0 pads"
        found.append(part(f"list_{listed.name}", listed.length, "int64", says, lambda a, p=place: a.lists[p]))
    if numbers:
        names = ", ".join(one.name for one in numbers)
        says = f"{names}, standardized; nan missing"
        found.append(part("numbers", len(numbers), "float32", says, lambda a: a.numbers))
    for place, vector in enumerate(of_type(features, Vector)):
        says = f"{vector.name}; nan missing"
        found.append(part(f"vector_{vector.name}", vector.width or 0, "float32", says, lambda a, p=place: a.vectors[p]))
    return found

"""The items that may be listed, stored without an array of all items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recpo.errors import RecpoError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pool:
    """The items 1..V of a catalog, or some of them, without excluded items.

    A request excludes only a few items, so the rest of the catalog is not copied for it.

    Attributes:
        ids: ``[N]`` internal ids, ascending; None = 1..``num_items``.
        num_items: V.
        left_out: ``[E]`` places of ``ids`` (or of 1..V) that are excluded, ascending.
    """

    ids: IntArray | None
    num_items: int
    left_out: IntArray

    @classmethod
    def of(cls, num_items: int, *, exclude: ArrayLike = (), ids: ArrayLike | None = None) -> Pool:
        """The pool of one request.

        Args:
            num_items: V.
            exclude: internal ids that must not be listed, in any order; 0 pads.
            ids: the only internal ids that may be listed; None = the full catalog.

        Raises:
            RecpoError: an id outside 1..V (0..V for those to exclude).
        """
        excluded, kept = _ids(exclude, "exclude", 0, num_items), None
        if ids is not None:
            kept = _ids(ids, "ids", 1, num_items)
            excluded = np.searchsorted(kept, excluded[np.isin(excluded, kept)])
        else:
            excluded = excluded[excluded > 0] - 1
        return cls(kept, num_items, excluded)

    def __len__(self) -> int:
        """How many items may be listed."""
        return (self.num_items if self.ids is None else len(self.ids)) - len(self.left_out)

    def at(self, ranks: IntArray) -> IntArray:
        """The items at ``ranks [n]``, 0 .. ``len(self)`` - 1, in ascending order of all items of the pool."""
        place = ranks + np.searchsorted(self.left_out - np.arange(len(self.left_out)), ranks, side="right")
        return place + 1 if self.ids is None else self.ids[place]

    def contains(self, items: IntArray) -> NDArray[np.bool_]:
        """Whether each of ``items [n]`` may be listed."""
        place = items - 1
        known = (items >= 1) & (items <= self.num_items)
        if self.ids is not None:
            place = np.minimum(np.searchsorted(self.ids, items), max(0, len(self.ids) - 1))
            known &= self.ids[place] == items if len(self.ids) else False
        return known & ~np.isin(place, self.left_out)


def _ids(values: ArrayLike, name: str, smallest: int, largest: int) -> IntArray:
    found = np.unique(np.asarray(values, np.int64))
    if len(found) and (found[0] < smallest or found[-1] > largest):
        raise RecpoError(f"pool: {name} has ids {found[0]}..{found[-1]}, expected {smallest}..{largest}")
    return found

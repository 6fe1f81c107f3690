"""What a change of the policy moves: users, items, coverage, and the attributes of what is listed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from recpo.explorer.catalog import Catalog
from recpo.explorer.survey import Survey

_VALUES: Final = 8  # values of an attribute that are shown
_HEAD: Final = 100  # one item of so many is popular
_LIKED: Final = 20_000  # items that most of the positives are of
_MOST_VALUES: Final = 500  # an attribute with more is a name, not a kind


class Coverage(NamedTuple):
    """How the lists of a contender spread over the catalog.

    Attributes:
        name: of the contender.
        items: number of distinct items in the lists.
        share: of the catalog.
        popular: share of places that hold one of the most popular hundredth of the items.
        new: share of places that hold items without training events.
        short: share of users whose list is not full.
    """

    name: str
    items: int
    share: float
    popular: float
    new: float
    short: float


class Calibrated(NamedTuple):
    """The shares of the values of one attribute.

    Attributes:
        attribute: its name.
        rows: value, share among the items that users liked before, shares in the lists of every contender.
    """

    attribute: str
    rows: list[tuple[str, float, list[float]]]


@dataclass(frozen=True)
class Comparison:
    """Compares the contenders of a survey.

    Attributes:
        survey: the lists of the contenders.
        catalog: the items.
    """

    survey: Survey
    catalog: Catalog

    def ordered(self, order: str, one: int, other: int, count: int) -> list[int]:
        """Items in an order of the items page, the first ``count``; ``other`` replaces ``one``."""
        before, after = self.survey.listed(one).astype(np.int64), self.survey.listed(other).astype(np.int64)
        moved = after - before
        if order == "listed":
            key = after
        elif order == "new":
            is_new = np.append(False, self.catalog.events == 0)
            key = np.where(is_new, after + 1, 0)
        else:
            key = moved if order == "gain" else -moved
        # only the items that are in a list, not the catalog, are sorted
        some = np.flatnonzero(key > 0)
        best = some[np.argsort(-key[some], kind="stable")][:count]
        return [int(item) for item in best]

    @cached_property
    def overlaps(self) -> list[tuple[str, list[float]]]:
        """Mean overlap of the lists of every pair of contenders."""
        count = range(len(self.survey.contenders))
        return [
            (self.survey.contenders[one].name, [float(self.survey.overlap(one, other).mean()) for other in count])
            for one in count
        ]

    @cached_property
    def coverage(self) -> list[Coverage]:
        """How the lists of every contender spread over the catalog."""
        items = self.survey.data.num_items
        is_popular = np.append(False, self.catalog.ranks <= max(1, items // _HEAD))
        is_new = np.append(False, self.catalog.events == 0)
        found = []
        for place, one in enumerate(self.survey.contenders):
            count = self.survey.listed(place)
            total = max(1, int(count.sum()))
            covered = self.survey.coverage(place)
            short = float((one.lists == 0).any(1).mean())
            popular, new = (float(count[which].sum()) / total for which in (is_popular, is_new))
            found.append(Coverage(one.name, covered, covered / items, popular, new, short))
        return found

    def calibration(self) -> list[Calibrated]:
        """Of every attribute with few values, how often lists hold them and how often users liked them before.

        What users liked are the training positives of the whole log.
        """
        listed = [self.survey.listed(place) for place in range(len(self.survey.contenders))]
        liked = np.append(0, self.catalog.positives).astype(np.int64)
        shown = np.flatnonzero(sum(listed))
        some = np.union1d(shown, np.argsort(-liked, kind="stable")[:_LIKED])
        some = some[some > 0]
        found = []
        for attribute in self.catalog.attributes:
            values = self.catalog.values(attribute, some.tolist())
            before = _shares(values, liked)
            if not 1 < len(before) <= _MOST_VALUES:
                continue
            of_lists = [_shares(values, count) for count in listed]
            most = sorted(before, key=before.__getitem__, reverse=True)[:_VALUES]
            rows = [(value, before[value], [shares.get(value, 0.0) for shares in of_lists]) for value in most]
            found.append(Calibrated(attribute, rows))
        return found


def _shares(values: Mapping[int, Sequence[str]], counts: np.ndarray) -> dict[str, float]:
    """Share of each value among the counted items; an item with several values counts for each in equal parts."""
    found: dict[str, float] = defaultdict(float)
    for item, names in values.items():
        for name in names:
            if counts[item]:
                found[name] += float(counts[item]) / len(names)
    total = sum(found.values()) or 1.0
    return {name: count / total for name, count in found.items()}

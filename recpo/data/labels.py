"""Preference labels in [0, 1] that come from a column of the log, or from the mere fact of an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import ibis
import ibis.expr.types as ir

from recpo.data.schema import Derived, LogColumns
from recpo.data.shaping import Label
from recpo.errors import RecpoError


@dataclass(frozen=True)
class EveryEvent(Label):
    """Every event is a positive: 1. For logs of purchases, clicks or visits without any other feedback."""

    def add(self, events: ir.Table) -> ir.Table:
        """A constant column."""
        return events.mutate(**{Derived.LABEL: ibis.literal(1.0)})


@dataclass(frozen=True)
class BinaryColumn(Label):
    """The column mapped to ``label`` as it is, 0 or 1: a click, a like, KuaiRand's ``long_view``.

    Any other value is refused by ``recpo prepare``; a missing one makes the event neutral.
    """

    needs: ClassVar[tuple[str, ...]] = (LogColumns.LABEL,)

    def refuses(self, label: ir.FloatingColumn) -> ir.BooleanColumn:
        """Anything but 0 and 1."""
        return (label != 0) & (label != 1)

    def add(self, events: ir.Table) -> ir.Table:
        """The column itself."""
        return events.mutate(**{Derived.LABEL: events[Derived.VALUE]})


@dataclass(frozen=True)
class NumericColumn(Label):
    """The number mapped to ``label`` on a line from ``low`` (0) to ``high`` (1), clipped; or compared with a threshold.

    The ends are given, not fitted: the label of an event does not depend on other events. For ratings from 0.5 to 5
    take ``low=0.5, high=5``, or ``threshold=4`` for 1 where the rating is at least 4 and 0 elsewhere.

    Args:
        low: value that becomes 0.
        high: value that becomes 1.
        threshold: with a threshold, 1 where the value is at least this and 0 elsewhere, whatever ``low`` and ``high``.
    """

    low: float = 0.0
    high: float = 1.0
    threshold: float | None = None

    needs: ClassVar[tuple[str, ...]] = (LogColumns.LABEL,)

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise RecpoError(f"label NumericColumn: low {self.low} must be below high {self.high}")

    def add(self, events: ir.Table) -> ir.Table:
        """A line or a step."""
        value = events[Derived.VALUE]
        if self.threshold is None:
            label = ((value - self.low) / (self.high - self.low)).clip(lower=0.0, upper=1.0)
        else:
            label = (value >= self.threshold).cast("int8").cast("float64")
        return events.mutate(**{Derived.LABEL: label})

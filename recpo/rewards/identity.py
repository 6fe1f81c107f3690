"""Checks that a reward was made for the items, users and feedback that it scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError
from recpo.feedback import FeedbackDefinition


class Identified(Protocol):
    """The items and users of prepared data."""

    @property
    def root(self) -> object:
        """Its directory."""

    @property
    def catalog_checksum(self) -> str:
        """The checksum of its items."""

    @property
    def users_checksum(self) -> str:
        """The checksum of its users."""

    @property
    def feedback(self) -> FeedbackDefinition:
        """Its definition of feedback."""


def validate_identity(reward: RewardFunction, name: str, data: Identified) -> None:
    """Raises if a reward was made for other items, users or feedback than those that it scores.

    Args:
        reward: the reward.
        name: its name in the message.
        data: the data that it scores.

    Raises:
        RecpoError: the items differ, the reward keeps factors of other users, or it reads feedback levels of another
            meaning.
    """
    for definition in reward.feedback:
        definition.validate_same(data.feedback, name, data.root)
    if reward.catalog_checksum not in (None, data.catalog_checksum):
        raise RecpoError(
            f"{name}: it was made for other items than {data.root} holds (items.parquet differs); use the prepared "
            "directory it was made with"
        )
    if reward.users_checksum not in (None, data.users_checksum):
        raise RecpoError(
            f"{name}: it knows its users by their number, and was made for others than {data.root} holds "
            "(users.parquet differs); use the prepared directory it was made with, or for FactorReward set users to "
            "folded"
        )


def common_checksum(name: str, kind: str, checksums: Iterable[str | None]) -> str | None:
    """The common checksum of several rewards, without those that have none; None if no reward has one.

    Args:
        name: name of the reward that combines them.
        kind: what the checksums identify: items, users.
        checksums: checksums of the rewards.

    Raises:
        RecpoError: they differ.
    """
    known = sorted(one for one in set(checksums) if one is not None)
    if len(known) > 1:
        raise RecpoError(f"{name}: its rewards were made for different {kind}; use one prepared directory")
    return known[0] if known else None

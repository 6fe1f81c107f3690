"""Whose rewards they are: the items and users that a reward was made for, compared with those it is to score."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from recpo.contracts import RewardFunction
from recpo.errors import RecpoError


class Identified(Protocol):
    """Prepared data, as far as its items and users go."""

    @property
    def root(self) -> object:
        """Its directory."""

    @property
    def catalog_checksum(self) -> str:
        """Of its items."""

    @property
    def users_checksum(self) -> str:
        """Of its users."""


def validate_identity(reward: RewardFunction, name: str, data: Identified) -> None:
    """Raises where a reward was made for others than those that it is to score.

    Args:
        reward: the reward.
        name: what it is called in the message.
        data: what it is to score.

    Raises:
        RecpoError: other items, or other users than those whose rewards it keeps.
    """
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
    """The one checksum of those of several rewards that have one; None where none has.

    Args:
        name: of the reward that combines them.
        kind: what they identify: items, users.
        checksums: of the rewards.

    Raises:
        RecpoError: they differ.
    """
    known = sorted(one for one in set(checksums) if one is not None)
    if len(known) > 1:
        raise RecpoError(f"{name}: its rewards were made for different {kind}; use one prepared directory")
    return known[0] if known else None

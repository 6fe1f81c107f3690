"""Tables that no single machine holds: a Lightning strategy that shards them with torchrec, and what goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpo.sharding.strategy import ShardedStrategy

__all__ = ["ShardedStrategy"]


def __getattr__(name: str) -> Any:
    # importing torchrec takes seconds, and much of this package does without it
    if name == "ShardedStrategy":
        try:
            from recpo.sharding.strategy import ShardedStrategy
        except (ImportError, OSError) as error:  # a fbgemm that does not suit the machine is an OSError
            raise ImportError(
                f"ShardedStrategy needs torchrec, which cannot be imported here ({error}): `recpo doctor` says how to "
                "fix it"
            ) from error

        return ShardedStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Sharded tables for catalogs that do not fit on one machine: a Lightning strategy on top of torchrec."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpo.sharding.strategy import ShardedStrategy

__all__ = ["ShardedStrategy"]


def __getattr__(name: str) -> Any:
    # importing torchrec takes seconds, and much of this package works without it
    if name == "ShardedStrategy":
        try:
            from recpo.sharding.strategy import ShardedStrategy
        except (ImportError, OSError) as error:  # an fbgemm build that does not fit the machine raises OSError
            raise ImportError(
                f"ShardedStrategy needs torchrec, which cannot be imported here ({error}): `recpo doctor` says how to "
                "fix it"
            ) from error

        return ShardedStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

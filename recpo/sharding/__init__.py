"""Tables that no single machine holds: a Lightning strategy that shards them with torchrec, and what goes with it."""

from recpo.sharding.strategy import ShardedStrategy

__all__ = ["ShardedStrategy"]

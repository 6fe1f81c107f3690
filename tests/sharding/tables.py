"""Modules of item tables, sharded by the strategy as in a run but without a trainer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.forkserver import ensure_running
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recpo.policies.item_table import ItemTable


def as_torchrun() -> None:
    """What torchrun tells a process, for the group that is there already."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="tests", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


@contextmanager
def only_rank() -> Iterator[None]:
    """This process is the only rank of a group meanwhile."""
    ensure_running()  # a server of forks that started meanwhile would give all later ones the words of torchrun
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
            os.environ.clear()  # of what as_torchrun sets
            os.environ.update(environment)


def shard(module: nn.Module, *arguments: Any, device: str = "cpu") -> nn.Module:
    """Replaces the tables of ``module`` as ``ShardedStrategy(*arguments)`` does."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from recpo.sharding import ShardedStrategy

    as_torchrun()
    strategy = ShardedStrategy(*arguments)
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device(device)] * dist.get_world_size()
    strategy._shard(module)
    return module


class Model(nn.Module):
    """Item tables by name, equal on all ranks; row 0 is zero."""

    def __init__(self, seed: int = 0, /, **tables: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name, (rows, dim) in tables.items():
            setattr(self, name, ItemTable(rows - 1, dim, std=1.0))

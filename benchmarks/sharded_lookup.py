"""One training step of a sharded table alone: recpo's collected gradients against torchrec's update going backward.

    torchrun --standalone --nproc_per_node 2 benchmarks/sharded_lookup.py

Each contender looks up the same ids (Zipf-distributed, or evenly with --zipf 0), has a gradient for every vector and
updates the rows with row-wise Adagrad. torchrec updates them while it goes backward; recpo sends the gradients back and
updates once, after clipping, accumulation and whatever else has had its turn. Prints one JSON line per contender: CPU
time of a rank per step relative to torchrec's (the best of rounds that take turns), and the same for two lookups per
step, which torchrec turns into two updates.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpo.policies.item_table import ItemTable, tables_on_meta
from recpo.sharding.lookup_tables import LookupTable, TableOptimizer, TableOptions
from recpo.sharding.memory import TableSpec
from recpo.sharding.planning import collection_plan, make_collection, plan_tables, table_key

OPTIONS = TableOptions("rowwise_adagrad", lr=0.02)


def sharded(spec: TableSpec) -> tuple[Any, list[Any]]:
    """A collection of one table over the ranks, and its blocks."""
    plan = plan_tables([spec], optimizer=OPTIONS.optimizer, world_size=dist.get_world_size(), group=dist.group.WORLD)
    cpu = torch.device("cpu")
    model = DistributedModelParallel(
        nn.ModuleDict({table_key(spec.name): make_collection(spec)}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=cpu,
        plan=collection_plan(plan.sharding),
        sharders=[EmbeddingCollectionSharder(fused_params=OPTIONS.fused_params(cpu, frozen=False))],
        init_data_parallel=False,
    )
    return model.module[table_key(spec.name)], plan.placements[spec.name].blocks


class InBackward:
    """torchrec as it is."""

    def __init__(self, spec: TableSpec) -> None:
        self._key, (self._collection, _) = table_key(spec.name), sharded(spec)

    def step(self, lookups: list[Tensor], gradient: Tensor) -> None:
        """Lookups, gradients, update."""
        loss = torch.zeros(())
        for ids in lookups:
            lengths = torch.tensor([ids.numel()], dtype=torch.int32)
            features = KeyedJaggedTensor([self._key], ids.reshape(-1), lengths=lengths)
            loss = loss + (self._collection(features)[self._key].values() * gradient[: ids.numel()]).sum()
        loss.backward()


class Collected:
    """recpo's table and its optimizer."""

    def __init__(self, spec: TableSpec) -> None:
        collection, blocks = sharded(spec)
        with tables_on_meta():
            table = ItemTable(spec.num_rows - 1, spec.dim)
        assert dist.group.WORLD is not None
        self._table = LookupTable(table, table_key(spec.name), collection, blocks, dist.group.WORLD)
        self._optimizer = TableOptimizer({"table": self._table}, OPTIONS)

    def step(self, lookups: list[Tensor], gradient: Tensor) -> None:
        """Lookups, gradients, update."""
        loss = torch.zeros(())
        for ids in lookups:
            vectors = self._table(ids)
            loss = loss + (vectors.reshape(-1, vectors.shape[-1]) * gradient[: ids.numel()]).sum()
        loss.backward()
        self._table.collect_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=256 * 50, help="per rank and step")
    parser.add_argument("--zipf", type=float, default=1.2, help="exponent; 0 = evenly")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sharding", default="row_wise")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rng = np.random.default_rng(dist.get_rank())
    spec = TableSpec("item_table", arguments.items + 1, arguments.dim, arguments.ids, arguments.sharding)
    contenders = {"torchrec": InBackward(spec), "recpo": Collected(spec)}
    gradient = torch.randn(arguments.ids, arguments.dim)
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        even = rng.integers(0, arguments.items, arguments.ids)
        drawn = torch.from_numpy(rng.zipf(arguments.zipf, arguments.ids) - 1 if arguments.zipf else even)
        drawn = drawn % arguments.items + 1
        for lookups in ([drawn], list(drawn.chunk(2))):
            for name, contender in contenders.items():
                dist.barrier()
                before = time.process_time()
                contender.step(lookups, gradient)
                spent[name, len(lookups)].append(time.process_time() - before)
    for name in contenders:
        ratios = {f"{n}_lookups": round(min(spent[name, n]) / min(spent["torchrec", n]), 2) for n in (1, 2)}
        if dist.get_rank() == 0:
            sizes = {"items": arguments.items, "dim": arguments.dim, "ids": arguments.ids}
            print(json.dumps(sizes | {"ranks": dist.get_world_size(), "contender": name, **ratios}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

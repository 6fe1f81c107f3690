"""Exact softmax over a catalog: one process with the whole table against ranks with a part of the rows each.

One update (forward and backward, no optimizer) of the likelihood of 512 states in all, d = 64, float32, one thread per
process; ranks share the states evenly and talk over gloo on this machine. Processes are new for every contender, so
that the peak resident size (torch included) is its own. Prints one JSON line per contender; the loss and the norm of
the table's gradient are to agree. Times are those of the slowest rank, of which processor time is the one to compare
where there are fewer idle cores than ranks.

    python benchmarks/sharded_head.py            # V = 100,000 and 1,000,000, one process and two ranks
    python benchmarks/sharded_head.py --quick    # V = 20,000
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from recpo.ops.linear_logprob import linear_logprob
from recpo.ops.sharded_logprob import RowShard, sharded_logprob


def rows_of(first: int, stop: int, dim: int) -> Tensor:
    """Rows ``first`` to ``stop`` of a table that is the same however it is cut."""
    rows = torch.empty(stop - first, dim)
    for part in rows.split(8192):
        numbers = torch.arange(first * dim, first * dim + part.numel(), dtype=torch.float64)
        part.copy_((numbers * 0.7391).sin_().view_as(part) * (2 / dim) ** 0.5)
        first += len(part)
    return rows


def measure(rank: int, ranks: int, store: str, items: int, dim: int, states: int, repeats: int) -> None:
    """Runs one rank of a contender; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    first, stop = ((items + 1) * part // ranks for part in (rank, rank + 1))
    table = rows_of(first, stop, dim).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    own = slice(states * rank // ranks, states * (rank + 1) // ranks)
    contexts = torch.randn(states, dim, generator=generator)[own].clone().requires_grad_()
    targets = torch.randint(1, items + 1, (states,), generator=generator)[own]
    seconds, cpu_seconds = [], []
    for _ in range(repeats + 1):
        table.grad = contexts.grad = None
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        if ranks == 1:
            logp = linear_logprob(contexts, table, targets)
        else:
            logp = sharded_logprob(contexts, RowShard(table, first, items + 1), targets)
        loss = -logp.sum() * (ranks / states)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    found: list[dict] = [{}] * ranks
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # the first update warms up
    mine = {
        "s": seconds[1:],
        "cpu_s": cpu_seconds[1:],
        "rss": peak,
        "loss": loss.item(),
        "grad": table.grad.double().norm(),
    }
    dist.all_gather_object(found, mine)
    if rank == 0:
        slowest = [max(times) for times in zip(*(one["s"] for one in found), strict=True)]
        line = {
            "contender": "linear_logprob" if ranks == 1 else "sharded_logprob",
            "ranks": ranks, "items": items, "dim": dim, "states": states,
            "s": round(statistics.median(slowest), 4), "s_min": round(min(slowest), 4), "s_max": round(max(slowest), 4),
            "cpu_s_per_rank": round(max(statistics.median(one["cpu_s"]) for one in found), 4),
            "peak_rss_mib_per_rank": round(max(one["rss"] for one in found)),
            "loss": round(sum(one["loss"] for one in found) / ranks, 5),
            "gradient_norm": round(float(torch.stack([one["grad"] for one in found]).norm()), 7),
            "torch": torch.__version__,
        }  # fmt: skip
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="V = 20,000")
    parser.add_argument("--items", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--states", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for items in [20_000] if args.quick else args.items:
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                store = str(Path(folder) / "store")
                mp.spawn(measure, (ranks, store, items, args.dim, args.states, args.repeats), nprocs=ranks)


if __name__ == "__main__":
    main()

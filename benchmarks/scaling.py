"""How costs grow with items, events and ranks, on one thread: the numbers of docs/scaling.md.

``--rows step``: CPU time and peak resident size of a training step (forward, backward, optimizer; 32 histories of 50
events, d = 64, every event scored) over 10^4 to 10^6 items, with the full and the sampled normalizer (1,024 negatives,
sparse gradients) and with semantic ids (3 codes of 256, no item vectors). ``times_smallest`` is the CPU time over that
of the same policy on the smallest catalog.

``--rows epoch``: what a rank spends per event of a log on counting the windows of an epoch and on reading its batches,
for logs of several sizes, for 1 and 8 ranks, and for both assignments (``data.assign``) where there are 8.

Every line comes from a process of its own, so that its peak resident size (torch included) is its own.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --quick
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decoding import generating_policy, random_codes

from recpo.base.contracts import Policy
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.batches.datamodule import Assign, Epochs, TrainBatches
from recpo.batches.slates import Rank, SequenceLayout
from recpo.log.prepared import Prepared
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.policies.semantic_search import Trie
from recpo.training.callbacks import tune_allocator
from recpo.training.optimizers import build_optimizer

BATCH, HISTORY, DIM = 32, 50, 64
POLICIES = ("full", "sampled", "semantic")


def policy_of(kind: str, items: int) -> Policy:
    """The policy to train, without dropout."""
    if kind == "semantic":
        policy: SemanticIdPolicy = generating_policy(Trie(random_codes(items), (256, 256, 256)), DIM)
        policy.code_table.sparse = True
        return policy
    sampled = kind == "sampled"
    return CatalogSoftmaxPolicy(items, dim=DIM, normalizer=kind, sparse=sampled, dropout=0.0)


def batch_of(items: int) -> FeedbackBatch:
    """Every event is scored after those before it, as in pre-training."""
    ids = torch.randint(1, items + 1, (BATCH, HISTORY + 1))
    histories = Histories(ids[:, :-1], torch.full((BATCH,), HISTORY))
    visible = torch.arange(1, HISTORY + 1).expand(BATCH, -1)
    slates = Slates(ids[:, 1:], visible, torch.ones(BATCH, HISTORY, dtype=torch.bool))
    return FeedbackBatch(histories, slates, torch.arange(BATCH))


def step(kind: str, items: int, repeats: int) -> dict[str, Any]:
    """The median step of one policy in this process."""
    tune_allocator()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = policy_of(kind, items).train()
    optimizer = build_optimizer(policy, torch.optim.Adam, torch.optim.Adagrad)
    spent = []
    for _ in range(repeats + 1):
        batch = batch_of(items)
        start = time.process_time()
        optimizer.zero_grad()
        (-policy.log_prob(batch).sum(-1).mean()).backward()
        optimizer.step()
        spent.append(time.process_time() - start)
    return {"policy": kind, "items": items, "cpu_ms": 1e3 * statistics.median(spent[1:])}


def epoch(prepared: str, ranks: int, assign: Assign, repeats: int) -> dict[str, Any]:
    """The cost of one rank's epoch for this number of ranks, in this process."""
    torch.set_num_threads(1)
    data, layout = Prepared.open(prepared), SequenceLayout(HISTORY)
    events = sum(shard["rows"] for shard in data.manifest["shards"]["train"])
    planned, read = [], []
    for _ in range(repeats + 1):
        start = time.process_time()
        batches = TrainBatches(data, layout, 128, 0, Rank(0, ranks), Epochs(assign=assign))
        planned.append(time.process_time() - start)
        start = time.process_time()
        count = sum(1 for _ in batches)
        read.append(time.process_time() - start)
    ns = {"plan": planned, "read": read}
    per_event = {f"{name}_ns_per_event": 1e9 * statistics.median(spent[1:]) / events for name, spent in ns.items()}
    return {"events": events, "ranks": ranks, "assign": assign, "batches_of_rank": count, **per_event}


def measured(*flags: object) -> dict[str, Any]:
    """One line from a process of its own."""
    command = [sys.executable, __file__, *map(str, flags)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def recpo(*flags: object) -> None:
    """A verb in a process of its own: what this one has held once would count as the memory of those it starts."""
    command = [sys.executable, "-m", "recpo.cli.main", *map(str, flags)]
    subprocess.run(command, check=True, capture_output=True)


def steps(sizes: list[int], repeats: int) -> None:
    for kind in POLICIES:
        smallest = None
        for items in sizes:
            line = measured("--step", kind, "--items", items, "--repeats", repeats)
            smallest = smallest or line["cpu_ms"]
            print(json.dumps(line | {"times_smallest": round(line["cpu_ms"] / smallest, 2)}), flush=True)


def epochs(sizes: list[int], repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for events in sizes:
            log, out = Path(folder) / f"log_{events}", Path(folder) / f"prepared_{events}"
            recpo(
                "simulate", "--out", log, "--users", events // 50, "--items", max(50, events // 200), "--events", events
            )
            recpo("prepare", "--log", log / "log", "--out", out, "--rows_per_shard", max(1000, sizes[-1] // 64))
            for ranks, assign in ((1, "batches"), (8, "batches"), (8, "shards")):
                line = measured("--epoch", out, "--ranks", ranks, "--assign", assign, "--repeats", repeats)
                print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=["step", "epoch"], help="only these")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step", choices=POLICIES, help=argparse.SUPPRESS)
    parser.add_argument("--epoch", help=argparse.SUPPRESS)
    parser.add_argument("--items", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--assign", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.step or flags.epoch:
        if flags.step:
            line = step(flags.step, flags.items, flags.repeats)
        else:
            line = epoch(flags.epoch, flags.ranks, flags.assign, flags.repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(line | {"peak_rss_mb": round(peak / 1e6), "torch": torch.__version__}))
        return
    if flags.rows != "epoch":
        steps([500, 4000] if flags.quick else [10**4, 10**5, 10**6], flags.repeats)
    if flags.rows != "step":
        epochs([20_000] if flags.quick else [10**6, 2 * 10**6, 4 * 10**6], flags.repeats)


if __name__ == "__main__":
    main()

"""One library's ranking metrics of given lists, for ``benchmarks/evaluation.py``; runs in the library's environment.

    python ranking_metrics.py LIBRARY lists.npz REPEATS

``lists.npz``: ``lists [U, K]`` and ``targets [U, P]``, distinct items 1..V of every user. Prints one JSON line: seconds
of every repeat after the first, from arrays of the library's own kind in memory to the means over users, and the means.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version

import numpy as np

KS = (10, 100)
BATCH = 4096  # users at once, where the library takes batches


def numpy(lists, targets):
    """Plain NumPy, all comparisons at once per batch: what one would write without a library."""
    discount = 1 / np.log2(np.arange(2, lists.shape[1] + 2))
    ideal = np.concatenate([[0], discount.cumsum()])

    def measure():
        sums = dict.fromkeys((f"{name}@{k}" for name in ("NDCG", "Recall", "MRR") for k in KS), 0.0)
        for begin in range(0, len(lists), BATCH):
            shown, wanted = lists[begin : begin + BATCH], targets[begin : begin + BATCH]
            hit = np.zeros(shown.shape, bool)
            for column in wanted.T:
                hit |= shown == column[:, None]
            first = np.where(hit.any(1), hit.argmax(1) + 1, np.inf)
            for k in KS:
                sums[f"NDCG@{k}"] += (hit[:, :k] @ discount[:k]).sum() / ideal[min(k, wanted.shape[1])]
                sums[f"Recall@{k}"] += hit[:, :k].sum() / wanted.shape[1]
                sums[f"MRR@{k}"] += (1 / first[first <= k]).sum()
        return {name: float(total) / len(lists) for name, total in sums.items()}

    return measure, ("numpy",)


def recpo(lists, targets):
    import torch

    from recpo.ops.ranking import mrr, ndcg, ranked_hits, recall

    lists, targets = torch.from_numpy(lists), torch.from_numpy(targets)
    metrics = {"NDCG": ndcg, "Recall": recall, "MRR": mrr}

    def measure():
        parts = []
        for begin in range(0, len(lists), BATCH):
            wanted = targets[begin : begin + BATCH]
            hits = ranked_hits(lists[begin : begin + BATCH], wanted, torch.ones_like(wanted, dtype=torch.bool))
            parts.append(torch.cat([metric(hits, KS) for metric in metrics.values()], 1))
        names = [f"{name}@{k}" for name in metrics for k in KS]
        return dict(zip(names, torch.cat(parts).double().nanmean(0).tolist(), strict=True))

    return measure, ("torch",)


def replay(lists, targets):
    import torch
    from replay.metrics.torch_metrics_builder import TorchMetricsBuilder

    lists, targets = torch.from_numpy(lists), torch.from_numpy(targets)

    def measure():
        builder = TorchMetricsBuilder(["ndcg", "recall", "mrr"], list(KS))
        for begin in range(0, len(lists), BATCH):
            builder.add_prediction(lists[begin : begin + BATCH], targets[begin : begin + BATCH])
        names = {"ndcg": "NDCG", "recall": "Recall", "mrr": "MRR"}
        found = ([*name.split("@"), value] for name, value in builder.get_metrics().items())
        return {f"{names[name]}@{k}": float(value) for name, k, value in found}

    return measure, ("replay-rec", "torch")


def rectools(lists, targets):
    import pandas as pd
    from rectools import Columns
    from rectools.metrics import MRR, NDCG, Recall, calc_metrics

    users, places = np.indices(lists.shape)
    shown = {Columns.User: users.ravel(), Columns.Item: lists.ravel(), Columns.Rank: places.ravel() + 1}
    wanted = {Columns.User: np.indices(targets.shape)[0].ravel(), Columns.Item: targets.ravel()}
    shown, wanted = pd.DataFrame(shown), pd.DataFrame(wanted)
    metrics = {f"{kind.__name__}@{k}": kind(k=k) for kind in (Recall, MRR) for k in KS}
    metrics |= {f"NDCG@{k}": NDCG(k=k, divide_by_achievable=True) for k in KS}

    def measure():
        return {name: float(value) for name, value in calc_metrics(metrics, shown, wanted).items()}

    return measure, ("rectools", "pandas")


def main():
    library, file, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3])
    arrays = np.load(file)
    measure, packages = globals()[library](arrays["lists"], arrays["targets"])
    means, seconds, cpu_seconds = measure(), [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        measure()
        seconds.append(time.perf_counter() - start[0])
        cpu_seconds.append(time.process_time() - start[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    versions = {package: version(package) for package in packages}
    facts = {"means": means, "peak_rss_mib": peak, "versions": versions}
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, **facts}))


if __name__ == "__main__":
    main()

"""Ranking metrics as loops over one user at a time."""

import math


def hits_of(recommended, targets, k):
    return [item in targets and item != 0 for item in recommended[:k]]


def metrics(recommended, targets, k):
    """All metrics of one user's list at ``k``; nan without targets."""
    targets = set(targets)
    if not targets:
        return dict.fromkeys(["HitRate", "Recall", "Precision", "NDCG", "MRR", "MAP"], math.nan)
    hits = hits_of(recommended, targets, k)
    found = sum(hits)
    best = min(k, len(targets))
    dcg = sum(1 / math.log2(rank + 1) for rank, hit in enumerate(hits, 1) if hit)
    ideal = sum(1 / math.log2(rank + 1) for rank in range(1, best + 1))
    first = next((rank for rank, hit in enumerate(hits, 1) if hit), None)
    precisions = [sum(hits[:rank]) / rank for rank, hit in enumerate(hits, 1) if hit]
    return {
        "HitRate": float(found > 0),
        "Recall": found / len(targets),
        "Precision": found / k,
        "NDCG": dcg / ideal,
        "MRR": 1 / first if first else 0.0,
        "MAP": sum(precisions) / best,
    }


def graded_ndcg(recommended, gains, k):
    """Of a user whose held-out items have ``gains`` (item to gain); nan if all are 0."""

    def dcg(values):
        return sum(value / math.log2(rank + 1) for rank, value in enumerate(values, 1))

    best = dcg(sorted(gains.values(), reverse=True)[:k])
    return dcg([gains.get(item, 0) for item in recommended[:k]]) / best if best else math.nan


def mean_rank(recommended, targets, k):
    """Mean rank of the targets, k + 1 for an absent one; nan without targets."""
    shown = recommended[:k]
    ranks = [shown.index(item) + 1 if item in shown else k + 1 for item in set(targets)]
    return sum(ranks) / len(ranks) if ranks else math.nan

"""Properties of lists as loops over one user at a time; vectors, tags and counts are dictionaries by item."""

import math
from itertools import combinations


def filled(items):
    return [item for item in items if item]


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def gini(counts):
    """Half of the mean absolute difference of all pairs, relative to the mean."""
    size, total = len(counts), sum(counts)
    return sum(abs(a - b) for a in counts for b in counts) / (2 * size * total) if total else math.nan


def bins(counts):
    """Head, torso, tail or unseen for every item of ``counts`` (item to events)."""
    total, before, found = sum(counts.values()), 0, {}
    for item in sorted(counts, key=lambda i: (-counts[i], i)):
        found[item] = "unseen in training" if not counts[item] else "head"
        if counts[item] and 2 * before >= total:
            found[item] = "torso" if 10 * before < 8 * total else "tail"
        before += counts[item]
    return found


def novelty(items, counts):
    total = sum(counts.values()) + len(counts)
    return mean(-math.log2((counts[item] + 1) / total) for item in filled(items))


def popularity_lift(items, seen, counts):
    usual = mean(counts[item] for item in filled(seen))
    return mean(counts[item] for item in filled(items)) / usual - 1 if usual > 0 else math.nan


def tail_share(items, counts):
    label = bins(counts)
    return mean(label[item] in ("tail", "unseen in training") for item in filled(items))


def repeat_rate(items, seen):
    return mean(item in filled(seen) for item in filled(items))


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def diversity(items, vectors):
    kept = [vectors[item] for item in filled(items) if any(vectors[item])]
    return 1 - mean(cosine(a, b) for a, b in combinations(kept, 2))


def tag_diversity(items, tags):
    kept = [tags[item] for item in filled(items) if tags[item]]
    return 1 - mean(len(a & b) / math.sqrt(len(a) * len(b)) for a, b in combinations(kept, 2))


def shares(items, tags):
    weight = {}
    for item in filled(items):
        for tag in tags[item]:
            weight[tag] = weight.get(tag, 0) + 1 / len(tags[item])
    total = sum(weight.values())
    return {tag: value / total for tag, value in weight.items()}


def tag_entropy(items, tags):
    q = shares(items, tags)
    return -sum(share * math.log(share) for share in q.values()) if q else math.nan


def miscalibration(items, seen, tags, alpha=0.01):
    p, q = shares(seen, tags), shares(items, tags)
    if not p or not q:
        return math.nan
    return sum(p[g] * math.log(p[g] / ((1 - alpha) * q.get(g, 0) + alpha * p[g])) for g in p)

"""Slates without replacement, one ordering at a time: the definition, for a few items."""

from itertools import permutations

import numpy as np


def slates(weights, k):
    """Every ordered slate of k items that can be drawn, and its probability (Plackett, 1975)."""
    drawable = [i for i, weight in enumerate(weights) if weight > 0]
    for slate in permutations(drawable, min(k, len(drawable))):
        probability, left = 1.0, sum(weights[i] for i in drawable)
        for item in slate:
            probability *= weights[item] / left
            left = sum(weights[i] for i in drawable if i not in slate[: slate.index(item) + 1])
        yield slate, probability


def inclusion(weights, k):
    found = np.zeros(len(weights))
    for slate, probability in slates(weights, k):
        for item in slate:
            found[item] += probability
    return found

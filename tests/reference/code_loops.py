"""Slow, independent versions of the tokenizer's steps: loops over items, NumPy only, without recpo."""

import math
from collections import Counter

import numpy as np


def residual_encode(points, centroids):
    """Nearest code of every level, one item at a time: ``codes [n, T]`` and the squared errors ``[n, T]``."""
    codes, errors = [], []
    for point in np.asarray(points, dtype=np.float64):
        residual, row, lost = point.copy(), [], []
        for book in np.asarray(centroids, dtype=np.float64):
            distances = [float(((residual - centroid) ** 2).sum()) for centroid in book]
            row.append(int(np.argmin(distances)))
            lost.append(min(distances))
            residual -= book[row[-1]]
        codes.append(row)
        errors.append(lost)
    return np.array(codes), np.array(errors)


def relative_errors(points, centroids, codes):
    """Squared error after every level over the squared distance to the mean."""
    points, residual, errors = np.asarray(points, np.float64), np.array(points, np.float64), []
    spread = ((points - points.mean(0)) ** 2).sum()
    for level in range(codes.shape[1]):
        for row, code in enumerate(codes[:, level]):
            residual[row] -= centroids[level][code]
        errors.append((residual**2).sum() / spread)
    return errors


def code_entropy(codes):
    """``H = -sum p log p`` of a list of codes, in nats."""
    return -sum(n / len(codes) * math.log(n / len(codes)) for n in Counter(codes).values())


def first_come(codes, distances_of, num_codes):
    """Last codes without collisions under one prefix: nearest items stay, then the others one by one, nearest first.

    ``distances_of[i]`` are the distances of item i to every code.
    """
    own = [distances_of[item][code] for item, code in enumerate(codes)]
    order = sorted(range(len(codes)), key=lambda item: (own[item], item))
    taken, placed, waiting = set(), {}, []
    for item in order:
        if codes[item] in taken:
            waiting.append(item)
        else:
            taken.add(codes[item])
            placed[item] = codes[item]
    for item in waiting:
        free = [code for code in range(num_codes) if code not in taken]
        best = min(free, key=lambda code: (distances_of[item][code], code))
        taken.add(best)
        placed[item] = best
    return [placed[item] for item in range(len(codes))]


def near_pairs(sequences, window):
    """Weight ``1 / distance`` of every unordered pair of different items, summed over all sequences."""
    weights = Counter()
    for sequence in sequences:
        for place, item in enumerate(sequence):
            for distance in range(1, window + 1):
                if place + distance < len(sequence) and sequence[place + distance] != item:
                    pair = tuple(sorted((item, sequence[place + distance])))
                    weights[pair] += 1 / distance
    return weights


def positive_information(weights, shift):
    """``max(0, log(n_ij n / (n_i n_j)) - log shift)`` of symmetric weights."""
    item = Counter()
    for (one, other), weight in weights.items():
        item[one] += weight
        item[other] += weight
    total = sum(item.values())
    return {
        pair: max(0.0, math.log(weight * total / (item[pair[0]] * item[pair[1]])) - math.log(shift))
        for pair, weight in weights.items()
    }

"""A trie as a dictionary of dictionaries, and searches as walks over it: loops, without recpo."""

import itertools
import math


def dictionary_trie(tuples):
    """Nested dictionaries; the last code of tuple i leads to item i + 1."""
    root = {}
    for item, codes in enumerate(tuples, start=1):
        node = root
        for code in codes[:-1]:
            node = node.setdefault(code, {})
        node[codes[-1]] = item
    return root


def children(root, prefix):
    """The dictionary after a prefix; empty where no item has it."""
    node = root
    for code in prefix:
        node = node.get(code, {})
    return node


def distribution(scores, allowed, temperature=1.0, top_p=1.0):
    """Probabilities by code: softmax of the allowed scores at a temperature, then the nucleus."""
    weights = {code: math.exp((scores[code] - max(scores)) / temperature) for code in allowed}
    total = sum(weights.values())
    kept, reached = {}, 0.0
    for code in sorted(weights, key=lambda code: (-weights[code], code)):
        if kept and reached >= top_p < 1:
            break
        kept[code] = weights[code] / total
        reached += kept[code]
    return {code: p / reached for code, p in kept.items()}


def tuple_probabilities(tuples, sizes, scores_of, inside=True, temperature=1.0, top_p=1.0):
    """Token probabilities of every tuple that can be drawn: of items only, or of the whole product of codebooks."""
    root = dictionary_trie(tuples)
    found = {}
    for codes in tuples if inside else itertools.product(*map(range, sizes)):
        factors = []
        for level, code in enumerate(codes):
            allowed = children(root, codes[:level]) if inside else range(sizes[level])
            factors.append(distribution(scores_of(codes[:level]), allowed, temperature, top_p).get(code, 0.0))
        found[tuple(codes)] = factors
    return found

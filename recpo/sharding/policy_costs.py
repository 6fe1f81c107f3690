"""Costs of a policy beside its weights: activations, operations, and the trie of semantic ids.

Weights are counted on the modules themselves (``workload``). These formulas cover what no module shows before it runs;
tests compare them with real runs.

Symbols: ``W`` ranks, ``V`` items, ``d`` the width of vectors and states, ``H`` events of a history, ``N`` states that a
rank scores per step, ``T`` codes per item, ``K`` the size of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from recpo.base.features import Categories, Category, Feature, Number, Vector, of_type
from recpo.ops.kernels import BLOCK_BYTES, BLOCK_BYTES_ACCELERATOR, BLOCK_ROWS_OF_TABLE, KEEP_BYTES
from recpo.policies.item_features import BLOCK_ITEMS
from recpo.sharding.costs import FLOAT

Blocks = Literal["sasrec", "hstu"]
Device = Literal["cpu", "cuda"]

_TRIE_BITMAP_BYTES_PER_CHILD = 4


# ---------------------------------------------------------------- dense parameters
def dense_bytes(parameters: int, ranks: int, copies: int = 0, *, mixed: bool = False) -> int:
    """``16`` bytes per parameter: weight, gradient, and Adam's two moments.

    Plus ``4`` for the all-reduced bucket, ``4`` for each frozen copy, and ``2`` for a 16-bit copy of the weights.
    """
    return parameters * (FLOAT * (4 + (ranks > 1) + copies) + 2 * mixed)


# ---------------------------------------------------------------- activations
# Floats kept for the backward pass, measured by hooks on saved tensors (torch 2.13, dropout on); tests hold them within
# 20 %. Under autocast to 16 bits the blocks keep 0.57 of the bytes.
_SASREC_FLOATS, _EMBEDDED_FLOATS, _DECODER_FLOATS, _CODE_FLOATS = 20.0, 2.3, 26.0, 5.0
_HSTU_FLOATS, _HSTU_FLOATS_PER_HEAD_AND_EVENT, _TIME_GAP_FLOATS_PER_EVENT = 17.6, 2.1, 2.0
MIXED_SHARE = 0.57


def encoder_activation_bytes(
    events: float, dim: int, layers: int, blocks: Blocks, heads: int, history: int, *, mixed: bool = False
) -> float:
    """Activations that the encoder keeps for ``events`` events: about ``20 d`` floats per event and SASRec block.

    HSTU keeps ``17.6 d + 2.1 heads H`` floats: its attention weights and the time buckets between events are kept.
    """
    share = MIXED_SHARE if mixed else 1.0
    if blocks == "sasrec":
        return FLOAT * events * (layers * _SASREC_FLOATS * dim * share + _EMBEDDED_FLOATS * dim)
    per_block = _HSTU_FLOATS * dim + _HSTU_FLOATS_PER_HEAD_AND_EVENT * heads * history
    once = _EMBEDDED_FLOATS * dim + _TIME_GAP_FLOATS_PER_EVENT * history
    return FLOAT * events * (layers * per_block * share + once)


def decoder_activation_bytes(
    items: float, dim: int, layers: int, codebooks: Sequence[int], *, mixed: bool = False
) -> float:
    """Activations that the decoder keeps for ``items``: ``26 d`` floats per code and layer, ``1.25 K`` per softmax."""
    share = MIXED_SHARE if mixed else 1.0
    tokens = len(codebooks)
    floats = tokens * dim * (layers * _DECODER_FLOATS * share + _CODE_FLOATS) + 1.25 * sum(codebooks)
    return FLOAT * items * floats


def full_softmax_bytes(states: float, dim: int, rows: int, ranks: int, device: Literal["cpu", "cuda"] = "cpu") -> float:
    """Memory of the exact softmax for ``N`` states per rank over ``rows`` of its own: blocks, not ``[N W, rows]``.

    The terms are three blocks of logits, the states of all ranks with their expected rows and gradients ``3 · 4 d N
    W``, one log-sum-exp per block of 8192 rows ``4 N W rows / 8192``, and the softmax itself if it takes at most 192
    MiB.
    """
    scored = states * ranks
    softmax = FLOAT * scored * rows
    per_block = FLOAT * scored * -(-rows // BLOCK_ROWS_OF_TABLE)
    blocks = 3 * min(BLOCK_BYTES.get(device, BLOCK_BYTES_ACCELERATOR), softmax)
    return 3 * FLOAT * dim * scored + per_block + blocks + (softmax if softmax <= KEEP_BYTES else 0.0)


def sampled_softmax_bytes(states: float, negatives: int) -> float:
    """Scores, masked scores, their concatenation and its gradient: ``4 · 4 N K``, plus a mask of one byte each."""
    return states * negatives * (4 * FLOAT + 1)


# ---------------------------------------------------------------- features of items
class FeatureSizes(NamedTuple):
    """What a ``FeatureEncoder`` reads of an item.

    Attributes:
        codes: rows of its code table: one per category, ``length`` per list.
        weighted: these rows have weights, because the schema has lists.
        dense: columns: two per number, and the width plus one per vector.
    """

    codes: int
    weighted: bool
    dense: int

    @classmethod
    def of(cls, features: Sequence[Feature]) -> FeatureSizes:
        """Counts the columns of fitted features."""
        lists = of_type(features, Categories)
        codes = len(of_type(features, Category)) + sum(one.length for one in lists)
        dense = 2 * len(of_type(features, Number)) + sum((one.width or 0) + 1 for one in of_type(features, Vector))
        return cls(codes, bool(lists), dense)

    @property
    def bytes_per_item(self) -> int:
        """Bytes per item on every rank: codes (4 bytes), their weights, columns, and whether the item has events."""
        return FLOAT * (self.codes * (1 + self.weighted) + self.dense) + 1


def feature_activation_bytes(lookups: float, sizes: FeatureSizes, hidden: int) -> float:
    """Activations that the encoder keeps for that many items: codes, weights, columns, and two hidden layers."""
    per_item = sizes.codes * (1 + sizes.weighted) + sizes.dense + 2 * hidden
    return FLOAT * lookups * per_item


def item_matrix_bytes(rows: float, dim: int, sizes: FeatureSizes, hidden: int) -> float:
    """Memory of the vectors of ``rows`` items in a step: the matrix, its gradient, and one block that is being encoded.

    A block consists of its activations, its vectors, and the gradients of the vectors and of both hidden layers.
    """
    block = min(float(BLOCK_ITEMS), rows)
    at_work = feature_activation_bytes(block, sizes, hidden) + FLOAT * block * (2 * dim + 2 * hidden)
    return 2 * FLOAT * rows * dim + at_work


def feature_flops(items: float, dim: int, sizes: FeatureSizes, hidden: int) -> float:
    """Forward: ``2 h (D + d)`` per item. Lookups of codes are not multiplications."""
    return 2 * items * hidden * (sizes.dense + dim)


# ---------------------------------------------------------------- operations (a multiplication with an addition is two)
def encoder_flops(events: float, dim: int, layers: int, blocks: Blocks, history: int) -> float:
    """Forward: ``24 d²`` (SASRec) or ``10 d²`` (HSTU) per event and block, and ``4 H d`` for attention."""
    return events * layers * ((24 if blocks == "sasrec" else 10) * dim**2 + 4 * history * dim)


def decoder_flops(items: float, dim: int, layers: int, codebooks: Sequence[int], history: int) -> float:
    """Forward: per item ``T layers (28 d² + 4 d (H + 1 + T))``, and ``2 d K`` for every code."""
    tokens = len(codebooks)
    return items * (tokens * layers * (28 * dim**2 + 4 * dim * (history + 1 + tokens)) + 2 * dim * sum(codebooks))


def softmax_flops(states: float, candidates: float, dim: int) -> float:
    """Forward: ``2 N C d``. With a catalog in ``W`` parts, a rank scores ``N W`` states on ``V / W`` rows, so C = V."""
    return 2 * states * candidates * dim


# ---------------------------------------------------------------- trie
def trie_levels(num_items: int, codebooks: Sequence[int]) -> list[int]:
    """Expected nodes of the levels 0..T for uniform codes: ``P (1 - (1 - 1/P)^V)`` with ``P`` possible prefixes.

    The last level has one node per item. Real codes are not uniform, so real tries have fewer nodes.
    """
    levels, prefixes = [1.0], 1.0
    for size in codebooks[:-1]:
        prefixes *= size
        levels.append(prefixes * (1 - (1 - 1 / prefixes) ** num_items) if prefixes < 1e12 else float(num_items))
    return [round(min(level, num_items)) for level in levels] + [num_items]


def trie_bytes(levels: Sequence[int], codebooks: Sequence[int]) -> int:
    """Bytes of the trie of ``policies.semantic_search``, which every rank holds, given the nodes of the levels 0..T.

    Each node takes 4 bytes and its last code (1, 2 or 4 bytes), plus 4 bytes if it has children. Each item takes 8
    bytes. On levels where that is small, there is one bit per node and code.
    """
    code_bytes = next(size for size, most in ((1, 1 << 8), (2, 1 << 15), (4, 1 << 31)) if max(codebooks) <= most)
    size = sum(levels) * (4 + code_bytes) + 4 * sum(levels[:-1]) + 8 * levels[-1]
    for nodes, children, codes in zip(levels, levels[1:], codebooks, strict=False):
        bitmap = nodes * -(-codes // 8)
        size += bitmap if bitmap <= _TRIE_BITMAP_BYTES_PER_CHILD * max(children, codes) else 0
    return size

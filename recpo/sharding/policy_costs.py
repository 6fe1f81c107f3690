"""What a policy costs beside its weights: activations, operations, the trie of semantic ids.

Weights are counted on the modules themselves (``workload``); these formulas are for what no module tells before it
runs, and tests compare them with real runs.

Words: ``W`` ranks, ``V`` items, ``d`` the width of vectors and states, ``H`` events of a history, ``N`` states that a
rank scores per step, ``T`` codes per item, ``K`` the size of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from recpo.features.schema import Categories, Category, Feature, Number, Vector, of_type
from recpo.ops.kernels import BLOCK_BYTES, BLOCK_BYTES_ACCELERATOR, BLOCK_ROWS_OF_TABLE, KEEP_BYTES
from recpo.policies.item_features import BLOCK_ITEMS
from recpo.sharding.costs import FLOAT

Blocks = Literal["sasrec", "hstu"]
Device = Literal["cpu", "cuda"]

_TRIE_BITMAP_BYTES_PER_CHILD = 4


# ---------------------------------------------------------------- dense parameters
def dense_bytes(parameters: int, ranks: int, copies: int = 0, *, mixed: bool = False) -> int:
    """``16`` bytes per parameter: weight, gradient, Adam's two moments.

    ``4`` more for the bucket that is all-reduced, ``4`` for each frozen copy, ``2`` for a 16-bit copy of the weights.
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
    """What the encoder keeps of ``events`` events: about ``20 d`` floats per event and SASRec block.

    HSTU: ``17.6 d + 2.1 heads H``, because its attention weights are kept, and buckets of the time between events.
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
    """What the decoder keeps of ``items`` items: ``26 d`` floats per code and layer, ``1.25 K`` per softmax."""
    share = MIXED_SHARE if mixed else 1.0
    tokens = len(codebooks)
    floats = tokens * dim * (layers * _DECODER_FLOATS * share + _CODE_FLOATS) + 1.25 * sum(codebooks)
    return FLOAT * items * floats


def full_softmax_bytes(states: float, dim: int, rows: int, ranks: int, device: Literal["cpu", "cuda"] = "cpu") -> float:
    """What the exact softmax holds of ``N`` states per rank over ``rows`` of its own: blocks, not ``[N W, rows]``.

    A block of logits (three of them at work), the states of all ranks, their expected rows and gradients
    ``3 · 4 d N W``, a log-sum-exp per block of 8192 rows ``4 N W rows / 8192``, and the softmax itself where it takes
    at most 192 MiB.
    """
    scored = states * ranks
    softmax = FLOAT * scored * rows
    per_block = FLOAT * scored * -(-rows // BLOCK_ROWS_OF_TABLE)
    blocks = 3 * min(BLOCK_BYTES.get(device, BLOCK_BYTES_ACCELERATOR), softmax)
    return 3 * FLOAT * dim * scored + per_block + blocks + (softmax if softmax <= KEEP_BYTES else 0.0)


def sampled_softmax_bytes(states: float, negatives: int) -> float:
    """Scores, masked scores, their concatenation and its gradient: ``4 · 4 N K``, and a mask of a byte each."""
    return states * negatives * (4 * FLOAT + 1)


# ---------------------------------------------------------------- features of items
class FeatureSizes(NamedTuple):
    """What a ``FeatureEncoder`` reads of an item.

    Attributes:
        codes: rows of its table of codes: one per category, ``length`` per list.
        weighted: these rows have weights, as there are lists.
        dense: columns: two per number, and of a vector one more than its width.
    """

    codes: int
    weighted: bool
    dense: int

    @classmethod
    def of(cls, features: Sequence[Feature]) -> FeatureSizes:
        """Those of fitted features."""
        lists = of_type(features, Categories)
        codes = len(of_type(features, Category)) + sum(one.length for one in lists)
        dense = 2 * len(of_type(features, Number)) + sum((one.width or 0) + 1 for one in of_type(features, Vector))
        return cls(codes, bool(lists), dense)

    @property
    def bytes_per_item(self) -> int:
        """What every rank keeps of an item: codes in 4 bytes, their weights, columns, and whether it has events."""
        return FLOAT * (self.codes * (1 + self.weighted) + self.dense) + 1


def feature_activation_bytes(lookups: float, sizes: FeatureSizes, hidden: int) -> float:
    """What the encoder keeps of so many items for the backward pass: codes, weights, columns, and two hidden layers."""
    per_item = sizes.codes * (1 + sizes.weighted) + sizes.dense + 2 * hidden
    return FLOAT * lookups * per_item


def item_matrix_bytes(rows: float, dim: int, sizes: FeatureSizes, hidden: int) -> float:
    """What the vectors of ``rows`` items take in a step: the matrix, its gradient, and one block that is encoded.

    Of a block: what is kept for the backward pass, vectors, and the gradients of vectors and of both hidden layers.
    """
    block = min(float(BLOCK_ITEMS), rows)
    at_work = feature_activation_bytes(block, sizes, hidden) + FLOAT * block * (2 * dim + 2 * hidden)
    return 2 * FLOAT * rows * dim + at_work


def feature_flops(items: float, dim: int, sizes: FeatureSizes, hidden: int) -> float:
    """Forward: ``2 h (D + d)`` per item; look-ups of codes are no multiplications."""
    return 2 * items * hidden * (sizes.dense + dim)


# ---------------------------------------------------------------- operations (a multiplication with an addition is two)
def encoder_flops(events: float, dim: int, layers: int, blocks: Blocks, history: int) -> float:
    """Forward: ``24 d²`` (SASRec) or ``10 d²`` (HSTU) per event and block, and ``4 H d`` for the attention."""
    return events * layers * ((24 if blocks == "sasrec" else 10) * dim**2 + 4 * history * dim)


def decoder_flops(items: float, dim: int, layers: int, codebooks: Sequence[int], history: int) -> float:
    """Forward: per item ``T layers (28 d² + 4 d (H + 1 + T))`` and ``2 d K`` for every code."""
    tokens = len(codebooks)
    return items * (tokens * layers * (28 * dim**2 + 4 * dim * (history + 1 + tokens)) + 2 * dim * sum(codebooks))


def softmax_flops(states: float, candidates: float, dim: int) -> float:
    """Forward: ``2 N C d``; of a catalog in ``W`` parts a rank scores ``N W`` states on ``V / W`` rows: C = V."""
    return 2 * states * candidates * dim


# ---------------------------------------------------------------- trie
def trie_levels(num_items: int, codebooks: Sequence[int]) -> list[int]:
    """Expected nodes of the levels 0..T where codes were drawn evenly: ``P (1 - (1 - 1/P)^V)``, ``P`` the prefixes.

    The last level has one node per item. Codes of real items are not even, so there are fewer nodes than this.
    """
    levels, prefixes = [1.0], 1.0
    for size in codebooks[:-1]:
        prefixes *= size
        levels.append(prefixes * (1 - (1 - 1 / prefixes) ** num_items) if prefixes < 1e12 else float(num_items))
    return [round(min(level, num_items)) for level in levels] + [num_items]


def trie_bytes(levels: Sequence[int], codebooks: Sequence[int]) -> int:
    """The trie of ``recpo.policies.trie``, on every rank, whose levels 0..T have so many nodes.

    Per node 4 bytes and its last code (1, 2 or 4), 4 more where it has children, 8 per item, and a bit per node and
    code on the levels where that is little.
    """
    code_bytes = next(size for size, most in ((1, 1 << 8), (2, 1 << 15), (4, 1 << 31)) if max(codebooks) <= most)
    size = sum(levels) * (4 + code_bytes) + 4 * sum(levels[:-1]) + 8 * levels[-1]
    for nodes, children, codes in zip(levels, levels[1:], codebooks, strict=False):
        bitmap = nodes * -(-codes // 8)
        size += bitmap if bitmap <= _TRIE_BITMAP_BYTES_PER_CHILD * max(children, codes) else 0
    return size

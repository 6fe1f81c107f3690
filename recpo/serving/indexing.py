"""Builds the approximate index of a bundle, and measures what it finds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.policies.catalog_search import best_by_blocks
from recpo.serving.bundle import TOLERANCE
from recpo.serving.encoded_histories import EncodedHistories, ProgramReads, program_inputs
from recpo.serving.item_index import IndexOptions, IndexRuntime, ItemIndex, import_faiss
from recpo.serving.manifest import INDEX, VECTORS
from recpo.serving.program import has_item_matrix, histories_of, item_matrix, overlap, random_inputs

_USERS: Final = 256  # random histories on which the number of probes is chosen, and as many on which recall is measured
_SHORT: Final = 10
_ITEMS_PER_LIST: Final = 39  # what faiss wants at least to find the center of a list
_POINTS_PER_LIST: Final = 64  # what a center is fitted to; faiss would take 256, for minutes at a million items
_MOST_PROBED: Final = 0.25  # share of the lists beyond which an index is no faster than the whole catalog


class StateProgram(nn.Module):
    """``(item_ids [B, H], feedback [B, H], ...) -> states [B, d]``: what an index is asked with.

    The inputs are those of a ``ServingProgram`` without ``exclude``.

    Args:
        policy: with an item matrix.
        reads: what it reads beyond items and feedback.
    """

    def __init__(self, policy: Policy, reads: ProgramReads) -> None:
        super().__init__()
        self.policy: Any = policy
        self.inputs, self.reads = program_inputs(policy.max_history, reads, exclude=False), reads

    def forward(self, *tensors: Tensor) -> Tensor:
        """See the class."""
        given = {one.name: tensor for one, tensor in zip(self.inputs, tensors, strict=True)}
        states: Tensor = self.policy.last_states(histories_of(given, self.reads, self.policy.num_items))
        return states


def validate_indexable(policy: Policy) -> None:
    """Raises ``RecpoError`` where the score of an item is no product of a state and the item's vector."""
    if not has_item_matrix(policy):
        raise RecpoError(
            f"{type(policy).__name__} has no item matrix: an index is for a softmax over the catalog",
            code="unsupported",
            field="index",
        )
    if item_matrix(policy)[1]:
        raise RecpoError(
            "index: with a lower bound the score of an item is no product of two vectors, so an index would search for "
            "something else: tilt with lower_bound 0, or export without an index",
            code="unsupported",
            field="lower_bound",
        )


def build_index(
    policy: Policy, k: int, options: IndexOptions, root: Path, reads: ProgramReads | None = None
) -> dict[str, Any]:
    """Writes the index and the item vectors of a policy, and measures its recall on random histories.

    Args:
        policy: with an item matrix.
        k: length of the longest list.
        options: see there.
        root: the directory of the bundle.
        reads: what the policy reads beyond items and feedback; None = times, if it says so.

    Returns:
        The manifest's entry ``index``: ``kind``, ``lists``, ``probes``, ``oversampling``, ``users`` (random histories,
        other ones than those on which the number of probes was chosen), ``recall_10`` and ``recall_k`` (mean share of
        the exact list that is found), ``target``.

    Raises:
        RecpoError: faiss is missing, or more than a quarter of the lists would have to be probed.
    """
    faiss, reads = import_faiss(), ProgramReads(policy.reads_timestamps) if reads is None else reads
    vectors = item_matrix(policy)[0].contiguous().numpy()
    index = _trained(faiss, vectors[1:], options)
    candidates, searched = options.oversampling * k, _Sample(policy, k, reads, seed=2)
    probes = 1
    while (found := searched.recall(ItemIndex(index, vectors, probes, candidates)))[0] < options.recall:
        probes *= 2
        if probes > max(1, index.nlist * _MOST_PROBED):
            raise RecpoError(
                f"index: {probes // 2} of {index.nlist} lists give a recall of {found[0]:.3f}, {options.recall:g} is "
                "asked for, and probing more of them is no faster than scoring the whole catalog: export without an "
                "index, or ask for a lower index.recall",
                code="out_of_range",
                field="recall",
            )
    recall = _Sample(policy, k, reads, seed=3).recall(ItemIndex(index, vectors, probes, candidates))
    faiss.write_index(index, str(root / INDEX))
    np.save(root / VECTORS, vectors, allow_pickle=False)
    return {
        "kind": "faiss IVF, 8 bits, inner product",
        "lists": index.nlist,
        "probes": probes,
        "oversampling": options.oversampling,
        "users": _USERS,
        "recall_10": recall[0],
        "recall_k": recall[1],
        "target": options.recall,
    }


def verify_index(runtime: IndexRuntime, policy: Policy, k: int) -> None:
    """Compares states and scores with those of the policy, on random histories.

    Raises:
        RecpoError: they differ by more than 1e-4 of the largest one.
    """
    inputs = random_inputs(policy, 33, torch.Generator().manual_seed(0), runtime.reads)
    states, vectors = _states(policy, inputs, runtime.reads), item_matrix(policy)[0]
    found, scores = map(torch.from_numpy, runtime.recommend(inputs, k))
    expected = (vectors[found] * states[:, None]).sum(-1).masked_fill(found == 0, -torch.inf)
    gaps = [
        ((ours - theirs).abs().nan_to_num(0.0).max() / theirs[theirs.isfinite()].abs().max().clamp_min(1.0)).item()
        for ours, theirs in ((torch.from_numpy(runtime.states(inputs)), states), (scores, expected))
    ]
    if not max(gaps) <= TOLERANCE:
        raise RecpoError(
            f"states or scores of the index differ from the policy's, by {max(gaps):.2g} of the largest",
            code="mismatch",
            field="index",
        )


class _Sample:
    """Random histories with their exact lists."""

    def __init__(self, policy: Policy, k: int, reads: ProgramReads, seed: int) -> None:
        inputs = random_inputs(policy, _USERS, torch.Generator().manual_seed(seed), reads)
        self._k, self._states = k, _states(policy, inputs, reads)
        self._exclude = torch.from_numpy(np.concatenate([inputs.item_ids, inputs.exclude], 1))
        ids, best, _ = best_by_blocks(self._states, item_matrix(policy)[0], k, self._exclude)
        self._exact = ids.masked_fill(best == -torch.inf, 0).numpy()

    def recall(self, index: ItemIndex) -> tuple[float, float]:
        """Mean share of the first 10 and of all items of the exact lists that are in those of the index."""
        found, _ = index.search(self._states.numpy(), self._exclude.numpy(), self._k)
        return overlap(found[:, :_SHORT], self._exact[:, :_SHORT]), overlap(found, self._exact)


def _trained(faiss: Any, vectors: np.ndarray, options: IndexOptions) -> Any:
    items, dim = vectors.shape
    lists = round(4 * math.sqrt(items)) if options.lists is None else options.lists
    lists = max(1, min(lists, items // _ITEMS_PER_LIST))
    quantizer = faiss.IndexFlatIP(dim)
    index = faiss.IndexIVFScalarQuantizer(
        quantizer, dim, lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    index.cp.max_points_per_centroid = _POINTS_PER_LIST
    index.train(vectors)
    index.add(vectors)
    return index


@torch.no_grad()
def _states(policy: Policy, inputs: EncodedHistories, reads: ProgramReads) -> Tensor:
    program = StateProgram(policy, reads)
    states: Tensor = program(*(torch.from_numpy(one.of(inputs)) for one in program.inputs))
    return states

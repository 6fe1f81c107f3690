"""Approximate search of a large catalog: a faiss index finds candidates, their exact scores rank them; without torch.

The bundle's program gives the state of a user; the items whose vectors have the largest products with it are looked
for in the lists of the index that are nearest. A score is the exact product, which is the policy's log-probability but
for a constant of the request: the normalizer would take all items.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from recpo.base.errors import PositiveInt, RecpoError, validate_range, validate_ranges
from recpo.serving.encoded_histories import EncodedHistories
from recpo.serving.manifest import INDEX, ONNX_PROGRAM, REMEDY, VECTORS, WEIGHTS, BundleManifest, readable
from recpo.serving.runtimes import CPU_PROVIDER, OnnxRuntime, excluded

_TABLES = ("item_table.weight", "base.item_table.weight")  # of a catalog softmax, alone or below a tilted policy
_CODES = ("code_table.weight", "base.code_table.weight")


def bundle_item_vectors(root: Path, manifest: BundleManifest | None = None) -> np.ndarray:
    """The vectors that the bundle's encoder reads for its items, ``[V + 1, d]`` float32; row 0 is not an item.

    They are in ``policy.safetensors``, whose checksum is in the manifest, so the bundle needs no further file.

    Args:
        root: the bundle.
        manifest: its manifest, already verified; None = read and verify it here.

    Raises:
        RecpoError: no bundle, or its policy has no table of item vectors (semantic ids, a class that is not recpo's).
    """
    from safetensors import SafetensorError, safe_open  # lists without re-ranking do not need it

    manifest = BundleManifest.read(root) if manifest is None else manifest
    if manifest.options is not None:
        file = root / WEIGHTS
        with readable(file, SafetensorError, OSError), safe_open(str(file), framework="numpy") as weights:
            names = set(weights.keys())
            if not names & set(_CODES) and (found := [name for name in _TABLES if name in names]):
                return np.asarray(weights.get_tensor(found[0]), np.float32)
    raise RecpoError(
        f"{root}: its policy, {manifest.policy['class']}, has no table of item vectors; re-rank with vectors of a file "
        "(rerank_options.attributes and rerank_options.vectors)",
        code="unsupported",
        field="vectors",
    )


STATES: Final = "states"
# Fewer than faiss takes for a matrix product, which would make the lists of a user depend on who else is in the batch.
_AT_ONCE: Final = 16


@dataclass(frozen=True)
class IndexOptions:
    """An approximate index in place of the search of the whole catalog.

    Args:
        recall: share of the 10 best items that it must find, on average over random histories; as few lists are probed
            as give it.
        lists: clusters of items; null = four times the root of their number.
        oversampling: candidates whose exact score is computed, for each place of the longest list.
    """

    recall: float = 0.99
    lists: PositiveInt | None = None
    oversampling: PositiveInt = 4

    def __post_init__(self) -> None:
        validate_ranges(self)
        validate_range(0 < self.recall <= 1, "recall", "must be a share above 0 and at most 1", self.recall)


@dataclass(frozen=True)
class ItemIndex:
    """Finds the items whose vectors have the largest products with a state.

    Attributes:
        index: of faiss, over the items 1..V in their order.
        vectors: ``[V + 1, d]`` float32; row 0 is padding.
        probes: lists that are searched.
        candidates: items whose exact score is computed, beside as many as are excluded.
    """

    index: Any
    vectors: np.ndarray
    probes: int
    candidates: int

    @classmethod
    def load(cls, root: Path, manifest: BundleManifest) -> ItemIndex:
        """Reads the index of a bundle whose files are verified already; nothing is unpickled.

        Raises:
            RecpoError: faiss is missing, or the files are no index of this catalog.
        """
        faiss, facts = import_faiss(), manifest.index or {}
        with readable(root / INDEX, RuntimeError, OSError, MemoryError), _limits(faiss, (root / INDEX).stat().st_size):
            index = faiss.read_index(str(root / INDEX))
        with readable(root / VECTORS, ValueError, OSError):
            vectors = np.load(root / VECTORS, mmap_mode="r", allow_pickle=False)
        known = isinstance(index, faiss.IndexIVF) and index.metric_type == faiss.METRIC_INNER_PRODUCT
        if not known or vectors.dtype != np.float32 or vectors.shape != (index.ntotal + 1, index.d):
            raise RecpoError(
                f"{root / INDEX} and {VECTORS} do not belong together: {REMEDY}", code="mismatch", field=VECTORS
            )
        if index.ntotal != manifest.num_items:
            raise RecpoError(
                f"{root / INDEX} has {index.ntotal} items, the bundle {manifest.num_items}: {REMEDY}",
                code="mismatch",
                field=INDEX,
            )
        if not _lists_every_item(faiss, index):
            raise RecpoError(f"{root / INDEX} does not list every item once: {REMEDY}", code="damaged", field="lists")
        return cls(index, vectors, facts["probes"], facts["oversampling"] * manifest.k)

    def search(
        self, states: np.ndarray, exclude: np.ndarray, k: int, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best items that are found, with their exact scores; ties to the smaller id.

        Equal states have equal lists and scores in any batch, and a list is the beginning of every longer one. Where
        fewer than k items are found and more may be listed, the whole catalog is scored.

        Args:
            states: ``[B, d]`` float32.
            exclude: ``[B, M]`` ids that are not listed, 0 pads.
            k: length of the lists.
            allowed: ``[B, V + 1]`` bool, which items may be listed; None = every one.

        Returns:
            ids ``[B, k]`` int64, 0 if no item is left, and scores ``[B, k]`` float32, -inf there.
        """
        ids, scores = np.zeros((len(states), k), np.int64), np.full((len(states), k), -np.inf, np.float32)
        for begin in range(0, len(states), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            barred = [np.unique(row[row > 0]) for row in exclude[part]]
            found = self._candidates(states[part], max(map(len, barred)))
            for row, (state, out, near) in enumerate(zip(states[part], barred, found, strict=True)):
                near = near[: self.candidates + len(out)]
                near = near[(near > 0) & ~np.isin(near, out)]
                left = len(self.vectors) - 1 - len(out)
                if allowed is not None:
                    kept = allowed[begin + row]
                    near = near[kept[near]]
                    out = np.union1d(out, np.flatnonzero(~kept)) if len(near) < k else out
                    left = len(self.vectors) - 1 - len(out)
                if len(near) < min(k, left):
                    near = self._best_of_all(state, out, k)
                listed = self._ranked(state, near, k)
                ids[begin + row, : len(listed[0])], scores[begin + row, : len(listed[0])] = listed
        return ids, scores

    def _candidates(self, states: np.ndarray, excluded: int) -> np.ndarray:
        """Ids ``[B, n]`` by their approximate scores, best first, 0 where there is none."""
        faiss = import_faiss()
        number = min(self.candidates + excluded, self.index.ntotal)
        parameters = faiss.SearchParametersIVF(nprobe=self.probes)
        _, places = self.index.search(np.ascontiguousarray(states), number, params=parameters)
        ids: np.ndarray = places + 1  # -1 where there is none
        return ids

    def _best_of_all(self, state: np.ndarray, excluded: np.ndarray, k: int) -> np.ndarray:
        scores = self.vectors[1:] @ state
        scores[excluded - 1] = -np.inf
        left = min(k, len(scores) - len(excluded))
        # one candidate more: a product of matrices rounds otherwise than the exact score does
        best: np.ndarray = np.argpartition(-scores, min(left, len(scores) - 1))[: left + 1] + 1
        return best[~np.isin(best, excluded)]

    def _ranked(self, state: np.ndarray, items: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Exact scores, each computed alone, so that no other candidate changes a bit of them."""
        items = np.sort(items)
        scores = np.einsum("nd,d->n", self.vectors[items], state, optimize=False)
        order = np.argsort(-scores, kind="stable")[:k]
        return items[order], scores[order]


class IndexRuntime(OnnxRuntime):
    """A bundle's program for states in ONNX Runtime, and its index.

    Args:
        root: the bundle, whose files are verified already.
        manifest: its manifest, with an index.
        threads: see ``OnnxRuntime``.
        provider: see ``OnnxRuntime``.

    Raises:
        RecpoError: see ``ItemIndex.load`` and ``OnnxRuntime``.
    """

    def __init__(self, root: Path, manifest: BundleManifest, *, threads: int = 0, provider: str = CPU_PROVIDER) -> None:
        self.index = ItemIndex.load(root, manifest)
        outputs = {STATES: self.index.vectors.shape[1]}
        super().__init__(root / ONNX_PROGRAM, manifest, threads=threads, provider=provider, outputs=outputs)
        self.reads = replace(manifest.reads, mask=manifest.num_items + 1)  # the search takes it, not the program

    def states(self, inputs: EncodedHistories) -> np.ndarray:
        """States ``[B, d]`` of the users."""
        return self.run(inputs)[0]

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        return self.index.search(self.states(inputs), excluded(inputs, self.reads.repeats), k, inputs.allowed)


@contextmanager
def _limits(faiss: Any, size: int) -> Iterator[None]:
    """Lets faiss reserve no more memory for a part of a file than the file has bytes, where faiss can be told."""
    names = [f"deserialization_{name}_limit" for name in ("loop", "vector_byte")]
    names = [name for name in names if hasattr(faiss, f"set_{name}")]
    before = [getattr(faiss, f"get_{name}")() for name in names]
    for name in names:
        getattr(faiss, f"set_{name}")(size)
    try:
        yield
    finally:
        for name, limit in zip(names, before, strict=True):
            getattr(faiss, f"set_{name}")(limit)


def _lists_every_item(faiss: Any, index: Any) -> bool:
    """Whether the lists of an index contain the items 0 .. V - 1, each of them once."""
    seen = np.zeros(index.ntotal, bool)
    if index.invlists.nlist != index.nlist or index.quantizer.ntotal != index.nlist:
        return False
    sizes = [index.invlists.list_size(number) for number in range(index.nlist)]
    if sum(sizes) != index.ntotal:
        return False
    for number, size in enumerate(sizes):
        ids = faiss.rev_swig_ptr(index.invlists.get_ids(number), size) if size else np.zeros(0, np.int64)
        if size and not 0 <= ids.min() <= ids.max() < index.ntotal:
            return False
        seen[ids] = True
    return bool(seen.all())


def import_faiss() -> Any:
    """The module ``faiss``.

    Raises:
        RecpoError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise RecpoError(
            f"an index needs faiss ({error}): pip install recpo[index]", code="not_installed", field="faiss"
        ) from error
    return faiss

"""Engines that rank and score encoded histories. Here: the exported program in ONNX Runtime, alone or with an index.

With an approximate index, the program gives the state of a user; faiss looks for the items with the largest products
with it in the nearest lists of the index, and their exact scores rank them. A score is the exact product, which is the
policy's log-probability up to a constant of the request: the normalizer would take all items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from recpo.base.errors import PositiveInt, RecpoError, validate_range, validate_ranges
from recpo.base.feedback import HIGHEST
from recpo.serving.histories import EncodedHistories, PerUser
from recpo.serving.manifest import (
    INDEX,
    ONNX_PROGRAM,
    VECTORS,
    BundleManifest,
    ProgramInput,
    ProgramReads,
    program_inputs,
    readable,
)

EngineName = Literal["onnx", "torch"]

OUTPUTS: Final = ("top_items", "scores")
CPU_PROVIDER: Final = "CPUExecutionProvider"
STATES: Final = "states"
# Fewer than faiss takes for a matrix product, which would make the lists of a user depend on who else is in the batch.
_AT_ONCE: Final = 16


class Runtime(ABC):
    """Ranks the catalog, or scores candidates, for encoded histories.

    Every input is checked before it reaches a program. Otherwise an id or a feedback level out of range would index a
    table from its end and return a wrong answer.

    Attributes:
        num_items: catalog size V.
        max_history: H.
        reads: inputs beyond items and feedback.
        k: length of its longest list.
    """

    num_items: int
    max_history: int
    reads: ProgramReads
    k: int

    def __init__(self, like: BundleManifest | Runtime) -> None:
        """The sizes of a bundle or of another runtime."""
        self.num_items, self.max_history = like.num_items, like.max_history
        self.reads, self.k = like.reads, like.k

    def recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The best items that are not excluded, nor in the history unless ``reads.repeats``.

        Args:
            inputs: histories of B users.
            k: list length, at most ``self.k``.

        Returns:
            ids ``[B, k]`` int64, filled up with 0, and log-probabilities ``[B, k]`` float32, -inf for id 0.

        Raises:
            RecpoError: an id, a feedback level, a shape or a type that a policy cannot read.
        """
        if inputs.allowed is not None and not self.reads.mask:
            inputs = _without_mask(inputs)
        self._check(inputs)
        return self._recommend(inputs, k)

    def score(self, inputs: EncodedHistories, candidates: np.ndarray) -> np.ndarray:
        """Log-probabilities ``[B, C]`` float32 of the items ``candidates [B, C]``; nan for id 0.

        Raises:
            RecpoError: as in ``recommend``, or the runtime only ranks.
        """
        self._check(inputs)
        _check_range("candidates", candidates, self.num_items)
        return self._score(inputs, candidates)

    @cached_property
    def _inputs(self) -> tuple[ProgramInput, ...]:
        return program_inputs(self.max_history, self.reads)

    @abstractmethod
    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]: ...

    def _score(self, inputs: EncodedHistories, candidates: np.ndarray) -> np.ndarray:
        message = "this engine ranks the catalog and scores no candidates: load the bundle with engine=torch"
        raise RecpoError(message, code="unsupported", field="engine")

    def _check(self, inputs: EncodedHistories) -> None:
        for one in self._inputs:
            one.of(inputs)
        _check_range("item_ids", inputs.item_ids, self.num_items)
        _check_range("feedback", inputs.feedback, HIGHEST)
        _check_range("exclude", inputs.exclude, self.num_items)
        if self.reads.timestamps and inputs.timestamps is not None:
            _check_range("timestamps", inputs.timestamps, np.iinfo(np.int64).max)


class OnnxRuntime(Runtime):
    """The program of a bundle in ONNX Runtime. It does not import torch.

    Args:
        root: the bundle, whose files are verified already.
        manifest: its manifest.
        threads: 0 = one per core.
        provider: name of an execution provider of ONNX Runtime; the CPU runs operations that it does not support.
        outputs: width of its outputs by name, in order; None = those of a program that lists items.

    Raises:
        RecpoError: the file is not such a program, names files outside its directory, or the provider does not exist.
    """

    def __init__(
        self,
        root: Path,
        manifest: BundleManifest,
        threads: int = 0,
        provider: str = CPU_PROVIDER,
        outputs: Mapping[str, int] | None = None,
    ) -> None:
        import onnxruntime

        super().__init__(manifest)
        path = root / ONNX_PROGRAM
        self._inputs = program_inputs(manifest.max_history, manifest.reads, exclude=manifest.index is None)
        outputs = outputs or dict.fromkeys(OUTPUTS, self.k)
        self._outputs = list(outputs)
        if provider not in (available := onnxruntime.get_available_providers()):
            message = (
                f"provider is {provider!r}, this build of ONNX Runtime has {', '.join(available)}: name one of them, "
                "or install the build for your device (CUDAExecutionProvider: onnxruntime-gpu)"
            )
            raise RecpoError(message, code="unknown_name", field="provider")
        _validate_own_files(path)
        with readable(path, Exception):  # ONNX Runtime's own exceptions have no common base class
            settings = onnxruntime.SessionOptions()
            settings.intra_op_num_threads = threads
            # spinning threads would take the cores away from the code that reads the next request
            settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
            providers = list(dict.fromkeys([provider, CPU_PROVIDER]))
            self._session = onnxruntime.InferenceSession(str(path), settings, providers=providers)
        if provider not in self._session.get_providers():  # ONNX Runtime only warns
            message = (
                f"provider {provider} does not start here (its libraries or its device are missing): see the warning "
                f"of ONNX Runtime above, or use {CPU_PROVIDER}"
            )
            raise RecpoError(message, code="resources", field="provider")
        found = {entry.name: entry.shape[1:] for entry in (*self._session.get_inputs(), *self._session.get_outputs())}
        widths = {one.name: list(one.shape) for one in self._inputs} | {name: [one] for name, one in outputs.items()}
        # the exporter chooses the name of a dynamic size
        expected = {
            name: found.get(name, []) if any(isinstance(size, str) for size in shape) else shape
            for name, shape in widths.items()
        }
        if found != expected:
            message = f"{path} reads and gives {found}, expected {expected}: export the bundle again"
            raise RecpoError(message, code="mismatch", field=path.name)

    def run(self, inputs: EncodedHistories) -> list[np.ndarray]:
        """The outputs of the program, in their order."""
        given = {one.name: one.of(inputs) for one in self._inputs}
        results: list[np.ndarray] = self._session.run(self._outputs, given)
        return results

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        top_items, scores = self.run(inputs)
        return top_items[:, :k], scores[:, :k]


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
            message = f"{root / INDEX} and {VECTORS} do not belong together: {manifest.remedy()}"
            raise RecpoError(message, code="mismatch", field=VECTORS)
        if index.ntotal != manifest.num_items:
            message = f"{root / INDEX} has {index.ntotal} items, the bundle {manifest.num_items}: {manifest.remedy()}"
            raise RecpoError(message, code="mismatch", field=INDEX)
        if not _lists_every_item(faiss, index):
            message = f"{root / INDEX} does not list every item once: {manifest.remedy()}"
            raise RecpoError(message, code="damaged", field="lists")
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
                if allowed is not None:
                    kept = allowed[begin + row]
                    near = near[kept[near]]
                    out = np.union1d(out, np.flatnonzero(~kept)) if len(near) < k else out
                if len(near) < min(k, len(self.vectors) - 1 - len(out)):
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
    """A bundle's program for states in ONNX Runtime, and its index; arguments as of ``OnnxRuntime``.

    Raises:
        RecpoError: see ``ItemIndex.load`` and ``OnnxRuntime``.
    """

    def __init__(self, root: Path, manifest: BundleManifest, threads: int = 0, provider: str = CPU_PROVIDER) -> None:
        self.index = ItemIndex.load(root, manifest)
        super().__init__(root, manifest, threads, provider, {STATES: self.index.vectors.shape[1]})
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
        message = f"an index needs faiss ({error}): pip install recpo[index]"
        raise RecpoError(message, code="not_installed", field="faiss") from error
    return faiss


def excluded(inputs: EncodedHistories, repeats: bool) -> np.ndarray:
    """``[B, M]`` ids that must not be listed, 0 pads: with those of the history, unless they may be repeated."""
    return inputs.exclude if repeats else np.concatenate([inputs.item_ids, inputs.exclude], 1)


def _without_mask(inputs: EncodedHistories) -> EncodedHistories:
    """The same inputs with the items that may not be listed added to the excluded items."""
    assert inputs.allowed is not None
    row, item = np.nonzero(~inputs.allowed)
    barred = PerUser.of(len(inputs.item_ids), row, items=item).padded(0, len(inputs.item_ids))["items"]
    return inputs._replace(exclude=np.concatenate([inputs.exclude, barred], 1), allowed=None)


def _check_range(name: str, values: np.ndarray, largest: int) -> None:
    if values.size:
        low, high = values.min(), values.max()
        validate_range(0 <= low <= high <= largest, name, f"must be from 0 to {largest}", f"{low}..{high}")


def _validate_own_files(path: Path) -> None:
    """Raises if the program would read weights from any file other than ``model.onnx.data`` beside it."""
    import onnx

    with readable(path, Exception):  # protobuf's own exceptions
        model = onnx.load(str(path), load_external_data=False)
        places = {
            entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"
        }
    if foreign := places - {f"{path.name}.data"}:
        raise RecpoError(
            f"{path} reads weights from {min(foreign)!r}, expected {path.name}.data beside it: recpo does not load it",
            code="untrusted",
            field=min(foreign),
        )


def _tensors(message: Any) -> Iterator[Any]:
    """Every tensor anywhere in a protobuf message."""
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        for part in [value] if hasattr(value, "ListFields") else value:
            if descriptor.message_type.name == "TensorProto":
                yield part
            yield from _tensors(part)

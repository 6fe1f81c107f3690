"""The functions that are exported, and how a program or an index is compared with its policy before it is published.

A program is a policy's own ``recommend``, or a search of its catalog in blocks of items. With an approximate index, it
gives the states that the index is asked with; what the index finds is measured here.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.features import Categories, Feature, Vector, of_type
from recpo.base.feedback import HIGHEST, UNKNOWN
from recpo.base.types import Features, Histories, Recommendations
from recpo.policies import catalog_search
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.tilted import TiltedPolicy
from recpo.serving.bundle import FIRST_TIME_MS, TOLERANCE, compare_lists, random_features
from recpo.serving.histories import EncodedHistories
from recpo.serving.manifest import ALLOWED, EXCLUDE, INDEX, VECTORS, BundleManifest, ProgramReads, program_inputs
from recpo.serving.runtimes import OUTPUTS, STATES, IndexOptions, IndexRuntime, ItemIndex, Runtime, import_faiss

_EXAMPLE_USERS = 2  # a size of 1 would be exported as a constant
_SEARCHED: Final = (CatalogSoftmaxPolicy, TiltedPolicy)


class ServingProgram(nn.Module):
    """The function that is exported: a ranking of a server's inputs, or the states that an index is asked with.

    ``(item_ids [B, H], feedback [B, H], exclude [B, M], ...) -> (top_items [B, k], scores [B, k])``, with what else it
    reads behind these (``recpo.serving.manifest``); ids are internal, rows are padded with 0 on the right, and
    nothing of ``exclude`` is recommended, nor of the history unless ``reads.repeats``. A value out of range counts as
    0, unknown: in a lookup -1 would stand for the last row.

    Args:
        ranker: a policy, or a ``CatalogSearch`` of one.
        k: length of the lists; None = the program reads no ``exclude`` and gives the policy's states ``[B, d]``.
        reads: what it reads beyond items and feedback.
    """

    def __init__(self, ranker: Policy | CatalogSearch, k: int | None, reads: ProgramReads) -> None:
        super().__init__()
        self.ranker: Any = ranker
        self.num_items, self.max_history, self.reads, self.k = ranker.num_items, ranker.max_history, reads, k
        self.inputs = program_inputs(self.max_history, reads, exclude=k is not None)
        self.outputs = (STATES,) if k is None else OUTPUTS

    def forward(self, *tensors: Tensor) -> Any:
        """See the class."""
        given = {one.name: tensor for one, tensor in zip(self.inputs, tensors, strict=True)}
        histories = _histories_of(given, self.reads, self.num_items)
        if self.k is None:
            return self.ranker.last_states(histories)
        exclude = _within(given[EXCLUDE], self.num_items)
        exclude = exclude if self.reads.repeats else torch.cat([histories.item_ids, exclude], 1)
        if isinstance(self.ranker, CatalogSearch):
            top = self.ranker.recommend(histories, self.k, exclude, given.get(ALLOWED))
        else:
            top = self.ranker.recommend(histories, self.k, exclude)
        return top.item_ids, top.scores


class TorchProgramRuntime(Runtime):
    """A serving program in torch, before its export.

    Args:
        program: from the tensors of ``program_inputs`` to ``(top_items, scores)``.
        like: a bundle or a runtime with the same sizes.
    """

    def __init__(self, program: Callable[..., Any], like: BundleManifest | Runtime) -> None:
        super().__init__(like)
        self._program = program

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            tensors = [torch.from_numpy(one.of(inputs)) for one in self._inputs]
            top_items, scores = self._program(*tensors)
        return top_items[:, :k].numpy(), scores[:, :k].numpy()


class CatalogSearch(nn.Module):
    """A softmax over the catalog with its items in a ``BlockedTable``: what a policy recommends, in bounded memory.

    The vectors that the encoder looks up are those of the table too, where both are the same.

    Args:
        policy: a ``CatalogSoftmaxPolicy`` or ``TiltedPolicy``.
        precision: of the item matrix.
        block_rows: most items in a block.

    Raises:
        RecpoError: another policy, or numbers that the precision cannot hold.
    """

    def __init__(
        self,
        policy: Policy,
        precision: catalog_search.Precision = "float32",
        block_rows: int = catalog_search.BLOCK_ROWS,
    ) -> None:
        super().__init__()
        catalog_search.validate_precision(precision)
        if not has_item_matrix(policy):
            message = (
                f"{type(policy).__name__} has no item matrix: item_precision {precision} is for a softmax over the "
                "catalog, alone or tilted; leave it at float32"
            )
            raise RecpoError(message, code="unsupported", field="item_precision")
        self.num_items, self.max_history = policy.num_items, policy.max_history
        vectors, variance_columns = item_matrix(policy)
        self.table = catalog_search.BlockedTable(vectors, precision, variance_columns, block_rows)
        self.encoder: Any = _reading(policy, self.table, vectors, block_rows)

    def recommend(
        self, histories: Histories, k: int, exclude: Tensor, allowed: Tensor | None = None
    ) -> Recommendations:
        """See ``Policy.recommend``; of ``allowed`` see ``BlockedTable.top_k``."""
        states: Tensor = self.encoder.last_states(histories)
        return self.table.top_k(states, k, exclude, allowed)


def has_item_matrix(policy: Policy) -> bool:
    """Whether the policy's score of an item is a product of a state and the item's row."""
    return type(policy) in _SEARCHED


@torch.no_grad()
def item_matrix(policy: Policy) -> tuple[Tensor, int]:
    """What states are multiplied with, ``[V + 1, d]``, and how many columns are of a variance whose root is taken."""
    assert isinstance(policy, CatalogSoftmaxPolicy | TiltedPolicy)
    variance_columns = policy.factors.variance_columns if isinstance(policy, TiltedPolicy) else 0
    return policy.output_vectors().detach(), variance_columns


def ranker_of(
    policy: Policy, precision: catalog_search.Precision, block_rows: int = catalog_search.BLOCK_ROWS
) -> Policy | CatalogSearch:
    """What a bundle's program runs: the policy itself where its catalog fits half a block as it is."""
    if precision == "float32" and (policy.num_items < block_rows // 2 or not has_item_matrix(policy)):
        return policy
    return CatalogSearch(policy, precision, block_rows)


@torch.no_grad()
def _reading(policy: Policy, table: catalog_search.BlockedTable, vectors: Tensor, block_rows: int) -> Any:
    """A twin of the policy that looks items up in a blocked table; its own tables are left out."""
    twin = _twin(policy)
    encoder = twin
    if isinstance(policy, TiltedPolicy):
        encoder = twin.base = _twin(policy.base)
        if not isinstance(policy.base, CatalogSoftmaxPolicy):
            return twin  # it reads all of its vectors to fold a history in
    looked_up = encoder.item_vectors(torch.arange(policy.num_items + 1))
    width = looked_up.shape[1]
    if not torch.equal(vectors[:, :width], looked_up):
        table = catalog_search.BlockedTable(looked_up, table.precision, block_rows=block_rows)
    encoder.item_table = catalog_search.RoundedRows(table, width)
    encoder.output_table = None
    return twin


def _twin(module: nn.Module) -> Any:
    """The same tensors and children in a module whose children can be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _histories_of(given: Mapping[str, Tensor], reads: ProgramReads, num_items: int) -> Histories:
    """What a policy reads, of the tensors of a program by name; an id or a level out of range counts as 0."""
    item_ids = _within(given["item_ids"], num_items)

    def features(side: str, of: tuple[Feature, ...], *lead: int) -> Features | None:
        if not of:
            return None
        nothing = item_ids.new_zeros(item_ids.shape[0], *lead, 0)
        return Features(
            given.get(f"{side}_codes", nothing),
            tuple(given[f"{side}_list_{one.name}"] for one in of_type(of, Categories)),
            given.get(f"{side}_numbers", nothing.float()),
            tuple(given[f"{side}_vector_{one.name}"] for one in of_type(of, Vector)),
        )

    return Histories(
        item_ids,
        (item_ids != 0).sum(1),
        _within(given["feedback"], HIGHEST),
        given.get("timestamps"),
        given.get("behaviors"),
        features("user", reads.user),
        features("context", reads.context, item_ids.shape[1] + 1),
    )


def _within(values: Tensor, largest: int) -> Tensor:
    return torch.where((values > 0) & (values <= largest), values, 0)


def exported_program(program: ServingProgram) -> ExportedProgram:
    """The program as a graph, for any number of users and of excluded items."""
    random = random_inputs(program, _EXAMPLE_USERS, np.random.default_rng(0))
    users, width = Dim("users", min=1), Dim(EXCLUDE, min=1)
    inputs = tuple(torch.from_numpy(one.of(random)) for one in program.inputs)
    shapes = (tuple({0: users, 1: width} if one.name == EXCLUDE else {0: users} for one in program.inputs),)
    with tracing():
        return torch.export.export(program, inputs, dynamic_shapes=shapes)


@contextmanager
def traces_forgotten() -> Iterator[None]:
    """Removes torch's caches of a traced loop over blocks, which include a second class with the policy's name.

    While that class exists, a configuration that names the class of a policy would be ambiguous.
    """
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()


@contextmanager
def tracing() -> Iterator[None]:
    """Traces without gradients, without notes of the exporter about its own internals, and without stack traces.

    Stack traces contain file names of the exporting machine, and they take a tenth of the time of an export. Torch's
    cache of shapes takes more: hardly an operation of a program is on the same symbolic shapes as another.
    """
    logger, config = logging.getLogger("torch.onnx"), torch.fx.config
    level, without = logger.level, config.do_not_emit_stack_traces
    logger.setLevel(logging.ERROR)
    config.do_not_emit_stack_traces = True
    try:
        without_cache = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
        with warnings.catch_warnings(), torch.no_grad(), without_cache:
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        config.do_not_emit_stack_traces = without


ROUNDING: Final = {"float16": 0.02, "int8": 0.25}
"""Largest allowed difference of natural-log probabilities from rounding the item matrix."""

_CHECKED_USERS = (1, 33)  # batch sizes that differ from the example's
_COMPARED_USERS = 64
_SHORT = 10
_BEHAVIOR_SETS, _LONGEST_GAP_MS = 8, 10 * 86_400_000  # of random histories


def verify_runtime(runtime: Runtime, reference: Runtime) -> None:
    """Compares a runtime with the policy on random histories; the first one is empty, the last one full.

    The lists must be equal, except that items whose scores differ by less than 1e-4 may swap places.

    Args:
        runtime: the runtime to check.
        reference: the policy that it was made from.

    Raises:
        RecpoError: they differ.
    """
    generator = np.random.default_rng(0)
    for users in _CHECKED_USERS:
        inputs = random_inputs(runtime, users, generator)
        expected, found = (_listed(*one.recommend(inputs, runtime.k)) for one in (reference, runtime))
        for row, (wanted, listed) in enumerate(zip(expected, found, strict=True)):
            compare_lists(wanted, listed, f"the exported program differs from the policy, history {row}")


def _listed(items: np.ndarray, scores: np.ndarray) -> list[list[tuple[int, float]]]:
    """Items and scores of every list, without empty places."""
    rows = zip(items.tolist(), scores.tolist(), strict=True)
    return [[(item, score) for item, score in zip(*row, strict=True) if item] for row in rows]


def verify_rounded(
    runtime: Runtime, program: ServingProgram, policy: Runtime, precision: catalog_search.Precision
) -> dict[str, Any]:
    """Compares a runtime with the rounded policy, and the rounded policy with the policy.

    Args:
        runtime: the runtime to check.
        program: the torch program that it was made from.
        policy: the policy without rounding.
        precision: number format of the item matrix.

    Returns:
        Agreement of the lists of 64 random histories with the policy's lists: ``users``, ``overlap_10`` and
        ``overlap_k`` (mean share of common items in lists of 10 and k), ``mean_difference`` and ``largest_difference``
        (of the natural-log probabilities of common items), ``tolerance`` (for the latter).

    Raises:
        RecpoError: the runtime computes something else, or rounding changes more than ``ROUNDING``.
    """
    verify_runtime(runtime, TorchProgramRuntime(program, runtime))
    inputs = random_inputs(runtime, _COMPARED_USERS, np.random.default_rng(1))
    (found, scores), (expected, of_policy) = (one.recommend(inputs, runtime.k) for one in (runtime, policy))
    row, place, other = np.nonzero((found[:, :, None] == expected[:, None, :]) & (expected > 0)[:, None, :])
    gaps = np.abs(scores[row, place] - of_policy[row, other]) if len(row) else np.array([np.inf])
    agreement = {
        "users": _COMPARED_USERS,
        f"overlap_{_SHORT}": overlap(found[:, :_SHORT], expected[:, :_SHORT]),
        "overlap_k": overlap(found, expected),
        "mean_difference": float(gaps.mean()),
        "largest_difference": float(gaps.max()),
        "tolerance": ROUNDING[precision],
    }
    if not agreement["largest_difference"] <= ROUNDING[precision]:
        message = (
            f"item_precision {precision}: log-probabilities differ from the policy's by up to "
            f"{agreement['largest_difference']:.2g}, {ROUNDING[precision]:g} is allowed (overlap of the first "
            f"{_SHORT} items {agreement[f'overlap_{_SHORT}']:.3f}): export with "
            f"{'float16 or ' if precision == 'int8' else ''}float32"
        )
        raise RecpoError(message, code="mismatch", field="item_precision")
    return agreement


def overlap(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean share of the items of ``expected [B, n]`` that are in ``found [B, n]``; 0 is not an item."""
    shared = ((found[:, :, None] == expected[:, None, :]) & (expected > 0)[:, None, :]).any(1)
    return float((shared.sum(1) / np.maximum((expected > 0).sum(1), 1)).mean())


def random_inputs(like: Runtime | ServingProgram, users: int, generator: np.random.Generator) -> EncodedHistories:
    """Histories that it reads, of random items, the first empty and the last full, with three items to exclude each.

    Behaviors and features are random too; a fifth of the values are missing, and some are unknown. A third of the items
    may be listed; for the last user, all of them.
    """
    reads, lengths = like.reads, generator.integers(like.max_history + 1, size=users)
    lengths[-1], lengths[0] = like.max_history, 0
    real = np.arange(like.max_history) < lengths[:, None]
    answered = np.arange(like.max_history + 1) <= lengths[:, None]

    def drawn(first: int, end: int) -> np.ndarray:
        numbers: np.ndarray = generator.integers(first, end, real.shape) * real
        return numbers

    item_ids, feedback = drawn(1, like.num_items + 1), drawn(UNKNOWN, HIGHEST + 1)
    exclude = generator.integers(like.num_items + 1, size=(users, 3))
    times = (FIRST_TIME_MS + drawn(0, _LONGEST_GAP_MS).cumsum(1)) * real if reads.timestamps else None
    behaviors = drawn(0, _BEHAVIOR_SETS) if reads.behaviors else None
    user = random_features(reads.user, (users,), generator) if reads.user else None
    context = random_features(reads.context, answered.shape, generator).where(answered) if reads.context else None
    allowed = None
    if reads.mask:
        allowed = generator.random((users, reads.mask)) < 1 / 3
        allowed[-1], allowed[:, 0] = True, True
    return EncodedHistories(item_ids, feedback, exclude, times, behaviors, user, context, allowed)


_USERS: Final = 256  # random histories on which the number of probes is chosen, and as many on which recall is measured
_ITEMS_PER_LIST: Final = 39  # what faiss wants at least to find the center of a list
_POINTS_PER_LIST: Final = 64  # what a center is fitted to; faiss would take 256, for minutes at a million items
_MOST_PROBED: Final = 0.25  # share of the lists beyond which an index is no faster than the whole catalog


def validate_indexable(policy: Policy) -> None:
    """Raises ``RecpoError`` where the score of an item is no product of a state and the item's vector."""
    if not has_item_matrix(policy):
        message = f"{type(policy).__name__} has no item matrix: an index is for a softmax over the catalog"
        raise RecpoError(message, code="unsupported", field="index")
    if item_matrix(policy)[1]:
        message = (
            "index: with a lower bound the score of an item is no product of two vectors, so an index would search for "
            "something else: tilt with lower_bound 0, or export without an index"
        )
        raise RecpoError(message, code="unsupported", field="lower_bound")


def build_index(program: ServingProgram, k: int, options: IndexOptions, root: Path) -> dict[str, Any]:
    """Writes the index and the item vectors of a policy, and measures its recall on random histories.

    Args:
        program: gives the states of a policy with an item matrix.
        k: length of the longest list.
        options: see there.
        root: the directory of the bundle.

    Returns:
        The manifest's entry ``index``: ``kind``, ``lists``, ``probes``, ``oversampling``, ``users`` (random histories,
        other ones than those on which the number of probes was chosen), ``recall_10`` and ``recall_k`` (mean share of
        the exact list that is found), ``target``.

    Raises:
        RecpoError: faiss is missing, the policy has no index (``validate_indexable``), or more than a quarter of the
            lists would have to be probed.
    """
    faiss = import_faiss()
    validate_indexable(program.ranker)
    vectors = item_matrix(program.ranker)[0].contiguous().numpy()
    index = _trained(faiss, vectors[1:], options)
    candidates, searched = options.oversampling * k, _Sample(program, k, seed=2)
    probes = 1
    while (found := searched.recall(ItemIndex(index, vectors, probes, candidates)))[0] < options.recall:
        probes *= 2
        if probes > max(1, index.nlist * _MOST_PROBED):
            message = (
                f"index: {probes // 2} of {index.nlist} lists give a recall of {found[0]:.3f}, {options.recall:g} is "
                "asked for, and probing more of them is no faster than scoring the whole catalog: export without an "
                "index, or ask for a lower index.recall"
            )
            raise RecpoError(message, code="out_of_range", field="recall")
    recall = _Sample(program, k, seed=3).recall(ItemIndex(index, vectors, probes, candidates))
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


def verify_index(runtime: IndexRuntime, program: ServingProgram) -> None:
    """Compares states and scores with those of the policy, on random histories.

    Raises:
        RecpoError: they differ by more than 1e-4 of the largest one.
    """
    inputs = random_inputs(runtime, 33, np.random.default_rng(0))
    states, vectors = _states(program, inputs), item_matrix(program.ranker)[0]
    found, scores = map(torch.from_numpy, runtime.recommend(inputs, runtime.k))
    expected = (vectors[found] * states[:, None]).sum(-1).masked_fill(found == 0, -torch.inf)
    gaps = [
        ((ours - theirs).abs().nan_to_num(0.0).max() / theirs[theirs.isfinite()].abs().max().clamp_min(1.0)).item()
        for ours, theirs in ((torch.from_numpy(runtime.states(inputs)), states), (scores, expected))
    ]
    if not max(gaps) <= TOLERANCE:
        message = f"states or scores of the index differ from the policy's, by {max(gaps):.2g} of the largest"
        raise RecpoError(message, code="mismatch", field="index")


class _Sample:
    """Random histories with their exact lists."""

    def __init__(self, program: ServingProgram, k: int, seed: int) -> None:
        inputs = random_inputs(program, _USERS, np.random.default_rng(seed))
        self._k, self._states = k, _states(program, inputs)
        self._exclude = torch.from_numpy(np.concatenate([inputs.item_ids, inputs.exclude], 1))
        ids, best, _ = catalog_search.best_by_blocks(self._states, item_matrix(program.ranker)[0], k, self._exclude)
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
def _states(program: ServingProgram, inputs: EncodedHistories) -> Tensor:
    states: Tensor = program(*(torch.from_numpy(one.of(inputs)) for one in program.inputs))
    return states

"""The functions that are exported: a policy's own ``recommend``, or a search of its catalog in blocks of items."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.features import Feature
from recpo.base.feedback import HIGHEST
from recpo.base.types import Features, Histories, Recommendations
from recpo.policies.catalog_search import BLOCK_ROWS, BlockedTable, Precision, RoundedRows, validate_precision
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.tilted import TiltedPolicy
from recpo.serving.encoded_histories import ALLOWED, EXCLUDE, ProgramReads, features_of, program_inputs

_SEARCHED: Final = (CatalogSoftmaxPolicy, TiltedPolicy)


class ServingProgram(nn.Module):
    """The function that is exported: a ranking of a server's inputs.

    ``(item_ids [B, H], feedback [B, H], exclude [B, M], ...) -> (top_items [B, k], scores [B, k])``, with what else it
    reads behind these (``recpo.serving.encoded_histories``); ids are internal, rows are padded with 0 on the right, and
    nothing of ``exclude`` is recommended, nor of the history unless ``reads.repeats``. A value out of range counts as
    0, unknown: in a lookup -1 would stand for the last row.

    Args:
        ranker: a policy, or a ``CatalogSearch`` of one.
        k: length of the lists.
        reads: what it reads beyond items and feedback; None = times, if the ranker says so.
    """

    def __init__(self, ranker: Policy | CatalogSearch, k: int, reads: ProgramReads | None = None) -> None:
        super().__init__()
        self.ranker = ranker
        self.k = k
        self.reads = ProgramReads(ranker.reads_timestamps) if reads is None else reads
        self._names = [one.name for one in program_inputs(ranker.max_history, self.reads)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        given = dict(zip(self._names, tensors, strict=True))
        histories = histories_of(given, self.reads, self.ranker.num_items)
        exclude = _within(given[EXCLUDE], self.ranker.num_items)
        exclude = exclude if self.reads.repeats else torch.cat([histories.item_ids, exclude], 1)
        if isinstance(self.ranker, CatalogSearch):
            top = self.ranker.recommend(histories, self.k, exclude, given.get(ALLOWED))
        else:
            top = self.ranker.recommend(histories, self.k, exclude)
        return top.item_ids, top.scores


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

    def __init__(self, policy: Policy, precision: Precision = "float32", block_rows: int = BLOCK_ROWS) -> None:
        super().__init__()
        validate_precision(precision)
        if not has_item_matrix(policy):
            raise RecpoError(
                f"{type(policy).__name__} has no item matrix: item_precision {precision} is for a softmax over the "
                "catalog, alone or tilted; leave it at float32",
                code="unsupported",
                field="item_precision",
            )
        self.num_items, self.max_history, self.precision = policy.num_items, policy.max_history, precision
        self.reads_timestamps = policy.reads_timestamps
        vectors, rooted = item_matrix(policy)
        self.table = BlockedTable(vectors, precision, rooted, block_rows)
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
    rooted = policy.factors.rooted if isinstance(policy, TiltedPolicy) else 0
    return policy.output_vectors().detach(), rooted


def ranker_of(policy: Policy, precision: Precision, block_rows: int = BLOCK_ROWS) -> Policy | CatalogSearch:
    """What a bundle's program runs: the policy itself where its catalog fits half a block as it is."""
    if precision == "float32" and (policy.num_items < block_rows // 2 or not has_item_matrix(policy)):
        return policy
    return CatalogSearch(policy, precision, block_rows)


@torch.no_grad()
def _reading(policy: Policy, table: BlockedTable, vectors: Tensor, block_rows: int) -> Any:
    """A twin of the policy that looks items up in a blocked table; its own tables are left out."""
    twin = _twin(policy)
    encoder = twin
    if isinstance(policy, TiltedPolicy):
        encoder = twin.base = _twin(policy.base)
    looked_up = encoder.item_vectors(torch.arange(policy.num_items + 1))
    width = looked_up.shape[1]
    if not torch.equal(vectors[:, :width], looked_up):
        table = BlockedTable(looked_up, table.precision, block_rows=block_rows)
    encoder.item_table = RoundedRows(table, width)
    encoder.output_table = None
    return twin


def _twin(module: nn.Module) -> Any:
    """The same tensors and children in a module whose children can be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def histories_of(given: Mapping[str, Tensor], reads: ProgramReads, num_items: int) -> Histories:
    """What a policy reads, of the tensors of a program by name; an id or a level out of range counts as 0."""
    item_ids = _within(given["item_ids"], num_items)

    def features(side: str, of: tuple[Feature, ...], *lead: int) -> Features | None:
        if not of:
            return None

        def nothing(kind: str) -> Tensor:
            return item_ids.new_zeros(item_ids.shape[0], *lead, 0).to(getattr(torch, kind))

        return Features(*features_of(side, of, given, nothing))

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

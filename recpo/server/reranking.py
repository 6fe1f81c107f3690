"""Re-ranking in the server: the item attributes that a method needs, and the reordered lists of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from recpo.lists.reranking import ItemAttributes, Reranker, RerankOptions, reranked_places
from recpo.serving.attributes import ATTRIBUTES
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ITEM_ID, EncodedHistories
from recpo.serving.item_index import bundle_item_vectors


@dataclass(frozen=True)
class Reranking:
    """A method and its options.

    Attributes:
        method: chooses slates.
        options: the shortlist, and the file of item attributes.
    """

    method: Reranker
    options: RerankOptions

    def known(self, bundle: Bundle) -> ItemAttributes:
        """What the method reads of the items of a bundle.

        Raises:
            RecpoError: an attribute, its file or the item vectors are missing.
        """
        options = self.options
        if options.attributes is None and ATTRIBUTES in bundle.manifest.files:
            options = replace(options, attributes=bundle.root / ATTRIBUTES, item_id=ITEM_ID)
        known = options.read(self.method.attributes, bundle.items)
        if self.method.reads_vectors and known.vectors is None:
            known = known.with_vectors(bundle_item_vectors(bundle.root, bundle.manifest))
        return known

    def order(
        self,
        known: ItemAttributes,
        inputs: EncodedHistories,
        top_items: np.ndarray,
        scores: np.ndarray,
        lengths: Sequence[int],
    ) -> np.ndarray:
        """The new order of the lists ``[B, K]``, as places ``[B, K]``. Empty places do not move.

        Args:
            known: item attributes of the bundle that made the lists.
            inputs: the histories; calibration reads the items of them that the policy reads.
            top_items: internal ids, 0 = empty.
            scores: log-probabilities.
            lengths: length of each slate.
        """
        order = np.tile(np.arange(top_items.shape[1]), (len(top_items), 1))
        for row, k in enumerate(lengths):
            first = (row, slice(max(self.options.shortlist, k)))
            places = reranked_places(self.method, top_items[first], scores[first], k, known, inputs.item_ids[row])
            order[row, : len(places)] = places
        return order

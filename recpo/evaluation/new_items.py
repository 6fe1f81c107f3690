"""The cold start: how contenders handle candidates that no user was shown in the training period."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from recpo.evaluation.beyond_accuracy import mean_to_k
from recpo.evaluation.measures import Measure, Observed
from recpo.evaluation.segments import ItemSegment
from recpo.evaluation.true_rewards import TrueRewards
from recpo.ops.ranking import accuracy_of_bin, named, ranked_hits

#: Metrics of new items, without the list length.
NEW_METRICS: Final = ("new_share", "new_Recall", "new_NDCG", "new_HitRate", "new_true_reward")
#: The lists of new items alone exclude everything else, which takes a matrix of users by items.
LARGEST_CATALOG: Final = 50_000


@dataclass(frozen=True)
class NewItems(Measure):
    """Per-user metrics ``[B]`` at every k of new items: candidates without an event in the training period.

    - ``new_share@k``: share of new items among the filled ones of the first k places; nan for an empty list.
    - ``new_Recall@k``, ``new_NDCG@k``, ``new_HitRate@k``: with the new items among the held-out positives as targets,
      on the unchanged list; nan without such positives.
    - ``new_true_reward@k``, if the truth is known: mean true reward of the contender's k best items among the new ones,
      regardless of other items above them; nan if it lists none.

    Attributes:
        is_new: ``[V + 1]`` bool, the new items; place 0 is False.
        ks: list lengths.
        truth: truth of a simulation; None = not known.
    """

    is_new: Tensor
    ks: Sequence[int]
    truth: TrueRewards | None = None

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """See ``Measure.update``."""
        lists, targets = observed.lists.item_ids, observed.targets
        is_new = self.is_new.to(lists.device)
        share = mean_to_k(is_new[lists].double(), lists, self.ks)
        segment = ItemSegment("new", ("new",), is_new.long() - 1)
        (hits,) = segment.split(ranked_hits(lists, targets.item_ids, targets.positive), lists)
        metrics = named(self.ks, new_share=share)
        metrics |= {f"new_{name}": values for name, values in accuracy_of_bin(hits, self.ks).items()}
        if observed.new_lists is not None and self.truth is not None:
            worth = self.truth.of_lists(observed.batch.user_ids, observed.new_lists.item_ids)
            metrics |= {f"new_{name}": values for name, values in worth.items() if name.startswith("true_reward@")}
        return metrics

    @property
    def others(self) -> Tensor | None:
        """``[O]`` all other items, to exclude from lists of new items alone; None = no such lists are needed."""
        if self.truth is None or len(self.is_new) - 1 > LARGEST_CATALOG:
            return None
        return torch.arange(1, len(self.is_new))[~self.is_new[1:]]

    def as_json(self) -> dict[str, Any]:
        """The entry of the document."""
        too_large = self.truth is not None and self.others is None
        remark = (
            f"no lists of new items alone: the catalog has more than {LARGEST_CATALOG:,} items" if too_large else None
        )
        return {"items": int(self.is_new.sum()), "remark": remark}


def new_items(train_count: Tensor, is_candidate: Tensor | None) -> Tensor:
    """``[V + 1]`` bool, candidates without an event in the training period.

    Args:
        train_count: ``[V + 1]`` training events of the items, place 0 is unused.
        is_candidate: ``[V + 1]`` bool; None = every item is one.
    """
    found = train_count == 0
    found[0] = False
    return found if is_candidate is None else found & is_candidate

"""The expected earnings of a bundle under its own exploration: a contender of ``evaluate``, and its estimate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from recpo.base.types import FeedbackBatch, Histories, Recommendations
from recpo.evaluation.contenders import Contender, Loaded
from recpo.evaluation.held_out_pass import HeldOut
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.measure import rewarded
from recpo.evaluation.off_policy.results import POLICY
from recpo.evaluation.reading import Document
from recpo.lists.exploration import Exploration, Pool
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward
from recpo.serving.bundle import Bundle
from recpo.verbs.contenders import contenders_of
from recpo.verbs.simulated_service import BEST

#: Name of the contender in the evaluation of a round.
NEXT: Final = "next policy"
#: The estimator whose value is recorded.
ESTIMATOR: Final = "SNIPS"


@dataclass(frozen=True)
class NextEstimate:
    """The expected earnings of the next policy before it serves, from the log of the policy before it.

    Attributes:
        value: mean logged reward per exposure of slates drawn as they will be served; None = not known.
        low: lower end of the 95 % bootstrap interval over users.
        high: its upper end.
        effective_rows: the number of equally weighted exposures with the same information.
        warnings: reasons why the number may be wrong.
    """

    value: float | None
    low: float | None
    high: float | None
    effective_rows: float | None
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, document: Document) -> NextEstimate | None:
        """Reads the estimate from the document of an evaluation; None if the log has no propensities."""
        (contender,) = (one for one in document["contenders"] if one["name"] == NEXT)
        for entry in contender["off_policy"]:
            if (entry["target"], entry["estimator"]) == (POLICY, ESTIMATOR):
                ends = entry["intervals"]["bootstrap"]
                effective = entry["effective_sample_size"]
                return cls(entry["value"], ends["low"], ends["high"], effective, tuple(entry["warnings"]))
        return None


def as_served(bundle: Bundle, data: Prepared, exploration: Exploration | None, size: int, ks: list[int]) -> Contender:
    """The bundle as a contender whose log-probabilities are those of its slates, including exploration.

    The target ``policy`` of the off-policy values is therefore an item at a random place of a slate as it will be
    served. Lists are the bundle's best items. Slates of ``size`` items stand for all slates, including the shorter last
    ones of a session.

    Args:
        bundle: the bundle that serves next.
        data: prepared log with the bundle's items.
        exploration: how slates are drawn; None = the best items in order.
        size: items of a slate.
        ks: list lengths of the evaluation.
    """
    (plain,) = contenders_of([bundle], data, ks)
    served = BEST if exploration is None else exploration
    return replace(plain, name=NEXT, load=partial(_load, plain, bundle, served, min(size, data.num_items)))


def _load(plain: Contender, bundle: Bundle, exploration: Exploration, size: int) -> Loaded:
    loaded = plain.load()
    slates = _Slates(loaded.recommender, bundle, exploration, size)
    recommender = Recommender(slates.recommend, slates.log_prob, NEXT, scores_are_logp=True)
    return loaded._replace(recommender=recommender)


@dataclass
class _Slates:
    """The lists of a bundle, and the probabilities of its slates for the batch of the latest lists."""

    bundle: Recommender
    of: Bundle
    exploration: Exploration
    size: int
    exclude: Tensor | None = None
    shortlists: Recommendations | None = None

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        """The k best items. Keeps the whole shortlist for ``log_prob``."""
        assert self.bundle.recommend is not None
        width = min(max(self.size, self.exploration.shortlist), self.of.k)
        found = self.bundle.recommend(histories, max(k, width), exclude)
        self.exclude = exclude
        self.shortlists = Recommendations(found.item_ids[:, :width], found.scores[:, :width])
        return Recommendations(found.item_ids[:, :k], found.scores[:, :k])

    def log_prob(self, batch: FeedbackBatch) -> Tensor:
        """``[B, S, 1]``; -inf = slates of this context never show the item."""
        assert self.shortlists is not None
        items, scores = (part.numpy() for part in self.shortlists)
        barred = items[:, :0] if self.exclude is None else self.exclude.numpy()
        pools = [Pool.of(len(self.of.items), exclude=row) for row in barred]
        filled = np.where(items > 0, scores, -np.inf)
        found = self.exploration.probabilities(items, filled, self.size, batch.slates.item_ids.numpy(), pools)
        return torch.from_numpy(found).log()[:, :, None]


def logged_reward(data: Prepared, split: HeldOut, reward: LoggedReward) -> float | None:
    """Mean reward of the exposures of a held-out period; None if no exposure has a reward."""
    total = count = 0.0
    for shard in range(data.num_shards(split)):
        events = data.load(split, shard)
        values = rewarded(events, reward).reward[events.is_target]
        known = values[~np.isnan(values)]
        total, count = total + float(known.sum()), count + len(known)
    return total / count if count else None

"""The truth of a simulation about its users: true rewards of recommended lists, and a reward for training."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from recpo.base.contracts import RewardFunction, RewardScope
from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch, FeedbackBatch, Recommendations, Slates
from recpo.evaluation.candidates import HeldOut, has_positions
from recpo.evaluation.measures import Measure, Observed, Recommender
from recpo.log.prepared import Prepared
from recpo.ops.ranking import first_allowed
from recpo.worlds.truth import Truth

#: Name of the contender that knows the users' true preferences.
ORACLE: Final = "oracle"


@dataclass(frozen=True)
class TrueRewards(Measure):
    """Adds ``true_reward@k`` and ``true_dislike@k``, means over the filled places of a list, nan for an empty list.

    Attributes:
        truth: the truth of the simulation.
        user_ids: ``[users]`` the simulation's index of every user of the prepared data.
        item_ids: ``[V]`` the simulation's index of the items 1..V.
        day: the day for which tastes are evaluated.
        ks: list lengths.
    """

    truth: Truth
    user_ids: np.ndarray
    item_ids: np.ndarray
    day: float
    ks: Sequence[int]

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """See ``Measure.update``."""
        return self.of_lists(observed.batch.user_ids, observed.lists.item_ids)

    def of_logging_policy(self, users: Tensor) -> dict[str, Tensor]:
        """The exact expected reward ``[U]`` of the logging policy, the same at every k."""
        value = torch.from_numpy(self.truth.logging_value(self.user_ids[users.numpy()], self.day)).float()
        return {f"true_reward@{k}": value for k in self.ks}

    def oracle(self) -> Recommender:
        """Lists every user's best items by true reward, without excluded items. No list has a higher true reward."""
        truth, num_items = self.truth, len(self.item_ids)
        order = np.argsort(self.item_ids)
        ascending = self.item_ids[order]

        def recommend(batch: EvaluationBatch, k: int, exclude: Tensor) -> Recommendations:
            users = batch.user_ids
            strangers = len(truth.item_ids) - num_items  # items of the simulation that are in no event of the log
            available = int(truth.available(self.day).sum())
            depth = min(available, k + strangers + exclude.shape[1])
            best = truth.oracle_top_k(self.user_ids[users.cpu().numpy()], depth, self.day)
            place = np.searchsorted(ascending, best).clip(max=num_items - 1)
            known = ascending[place] == best
            candidates = torch.from_numpy(np.where(known, order[place] + 1, 0))
            candidates = candidates.gather(1, torch.from_numpy(~known).int().argsort(dim=1, stable=True))
            return Recommendations.by_place(first_allowed(candidates.to(users.device), k, exclude))

        return Recommender(recommend_to_batch=recommend, name=ORACLE)

    def of_lists(self, users: Tensor, recommended: Tensor) -> dict[str, Tensor]:
        """The metrics ``[B]`` of the lists ``recommended [B, K]`` of the users ``users [B]``."""
        shown = recommended[:, : max(self.ks)].cpu()
        filled = shown > 0
        # empty places are looked up as an arbitrary item and masked below
        items = self.item_ids[(shown - 1).clamp_min(0).numpy()]
        arguments = (self.user_ids[users.cpu().numpy()], items, self.day)
        metrics: dict[str, Tensor] = {}
        for name, values in (
            ("true_reward", self.truth.expected_reward(*arguments)),
            ("true_dislike", self.truth.dislike_probability(*arguments)),
        ):
            total = (torch.from_numpy(values) * filled).cumsum(1)
            places = filled.cumsum(1)
            last = [min(k, shown.shape[1]) - 1 for k in self.ks]
            metrics |= {f"{name}@{k}": total[:, i] / places[:, i] for k, i in zip(self.ks, last, strict=True)}
        return metrics


def true_rewards(path: Path, data: Prepared, split: HeldOut, ks: Sequence[int]) -> TrueRewards:
    """The truth in ``path`` for the users and items of ``data``.

    Tastes drift, so they are evaluated on the day on which the period starts (on the log's last day if every user has a
    separate period, or the data has no times).

    Raises:
        RecpoError: the data was not prepared from that simulation.
    """
    truth = Truth.load(path)
    boundaries = data.manifest["boundaries"]
    begin = boundaries.get(f"{split}_start_ms")
    last = truth.preferences.parameters.days - 1
    day = float(last if has_positions(data) else truth.day_of(boundaries["last_ms"] if begin is None else begin))
    items = data.item_ids().to_external(np.arange(1, data.num_items + 1))
    users = data.table("users.parquet", ["user_id"]).column(0)
    try:
        item_ids, user_ids = (column.cast("int64").to_numpy() for column in (items, users))
    except ValueError as error:
        message = f"{data.root} was not prepared from the simulation in {path}: its ids are not numbers"
        raise RecpoError(message, code="mismatch", field="truth") from error
    return TrueRewards(truth, user_ids, item_ids, day, ks)


@dataclass(frozen=True)
class TrueReward(RewardFunction):
    """The simulation's own expected reward of a candidate: ``P(satisfied) - dislike_cost P(dislike)``.

    Tastes drift. Like ``recpo evaluate --truth``, it uses the day on which the validation period starts. A candidate
    that is not an item (id 0) has no reward (nan).

    Attributes:
        truth: directory that ``recpo simulate`` wrote.
        prepared: directory that ``recpo prepare`` wrote from its log.
    """

    truth: Path
    prepared: str | Path

    @property
    def scopes(self) -> tuple[RewardScope, ...]:
        """See ``RewardFunction.scopes``."""
        data = Prepared.open(self.prepared)
        return (RewardScope(data.catalog_checksum, data.users_checksum),)

    @cached_property
    def _known(self) -> TrueRewards:
        return true_rewards(self.truth, Prepared.open(self.prepared), "valid", [1])

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        if batch.user_ids is None:
            message = "TrueReward needs the user ids of the contexts, and this batch has none"
            raise RecpoError(message, code="missing_value", field="user_ids")
        known, items = self._known, candidates.item_ids
        users = known.user_ids[batch.user_ids.cpu().numpy()]
        # ids that are not items are looked up as an arbitrary item and masked below
        shown = known.item_ids[np.maximum(items.cpu().numpy() - 1, 0)]
        rewards = torch.from_numpy(known.truth.expected_reward(users, shown, known.day)).float().to(items.device)
        return rewards.masked_fill(~candidates.mask | (items == 0), torch.nan)

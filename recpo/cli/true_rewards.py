"""The simulator's truth as a measure of recommended lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.evaluation.measures import Observed
from recpo.simulation.truth import Truth


@dataclass(frozen=True)
class TrueRewards:
    """Adds ``true_reward@k`` and ``true_dislike@k``, means over the places that a list fills, nan for an empty list.

    Attributes:
        truth: what the simulation knows.
        user_ids: ``[users]`` its number of every user of the prepared data.
        item_ids: ``[V]`` its number of the items 1..V.
        day: on which tastes are asked.
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

    def totals(self) -> dict[str, float]:
        """None."""
        return {}

    def of_logging_policy(self, users: Tensor) -> dict[str, Tensor]:
        """The exact expected reward ``[U]`` of the policy that made the log, the same at every k."""
        value = torch.from_numpy(self.truth.logging_value(self.user_ids[users.numpy()], self.day)).float()
        return {f"true_reward@{k}": value for k in self.ks}

    def of_lists(self, users: Tensor, recommended: Tensor) -> dict[str, Tensor]:
        """The metrics ``[B]`` of the lists ``recommended [B, K]`` of the users ``users [B]``."""
        shown = recommended[:, : max(self.ks)].cpu()
        filled = shown > 0
        # an empty place is looked up as any item and left out below
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


def true_rewards(path: Path, data: Prepared, split: Literal["valid", "test"], ks: Sequence[int]) -> TrueRewards:
    """The truth in ``path`` for the users and items of ``data``.

    Tastes drift, so they are taken on the day on which the period begins (on the log's last day where every user has a
    period of his own).

    Raises:
        RecpoError: the data was not prepared from that simulation.
    """
    truth = Truth.load(path)
    boundaries = data.manifest["boundaries"]
    begin = boundaries.get(f"{split}_start_ms")
    day = float(truth.day_of(boundaries["last_ms"] if begin is None else begin))
    items = data.item_ids().to_external(np.arange(1, data.num_items + 1))
    users = data.table("users.parquet", ["user_id"]).column(0)
    try:
        item_ids, user_ids = (column.cast("int64").to_numpy() for column in (items, users))
    except ValueError as error:
        raise RecpoError(
            f"{data.root} was not prepared from the simulation in {path}: its ids are no numbers"
        ) from error
    return TrueRewards(truth, user_ids, item_ids, day, ks)

"""The simulator's truth as a judge of recommended lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recpo.data.id_map import IdMap
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.evaluation.held_out import Judge
from recpo.simulation.truth import Truth


def true_rewards(path: Path, data: Prepared, split: Literal["valid", "test"], ks: Sequence[int]) -> Judge:
    """A judge that adds ``true_reward@k`` and ``true_dislike@k``, means over the places that a list fills.

    Tastes drift, so they are taken on the day on which the period begins (on the log's last day where every user has a
    period of his own).

    Raises:
        RecpoError: the data was not prepared from that simulation.
    """
    truth = Truth.load(path)
    boundaries = data.manifest["boundaries"]
    begin = boundaries.get(f"{split}_from")
    day = float(truth.day_of(boundaries["last_ms"] if begin is None else begin))
    items = IdMap.load(data.root / "items.parquet").to_external(np.arange(1, data.num_items + 1))
    users = pq.read_table(data.root / "users.parquet", columns=["user_id"]).column(0)
    try:
        item_ids, user_ids = (column.cast("int64").to_numpy() for column in (items, users))
    except ValueError as error:
        raise RecpoError(
            f"{data.root} was not prepared from the simulation in {path}: its ids are no numbers"
        ) from error
    longest = max(ks)

    def judge(row_ids: Tensor, recommended: Tensor) -> dict[str, Tensor]:
        shown = recommended[:, :longest].cpu()
        filled = shown > 0
        # an empty place is looked up as any item and left out below
        arguments = (user_ids[row_ids.cpu().numpy()], item_ids[(shown - 1).clamp_min(0).numpy()], day)
        metrics: dict[str, Tensor] = {}
        for name, values in (
            ("true_reward", truth.expected_reward(*arguments)),
            ("true_dislike", truth.dislike_probability(*arguments)),
        ):
            total = (torch.from_numpy(values) * filled).cumsum(1)
            places = filled.cumsum(1)
            last = [min(k, shown.shape[1]) - 1 for k in ks]
            metrics |= {f"{name}@{k}": total[:, i] / places[:, i] for k, i in zip(ks, last, strict=True)}
        return metrics

    return judge

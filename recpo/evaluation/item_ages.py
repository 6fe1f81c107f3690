"""Ages of the items when lists are made, and segments of the targets by age."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from recpo.evaluation.candidates import ALWAYS, NEVER, Candidates, HeldOutPeriod, has_positions
from recpo.evaluation.segments import NO_BIN, ItemSegment
from recpo.log.prepared import Prepared

_MILLISECONDS_PER_DAY: Final = 86_400_000
_BOUNDS: Final = (1.0, 3.0, 7.0, 30.0)
_BINS: Final = ("under 1 day", "1 to 3 days", "3 to 7 days", "7 to 30 days", "30 days and more", "no event in training")


def item_ages(data: Prepared, split: HeldOutPeriod, candidates: Candidates | None) -> Tensor | None:
    """Ages ``[V + 1]`` of the items in days, float64, at the start of the period; nan = unknown; place 0 is unused.

    An item's age counts from ``available_from`` if the candidates have it for any item (inf if it was always
    available), otherwise from the item's first event in the training period. If every user has a separate period, ages
    are those at the end of the log.

    Returns:
        None if the log has positions instead of times.
    """
    if has_positions(data):
        return None
    boundaries = data.manifest["boundaries"]
    at = int(boundaries.get(f"{split}_start_ms", boundaries["last_ms"]))
    born = np.full(1, ALWAYS) if candidates is None else candidates.available_from
    if ((born[1:] != ALWAYS) & (born[1:] != NEVER)).any():
        days = (at - born.astype(np.float64)) / _MILLISECONDS_PER_DAY
        days[born == ALWAYS], days[born == NEVER] = np.inf, np.nan
    else:
        first = np.full(data.num_items + 1, NEVER)
        for shard in range(data.num_shards("train")):
            item, time = data.columns("train", shard, ["item_index", "timestamp"]).values()
            np.minimum.at(first, item, time)
        days = np.where(first == NEVER, np.nan, (at - first.astype(np.float64)) / _MILLISECONDS_PER_DAY)
    return torch.from_numpy(days)


def item_age(days: Tensor) -> ItemSegment:
    """Items by age.

    Args:
        days: ``[V + 1]``; nan = unknown, which is a separate bin; items below 0 are in no bin.
    """
    label = torch.bucketize(days.double(), torch.tensor(_BOUNDS, dtype=torch.float64), right=True)
    label = label.masked_fill(days.isnan(), len(_BINS) - 1).masked_fill(days < 0, NO_BIN)
    label[0] = NO_BIN
    used = [index for index in range(len(_BINS)) if bool((label == index).any())]
    place = torch.full((len(_BINS) + 1,), NO_BIN)
    place[used] = torch.arange(len(used))
    return ItemSegment("item age", tuple(_BINS[index] for index in used), place[label])

"""The items near an item: by the factors of the reward model, or by the users who had both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from recpo.explorer.survey import Survey

_COUNT: Final = 12


@dataclass(frozen=True)
class Neighborhood:
    """Finds the neighbors of items.

    Attributes:
        survey: its reward model has the factors; without one, neighbors are in the same lists.
    """

    survey: Survey

    @property
    def by(self) -> str:
        """What near means, as the end of a sentence."""
        if self.survey.grades is None:
            return f"listed to the same users by {self.survey.contenders[-1].name}: share of its lists"
        return "cosine of the factors of the reward model"

    def of(self, item: int) -> list[tuple[int, float]]:
        """The nearest items, and how near they are, the nearest first."""
        model = self.survey.grades
        if model is None:
            return self._listed_together(item)
        near = cosine_similarity(model.item_factors, model.item_factors[item - 1][None], dim=1)
        near[item - 1] = -torch.inf
        best = near.topk(min(_COUNT, len(near)))
        found = zip((best.indices + 1).tolist(), best.values.tolist(), strict=True)
        return [(one, value) for one, value in found if np.isfinite(value)]

    def _listed_together(self, item: int) -> list[tuple[int, float]]:
        lists = self.survey.contenders[-1].lists
        having = lists[(lists == item).any(1)]
        counts = Counter(having[having != item].tolist())
        counts.pop(0, None)
        return [(int(one), count / len(having)) for one, count in counts.most_common(_COUNT)]

"""The verb ``factorize``: fits a matrix factorization of graded feedback, as a reward and as a baseline."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar

from recpo.artifacts import output_directory
from recpo.evaluation.beyond_accuracy import Exposure
from recpo.evaluation.reading import alike
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors
from recpo.rewards.graded import FactorOptions
from recpo.rewards.selection import fit_factors, validation_batches
from recpo.verbs.verb import Verb, function_of

_LISTED_USERS = 1000


@dataclass(frozen=True)
class Factorize(FactorOptions, Verb[Factors]):
    """Fits ``grade(user, item) = mean + p · q + user bias + item bias`` on the graded events of the training period.

    One shard is in memory at a time. If several ranks and ridges are given, the one with the smallest squared error on
    the validation period is chosen; users are folded in from the history before it. The grade of an event is the middle
    of its feedback level's quartile, 0 for a dislike (``recpo.base.feedback.GRADES``). Writes factors.safetensors and
    manifest.json. The model recommends, folds in any history, and is a reward (``FactorReward``).

    Raises:
        RecpoError: ``out`` exists, no event has a grade, or no validation event can select rank and ridge.
    """

    first_day: ClassVar = ("prepared", "out", "method", "ranks", "seed")

    prepared: Prepared | str | Path
    """prepared data, or its directory"""
    out: Path | str | None = None
    """output directory; null = keep the model in memory only"""
    _: KW_ONLY
    overwrite: bool = False
    """replace ``out`` if it exists"""
    progress: bool = False
    """show a progress bar on a terminal"""

    def execute(self) -> Factors:
        """Fits and selects on the data, then writes the directory."""
        options = self.part(FactorOptions)
        data = Prepared.open(self.prepared)
        if self.out is None:
            return fit_factors(data, options, progress=self.progress)
        with output_directory(self.out, kind="factors", overwrite=self.overwrite, inputs=[data.root]) as partial:
            factors = fit_factors(data, options, progress=self.progress)
            factors.write_files(partial)
            self.write_resolved(partial / "resolved.yaml")
        return factors


factorize = function_of(Factorize)


def similar_lists(factors: Factors, data: Prepared, k: int = 10) -> str | None:
    """A warning if the model's lists hardly differ between users (``recpo.evaluation.reading.alike``); None if not.

    Of up to 1,000 users of the validation period, without the items of their past.

    Args:
        factors: the model.
        data: prepared data of the same items.
        k: length of the lists.
    """
    k = min(k, data.num_items)
    exposure, users = Exposure(data.num_items, [k]), 0
    for batch in validation_batches(data, factors.max_history, _LISTED_USERS):
        exposure.add(factors.recommend(batch.feedback.histories, k, batch.exclude).item_ids)
        users += len(batch.user_ids)
    totals = exposure.totals()
    shares = {"coverage": totals[f"coverage@{k}"], "overlap": totals[f"overlap@{k}"]}
    return alike("factors", k=k, users=users, items=data.num_items, **shares)

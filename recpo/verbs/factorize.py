"""The verb ``factorize``: fits a matrix factorization of graded feedback, as a reward and as a baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from recpo.artifacts.outputs import output_directory
from recpo.base.errors import NonNegativeFloat, PositiveFloat, RecpoError
from recpo.evaluation.beyond_accuracy import Exposure
from recpo.evaluation.cautions import similar_lists_warning
from recpo.log.prepared import Prepared
from recpo.ops.exposures import mixed_aucs
from recpo.rewards.factors import Factors
from recpo.rewards.graded import FactorOptions
from recpo.rewards.recent_biases import with_recent_biases
from recpo.rewards.selection import VALIDATION_USERS, close_to_best, fit_factors, validation_batches
from recpo.verbs.verb import WritingVerb, function_of

_LISTED_USERS: Final = 1000
_HALF_LIVES: Final = (0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Factorize(FactorOptions, WritingVerb[Factors]):
    """Fits ``grade(user, item) = mean + p · q + user bias + item bias`` on the graded events of the training period.

    One shard is in memory at a time. If several ranks and ridges are given, the one with the smallest squared error on
    the validation period is chosen; users are folded in from the history before it. The grade of an event is the middle
    of its feedback level, 0 for a dislike (``recpo.base.feedback.GRADES``). Writes factors.safetensors and
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
    popularity: Sequence[NonNegativeFloat] = (0.0,)
    """weights to try of the logarithm of an item's number of training events, added to its grade, such as 0 .01 .02
    .05: what a recommender shows often, it had reasons to show, which grades of shown items cannot say. The smallest
    weight is chosen whose ``AUC_mixed`` on the validation period is at most one standard error below the best"""
    half_lives: Sequence[PositiveFloat] | None = None
    """days after which an event counts half in the bias of its item, to try: what everybody likes may change
    (``recpo.rewards.recent_biases``). Of several and none, the one with the highest ``AUC_mixed`` on the validation
    period is chosen, or none if that is at most one standard error below; a single one is taken; empty = all events
    count alike. null = .5, 1, 2, 4 and 8 where the training period ends at one time; with als, and for a held-out
    period, empty"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.popularity or (self.period != "train" and len(self.popularity) > 1):
            raise RecpoError(
                f"popularity has {len(self.popularity)} weights; give at least one, and one alone for a held-out "
                "period, as nothing is left to choose by",
                code="empty" if not self.popularity else "conflicting_options",
                field="popularity",
            )
        if self.half_lives and self.period != "train":
            raise RecpoError(
                f"half_lives weigh training events, and period is {self.period}: leave one of them out",
                code="conflicting_options",
                field="half_lives",
            )

    def execute(self) -> Factors:
        """Fits and selects on the data, then writes the directory."""
        options = self.part(FactorOptions)
        data = Prepared.open(self.prepared)
        if self.out is None:
            return self._fitted(data, options)
        with output_directory(self.out, kind="factors", overwrite=self.overwrite, inputs=[data.root]) as partial:
            factors = self._fitted(data, options)
            factors.write_files(partial)
            self.write_resolved(partial / "resolved.yaml")
        return factors

    def of(self, model: Factors) -> Self:
        """The verb that fits a model like this one, without a choice."""
        half_life = model.facts["half_life"]
        return replace(super().of(model), half_lives=() if half_life is None else (half_life,))

    def _fitted(self, data: Prepared, options: FactorOptions) -> Factors:
        factors = fit_factors(data, options, progress=self.progress)
        return self._with_popularity(self._with_recent_biases(factors, data), data)

    def _with_recent_biases(self, factors: Factors, data: Prepared) -> Factors:
        """The model with the best half-life of the biases of its items; ``facts`` have what was tried."""
        changes = data.ends_at_once and self.period == "train" and self.method == "variational"
        half_lives = self.half_lives if self.half_lives is not None else _HALF_LIVES if changes else ()
        models = with_recent_biases(factors, data, half_lives)
        if len(half_lives) == 1:
            del models[None]
        values, tried = _compared("half_life", models, data)
        place = 0 if close_to_best(values)[0] else int(values.mean(1).argmax())
        chosen = list(models)[place]
        return replace(models[chosen], facts={**factors.facts, "half_life": chosen, "half_lives_tried": tried})

    def _with_popularity(self, factors: Factors, data: Prepared) -> Factors:
        """The model with the best weight of popularity; ``facts`` have what was tried."""
        counts = torch.from_numpy(data.item_counts())
        models = {weight: factors.with_popularity(counts, weight) for weight in sorted(set(self.popularity))}
        values, tried = _compared("weight", models, data)
        chosen = list(models)[int(close_to_best(values).nonzero()[0])]
        return replace(models[chosen], facts={**factors.facts, "popularity": chosen, "popularity_tried": tried})


def _compared(name: str, models: Mapping[Any, Factors], data: Prepared) -> tuple[Tensor, list[dict[str, Any]]]:
    """``AUC_mixed`` ``[models, U]`` by validation user, and what was tried, for the facts; a single model has none."""
    tried = [{name: one} for one in models]
    if len(models) == 1:
        return torch.zeros(1, 0), tried
    values = mixed_auc(list(models.values()), data)
    if values.shape[1]:  # else no user has both a positive and another exposure
        tried = [one | {"AUC_mixed": float(value)} for one, value in zip(tried, values.mean(1), strict=True)]
    return values, tried


factorize = function_of(Factorize)


def similar_lists(factors: Factors, data: Prepared, k: int = 10) -> str | None:
    """A warning if the model's lists hardly differ between users (see ``similar_lists_warning``); None if not.

    Of up to 1,000 users of the validation period, without the items of their past.

    Args:
        factors: the model.
        data: prepared data of the same items.
        k: length of the lists.
    """
    k = min(k, data.num_items)
    exposure, users = Exposure(data.num_items, [k]), 0
    for batch in validation_batches(data, factors.max_history, _LISTED_USERS, factors.reads):
        exposure.add(factors.recommend(batch.feedback.histories, k, batch.exclude).item_ids)
        users += len(batch.user_ids)
    totals = exposure.totals()
    shares = {"coverage": totals[f"coverage@{k}"], "overlap": totals[f"overlap@{k}"]}
    return similar_lists_warning("factors", k=k, users=users, items=data.num_items, **shares)


def mixed_auc(models: Sequence[Factors], data: Prepared) -> Tensor:
    """``AUC_mixed`` ``[models, U]`` of the lists' ranking scores, for the validation users who have one, float64.

    Args:
        models: with equal ``max_history`` and ``reads``.
        data: prepared data of the same items.
    """
    found = []
    for batch in validation_batches(data, models[0].max_history, VALIDATION_USERS, models[0].reads):
        grades = [partial(model.bounded_grades, batch.feedback.histories) for model in models]
        found.append(mixed_aucs(batch, data.num_items, grades))
    everyone = torch.cat(found, 1) if found else torch.zeros(len(models), 0, dtype=torch.float64)
    return everyone[:, ~everyone.isnan().any(0)]

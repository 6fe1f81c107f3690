"""Fits a factor model and selects its rank, ridge and consumption features on the validation period."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from tqdm import tqdm

from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch
from recpo.batches.held_out import HeldOutBatches, Rank
from recpo.log.prepared import Prepared
from recpo.rewards import consumption, graded, variational
from recpo.rewards.consumption import ItemFeatures
from recpo.rewards.factors import Factors, plain
from recpo.rewards.graded import FactorOptions, chunks, mean_grade

_USERS_PER_BATCH: Final = 256
#: maximum number of validation users, evenly spaced; enough to distinguish squared errors
VALIDATION_USERS: Final = 20_000


def fit_factors(
    data: Prepared,
    options: FactorOptions = FactorOptions(),  # noqa: B008 frozen
    *,
    progress: bool = False,
) -> Factors:
    """Fits a factor model of grades on the training period, or on the period that ``options`` names.

    Among several ranks and ridges, it selects the one with the smallest squared error on the validation events. Users
    are folded in from the history before the period (``Factors.fold_in``), as in serving. The best one is fitted again
    with each further number of consumption features, and again the smallest error wins. The result is the model of the
    training period. ``Factors.facts`` has all errors.

    Args:
        data: prepared data.
        options: method, ranks, ridges and the rest.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: no event has a grade, or no validation event has one and there are several models.
    """
    mean, count = mean_grade(data, options.period)
    numbers, search = options.consumption_grid, len(options.grid) > 1 or len(options.consumption or ()) > 1
    models = len(options.grid) + len(numbers) - 1
    passes = models * options.sweeps + consumption.PASSES * sum(number > 0 for number in numbers) + 1
    events = sum(int(shard["targets"]) for shard in data.manifest["shards"][options.period])
    with tqdm(
        total=events * passes, desc="factorize", unit="event", unit_scale=True, disable=None if progress else True
    ) as bar:
        fit = _Fitting(data, mean, options, bar.update)
        trials = [fit(rank, ridge, numbers[0]) for rank, ridge in options.grid]
        compared = [trial.model for trial in trials] if options.period == "train" else []
        errors, targets = validation_errors(data, compared) if compared else ([], 0)
        if not targets and search:
            raise RecpoError(
                f"{data.root}: no validation event has a grade, so nothing says which of the {models} models is best: "
                "give one rank and one number of consumption features, and with the method als one ridge",
                code="empty",
            )
        if targets and len(numbers) > 1:
            best = trials[errors.index(min(errors))]
            further = [fit(best.rank, best.ridge, number) for number in numbers[1:]]
            errors += validation_errors(data, [trial.model for trial in further])[0]
            trials += further
        chosen = trials[errors.index(min(errors)) if targets else 0]
        factors = chosen.finish(bar.update)
    tried = [
        {"rank": trial.rank, "ridge": trial.ridge, "consumption": trial.consumption, "squared_error": error}
        for trial, error in zip(trials, errors if targets else [None] * len(trials), strict=True)
    ]
    facts = {"options": plain(options), "events": count, "validation_events": targets, "tried": tried}
    return replace(factors, facts=facts | {"consumption": chosen.consumption})


class _Trial(NamedTuple):
    """A fitted model that folds in and predicts, and a function that adds the training users."""

    rank: int
    ridge: float | None
    consumption: int
    model: Factors
    finish: Callable[[Callable[[int], object]], Factors]


class _Fitting:
    """Fits models of one mean and one set of options; features of consumption are computed once."""

    def __init__(self, data: Prepared, mean: float, options: FactorOptions, finished: Callable[[int], object]) -> None:
        self.data, self.mean, self.options, self.finished = data, mean, options, finished
        self._features = dict[int, ItemFeatures]()

    def __call__(self, rank: int, ridge: float | None, number: int) -> _Trial:
        data, mean, options = self.data, self.mean, self.options
        if ridge is None:
            features = self._features_of(number)
            fit = variational.fit_items(data, mean, rank, options, self.finished, options.period, features)
            model = variational.plain_factors(data, fit, mean, options)
            return _Trial(rank, None, number, model, partial(variational.finish, data, model, period=options.period))
        items = graded.fit_items(data, mean, rank, ridge, options, self.finished)
        model = graded.plain_factors(data, items, mean, ridge, options)
        return _Trial(rank, ridge, 0, model, partial(graded.finish, data, items, mean, ridge, options))

    def _features_of(self, number: int) -> ItemFeatures:
        if number not in self._features:
            parts = partial(chunks, self.data, self.finished, self.options.period)
            self._features[number] = consumption.consumed(parts, self.data.num_items, number, self.options.seed)
        return self._features[number]


def validation_batches(data: Prepared, max_history: int, max_users: int | None = None) -> Iterator[EvaluationBatch]:
    """The users of the validation period, each with the history before it."""
    users = HeldOutBatches(data, "valid", max_history, _USERS_PER_BATCH, Rank(), max_users)
    return iter(users) if data.num_shards("valid") else iter(())


def validation_errors(data: Prepared, models: list[Factors]) -> tuple[list[float], int]:
    """Mean squared error of every model on the graded validation events, and the number of these events.

    Args:
        data: prepared data.
        models: with equal ``max_history``.
    """
    sums, count = [0.0] * len(models), 0
    for batch in validation_batches(data, models[0].max_history, VALIDATION_USERS):
        slates = batch.feedback.slates
        assert slates.grade is not None
        known = slates.mask & ~slates.grade.isnan()
        count += int(known.sum())
        for number, model in enumerate(models):
            users = model.fold_in(batch.feedback.histories)
            predicted = model.grades(users, slates.item_ids)
            sums[number] += float((predicted - slates.grade)[known].double().square().sum())
    return [total / max(1, count) for total in sums], count

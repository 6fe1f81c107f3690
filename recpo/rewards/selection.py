"""Fits a factor model and selects its rank, ridge and prior on the validation period."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

from tqdm import tqdm

from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch
from recpo.batches.held_out import HeldOutBatches, Rank
from recpo.log.prepared import Prepared
from recpo.rewards import graded, variational
from recpo.rewards.factors import Factors, plain
from recpo.rewards.graded import FactorOptions, chunks, mean_grade
from recpo.rewards.variational import PriorFeatures

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
    are folded in from the history before the period (``Factors.fold_in``), as in serving. The first rank is fitted with
    every prior (``FactorOptions.priors``), and the other ranks with the best one. The result is the model of the
    training period. ``Factors.facts`` has all errors.

    Args:
        data: prepared data.
        options: method, ranks, ridges and the rest.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: no event has a grade, or no validation event has one and there are several models.
    """
    mean, count = mean_grade(data, options.period)
    schema = data.feature_schema.item
    if options.item_features and not schema:
        raise RecpoError(
            f"{data.root} has no features of items: prepare the log with a table of items, or leave item_features out",
            code="missing_value",
            field="item_features",
        )
    priors = options.priors(has_features=bool(schema))
    models, asked = len(options.grid) + len(priors) - 1, len(options.grid) * len(options.consumption or (0,))
    passes = models * options.sweeps + 1 + variational.TABLE_PASSES * any(joined for _, joined in priors)
    passes += variational.CONSUMPTION_PASSES * len({number for number, _ in priors} - {0})
    events = sum(int(shard["targets"]) for shard in data.manifest["shards"][options.period])
    with tqdm(
        total=events * passes, desc="factorize", unit="event", unit_scale=True, disable=None if progress else True
    ) as bar:
        fit = _Fitting(data, mean, options, bar.update)
        first, *others = options.grid
        best = fit(*first, *priors[0])
        errors, targets = validation_errors(data, [best.model]) if options.period == "train" else ([], 0)
        if not targets and asked > 1:
            raise RecpoError(
                f"{data.root}: no validation event has a grade, so nothing says which of {asked} models is best: give "
                "one rank and one number of consumption features, and with the method als one ridge",
                code="empty",
            )
        best = best._replace(error=errors[0] if targets else None)
        tried = [best.facts]

        def improved(settings: list[tuple[int, float | None, int, bool]]) -> _Trial:
            """The best of the models so far and further ones; the others leave memory."""
            trials = [fit(*one) for one in settings]
            errors, _ = validation_errors(data, [trial.model for trial in trials])
            trials = [trial._replace(error=error) for trial, error in zip(trials, errors, strict=True)]
            tried.extend(trial.facts for trial in trials)
            return min(best, *trials, key=lambda trial: trial.error or 0.0)

        if targets and len(priors) > 1:
            best = improved([(*first, *prior) for prior in priors[1:]])
        if others:
            best = improved([(*other, best.consumption, best.item_features) for other in others])
        factors = best.finish(bar.update)
    facts = {"options": plain(options), "events": count, "validation_events": targets, "tried": tried}
    return replace(factors, facts=facts | {"chosen": best.facts})


class _Trial(NamedTuple):
    """A fitted model that folds in and predicts, and a function that adds the training users."""

    rank: int
    ridge: float | None
    consumption: int
    item_features: bool
    model: Factors
    finish: Callable[[Callable[[int], object]], Factors]
    error: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What was tried, and the squared error on the validation period; None = unknown."""
        names = ("rank", "ridge", "consumption", "item_features")
        return {name: getattr(self, name) for name in names} | {"squared_error": self.error}


class _Fitting:
    """Fits models of one mean and one set of options; features of priors are computed once."""

    def __init__(self, data: Prepared, mean: float, options: FactorOptions, finished: Callable[[int], object]) -> None:
        self.data, self.mean, self.options, self.finished = data, mean, options, finished
        self._parts = partial(chunks, data, finished, options.period)
        self._consumption = dict[int, PriorFeatures]()

    def __call__(self, rank: int, ridge: float | None, consumption: int, item_features: bool) -> _Trial:
        data, mean, options = self.data, self.mean, self.options
        if ridge is None:
            features = self._features(consumption, item_features)
            fit = variational.fit_items(data, mean, rank, options, self.finished, options.period, features)
            model = variational.plain_factors(data, fit, mean, options)
            finish = partial(variational.finish, data, model, period=options.period)
            return _Trial(rank, None, consumption, item_features, model, finish)
        items = graded.fit_items(data, mean, rank, ridge, options, self.finished)
        model = graded.plain_factors(data, items, mean, ridge, options)
        return _Trial(rank, ridge, 0, False, model, partial(graded.finish, data, items, mean, ridge, options))

    def _features(self, number: int, item_features: bool) -> PriorFeatures:
        if number not in self._consumption:
            made = variational.of_consumption(self._parts, self.data.num_items, number, self.options.seed)
            self._consumption[number] = made
        return self._consumption[number].beside(self._table) if item_features else self._consumption[number]

    @cached_property
    def _table(self) -> PriorFeatures:
        features = self.data.item_features().map(lambda column: column[1:])
        return variational.of_table(self._parts, self.data.feature_schema.item, features, self.options.seed)


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

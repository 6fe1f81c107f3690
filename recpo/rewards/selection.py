"""Fits a factor model and selects its rank and ridge on the validation period."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from tqdm import tqdm

from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch
from recpo.batches.held_out import HeldOutBatches, Rank
from recpo.log.prepared import Prepared
from recpo.rewards import graded, variational
from recpo.rewards.factors import Factors, plain
from recpo.rewards.graded import FactorOptions, mean_grade

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
    are folded in from the history before the period (``Factors.fold_in``), as in serving. The result is the model of
    the training period. ``Factors.facts`` has all errors.

    Args:
        data: prepared data.
        options: method, ranks, ridges and the rest.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: no event has a grade, or no validation event has one and there are several models.
    """
    mean, count = mean_grade(data, options.period)
    grid = options.grid
    events = sum(int(shard["targets"]) for shard in data.manifest["shards"][options.period])
    total = events * (len(grid) * options.sweeps + 1)
    with tqdm(total=total, desc="factorize", unit="event", unit_scale=True, disable=None if progress else True) as bar:
        trials = [_fit(data, mean, rank, ridge, options, bar.update) for rank, ridge in grid]
        compared = [trial.model for trial in trials] if options.period == "train" else []
        errors, targets = validation_errors(data, compared) if compared else ([], 0)
        if not targets and len(grid) > 1:
            raise RecpoError(
                f"{data.root}: no validation event has a grade, so nothing says which of the {len(grid)} models is "
                "best: give one rank, and with the method als one ridge",
                code="empty",
            )
        best = min(range(len(grid)), key=lambda number: errors[number]) if targets else 0
        factors = trials[best].finish(bar.update)
    return replace(factors, facts=_facts(options, errors, targets, count))


class _Trial(NamedTuple):
    """A fitted model that folds in and predicts, and a function that adds the training users."""

    model: Factors
    finish: Callable[[Callable[[int], object]], Factors]


def _fit(
    data: Prepared,
    mean: float,
    rank: int,
    ridge: float | None,
    options: FactorOptions,
    finished: Callable[[int], object],
) -> _Trial:
    if ridge is None:
        fit = variational.fit_items(data, mean, rank, options, finished, options.period)
        model = variational.plain_factors(data, fit, mean, options)
        return _Trial(model, partial(variational.finish, data, model, period=options.period))
    items = graded.fit_items(data, mean, rank, ridge, options, finished)
    model = graded.plain_factors(data, items, mean, ridge, options)
    return _Trial(model, partial(graded.finish, data, items, mean, ridge, options))


def _facts(options: FactorOptions, errors: list[float], targets: int, count: int) -> dict[str, Any]:
    known = errors if targets else [None] * len(options.grid)
    return {
        "options": plain(options),
        "events": count,
        "validation_events": targets,
        "tried": [
            {"rank": rank, "ridge": ridge, "squared_error": error}
            for (rank, ridge), error in zip(options.grid, known, strict=True)
        ],
    }


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

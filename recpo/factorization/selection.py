"""Fits a factor model and chooses its rank and ridge on the validation period."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch
from tqdm import tqdm

from recpo.data.held_out import HeldOutBatches, Rank
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.factorization.factors import Factors
from recpo.factorization.graded import FactorOptions, Items, finish, fit_items, mean_grade
from recpo.factorization.model_file import plain
from recpo.types import EvaluationBatch

_USERS_PER_BATCH: Final = 256
#: validation users, evenly spaced, at most; enough to tell squared errors apart
VALIDATION_USERS: Final = 20_000


def fit_factors(
    data: Prepared,
    options: FactorOptions = FactorOptions(),  # noqa: B008 frozen
    *,
    progress: bool = False,
) -> Factors:
    """Fits the graded factor model of ``recpo.factorization.graded`` on the training period.

    Of several ranks and ridges that with the smallest squared error on the validation events is taken, every user
    folded in from the history before the period (``Factors.fold_in``, as it is served). The model stays the one of the
    training period. ``Factors.facts`` has all errors.

    Args:
        data: prepared data.
        options: ranks, ridges and the rest.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: no training event has a grade, or no validation event has one and there is something to choose.
    """
    mean, count = mean_grade(data)
    grid = list(product(options.ranks, options.ridges))
    events = sum(int(shard["rows"]) for shard in data.manifest["shards"]["train"])
    total = events * (len(grid) * options.sweeps + 1)
    with tqdm(total=total, desc="factorize", unit="event", unit_scale=True, disable=None if progress else True) as bar:
        fitted = [fit_items(data, mean, rank, ridge, options, bar.update) for rank, ridge in grid]
        candidates = [_plain(data, items, mean, ridge, options) for items, (_, ridge) in zip(fitted, grid, strict=True)]
        errors, targets = validation_errors(data, candidates)
        if not targets and len(grid) > 1:
            raise RecpoError(
                f"{data.root}: no validation event has a grade, so nothing says which of the {len(grid)} ranks and "
                "ridges is best: give one rank and one ridge"
            )
        best = min(range(len(grid)), key=lambda number: errors[number]) if targets else 0
        factors = finish(data, fitted[best], mean, grid[best][1], options, bar.update)
    return replace(factors, facts=_facts(options, grid, errors, targets, count))


def _plain(data: Prepared, items: Items, mean: float, ridge: float, options: FactorOptions) -> Factors:
    """What folds in and predicts; no users of the training period, no bounds."""
    rows, bias = torch.from_numpy(items.rows[:, :-1]).float(), torch.from_numpy(items.bias).float()
    max_history = options.max_history or int(data.manifest["max_context"])
    return Factors(mean, rows, bias, ridge, None, None, 0.0, data.catalog_checksum, max_history)


def _facts(
    options: FactorOptions, grid: list[tuple[int, float]], errors: list[float], targets: int, count: int
) -> dict[str, Any]:
    known = errors if targets else [None] * len(grid)
    tried = [
        {"rank": rank, "ridge": ridge, "squared_error": error} for (rank, ridge), error in zip(grid, known, strict=True)
    ]
    return {
        "options": plain(options),
        "train_events": count,
        "validation_events": targets,
        "tried": tried,
    }


def validation_batches(data: Prepared, max_history: int, max_users: int | None = None) -> Iterator[EvaluationBatch]:
    """The users of the validation period, each with the history before it."""
    users = HeldOutBatches(data, "valid", max_history, _USERS_PER_BATCH, Rank(), max_users)
    return iter(users) if data.num_shards("valid") else iter(())


def validation_errors(data: Prepared, models: list[Factors]) -> tuple[list[float], int]:
    """Mean squared error of every model on the graded validation events, and the number of those.

    Args:
        data: prepared data.
        models: of equal ``max_history``.
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

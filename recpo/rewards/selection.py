"""Fits a factor model and selects its rank, ridge and prior on the validation period."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from recpo.base.errors import RecpoError
from recpo.base.features import Reads, Side
from recpo.base.types import EvaluationBatch
from recpo.batches.slates import HeldOutBatches, Rank
from recpo.log.feature_columns import TableSide
from recpo.log.prepared import Prepared
from recpo.rewards import graded, prior_features, variational
from recpo.rewards.factors import Factors, plain
from recpo.rewards.graded import SIDE_OPTIONS, FactorOptions, Parts, chunks, mean_grade, of_some_users, repeated
from recpo.rewards.prior_features import CONSUMPTION_PASSES, TABLE_PASSES, PriorFeatures, UserTable

_USERS_PER_BATCH: Final = 256
# components of a table that are tried as factors; of large catalogs fewer: so many numbers are the covariances
_COMPONENTS: Final = (8, 32)
_MOST_NUMBERS: Final = 1 << 26
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
    every prior (``FactorOptions.priors``), then with the best one and the features of the users, and the other ranks
    with the best one of all. Then the features of the users are tried as their factors, and those of the items as
    theirs. If the factors of the best model say little, the first rank is fitted once more with a prior that is learned
    later, which prunes less (``recpo.rewards.variational``). The result is the model of the training period.
    ``Factors.facts`` has all errors; of a larger log, those of models of some users (``selection_events``).

    Args:
        data: prepared data.
        options: method, ranks, ridges and the rest.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: no event has a grade, or no validation event has one and there are several models.
    """
    mean, count = mean_grade(data, options.period)
    schema = data.feature_schema
    _validate_sides(data, options)
    priors, tries_users = options.priors(has_features=bool(schema.item)), options.tries_users(bool(schema.user))
    tries_factors, tries_items = tries_users and options.user_factors is None, options.tries_items(bool(schema.item))
    models = len(options.grid) + len(priors) - 1 + tries_users + len(_COMPONENTS) * (tries_factors + tries_items)
    asked = len(options.grid) * len(options.consumption or (0,))
    passes = models * options.sweeps + 1 + TABLE_PASSES * any(joined for _, joined in priors)
    passes += CONSUMPTION_PASSES * len({number for number, _ in priors} - {0})
    events = sum(int(shard["targets"]) for shard in data.manifest["shards"][options.period])
    tries = models > 1 and options.period == "train" and options.method == "variational"
    share = min(1.0, options.selection_events / events) if tries else 1.0
    total = round(events * (passes if share == 1.0 else share * passes + options.sweeps + CONSUMPTION_PASSES))
    with tqdm(total=total, desc="factorize", unit="event", unit_scale=True, disable=None if progress else True) as bar:
        every = repeated(partial(chunks, data, bar.update, options.period), bar.update)
        some = every if share == 1.0 else repeated(partial(of_some_users, every, share), bar.update)
        fit = _Fitting(data, mean, options, some)
        first, *others = options.grid
        warm_up = options.warm_up or variational.WARM_UP
        given = options.user_factors or 0, options.item_factors or 0
        reads_users = bool(options.user_features or options.user_factors)
        settings = [_Setting(*first, *prior, reads_users, *given, warm_up) for prior in priors]
        best = fit(settings[0])
        errors, targets = validation_errors(data, [best.model]) if options.period == "train" else ([], 0)
        if not targets and asked > 1:
            raise RecpoError(
                f"{data.root}: no validation event has a grade, so nothing says which of {asked} models is best: give "
                "one rank and one number of consumption features, and with the method als one ridge",
                code="empty",
            )
        best = best._replace(error=errors[0] if targets else None)
        tried = [best.facts]

        def improved(settings: list[_Setting]) -> _Trial:
            """The best of the models so far and further ones; the others leave memory."""
            trials = [fit(one) for one in settings]
            errors, _ = validation_errors(data, [trial.model for trial in trials])
            trials = [trial._replace(error=error) for trial, error in zip(trials, errors, strict=True)]
            tried.extend(trial.facts for trial in trials)
            return min(best, *trials, key=lambda trial: trial.error or 0.0)

        if targets and len(priors) > 1:
            best = improved(settings[1:])
        if targets and tries_users:
            best = improved([best.setting._replace(user_features=True)])
        if others:
            best = improved([best.setting._replace(rank=rank, ridge=ridge) for rank, ridge in others])
        if targets and tries_factors:
            joined = any(joined for _, joined in priors)
            best = improved([_Setting(0, None, 0, joined, True, count, 0, warm_up) for count in _COMPONENTS])
        if targets and tries_items:
            users = best.setting.user_features and not best.setting.user_factors
            best = improved([_Setting(0, None, 0, True, users, 0, count, warm_up) for count in _COMPONENTS])
        learns = not (best.setting.user_factors or best.setting.item_factors)
        if targets and learns and options.tries_late_priors and variational.is_pruned(best.model):
            best = improved([best.setting._replace(rank=first[0], warm_up=variational.LATE_WARM_UP)])
        if share < 1.0:
            best = _Fitting(data, mean, options, every)(best.setting)._replace(error=best.error)
        factors = best.finish(bar.update)
    facts = {"options": plain(options), "events": count, "validation_events": targets, "tried": tried}
    return replace(factors, facts=facts | {"chosen": best.facts})


def _validate_sides(data: Prepared, options: FactorOptions) -> None:
    """Raises if features are asked for that the data do not have."""
    for name in SIDE_OPTIONS:
        side: Side = "item" if name.startswith("item") else "user"
        if getattr(options, name) and not data.feature_schema.of(side):
            raise RecpoError(
                f"{data.root} has no features of {side}s: prepare the log with a table of {side}s, or leave {name} out",
                code="missing_value",
                field=name,
            )


class _Setting(NamedTuple):
    """What is tried: a rank, a ridge (None = it is learned), what prior means depend on, and when they are learned.

    Where components of the features of the users, or of the items, are their factors, the rank is 0: none is learned.
    """

    rank: int
    ridge: float | None
    consumption: int
    item_features: bool
    user_features: bool
    user_factors: int
    item_factors: int
    warm_up: int


class _Trial(NamedTuple):
    """A fitted model that folds in and predicts, and a function that adds the training users."""

    setting: _Setting
    model: Factors
    finish: Callable[[Callable[[int], object]], Factors]
    error: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What was tried, and the squared error on the validation period; None = unknown."""
        named = self.setting._asdict()
        if self.setting.ridge is not None:
            del named["warm_up"]  # no prior is learned
        return named | {"squared_error": self.error}


class _Fitting:
    """Fits models of one mean and one set of options to some events; features of priors are computed once."""

    def __init__(self, data: Prepared, mean: float, options: FactorOptions, parts: Parts) -> None:
        self.data, self.mean, self.options, self._parts = data, mean, options, parts
        self._consumption = dict[int, PriorFeatures]()

    def __call__(self, setting: _Setting) -> _Trial:
        data, mean, options, rank, ridge = self.data, self.mean, self.options, setting.rank, setting.ridge
        if ridge is None:
            features = self._features(setting)
            asked = replace(options, warm_up=setting.warm_up)
            of_table: TableSide | None = None
            if setting.user_factors and features.users is not None:
                of_table, rank = "user", features.num_user_columns - features.history.shape[1]
            elif setting.item_factors and features.table is not None:
                of_table, rank = "item", features.items.shape[1]
            fit = variational.fit_items(self._parts, data.num_items, mean, rank, asked, features, of_table=of_table)
            model = variational.plain_factors(data, fit, mean, options)
            return _Trial(setting, model, partial(variational.finish, data, model, period=options.period))
        items = graded.fit_items(self._parts, data.num_items, mean, rank, ridge, options)
        model = graded.plain_factors(data, items, mean, ridge, options)
        return _Trial(setting, model, partial(graded.finish, data, items, model, options))

    def _features(self, setting: _Setting) -> PriorFeatures:
        number = setting.consumption
        if number not in self._consumption:
            made = prior_features.of_consumption(self._parts, self.data.num_items, number, self.options.seed)
            self._consumption[number] = made
        found, most = self._consumption[number], math.isqrt(_MOST_NUMBERS // self.data.num_items)
        if setting.item_factors:
            found = self._item_table.largest(min(setting.item_factors, most))
        elif setting.item_features:
            found = found.beside(self._item_table)
        users = self._user_table if setting.user_features else None
        if users is not None and setting.user_factors:
            users = users.largest(min(setting.user_factors, most))
        return found._replace(users=users)

    @cached_property
    def _item_table(self) -> PriorFeatures:
        features = self.data.item_features().map(lambda column: column[1:])
        return prior_features.of_table(self._parts, self.data.feature_schema.item, features, self.options.seed)

    @cached_property
    def _user_table(self) -> UserTable | None:
        features = self.data.user_features().tensors()
        return prior_features.of_user_table(self.data.feature_schema.user, features, self.options.seed)


def validation_batches(
    data: Prepared,
    max_history: int,
    max_users: int | None = None,
    reads: Reads = Reads(),  # noqa: B008  immutable
) -> Iterator[EvaluationBatch]:
    """The users of the validation period, each with the history before it."""
    users = HeldOutBatches(data, "valid", max_history, _USERS_PER_BATCH, Rank(), max_users, reads)
    return iter(users) if data.num_shards("valid") else iter(())


def close_to_best(values: Tensor) -> Tensor:
    """Which rows of ``values [N, U]`` have a mean at most one standard error below the best one's, paired by user.

    All of them if there are fewer than two users.
    """
    if values.shape[1] < 2:
        return torch.ones(len(values), dtype=torch.bool)
    loss = values[values.mean(1).argmax()] - values
    return loss.mean(1) <= loss.std(1) / loss.shape[1] ** 0.5


def validation_errors(data: Prepared, models: list[Factors]) -> tuple[list[float], int]:
    """Mean squared error of every model on the graded validation events, and the number of these events.

    Args:
        data: prepared data.
        models: with equal ``max_history``.
    """
    sums, count = [0.0] * len(models), 0
    reads = Reads(user=any(model.user_features for model in models))
    for batch in validation_batches(data, models[0].max_history, VALIDATION_USERS, reads):
        slates = batch.feedback.slates
        assert slates.grade is not None
        known = slates.mask & ~slates.grade.isnan()
        count += int(known.sum())
        for number, model in enumerate(models):
            users = model.fold_in(batch.feedback.histories)
            predicted = model.grades(users, slates.item_ids)
            sums[number] += float((predicted - slates.grade)[known].double().square().sum())
    return [total / max(1, count) for total in sums], count

"""The search of ``fit``: variants of the leading recipe, in what is left of the budget."""

import math
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from recpo.evaluation.decision import leaderboard
from recpo.training import recipes
from recpo.verbs import fit_steps
from recpo.verbs.fit_steps import FitSteps

_SEARCH: Final = "the search"
_MOST_TRIALS: Final = 20
_STARTUP_TRIALS: Final = 4  # drawn at random before the sampler has a model
_DIGITS: Final = 3


class Dimension(NamedTuple):
    """An option that is searched on a logarithmic scale between two values, or among choices; and its default."""

    option: str
    default: float | int
    low: float = math.nan
    high: float = math.nan
    choices: tuple[float | int, ...] = ()


#: What is searched of every recipe. Defaults are those of its configuration; those that follow from the log go before.
SPACES: Final[Mapping[str, tuple[Dimension, ...]]] = {
    recipes.PRETRAIN: (
        Dimension("optimizer.init_args.lr", 0.001, 0.0003, 0.005),
        Dimension("policy.init_args.dropout", 0.2, choices=(0.0, 0.1, 0.2, 0.35, 0.5)),
        Dimension("policy.init_args.dim", 64, choices=(32, 64, 128)),
    ),
    recipes.PRETRAIN_RANKING: (
        Dimension("optimizer.init_args.lr", 0.002, 0.0005, 0.005),
        Dimension("policy.init_args.dropout", 0.5, 0.05, 0.7),
        Dimension("policy.init_args.dim", 128, choices=(64, 128, 256)),
    ),
    recipes.MPO: (
        Dimension("objective.init_args.temperature", 0.035, 0.0125, 0.1),
        Dimension("reward.init_args.lower_bound", 1.0, choices=(0.0, 0.5, 1.0, 2.0)),
        Dimension("optimizer.init_args.lr", 0.01, 0.003, 0.03),
    ),
    recipes.MPO_MODEL: (
        Dimension("objective.init_args.temperature", 0.05, 0.02, 0.3),
        Dimension("optimizer.init_args.lr", 0.01, 0.003, 0.03),
    ),
    recipes.GSPO: (
        Dimension("optimizer.init_args.lr", 0.003, 0.001, 0.01),
        Dimension("objective.init_args.kl_coef", 0.5, 0.1, 1.0),
    ),
    recipes.GBPO: (
        Dimension("optimizer.init_args.lr", 0.0005, 0.0001, 0.003),
        Dimension("anchor_coef", 0.0, choices=(0.0, 0.1, 0.3, 1.0)),
    ),
    recipes.VALUE_DPO_LIKELIHOOD: (
        Dimension("optimizer.init_args.lr", 0.002, 0.0005, 0.005),
        Dimension("objective.init_args.beta", 0.1, 0.03, 0.5),
        Dimension("objective.init_args.nll_coef", 0.1, 0.03, 0.5),
    ),
    recipes.VALUE_DPO: (
        Dimension("optimizer.init_args.lr", 0.0005, 0.0001, 0.003),
        Dimension("objective.init_args.beta", 0.3, 0.03, 1.0),
        Dimension("objective.init_args.nll_coef", 0.0, choices=(0.0, 0.03, 0.1, 0.3)),
    ),
}


def search(steps: FitSteps, reserve: float) -> list[str]:
    """Trains variants of the leading recipe while the budget lasts; returns their names.

    The sampler is Optuna's tree-structured Parzen estimator with the seed of the fit, so one seed and one number of
    trials give the same trials. Without Optuna (``pip install recpo[search]``) nothing is searched, which is said.

    Args:
        steps: the steps so far.
        reserve: seconds to keep for what follows.
    """
    leading = _leading_recipe(steps)
    if steps.plan.trials == 0 or leading is None:
        return []
    try:
        import optuna
    except ImportError:
        steps.plan.failed[_SEARCH] = "Optuna is not installed (pip install 'recpo[search]')"
        steps.say(f"no search: {steps.plan.failed[_SEARCH]}")
        return []
    steps.plan.failed.pop(_SEARCH, None)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=steps.options.seed, n_startup_trials=_STARTUP_TRIALS)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    log_scale, choice = optuna.distributions.FloatDistribution, optuna.distributions.CategoricalDistribution
    recipe = recipes.RECIPES[leading]
    known = steps.options_of(recipe)
    defaults = {one.option: known.get(one.option, one.default) for one in SPACES[leading]}
    space: dict[str, Any] = {
        one.option: choice(sorted({*one.choices, defaults[one.option]}))
        if one.choices
        else log_scale(one.low, one.high, log=True)
        for one in SPACES[leading]
    }
    study.add_trial(optuna.create_trial(params=defaults, distributions=space, value=_value(steps, leading)))
    found: list[str] = []
    number = 0
    longest = steps.plan.seconds_of(steps.root / recipes.RUNS / leading) or 0.0
    while number < (_MOST_TRIALS if steps.plan.trials is None else steps.plan.trials):
        if steps.plan.trials is None and steps.left - reserve < 1.2 * longest:
            break
        number += 1
        began, trial = time.monotonic(), study.ask(space)
        name = f"{leading}-{number}"
        values = trial.params.items()
        changed = {key: float(f"{one:.{_DIGITS}g}") if isinstance(one, float) else one for key, one in values}
        if steps.train(name, recipe, changed):
            study.tell(trial, _value(steps, name))
            found.append(name)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        longest = max(longest, time.monotonic() - began)
    steps.plan.trials = number
    steps.save()
    return found


def _leading_recipe(steps: FitSteps) -> str | None:
    """The trained recipe with the best value, tilted or not; None if only pre-training could be repeated for others."""
    trained, failed = steps.plan.recipes, steps.plan.failed
    for row in leaderboard(steps.measured, steps.criterion, steps.options.k):
        recipe = row.name.removeprefix(fit_steps.TILTED)
        if recipe in trained:
            # what lifts a tilted pre-trained policy is the reward model, which MPO trains toward
            by_reward = recipe == recipes.PRETRAIN and recipes.MPO in trained and recipes.MPO not in failed
            return recipes.MPO if by_reward else recipe
    return None


def _value(steps: FitSteps, name: str) -> float:
    value = steps.value(name)
    return value if math.isfinite(value) else 0.0

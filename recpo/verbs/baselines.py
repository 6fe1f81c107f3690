"""Baselines and factor models as policies that bundles serve."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, get_args

import torch

from recpo.artifacts import kind_of
from recpo.base.errors import RecpoError
from recpo.evaluation.baselines import BaselineCache, item_scores
from recpo.evaluation.contenders import Baseline, BaselineOptions, fitted_model
from recpo.log.prepared import Prepared
from recpo.policies.baseline import BaselinePolicy, EasePolicy, FactorPolicy, ImplicitPolicy, PopularityPolicy
from recpo.rewards.ease import EASE
from recpo.rewards.factors import Factors
from recpo.rewards.implicit import ImplicitALS
from recpo.serving.export import PolicyFacts
from recpo.training.tilting import assign_factors

_NOT_SERVED: Final = ("cooccurrence", "random")
#: Names of the baselines that a bundle can serve.
SERVED: Final[tuple[Baseline, ...]] = tuple(name for name in get_args(Baseline) if name not in _NOT_SERVED)


class ServedBaseline(NamedTuple):
    """A baseline as a policy: its name, the policy, and the options that rebuild it."""

    name: str
    policy: BaselinePolicy
    options: dict[str, Any]

    def facts(self, data: Prepared) -> PolicyFacts:
        """What a bundle keeps of it."""
        origin = {
            "run": self.name,
            "baseline": self.name,
            "catalog_checksum": data.catalog_checksum,
            "user_ids": data.user_id_type,
            "item_column": data.item_column,
        }
        return PolicyFacts(data.feedback, options=self.options, origin=origin)


def is_baseline(named: object) -> bool:
    """Whether an export names a baseline or factors instead of a run."""
    return isinstance(named, Factors) or str(named) in get_args(Baseline) or kind_of(Path(str(named))) == "factors"


def served_baseline(
    named: Factors | Baseline | Path | str,
    data: Prepared,
    options: BaselineOptions = BaselineOptions(),  # noqa: B008  frozen
    cache: BaselineCache = BaselineCache(),  # noqa: B008  frozen
) -> ServedBaseline:
    """A baseline, fitted on the training period of ``data``, or a factor model, as a policy.

    Args:
        named: name of a baseline, factors, or their directory.
        data: the prepared data.
        options: options of the baselines.
        cache: where fitted ones are kept.

    Raises:
        RecpoError: a baseline that cannot be served, or factors of other items or feedback.
    """
    if str(named) in _NOT_SERVED:
        raise RecpoError(
            f"{named} is a yardstick of evaluations and cannot be served; a bundle serves {', '.join(SERVED)}, factors "
            "or a run",
            code="unsupported",
            field="run",
        )
    if str(named) in SERVED:
        return _of_name(cast(Baseline, str(named)), data, options, cache)
    factors = named if isinstance(named, Factors) else Factors.open(named)
    factors.validate_feedback(data.feedback, data.root)
    factors.validate_items(data.catalog_checksum, data.root)
    return _of_factors("factors" if isinstance(named, Factors) else Path(named).resolve().name, factors)


def _of_name(name: Baseline, data: Prepared, options: BaselineOptions, cache: BaselineCache) -> ServedBaseline:
    made: dict[str, Any]
    if name not in ("factorization", "implicit_als", "ease"):
        popular, scores = PopularityPolicy(data.num_items), item_scores(name, data, options.recency_half_life)
        popular.item_scores.copy_(torch.from_numpy(scores).double().add(1e-9).log())
        return ServedBaseline(name, popular, {})
    model = fitted_model(name, data, options, cache)
    if isinstance(model, Factors):
        return _of_factors(name, model)
    if isinstance(model, ImplicitALS):
        made = {one: getattr(model, one) for one in ("unobserved", "ridge", "nu", "max_history")}
        made["rank"] = model.item_factors.shape[1]
        implicit = ImplicitPolicy(data.num_items, **made)
        implicit.item_factors.copy_(model.item_factors)
        return ServedBaseline(name, implicit, made)
    assert isinstance(model, EASE)
    made = {"max_history": model.max_history}
    ease = EasePolicy(data.num_items, **made)
    ease.weights.copy_(model.weights)
    return ServedBaseline(name, ease, made)


def _of_factors(name: str, factors: Factors) -> ServedBaseline:
    policy = FactorPolicy(factors.num_items, factors=factors.options)
    assign_factors(policy.factors, factors)
    return ServedBaseline(name, policy, {"factors": asdict(factors.options)})

"""The verb ``export``: writes a trained policy as a bundle for serving.

Baselines and factor models as policies that bundles serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, cast, get_args

import torch

from recpo.artifacts.checksums import kind_of
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import PolicyFeatures
from recpo.base.features import read_features
from recpo.evaluation.baselines import BaselineCache, item_scores
from recpo.evaluation.contenders import Baseline, BaselineOptions, fitted_model
from recpo.evaluation.evaluation import Evaluation
from recpo.log.id_map import IdMap
from recpo.log.prepared import ITEM_FEATURES, Prepared
from recpo.policies.baseline import BaselinePolicy, EasePolicy, FactorPolicy, ImplicitPolicy, PopularityPolicy
from recpo.rewards.factors import Factors
from recpo.rewards.implicit import EASE, ImplicitALS
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle, grows
from recpo.serving.of_runs import evaluation_facts, facts_of
from recpo.serving.refresh import EncodedItems, Refreshed, refresh_bundle
from recpo.training.run import Run
from recpo.training.tilting import assign_factors
from recpo.verbs.verb import Verb, function_of

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
        features = PolicyFeatures(
            data.fitted_features("item") if grows(self.policy) else None,
            data.fitted_features("user") if self.policy.reads_user else None,
        )
        return PolicyFacts(data.feedback, features, self.options, origin)


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
    factors.validate_features(data, ("item", "user"))
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


@dataclass(frozen=True)
class Export(BundleOptions, Verb[Bundle | Refreshed]):
    """Writes a trained policy as a bundle: an ONNX program, weights, items, a manifest with checksums.

    Only the run is needed; a baseline or a factor model is exported with its prepared data. Every engine is compared
    with the policy before the bundle appears. With ``refresh``, an existing bundle gets today's candidates in seconds:
    items that ``items`` does not contain, or marks as retired, are no longer listed; new items get a vector from their
    features, if the policy reads item features; otherwise they are counted and left out.

    Raises:
        RecpoError: options that do not fit each other; a run, factors or a bundle that cannot be opened or exported; no
            table of items, no candidate left, features that differ from the bundle's, or new items for a policy of
            semantic ids; ``out`` exists.
    """

    first_day: ClassVar = ("run", "out", "k", "prepared", "evaluation", "refresh", "items", "overwrite")

    run: Run | Factors | Path | str | None = None
    """run directory written by ``recpo train`` or ``recpo tilt``. With ``prepared`` also factors written by ``recpo
    factorize``, or the name of a baseline of ``recpo evaluate``: popularity, positives, item_rate, recency,
    factorization, implicit_als or ease"""
    _: KW_ONLY
    prepared: Prepared | Path | str | None = None
    """prepared data, for a baseline or factors"""
    out: Path | str
    """output bundle directory"""
    refresh: Bundle | Path | str | None = None
    """existing bundle to update, instead of a run"""
    items: Path | str | None = None
    """with ``refresh``, ``items.parquet`` of prepared data, or a Parquet file with ``item_id`` (or your own name of
    it), the columns of the features and, if items are retired, ``retired``. The bundle lists an item from
    ``available_from`` on and before ``available_until``, where the file has these columns (times, or milliseconds
    since 1970)"""
    checkpoint: Literal["best", "last"] = "best"
    """which checkpoint of the run"""
    compiled: Path | str | None = None
    """also write this file, the program as machine code for machines like this one (torch's AOTInductor)"""
    baseline_cache: Path | str | None = None
    """directory of fitted baselines, as in ``recpo evaluate``; null = a baseline is fitted again"""
    evaluation: Evaluation | Path | str | None = None
    """directory written by ``recpo evaluate`` with this run as a contender; its metrics, and those of baselines, go
    into the model card"""
    overwrite: bool = False
    """replace ``out`` if it is a bundle"""
    trust: Sequence[str] = ()
    """packages, in addition to recpo, whose classes the configuration of the run may name"""

    def execute(self) -> Bundle | Refreshed:
        """Writes the bundle of a run, or today's bundle from an existing one."""
        if self.refresh is not None and self.items is not None and self.run is None:
            root = self.refresh.root if isinstance(self.refresh, Bundle) else Path(self.refresh)
            encoded = _encoded_items(table := Path(self.items))
            return refresh_bundle(root, table, Path(self.out), encoded=encoded, overwrite=self.overwrite)
        if self.run is None or self.refresh is not None or self.items is not None:
            raise RecpoError(
                "export: give --run RUN, or --refresh BUNDLE and --items FILE", field="run", code="missing_option"
            )
        if self.compiled is not None and Path(self.compiled).exists() and not self.overwrite:
            raise RecpoError(
                f"{self.compiled} exists already: name another file for compiled, or set overwrite",
                field="compiled",
                code="exists",
            )
        if isinstance(self.run, Factors) or is_baseline(self.run):
            self._export_baseline(self.run)
        else:
            self._export_run(Run.open(self.run, self.trust))
        bundle = Bundle.open(Path(self.out))
        if self.compiled is not None:
            from recpo.serving.compiled import write_compiled  # importing Inductor takes seconds

            write_compiled(bundle.root, self.compiled, overwrite=self.overwrite)
        return bundle

    def _export_run(self, run: Run) -> None:
        policy = run.policy(self.checkpoint)
        facts = facts_of(run, policy, self.checkpoint, self._measured(run.root.resolve().name))
        self._write(policy, run.items, facts, run.root)

    def _export_baseline(self, named: Factors | Run | Path | str) -> None:
        if self.prepared is None:
            raise RecpoError(
                f"export: {named} is a baseline or a factor model, which does not know the items' ids: name the data "
                "with --prepared",
                field="prepared",
                code="missing_option",
            )
        assert not isinstance(named, Run)
        data = Prepared.open(self.prepared)
        kept = None if self.baseline_cache is None else Path(self.baseline_cache)
        served = served_baseline(named, data, cache=BaselineCache(kept, kept))
        facts = served.facts(data)
        measured = self._measured(served.name)
        facts = facts if measured is None else replace(facts, card={"evaluation": measured})
        self._write(served.policy, data.item_ids(), facts, data.root)

    def _measured(self, name: str) -> dict[str, Any] | None:
        """The metrics of the exported contender, for the model card."""
        if self.evaluation is None:
            return None
        given = self.evaluation
        evaluation = given if isinstance(given, Evaluation) else Evaluation.open(given)
        return evaluation_facts(evaluation.document, name)

    def _write(self, policy: Policy, items: IdMap, facts: PolicyFacts, source: object) -> None:
        options = replace(self.part(BundleOptions), k=min(self.k, policy.num_items))
        export_bundle(policy, items, facts, Path(self.out), options, overwrite=self.overwrite, inputs=[source])


def _encoded_items(table: Path) -> EncodedItems | None:
    """The features beside ``items.parquet`` of prepared data; None for other tables and for data without features."""
    if table.name != "items.parquet" or kind_of(table.parent) != "prepared":
        return None
    data = Prepared.open(table.parent)
    features = data.feature_schema.item
    if not features:
        return None
    rows = data.table(ITEM_FEATURES, [feature.name for feature in features])
    return EncodedItems(data.fitted_features("item"), read_features(features, rows))


export = function_of(Export)

"""The verb ``export``: writes a trained policy, a baseline or a factor model as a bundle for serving."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from recpo.artifacts.checksums import kind_of
from recpo.artifacts.outputs import validate_output_file
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.features import read_features
from recpo.evaluation.contenders import BaselineOptions
from recpo.evaluation.evaluation import Evaluation
from recpo.log.id_map import IdMap
from recpo.log.prepared import ITEM_FEATURES, Prepared
from recpo.rewards.factors import Factors
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, evaluation_facts, export_bundle, facts_of, write_compiled
from recpo.serving.refresh import EncodedItems, Refreshed, refresh_bundle
from recpo.training.run import Run, data_facts
from recpo.verbs.contenders import ServedBaseline, is_baseline, served_baseline
from recpo.verbs.verb import Verb, function_of


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
    factorize``, or the name of a baseline of ``recpo evaluate``: popularity, personal_popularity, positives,
    item_rate, recency, recent_rate, segment_popularity, segment_rate, sequential_rules, factorization, implicit_als,
    allrank or ease"""
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
    baseline_options: BaselineOptions = BaselineOptions()  # noqa: RUF009  frozen
    """options of the baselines"""
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
        if self.compiled is not None:
            validate_output_file(self.compiled, overwrite=self.overwrite, inputs=[self.out])
        if isinstance(self.run, Factors) or is_baseline(self.run):
            self._export_baseline(self.run)
        else:
            run = Run.open(self.run, self.trust)
            policy = run.policy(self.checkpoint)
            facts = facts_of(run, policy, self.checkpoint, self._measured(run.root.resolve().name))
            self._write(policy, run.items, facts, run.root)
        bundle = Bundle.open(Path(self.out))
        if self.compiled is not None:
            write_compiled(bundle.root, self.compiled, overwrite=self.overwrite)
        return bundle

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
        served = served_baseline(named, data, self.baseline_cache, self.baseline_options)
        facts = _facts_of_baseline(served, data, self._measured(served.name))
        self._write(served.policy, data.item_ids(), facts, data.root)

    def _measured(self, name: str) -> dict[str, Any] | None:
        """The metrics of the exported contender, for the model card."""
        if self.evaluation is None:
            return None
        return evaluation_facts(Evaluation.open(self.evaluation).document, name)

    def _write(self, policy: Policy, items: IdMap, facts: PolicyFacts, source: object) -> None:
        options = replace(self.part(BundleOptions), k=min(self.k, policy.num_items))
        export_bundle(policy, items, facts, Path(self.out), options, overwrite=self.overwrite, inputs=[source])


def _facts_of_baseline(served: ServedBaseline, data: Prepared, measured: dict[str, Any] | None) -> PolicyFacts:
    """What a bundle keeps of a baseline."""
    origin = {
        "run": served.name,
        "baseline": served.name,
        "catalog_checksum": data.catalog_checksum,
        "user_ids": data.user_id_type,
        "item_column": data.item_column,
    }
    card = {"data": data_facts(data)} | ({} if measured is None else {"evaluation": measured})
    return PolicyFacts(data.feedback, served.features(data), served.options, origin, card, data.repeats)


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

"""The verb ``export``: writes a trained policy as a bundle for serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from recpo.artifacts import kind_of
from recpo.base.errors import RecpoError
from recpo.base.features import read_features
from recpo.evaluation.evaluation import Evaluation
from recpo.log.prepared import ITEM_FEATURES, Prepared
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, export_bundle
from recpo.serving.of_runs import evaluation_facts, facts_of
from recpo.serving.refresh import EncodedItems, Refreshed, refresh_bundle
from recpo.training.run import Run
from recpo.verbs.verb import Verb, function_of


@dataclass(frozen=True)
class Export(BundleOptions, Verb[Bundle | Refreshed]):
    """Writes a trained policy as a bundle: an ONNX program, weights, items, a manifest with checksums.

    Only the run is needed. Every engine is compared with the policy before the bundle appears. With ``refresh``, an
    existing bundle gets today's candidates in seconds: items that ``items`` does not contain, or marks as retired, are
    no longer listed; new items get a vector from their features, if the policy reads item features.
    """

    first_day: ClassVar = ("run", "out", "k", "evaluation", "refresh", "items", "overwrite")

    run: Run | Path | str | None = None
    """run directory written by ``recpo train``"""
    _: KW_ONLY
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
            return refresh(self.refresh, self.items, self.out, overwrite=self.overwrite)
        if self.run is None or self.refresh is not None or self.items is not None:
            raise RecpoError(
                "export: give --run RUN, or --refresh BUNDLE and --items FILE", field="run", code="missing_option"
            )
        run = Run.open(self.run, self.trust)
        if self.compiled is not None and Path(self.compiled).exists() and not self.overwrite:
            raise RecpoError(
                f"{self.compiled} exists already: name another file for compiled, or set overwrite",
                field="compiled",
                code="exists",
            )
        measured = None
        if self.evaluation is not None:
            given = self.evaluation
            evaluation = given if isinstance(given, Evaluation) else Evaluation.open(given)
            measured = evaluation_facts(evaluation.document, run.root.resolve().name)
        policy = run.policy(self.checkpoint)
        options = replace(self.part(BundleOptions), k=min(self.k, run.num_items))
        facts = facts_of(run, policy, self.checkpoint, measured)
        export_bundle(policy, run.items, facts, Path(self.out), options, overwrite=self.overwrite, inputs=[run.root])
        bundle = Bundle.open(Path(self.out))
        if self.compiled is not None:
            from recpo.serving.compiled import write_compiled  # importing Inductor takes seconds

            write_compiled(bundle.root, self.compiled, overwrite=self.overwrite)
        return bundle


def refresh(bundle: Bundle | Path | str, items: Path | str, out: Path | str, *, overwrite: bool = False) -> Refreshed:
    """Updates the candidates of an existing bundle, without its run and without training.

    Items that the table does not contain, or marks as retired, are no longer listed. New items get a vector from their
    features if the policy reads item features; otherwise they are counted and left out.

    Args:
        bundle: the bundle, or its directory.
        items: ``items.parquet`` of prepared data, with its features next to it; or an item table as ``prepare`` reads
            it, Parquet with ``item_id`` (or your own name of it, as in the data of the run) and the columns of the
            features. Items whose ``retired`` is true are not candidates; others are from ``available_from`` on and
            before ``available_until``, where there are such columns.
        out: bundle directory to make.
        overwrite: replace ``out`` where it is a bundle.

    Raises:
        RecpoError: no bundle, no such table, no candidate left, features that differ from the bundle's, new items for a
            policy of semantic ids, or ``out`` exists.
    """
    root, table = bundle.root if isinstance(bundle, Bundle) else Path(bundle), Path(items)
    return refresh_bundle(root, table, Path(out), encoded=_encoded_items(table), overwrite=overwrite)


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

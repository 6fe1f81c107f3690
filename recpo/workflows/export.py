"""The verb ``export``: writes a trained policy as a bundle for serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from recpo.artifacts import kind_of
from recpo.data.prepared import ITEM_FEATURES, Prepared
from recpo.errors import RecpoError
from recpo.evaluation.evaluation import Evaluation
from recpo.features.arrays import read_features
from recpo.frames import FrameOrPath
from recpo.policies.blocked_table import Precision
from recpo.serving.bundle import Bundle
from recpo.serving.item_index import IndexOptions
from recpo.serving.refresh import EncodedItems, Refreshed, refresh_bundle
from recpo.serving.triton import validate_triton, write_triton
from recpo.training.run import Run


def export(
    run: Run | Path | str,
    out: Path | str,
    *,
    k: int = 100,
    checkpoint: Literal["best", "last"] = "best",
    item_precision: Precision = "float32",
    index: IndexOptions | None = None,
    repeats: bool = False,
    attributes: FrameOrPath | None = None,
    triton: Path | str | None = None,
    compiled: Path | str | None = None,
    evaluation: Evaluation | Path | str | None = None,
    overwrite: bool = False,
    trust: Sequence[str] = (),
) -> Bundle:
    """Writes the policy of a run as a bundle. Only the run is needed.

    Every engine is compared with the policy before the bundle appears.

    Args:
        run: the run, or its directory.
        out: bundle directory to make.
        k: length of the lists that the bundle serves, at most the size of the catalog.
        checkpoint: which checkpoint of the run.
        item_precision: how the program stores the item vectors: float32, float16, or int8 with a scale for each item.
        index: an approximate index instead of a search of the full catalog; scores are then log-probabilities plus a
            constant per user.
        repeats: items of the history may be listed again; only items that a request excludes are not listed.
        attributes: a frame or a Parquet file with ``item_id`` and attributes of the items (integers, strings, booleans,
            or lists of them) that requests can filter by.
        triton: also write this directory, a model repository for the Triton Inference Server.
        compiled: also write this file, the program as machine code by AOTInductor (``recpo.serving.compiled``).
        evaluation: evaluation with this run as a contender; its metrics, and those of baselines, go into the model
            card.
        overwrite: replace ``out`` where it is a bundle.
        trust: packages, in addition to recpo, whose classes the configuration of the run may name.

    Raises:
        RecpoError: no run, a run that was changed after it was written, ``out`` exists, or an engine differs from the
            policy.
    """
    opened = Run.open(run, trust)
    if triton is not None:
        validate_triton(triton, has_index=index is not None, overwrite=overwrite)
    if compiled is not None and Path(compiled).exists() and not overwrite:
        raise RecpoError(f"{compiled} exists already: name another file for compiled, or set overwrite")
    bundle = opened.export(
        out,
        k,
        checkpoint=checkpoint,
        item_precision=item_precision,
        index=index,
        repeats=repeats,
        attributes=attributes,
        evaluation=evaluation,
        overwrite=overwrite,
    )
    if triton is not None:
        write_triton(bundle.root, Path(triton), overwrite=overwrite, inputs=[opened.root])
    if compiled is not None:
        from recpo.serving.compiled import write_compiled  # importing Inductor takes seconds

        write_compiled(bundle.root, compiled, overwrite=overwrite)
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

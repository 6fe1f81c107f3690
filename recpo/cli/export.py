"""``recpo export``: writes a trained policy as a bundle for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from recpo.cli.verb_results import VerbResult, after_export
from recpo.errors import RecpoError
from recpo.policies.blocked_table import Precision
from recpo.serving.item_index import IndexOptions
from recpo.serving.manifest import BundleManifest
from recpo.workflows.export import export as _export
from recpo.workflows.export import refresh as _refresh


def export(
    out: Path,
    run: Path | None = None,
    refresh: Path | None = None,
    items: Path | None = None,
    k: int = 100,
    checkpoint: Literal["best", "last"] = "best",
    item_precision: Precision = "float32",
    index: IndexOptions | None = None,
    repeats: bool = False,
    attributes: Path | None = None,
    triton: Path | None = None,
    compiled: Path | None = None,
    evaluation: Path | None = None,
    overwrite: bool = False,
    trust: list[str] = [],  # noqa: B006  jsonargparse prints it
) -> VerbResult:
    """Writes a trained policy as a bundle: an ONNX program, weights, items, a manifest with checksums.

    Only the run is needed. Every engine is compared with the policy before the bundle appears. With ``refresh``, an
    existing bundle gets today's candidates in seconds: items that ``items`` does not contain, or marks as retired, are
    no longer listed; new items get a vector from their features, if the policy reads item features.

    Args:
        out: output bundle directory.
        run: run directory written by ``recpo train``.
        refresh: existing bundle to update, instead of a run.
        items: with ``refresh``, ``items.parquet`` of prepared data, or a Parquet file with ``item_id`` (or your own
            name of it), the columns of the features and, if items are retired, ``retired``. The bundle lists an item
            from ``available_from`` on and before ``available_until``, where the file has these columns (times, or
            milliseconds since 1970).
        k: length of the lists that the bundle serves, at most the size of the catalog.
        checkpoint: which checkpoint of the run.
        item_precision: how the program stores the item vectors: float32, float16, or int8 with a scale for each item.
        index: an approximate index (faiss) instead of a search of the full catalog: recall, lists, oversampling. Scores
            are then log-probabilities plus a constant per user. null = the full catalog is scored.
        repeats: items of the history may be listed again, as in music or groceries; only items that a request excludes
            are not listed.
        attributes: Parquet file with ``item_id`` and attributes of the items (integers, strings, booleans, or lists of
            them) that requests can filter by (``allow``, ``deny``).
        triton: also write this directory, a model repository for the Triton Inference Server.
        compiled: also write this file, the program as machine code for machines like this one (torch's AOTInductor).
        evaluation: directory written by ``recpo evaluate`` with this run as a contender; its metrics, and those of
            baselines, go into the model card.
        overwrite: replace ``out`` if it is a bundle.
        trust: packages, in addition to recpo, whose classes the configuration of the run may name.
    """
    if (run is None) == (refresh is None) or (refresh is None) != (items is None):
        raise RecpoError("export: give --run RUN, or --refresh BUNDLE and --items FILE")
    if refresh is not None and items is not None:
        fresh = _refresh(refresh, items, out, overwrite=overwrite)
        print(
            f"{out}: {fresh.listed:,} items may be listed, {fresh.later:,} of them later (available_from); "
            f"{fresh.retired:,} are retired; {fresh.added:,} new ones are added, {fresh.left_out:,} left out"
        )
        return after_export(out, None, {"items": fresh.listed, "retired": fresh.retired, "left_out": fresh.left_out})
    assert run is not None
    bundle = _export(
        run,
        out,
        k=k,
        checkpoint=checkpoint,
        item_precision=item_precision,
        index=index,
        repeats=repeats,
        attributes=attributes,
        triton=triton,
        compiled=compiled,
        evaluation=evaluation,
        overwrite=overwrite,
        trust=trust,
    )
    print(f"{out}: {len(bundle.items):,} items, lists of {bundle.k}; {_verified(bundle.manifest)}")
    if triton is not None:
        print(f"{triton}: model repository for Triton")
    if compiled is not None:
        print(f"{compiled}: machine code for this kind of machine; its lists are the policy's")
    return after_export(
        out, triton, {"items": len(bundle.items), "k": bundle.k, "agreement": bundle.manifest.agreement}
    )


def _verified(manifest: BundleManifest) -> str:
    if manifest.index is not None:
        facts = manifest.index
        return (
            f"the index looks into {facts['probes']} of {facts['lists']} lists and finds {facts['recall_10']:.3f} of "
            f"the 10 best items of {facts['users']} random histories"
        )
    if manifest.agreement is not None:
        facts = manifest.agreement
        return (
            f"{manifest.item_precision}: of the 10 best items of {facts['users']} random histories "
            f"{facts['overlap_10']:.3f} are the policy's; log-probabilities differ by up to "
            f"{facts['largest_difference']:.2g}"
        )
    return "every engine gives the policy's lists and scores"

"""``recpo export``: a trained policy as a bundle for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from recpo.errors import RecpoError
from recpo.workflows.export import export as _export
from recpo.workflows.export import refresh as _refresh


def export(
    out: Path,
    run: Path | None = None,
    refresh: Path | None = None,
    items: Path | None = None,
    k: int = 100,
    checkpoint: Literal["best", "last"] = "best",
    overwrite: bool = False,
    trust: list[str] = [],  # noqa: B006  jsonargparse prints it
) -> None:
    """Writes a trained policy as a bundle: an ONNX program, weights, items, a manifest with checksums.

    Nothing but the run is needed. Every engine is compared with the policy before the bundle appears. With ``refresh``
    a bundle that stands gets the candidates of today, in seconds: items that ``items`` does not name, or names as
    retired, are listed no more; unknown ones are counted and left out.

    Args:
        out: bundle directory to make.
        run: run directory written by ``recpo train``.
        refresh: in place of a run, the bundle that stands.
        items: with ``refresh``, Parquet file with ``item_id`` and, as ``recpo prepare`` writes it, ``retired``.
        k: length of the lists that the bundle serves; a smaller catalog caps it.
        checkpoint: which checkpoint of the run.
        overwrite: replace ``out`` where it is a bundle.
        trust: packages beside recpo whose classes the configuration of the run may name.
    """
    if (run is None) == (refresh is None) or (refresh is None) != (items is None):
        raise RecpoError("export: give --run RUN, or --refresh BUNDLE and --items FILE")
    if refresh is not None and items is not None:
        fresh = _refresh(refresh, items, out, overwrite=overwrite)
        print(
            f"{out}: {fresh.listed:,} items may be listed, {fresh.retired:,} are retired; {fresh.left_out:,} new ones "
            "are left out"
        )
        return
    assert run is not None
    bundle = _export(run, out, k=k, checkpoint=checkpoint, overwrite=overwrite, trust=trust)
    print(f"{out}: {len(bundle.items):,} items, lists of {bundle.k}; every engine gives the policy's lists and scores")

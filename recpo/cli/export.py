"""``recpo export``: a trained policy as a bundle for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from recpo.workflows.export import export as _export


def export(
    run: Path,
    out: Path,
    k: int = 100,
    checkpoint: Literal["best", "last"] = "best",
    overwrite: bool = False,
    trust: list[str] = [],  # noqa: B006  jsonargparse prints it
) -> None:
    """Writes a trained policy as a bundle: an ONNX program, weights, items, a manifest with checksums.

    Nothing but the run is needed. Every engine is compared with the policy before the bundle appears.

    Args:
        run: run directory written by ``recpo train``.
        out: bundle directory to make.
        k: length of the lists that the bundle serves; a smaller catalog caps it.
        checkpoint: which checkpoint of the run.
        overwrite: replace ``out`` where it is a bundle.
        trust: packages beside recpo whose classes the configuration of the run may name.
    """
    bundle = _export(run, out, k=k, checkpoint=checkpoint, overwrite=overwrite, trust=trust)
    print(f"{out}: {len(bundle.items):,} items, lists of {bundle.k}; every engine gives the policy's lists and scores")

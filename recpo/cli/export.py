"""``recpo export``: a trained policy as a bundle for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml

from recpo.artifacts import sha256
from recpo.data.prepared import Prepared
from recpo.serving.export import export_bundle
from recpo.training.run import RESOLVED, checkpoint_path, load_policy, refuse_other_items


def export(
    run: Path,
    prepared: str | Path,
    out: Path,
    k: int = 100,
    checkpoint: Literal["best", "last"] = "best",
    overwrite: bool = False,
) -> None:
    """Writes a trained policy as a bundle: an ONNX program, weights, items, a manifest with checksums.

    Every engine is compared with the policy before the bundle appears.

    Args:
        run: run directory written by ``recpo train``.
        prepared: the prepared directory that the run was trained on.
        out: bundle directory to make.
        k: length of the lists that the bundle serves; a smaller catalog caps it.
        checkpoint: which checkpoint of the run.
        overwrite: replace ``out`` where it is a bundle.
    """
    data = Prepared.open(prepared)
    refuse_other_items(run, data.catalog_checksum, data.root)
    configuration = yaml.safe_load((run / RESOLVED).read_text(encoding="utf-8"))
    k, weights = min(k, data.num_items), checkpoint_path(run, checkpoint)
    export_bundle(
        load_policy(run, checkpoint),
        data.item_ids(),
        data.feedback,
        out,
        k=k,
        options=configuration["policy"].get("init_args", {}),
        origin={
            "run": run.resolve().name,
            "checkpoint": checkpoint,
            "weights": sha256(weights) if weights.is_file() else None,
            "catalog_checksum": data.catalog_checksum,
        },
        overwrite=overwrite,
        inputs=[run, data.root],
    )
    print(f"{out}: {data.num_items:,} items, lists of {k}; every engine gives the policy's lists and scores")

"""``recpo export``: a trained policy as a bundle for serving."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import yaml

from recpo.data.prepared import Prepared
from recpo.serving.export import export_bundle
from recpo.training.run import RESOLVED, load_policy, refuse_other_items


def export(
    run: Path,
    prepared: str | Path,
    out: Path,
    k: int = 100,
    checkpoint: Literal["best", "last"] = "best",
    overwrite: bool = False,
) -> None:
    """Writes a trained policy as a bundle: ONNX and torch.export programs, the item table, a manifest with checksums.

    Both programs are compared with the policy before the bundle appears.

    Args:
        run: run directory written by ``recpo train``.
        prepared: the prepared directory that the run was trained on.
        out: bundle directory to make.
        k: length of the lists that the bundle serves; a smaller catalog caps it.
        checkpoint: which checkpoint of the run.
        overwrite: replace ``out`` where it exists.
    """
    data = Prepared.open(prepared)
    refuse_other_items(run, data.catalog_checksum, data.root)
    options = yaml.safe_load((run / RESOLVED).read_text(encoding="utf-8"))
    k = min(k, data.num_items)
    with TemporaryDirectory() as folder:
        # The bundle's items come from a local file.
        data.item_ids().save(Path(folder) / "items.parquet")
        export_bundle(
            load_policy(run, checkpoint),
            Path(folder),
            out,
            k=k,
            feedback=data.manifest["feedback"],
            origin={
                "policy": options["policy"],
                "checkpoint": checkpoint,
                "catalog_checksum": data.catalog_checksum,
            },
            overwrite=overwrite,
        )
    print(f"{out}: {data.num_items:,} items, lists of {k}; ONNX and torch.export give the policy's lists and scores")

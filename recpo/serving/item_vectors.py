"""The item vectors of a bundle, for re-ranking by similarity; read without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from recpo.base.errors import RecpoError
from recpo.serving.manifest import WEIGHTS, BundleManifest

_TABLES = ("item_table.weight", "base.item_table.weight")  # of a catalog softmax, alone or below a tilted policy
_CODES = ("code_table.weight", "base.code_table.weight")


def bundle_item_vectors(root: Path, manifest: BundleManifest | None = None) -> np.ndarray:
    """The vectors that the bundle's encoder reads for its items, ``[V + 1, d]`` float32; row 0 is not an item.

    They are in ``policy.safetensors``, whose checksum is in the manifest, so the bundle needs no further file.

    Args:
        root: the bundle.
        manifest: its manifest, already verified; None = read and verify it here.

    Raises:
        RecpoError: no bundle, or its policy has no table of item vectors (semantic ids, a class that is not recpo's).
    """
    manifest = BundleManifest.read(root) if manifest is None else manifest
    if manifest.options is not None:
        try:
            with safe_open(str(root / WEIGHTS), framework="numpy") as weights:
                names = set(weights.keys())
                if not names & set(_CODES) and (found := [name for name in _TABLES if name in names]):
                    return np.asarray(weights.get_tensor(found[0]), np.float32)
        except (SafetensorError, OSError) as error:
            raise RecpoError(f"{root / WEIGHTS} cannot be read ({error}): export the bundle again") from error
    raise RecpoError(
        f"{root}: its policy, {manifest.policy['class']}, has no table of item vectors; re-rank with vectors of a file "
        "(rerank_options.attributes and rerank_options.vectors)"
    )

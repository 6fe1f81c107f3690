"""A bundle for today's catalog, out of yesterday's and a table of items: in seconds, without training."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recpo import __version__
from recpo.artifacts import output_directory, sha256
from recpo.data.id_map import RETIRED, IdMap
from recpo.errors import RecpoError
from recpo.serving.bundle import Bundle, load_runtime
from recpo.serving.golden import GOLDEN, write_golden
from recpo.serving.histories import ITEM_ID
from recpo.serving.manifest import ITEMS, MANIFEST, BundleManifest


class Refreshed(NamedTuple):
    """A refreshed bundle, and what became of the items.

    Attributes:
        bundle: the new bundle.
        listed: items that may be listed.
        retired: items that are in no list any more.
        left_out: items of the table that the bundle does not know: it has no vectors for them.
    """

    bundle: Bundle
    listed: int
    retired: int
    left_out: int


def refresh_bundle(root: Path, items: Path, out: Path, *, overwrite: bool = False) -> Refreshed:
    """Writes the bundle ``root`` with the candidates of today to ``out``.

    Items of the bundle that ``items`` does not name, or names as retired, are listed no more; they stay in histories.
    Nothing is appended: a bundle has the vectors of its own items only, so new ones are counted and left out. Program
    and weights are linked, golden requests are asked again, checksums are the bundle's own.

    Args:
        root: the bundle.
        items: Parquet file with ``item_id`` and, as ``prepare`` writes it, ``retired``.
        out: bundle directory to make.
        overwrite: replace a bundle in ``out``.

    Raises:
        RecpoError: no bundle, no such table, no candidate left, or ``out`` is in the way.
    """
    manifest, known = BundleManifest.read(root), IdMap.load(root / ITEMS)
    named, left_out = _candidates(items, known)
    numbers = np.arange(1, len(known) + 1)
    retired = np.union1d(np.setdiff1d(numbers, named), known.retired)
    if len(retired) == len(known):
        raise RecpoError(f"{items}: none of its items is a candidate of {root}: name the table of the same catalog")
    fresh = IdMap(known.to_external(numbers), retired)
    origin = {**manifest.origin, "refreshed": {"bundle": root.resolve().name, "manifest": sha256(root / MANIFEST)}}
    manifest = replace(manifest, origin=origin, versions={**manifest.versions, "recpo": __version__})
    with output_directory(out, kind="bundle", overwrite=overwrite, inputs=[root, items]) as working:
        for name in manifest.files:
            if name not in (ITEMS, GOLDEN):
                _link(root / name, working / name)
        fresh.save(working / ITEMS)
        write_golden(Bundle(working, manifest, fresh, load_runtime(working, manifest, "onnx")), working / GOLDEN)
        manifest.write(working)
    return Refreshed(Bundle.load(out), len(known) - len(retired), len(retired), left_out)


def _candidates(items: Path, known: IdMap) -> tuple[np.ndarray, int]:
    """Internal ids of the items that a table names as candidates, and how many of these are unknown."""
    try:
        with pq.ParquetFile(items) as file:
            names = [name for name in (ITEM_ID, RETIRED) if name in file.schema_arrow.names]
            table = file.read(names)
        ids = table[ITEM_ID].combine_chunks()
    except (OSError, KeyError, pa.ArrowException) as error:
        raise RecpoError(f"items: {items} is no Parquet file with a column item_id ({error})") from error
    if RETIRED in names:
        ids = ids.filter(pc.invert(table[RETIRED].combine_chunks().fill_null(False)))
    found = known.to_internal(ids)
    return np.unique(found[found > 0]), int((found == 0).sum())


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

"""Semantic ids: the code tuple of every item, written by ``recpo tokenize`` and read by policies.

::

    codes/codes.parquet     item_index 1..V ascending, item_id (external), code_0 .. code_{T-1} (int32)
    codes/manifest.json     codebook sizes, checksum of the catalog, how the codes were made, the report
    codes/codebooks.safetensors   the frozen codebooks, if the codes were made from vectors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts.artifact import Artifact
from recpo.artifacts.checksums import verify
from recpo.base.errors import RecpoError, reading

if TYPE_CHECKING:
    import pandas as pd

CODES, MANIFEST, CODEBOOKS = "codes.parquet", "manifest.json", "codebooks.safetensors"


@dataclass(frozen=True)
class Codes(Artifact):
    """The code tuples of a catalog. No two items share a tuple. A directory of them is accepted wherever its path is.

    Attributes:
        codes: ``[V, T]`` int64; row i belongs to item i + 1, and code t is in 0 .. ``codebook_sizes[t]`` - 1.
        codebook_sizes: ``K_t`` of every level.
        catalog_checksum: identifies the items (``Prepared.catalog_checksum``).
        root: the directory; None = they are in memory only.
        manifest: how the codes were made.
    """

    kind: ClassVar = "codes"
    version: ClassVar = 3
    made_by: ClassVar = "recpo tokenize"

    codes: np.ndarray
    codebook_sizes: tuple[int, ...]
    catalog_checksum: str
    root: Path | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Rejects codes that are out of range and tuples that two items share."""
        codes, sizes = self.codes, np.asarray(self.codebook_sizes)
        if codes.ndim != 2 or codes.shape[1] != len(sizes) or not len(codes) or not len(sizes):
            raise RecpoError(
                f"codes have shape {codes.shape}, expected [items, {len(sizes)} levels], at least one each",
                code="wrong_shape",
                field="codes",
            )
        outside = ((codes < 0) | (codes >= sizes)).any(1)
        if outside.any():
            raise RecpoError(
                f"{int(outside.sum())} items have a code outside 0 .. codebook size - 1 (sizes {list(sizes)}), the "
                f"first is item_index {int(outside.argmax()) + 1}: run `recpo tokenize` again",
                code="out_of_range",
                field="codes",
            )
        repeated = len(codes) - len(np.unique(codes, axis=0))
        if repeated:
            raise RecpoError(
                f"{repeated} items share their codes with another one: run `recpo tokenize` again",
                code="duplicate",
                field="codes",
            )

    def __fspath__(self) -> str:
        return str(self._directory)

    @property
    def report(self) -> dict[str, Any]:
        """Use of the codebooks, error of the vectors, collisions (``recpo.items.tokenization``)."""
        return dict(self.manifest["report"])

    def to_pandas(self) -> pd.DataFrame:
        """One row per item: ``item_index`` (1..V), ``item_id`` (external), ``code_0``, ``code_1`` and so on."""
        return pq.read_table(self._directory / CODES).to_pandas()

    @property
    def _directory(self) -> Path:
        if self.root is None:
            raise RecpoError("these codes are in memory only: open their directory", code="missing_file", field="codes")
        return self.root

    @property
    def num_items(self) -> int:
        """V."""
        return len(self.codes)

    @classmethod
    def _read(cls, root: Path) -> Self:
        manifest = cls.facts_of(root)
        faults = OSError, ValueError, TypeError, KeyError, pa.ArrowException
        with reading(root, *faults, remedy=cls.remedy(), field="codes"):
            files = manifest["files"]  # a run has no copy of the codebooks
            verify(root, {name: files[name] for name in files if (root / name).exists() or name == CODES}, cls.remedy())
            sizes = tuple(int(size) for size in manifest["codebook_sizes"])
            columns = pq.read_table(root / CODES, columns=[f"code_{level}" for level in range(len(sizes))])
            codes = np.stack([column.to_numpy() for column in columns.columns], 1).astype(np.int64)
            return cls(codes, sizes, str(manifest["catalog_checksum"]), root, manifest)

    def save(self, root: Path, item_ids: pa.ChunkedArray | pa.Array, description: dict[str, Any]) -> None:
        """Writes ``codes.parquet`` and, last, ``manifest.json`` into the directory ``root``, which may have codebooks.

        Args:
            root: the directory.
            item_ids: ``[V]`` external ids of the items 1..V.
            description: how the codes were made; copied into the manifest.
        """
        columns: dict[str, Any] = {"item_index": np.arange(1, self.num_items + 1, dtype=np.int32), "item_id": item_ids}
        columns |= {f"code_{level}": column.astype(np.int32) for level, column in enumerate(self.codes.T)}
        pq.write_table(pa.table(columns), root / CODES)
        manifest = {
            "num_items": self.num_items,
            "codebook_sizes": list(self.codebook_sizes),
            "catalog_checksum": self.catalog_checksum,
        }
        self.write_facts(root, manifest | description, [name for name in (CODES, CODEBOOKS) if (root / name).exists()])

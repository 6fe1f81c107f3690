"""A bundle: an exported policy, its item table and a manifest with checksums; loaded and run without training code.

::

    bundle/model.onnx      the program for ONNX Runtime (and model.onnx.data beside it where it exceeds 2 GB)
    bundle/model.pt2       the same program for torch.export.load
    bundle/items.parquet   item_index 1..V and item_id, the external id
    bundle/manifest.json   versions, inputs and outputs, feedback levels, SHA-256 of every file; written last

With the default engine, ONNX Runtime, neither torch nor lightning nor torchrec is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from recpo.data.id_map import IdMap
from recpo.errors import RecpoError
from recpo.serving.histories import ServingCounts, encode_histories
from recpo.serving.manifest import ITEMS, read_manifest
from recpo.serving.runtimes import Runtime, RuntimeName, load_runtime


class Served(NamedTuple):
    """Recommendations and what was left out on the way.

    Attributes:
        table: ``user_id`` as given, ``rank`` int32 from 1, ``item_id`` external, ``score`` float32 (log-probability);
            users in the order of the histories, best item first.
        counts: see ``ServingCounts``.
    """

    table: pa.Table
    counts: ServingCounts


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle.

    Attributes:
        manifest: the verified manifest.
        items: external ids of the catalog.
        engine: runs the program.
    """

    manifest: dict[str, Any]
    items: IdMap
    engine: Runtime

    @classmethod
    def load(cls, path: Path | str, engine: RuntimeName = "onnx") -> Bundle:
        """Verifies every checksum, then loads. The checksums find damage, not malice: load only bundles that you trust.

        Args:
            path: directory written by ``recpo export``.
            engine: ``onnx`` (ONNX Runtime) or ``torch``.

        Raises:
            RecpoError: no bundle, an incomplete or altered one, or one of another format version.
        """
        root = Path(path)
        manifest = read_manifest(root)
        items = IdMap.load(root / ITEMS)
        if len(items) != manifest["num_items"]:
            raise RecpoError(
                f"{root / ITEMS} has {len(items)} items, the program {manifest['num_items']}: export again"
            )
        return cls(manifest, items, load_runtime(root, engine))

    @property
    def k(self) -> int:
        """Length of the program's lists."""
        return int(self.manifest["k"])

    def recommend(self, histories: pa.Table | pd.DataFrame, k: int | None = None) -> Served:
        """The best items for every history, without those in it and those that are blocked.

        Unknown items are skipped and counted. An empty history gets what the policy recommends when nothing is known.
        Of a history longer than the policy reads, the most recent events count, and the older items are not recommended
        either. The whole table is one batch: hand over large ones in parts.

        Args:
            histories: ``user_id``; ``item_ids``, lists of external ids, oldest first; optionally ``feedback``, lists of
                as many feedback levels (the manifest's ``feedback`` says how they are computed), and ``blocked``, lists
                of external ids; ``timestamps``, lists of times, if the policy reads them (the manifest's ``inputs``).
            k: list length, at most the bundle's own; None = that.

        Raises:
            RecpoError: a column is missing or of a wrong type, or k is out of range.
        """
        k = self.k if k is None else k
        if not 1 <= k <= self.k:
            raise RecpoError(f"k is {k}, this bundle serves 1 to {self.k}; export one with a larger --k for more")
        table = histories if isinstance(histories, pa.Table) else pa.Table.from_pandas(histories, preserve_index=False)
        reads_timestamps = "timestamps" in self.manifest["inputs"]
        max_history = int(self.manifest["max_history"])
        encoded, counts = encode_histories(table, self.items.to_internal, max_history, reads_timestamps)
        if table.num_rows:
            top_items, scores = self.engine(*(array for array in encoded if array is not None))
        else:
            top_items, scores = np.zeros((0, k), np.int64), np.zeros((0, k), np.float32)
        top_items, scores = top_items[:, :k], scores[:, :k]
        filled = top_items > 0
        counts.short_lists = int((~filled).any(1).sum())
        row, rank = np.nonzero(filled)
        columns = {
            "user_id": table.column("user_id").take(pa.array(row)),
            "rank": pa.array((rank + 1).astype(np.int32)),
            "item_id": self.items.to_external(top_items[filled]),
            "score": pa.array(scores[filled]),
        }
        return Served(pa.table(columns), counts)

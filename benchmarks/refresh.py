"""Cost of updating a bundle to a new catalog: some items retire, and new ones come with features.

    python benchmarks/refresh.py --items 100000 --new 5000

Prints seconds of processor time and bytes: of the export, of a refresh that only retires, and of one that adds items.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recpo.base.feature_encoding import FittedFeatures, PolicyFeatures, of_side
from recpo.base.features import Category, FeatureSchema, Vector
from recpo.base.feedback import FeedbackDefinition
from recpo.log.id_map import IdMap
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.item_features import ItemFeatureOptions
from recpo.serving.export import PolicyFacts, export_bundle
from recpo.serving.refresh import refresh_bundle

OPTIONS, AUTHORS, WIDTH = {"dim": 64, "max_history": 50}, 1000, 64


def main() -> None:
    """Exports, retires, grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--new", type=int, default=5_000)
    chosen = parser.parse_args()
    features = (Category("author", num_codes=AUTHORS + 2), Vector("text", width=WIDTH))
    fitted = of_side(features, {"author": pa.array(np.arange(AUTHORS))})
    rows = _rows(chosen.items + chosen.new)
    known = rows.slice(0, chosen.items)
    policy, ids = _policy(fitted, known), IdMap(known["item_id"].combine_chunks())
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)

        def export() -> None:
            export_bundle(
                policy,
                ids,
                PolicyFacts(FeedbackDefinition(), features=PolicyFeatures(item=fitted), options=OPTIONS),
                root / "old",
            )

        pq.write_table(known.slice(1000), root / "fewer.parquet")
        pq.write_table(rows.slice(1000), root / "today.parquet")
        _report("export", export, root / "old")
        _report(
            "1,000 retire",
            lambda: refresh_bundle(root / "old", root / "fewer.parquet", root / "retired"),
            root / "retired",
        )
        _report(
            f"1,000 retire, {chosen.new:,} come",
            lambda: refresh_bundle(root / "old", root / "today.parquet", root / "grown"),
            root / "grown",
        )


def _rows(count: int) -> pa.Table:
    generator = np.random.default_rng(0)
    vectors = pa.array(generator.normal(size=count * WIDTH).astype(np.float32))
    return pa.table(
        {
            "item_id": np.arange(count),
            "author": generator.integers(0, AUTHORS, count),
            "text": pa.FixedSizeListArray.from_arrays(vectors, WIDTH),
        }
    )


def _policy(fitted: FittedFeatures, rows: pa.Table) -> CatalogSoftmaxPolicy:
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(len(rows), item_features=ItemFeatureOptions(), **OPTIONS)
    policy.set_schema(FeatureSchema(item=fitted.features))
    encoded = fitted.read(rows, "items")
    policy.set_item_features(encoded.rows(np.arange(-1, len(rows)).clip(min=0)).tensors())
    return policy.eval()


def _report(name: str, call: Callable[[], object], out: Path) -> None:
    begun = time.process_time()
    call()
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{name}: {time.process_time() - begun:.1f} s of processor time, {size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()

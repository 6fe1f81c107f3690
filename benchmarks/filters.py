"""Cost of a filter per request: a bundle with attributes against one without, on one thread.

    python benchmarks/filters.py --items 100000

Prints milliseconds of processor time of a call of the program, the request encoded already, of 1 and of 32 users:
without attributes, with attributes and no filter, with one that denies half of the catalog, and one that allows a
hundredth of it. And of the mask of a request.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from recpo.base.feedback import FeedbackDefinition
from recpo.log.id_map import IdMap
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.histories import EncodedHistories

OPTIONS = {"dim": 64, "max_history": 50}


def main() -> None:
    """Exports twice and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=20)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    policy, ids = CatalogSoftmaxPolicy(chosen.items, **OPTIONS).eval(), pa.array(np.arange(chosen.items))
    columns = {
        "item_id": ids,
        "half": generator.integers(0, 2, chosen.items),
        "author": generator.integers(0, 100, chosen.items),
    }
    with tempfile.TemporaryDirectory() as work:
        bundles = {}
        for name, attributes in (("none", None), ("known", columns)):
            export_bundle(
                policy,
                IdMap(ids),
                PolicyFacts(FeedbackDefinition()),
                Path(work) / name,
                BundleOptions(k=100, attributes=attributes),
            )
            bundles[name] = Bundle.open(Path(work) / name, threads=1)
    filters = bundles["known"].filters
    assert filters is not None
    half, few = filters.allowed(None, {"half": [1]}), filters.allowed({"author": [7]}, None)
    print(f"mask of a request: {_cost(lambda: filters.allowed(None, {'half': [1]}), chosen.calls):.2f} ms")
    for users in (1, 32):
        history = generator.integers(1, chosen.items, (users, OPTIONS["max_history"]))
        inputs = EncodedHistories(history, history % 6, np.zeros((users, 1), np.int64))
        for name, bundle, mask in (
            ("without attributes", bundles["none"], None),
            ("no filter", bundles["known"], None),
            ("denies half", bundles["known"], half),
            ("allows a hundredth", bundles["known"], few),
        ):
            asked = inputs if mask is None else inputs._replace(allowed=np.tile(mask, (users, 1)))
            runtime = bundle.runtime
            print(f"{users:3} users, {name}: {_cost(lambda: runtime.recommend(asked, 10), chosen.calls):.2f} ms")  # noqa: B023


def _cost(call: Callable[[], object], times: int) -> float:
    """Least milliseconds of processor time."""
    found = []
    for _ in range(times):
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return min(found) * 1000


if __name__ == "__main__":
    main()

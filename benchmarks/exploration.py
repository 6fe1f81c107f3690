"""Cost of exploration and re-ranking per request: milliseconds, and the error of the propensities.

    python benchmarks/exploration.py
    python benchmarks/exploration.py --quick               # tiny

Prints one JSON line per size of the shortlist: slates of 10 out of a catalog of 100,000 items, whose log-probabilities
have the given spread (standard deviation), drawn at temperature 1 with epsilon .1, alone and in batches of 32; and the
largest relative error of the propensities against the same integral on a grid three times as fine that reaches further.
Then one line per re-ranking method. Times are medians of CPU time on one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from unittest.mock import patch

import numpy as np

from recpo.lists import exploration as inclusion
from recpo.lists.exploration import Exploration, Pool, inclusion_probabilities
from recpo.lists.reranking import (
    AttributeCap,
    Calibration,
    Determinantal,
    ItemAttributes,
    MaximalMarginalRelevance,
    Tags,
    reranked,
)

CATALOG, K, DIM, TAGS, HISTORY = 100_000, 10, 64, 50, 100


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    function()
    spent = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        spent.append(time.process_time() - begin)
    return 1e3 * float(np.median(spent))


def relative_error(logits: np.ndarray, chosen: np.ndarray) -> float:
    found, spacing = inclusion_probabilities(logits, K, chosen), inclusion._spacing(K)
    with patch.object(inclusion, "_spacing", lambda k: spacing / 3), patch.object(inclusion, "_TAIL", 1e-15):
        finer = inclusion_probabilities(logits, K, chosen)
    return float((np.abs(found - finer) / finer).max())


def explored(shortlist: int, spread: float, repeats: int) -> dict:
    generator = np.random.default_rng(0)
    exploration = Exploration(temperature=1.0, epsilon=0.1, shortlist=shortlist)
    logp = spread * generator.normal(size=(32, shortlist))
    items = np.stack([generator.choice(CATALOG, shortlist, replace=False) + 1 for _ in range(32)])
    pools = [Pool.of(CATALOG, exclude=generator.integers(1, CATALOG, 50)) for _ in range(32)]
    alone = milliseconds(lambda: exploration.sample(items[0], logp[0], K, generator, pools[0]), repeats)
    batch = milliseconds(lambda: exploration.sample_batch(items, logp, K, generator, pools), repeats) / 32
    drawn = np.argsort(-(logp + generator.gumbel(size=logp.shape)), axis=1)[:, :K]
    return {
        "what": "exploration",
        "shortlist": shortlist,
        "spread": spread,
        "ms alone": round(alone, 2),
        "ms in a batch of 32": round(batch, 2),
        "relative error": float(f"{relative_error(logp, drawn):.1e}"),
    }


def times_of_reranking(shortlist: int, repeats: int) -> list[dict]:
    generator = np.random.default_rng(0)
    tags = Tags.from_pairs(np.arange(1, CATALOG + 1), generator.integers(0, TAGS, CATALOG), CATALOG)
    known = ItemAttributes({"category": tags}).with_vectors(generator.normal(size=(CATALOG + 1, DIM)))
    items = generator.choice(CATALOG, shortlist, replace=False) + 1
    scores, history = np.sort(generator.normal(size=shortlist))[::-1], generator.integers(1, CATALOG, HISTORY)
    methods = [MaximalMarginalRelevance(), Determinantal(), AttributeCap("category"), Calibration("category")]
    lists = items[None], scores[None], [K], known, history[None], shortlist
    return [
        {
            "what": method.label,
            "shortlist": shortlist,
            "ms alone": round(milliseconds(lambda m=method: reranked(m, *lists), repeats), 2),
        }
        for method in methods
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    sizes, repeats = ((20,), 2) if options.quick else ((100, 300, 1000), 50)
    lines = [explored(size, spread, repeats) for size in sizes for spread in (0.5, 2.0, 5.0)]
    for line in [*lines, *(line for size in sizes for line in times_of_reranking(size, repeats))]:
        print(json.dumps({"benchmark": "exploration", **line, "machine": platform.machine()}), flush=True)


if __name__ == "__main__":
    main()

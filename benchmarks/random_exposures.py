"""What `recpo fit` decides from ratings that people chose to give, judged by ratings of items that were drawn for them.

    python benchmarks/random_exposures.py --chosen train.ascii --drawn test.ascii --work runs/random_exposures

Made for Coat (Schnabel et al., "Recommendations as treatments", ICML 2016; cs.cornell.edu/~schnabts/mnar): 290 people
rated 24 of 300 coats of their own choice, and 16 that were drawn uniformly. recpo ships none of it. A file is a matrix
``[users, items]`` of ratings from 1 to 5; 0 = not rated.

The log has the chosen ratings at random times of ten days, in an order that ``--orders`` seeds, and those of drawn
items on the eleventh day. So the test period of the fit, which never decides, has uniformly random exposures, and its
``AUC_other`` is the probability that a coat that someone likes scores above one that the same person was shown by
chance and does not like. Prints one JSON line per order: what ships, the strongest baseline of the test period, and the
paired difference. The directories of finished fits are not made again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from decisions import paired

import recpo

METRIC = "AUC_other"
DAYS, DAY = 10, 86_400
START = 1_699_920_000  # a midnight


def log_of(chosen: np.ndarray, drawn: np.ndarray, order: int) -> pd.DataFrame:
    """The log: chosen ratings on days 1 to 10, drawn ones on day 11."""
    rng, parts = np.random.default_rng(order), []
    for ratings, first, days in ((chosen, 0, DAYS), (drawn, DAYS, 1)):
        user, item = np.nonzero(ratings)
        second = rng.integers(first * DAY, (first + days) * DAY, len(user))
        columns = {"user_id": user, "item_id": item, "rating": ratings[user, item], "timestamp": START + second}
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def judged(root: Path) -> dict[str, object]:
    """What a fit ships against the strongest baseline, on the drawn items."""
    decision = recpo.load(root)
    found = decision.evaluation.document
    known = {one["name"]: one for one in found["contenders"] if METRIC in one["metrics"]}  # an oracle has none
    value = {name: one["metrics"][METRIC]["mean"] for name, one in known.items()}
    baseline = max((name for name in value if known[name]["kind"] == "baseline"), key=lambda name: value[name])
    gain, half_width = paired(found, decision.chosen, baseline, METRIC)
    row = {"ships": decision.chosen, METRIC: value[decision.chosen], "baseline": baseline, "its": value[baseline]}
    return row | {"gain": gain, "half_width": half_width}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chosen", type=Path, required=True, help="matrix of the ratings that people chose to give")
    parser.add_argument("--drawn", type=Path, required=True, help="matrix of their ratings of items that were drawn")
    parser.add_argument(
        "--orders", type=int, nargs="+", default=[0, 1, 2], help="seeds of the order of the chosen ones"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="of every fit")
    parser.add_argument("--work", type=Path, default=Path("runs/random_exposures"))
    parser.add_argument("--quick", action="store_true", help="one order, seconds of training")
    options = parser.parse_args()
    if options.quick:
        options.orders, options.minutes = options.orders[:1], 0.01
    chosen, drawn = (np.loadtxt(file, dtype=np.int64, ndmin=2) for file in (options.chosen, options.drawn))
    for order in options.orders:
        root = options.work / str(order)
        if not (root / "decision.json").is_file():
            recpo.fit(log_of(chosen, drawn, order), root, minutes=options.minutes, overwrite=root.is_dir())
        print(json.dumps({"order": order, **judged(root)}))


if __name__ == "__main__":
    main()

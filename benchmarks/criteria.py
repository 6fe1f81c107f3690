"""Judges criteria of value by the truth: which number on validation events picks the policy people gain most from?

    python benchmarks/criteria.py --worlds default confounded --seeds 0 1 --minutes 5

For every simulated world, `recpo fit` makes the contenders: baselines, reward model, trained, tilted and searched
policies. All are then evaluated on the validation period, with the criteria that a log allows and with the true value
of their lists, which no criterion sees. A criterion is judged by Kendall's tau with the true value over the contenders,
and by the true value of its choice as a share of the best contender's. Prints one JSON line per world, seed and
criterion, and a table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import kendalltau

import recpo

WEIGHTS = (1.0, 0.75, 0.6, 0.5, 0.4, 0.0)
ESTIMATORS = ("SNIPS", "DR", "SNDR", "beta-IPS", "combined")


def criteria_of(contender: dict[str, Any], k: int) -> dict[str, float | None]:
    """The value of every criterion for one contender of an evaluation."""
    metrics = {name: value["mean"] for name, value in contender["metrics"].items()}
    other, unseen = metrics.get("AUC_other"), metrics.get("AUC_unseen")
    found: dict[str, float | None] = {}
    for weight in WEIGHTS:
        mixed = None if other is None or unseen is None else weight * other + (1 - weight) * unseen
        found[f"{weight:g} AUC_other + {1 - weight:g} AUC_unseen"] = mixed
    found[f"NDCG@{k}"] = metrics.get(f"NDCG@{k}")
    found["NDCG x (AUC_other - .5)"] = None if other is None else (metrics[f"NDCG@{k}"] or 0.0) * (other - 0.5)
    for entry in contender["off_policy"]:
        if entry["target"] == f"top_{k}" and entry["estimator"] in ESTIMATORS:
            found[entry["estimator"]] = entry["value"]
    return found


def judged(document: dict[str, Any], k: int) -> list[dict[str, Any]]:
    """Tau and share of every criterion over the contenders of an evaluation that know their true value."""
    known = [one for one in document["contenders"] if one["kind"] != "oracle" and f"true_reward@{k}" in one["metrics"]]
    known = [one for one in known if one["name"] != "logging policy"]
    truth = [one["metrics"][f"true_reward@{k}"]["mean"] for one in known]
    values = [criteria_of(one, k) for one in known]
    _add_sums(values)
    rows = []
    for name in values[0]:
        column = [one.get(name) for one in values]
        if None in column:
            continue
        best = max(range(len(column)), key=lambda place: column[place] or 0.0)
        tau = float(kendalltau(column, truth).statistic)
        picked = {"picked": known[best]["name"], "share": truth[best] / max(truth), "contenders": len(truth)}
        rows.append({"criterion": name, "tau": tau, **picked})
    return rows


def _add_sums(values: list[dict[str, float | None]]) -> None:
    """Adds sums of two criteria, each in units of its standard deviation over the contenders."""
    for estimator in ESTIMATORS:
        parts = ["0.6 AUC_other + 0.4 AUC_unseen", estimator]
        columns = [[one.get(part) for one in values] for part in parts]
        if any(value is None for column in columns for value in column):
            continue
        standard = [(np.asarray(column) - np.mean(column)) / np.std(column) for column in columns]
        for one, total in zip(values, sum(standard), strict=True):
            one[f"AUC_mixed + {estimator}, standardized"] = float(total)


def one_world(world: str, seed: int, options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Simulates, fits and judges."""
    sizes = {name: value for name in ("users", "items", "events") if (value := getattr(options, name)) is not None}
    if world == "replay":
        sizes["matrix"] = options.matrix
    simulation = recpo.simulate(root / "world", world=world, seed=seed, **sizes)
    decision = recpo.fit(simulation, root / "fit", minutes=options.minutes, k=options.k, on_step=say)
    runs = [
        root / "fit" / "runs" / name for name in decision.to_pandas()["name"] if (root / "fit/runs" / name).exists()
    ]
    named = ["popularity", "item_rate", "implicit_als", "factorization", "allrank", root / "fit" / "factors", *runs]
    found = recpo.evaluate(
        root / "fit" / "prepared",
        named,
        split="valid",
        truth=simulation.root,
        ks=[options.k],
        baseline_cache=root / "fit" / "baselines",
    )
    return [{"world": world, "seed": seed, **row} for row in judged(found.document, options.k)]


def say(text: str) -> None:
    print(f"# {text[:150]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=["default", "confounded", "skewed", "small", "living"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--matrix", type=Path, default=None, help="rewards of world replay (real_truth.py writes them)")
    for name in ("users", "items", "events"):
        parser.add_argument(f"--{name}", type=int, default=None, help="null = as in the world's preset")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for world in options.worlds:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as place:
                for row in one_world(world, seed, options, Path(place)):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    print(f"\n{'criterion':<40} {'tau':>6} {'mean share':>10} {'worst share':>11}")
    for name in dict.fromkeys(row["criterion"] for row in rows):
        own = [row for row in rows if row["criterion"] == name]
        taus, shares = [row["tau"] for row in own], [row["share"] for row in own]
        print(f"{name:<40} {fmean(taus):6.2f} {fmean(shares):10.3f} {min(shares):11.3f}")


if __name__ == "__main__":
    main()

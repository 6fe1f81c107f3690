"""Factorizations without and with prior means from consumption and features: errors and true values.

    python benchmarks/priors.py --work runs/priors                        # ten worlds, a few minutes on one core
    python benchmarks/priors.py --work runs/priors --worlds small:0       # one of them

For every world (``kind:seed``): simulates a log, prepares it (with both tables in a living world), and fits a
factorization for every prior, and one with the default options, which chooses on the validation period. Then one
evaluation of the models' own lists. Prints, per world and model: the squared error on the validation period, and the
true value and dislikes of the top-10 lists of the test period, which rank by the expected grade (``mean``) and by the
model's default lower bound (``bound``); the number of distinct items in the latter; and the seconds of the fit.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import recpo
from recpo.log.feature_columns import FeatureColumns

PRIORS = {
    "none": {"consumption": [0], "item_features": False, "user_features": False},
    "consumption": {"consumption": [16], "item_features": False, "user_features": False},
    "item features": {"consumption": [0], "item_features": True, "user_features": False},
    "both": {"consumption": [16], "item_features": True, "user_features": False},
    "user features": {"consumption": [0], "item_features": False, "user_features": True},
    "item and user features": {"consumption": [0], "item_features": True, "user_features": True},
    "chosen": {},
}
COLUMNS = ("world", "prior", "validation error", "mean: value", "dislikes", "bound: value", "dislikes", "items", "s")


def data_of(root, kind, seed, quick):
    """The simulation and its prepared data."""
    size = {"users": 150, "items": 300, "events": 5000} if quick else {}
    world = recpo.simulate(root / "world", world=kind, seed=seed, overwrite=True, **size)
    if kind != "living":
        return world, recpo.prepare(world.log, root / "prepared", overwrite=True)
    tables = {"items": world.items, "users": world.users, "catalog": "items"}
    tables["features"] = FeatureColumns(available_from="available_from")
    return world, recpo.prepare(world.log, root / "prepared", overwrite=True, **tables)


def measured(root, kind, seed, quick):
    """The models of a world: prior -> numbers."""
    world, data = data_of(root, kind, seed, quick)
    found = {}
    for name, options in PRIORS.items():
        schema = data.feature_schema
        if (options.get("item_features") and not schema.item) or (options.get("user_features") and not schema.user):
            continue
        begin = time.perf_counter()
        bounded = recpo.factorize(data, **options, **({"ranks": [2], "sweeps": 5} if quick else {}))
        found[name] = {"seconds": time.perf_counter() - begin, **bounded.facts["chosen"]}
        directory = root / name.replace(" ", "_")
        bounded.save(directory / "bound", overwrite=True)
        replace(bounded, lower_bound=0.0).save(directory / "mean", overwrite=True)
    places = [root / name.replace(" ", "_") / how for name in found for how in ("mean", "bound")]
    recpo.evaluate(
        data,
        contenders=[*map(str, places)],
        baselines=False,
        truth=world.root / "truth",
        ks=[10],
        segments=False,
        off_policy=None,
        out=root / "evaluation",
        overwrite=True,
    )
    document = json.loads((root / "evaluation" / "metrics.json").read_text(encoding="utf-8"))
    contenders = iter(document["contenders"])
    for model in found.values():
        for how in ("mean", "bound"):
            one = next(contenders)
            model[f"{how}_value"] = one["metrics"]["true_reward@10"]["mean"]
            model[f"{how}_dislikes"] = one["metrics"]["true_dislike@10"]["mean"]
            model[f"{how}_items"] = round(one["totals"]["coverage@10"] * data.num_items)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/priors"))
    kinds = ("default", "confounded", "small", "living")
    worlds = [f"{kind}:{seed}" for kind in kinds for seed in range(3 if kind in ("default", "small") else 2)]
    parser.add_argument("--worlds", nargs="+", default=worlds)
    parser.add_argument("--quick", action="store_true", help="one tiny world, to see that it runs")
    options = parser.parse_args()
    options.worlds = ["living:0"] if options.quick else options.worlds
    table = Table(*COLUMNS, title="factorizations by their prior means")
    for name in options.worlds:
        kind, _, seed = name.partition(":")
        for prior, one in measured(options.work / f"{kind}-{seed}", kind, int(seed), options.quick).items():
            print(json.dumps({"world": name, "prior": prior, **one}), flush=True)
            values = (f"{one[f'{how}_{what}']:.4f}" for how in ("mean", "bound") for what in ("value", "dislikes"))
            error, items, seconds = f"{one['squared_error']:.5f}", str(one["bound_items"]), f"{one['seconds']:.1f}"
            table.add_row(name, prior, error, *values, items, seconds)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

"""True value of aligned policies against the baselines that a team would use: simulated worlds, several seeds.

    python benchmarks/value.py --work runs/value                          # the worlds that nothing was tuned on
    python benchmarks/value.py --work runs/tuning --worlds default:0      # one of those that may be looked at

For every world: simulates a log, prepares it as `recpo init` proposes, fits a factorization, and for every training
seed pre-trains a policy, aligns it with GBPO from the log, with MPO toward a variational factorization, with every
method of ``--methods`` (configurations with the same reward; of ``semantic_grpo`` from a pre-trained policy of
semantic ids) for the training seeds of ``--method-seeds``, and tilts the MPO policy by it. Then one evaluation of all
of them, with the baselines, the lists of the reward model itself (``factors``) and the oracle. What is there already
is not made again.

Prints one JSON line per contender, world and seed, and a table per kind of world: true value and true dislikes of the
top-10 lists of the test period (the whole catalog is ranked without the user's earlier items), NDCG, coverage, the
SNIPS, and the paired differences to the strongest baseline and to the reward model, with their Student 95 % intervals
over the worlds and seeds. Per world also how well off-policy values order the contenders as the true ones do (Kendall's
tau of every estimator of ``ESTIMATORS``).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau
from verbs import QUICK_FACTORS, QUICK_TRAINING, call, configurations

from recpo.evaluation.estimates import estimate_over_seeds
from recpo.log.inspection import inspect_log
from recpo.verbs.evaluate import evaluate
from recpo.verbs.factorize import factorize
from recpo.verbs.init import preparation_of
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import simulate
from recpo.verbs.tilt import tilt
from recpo.verbs.tokenize import tokenize
from recpo.verbs.train import train

BASELINES = ("popularity", "item_rate", "factorization", "implicit_als", "ease")
ALLRANK = "allrank"  # named like a baseline, but no team has it without recpo
REWARD_MODEL = "factors"
METRICS = {
    "true_reward@10": "true value",
    "true_dislike@10": "true dislikes",
    "NDCG@10": "NDCG",
    "coverage@10": "coverage",
    "SNIPS": "SNIPS",
}
# of the off-policy value of the lists
ESTIMATORS = ("SNIPS", "DR", "SNDR", "Switch-DR")


class World(NamedTuple):
    """A world to measure in: the kind of it and the seed of its simulation."""

    kind: str
    seed: int

    @classmethod
    def parse(cls, text: str) -> World:
        """The world of ``kind:seed``."""
        kind, _, seed = text.partition(":")
        return cls(kind, int(seed))


def prepared_world(world, root, options):
    """The log, the prepared data and the factorization of a world."""
    log, prepared, factors = root / "log", root / "prepared", root / "factors"
    if not (prepared / "manifest.json").is_file():
        call(simulate, out=log, world=world.kind, seed=world.seed, overwrite="true", **options.simulation)
        tables = {"items": log / "items.parquet"} if (log / "items.parquet").is_file() else {}
        proposed = preparation_of(inspect_log(log / "log"))
        prepare(out=prepared, overwrite=True, progress=False, **proposed, **tables)
    if not factors.is_dir():
        call(factorize, prepared=prepared, out=factors, **(QUICK_FACTORS if options.quick else {}))
    return log, prepared, factors


def codes_of(root, prepared):
    """The semantic ids of a world's items."""
    codes = root / "codes"
    if not codes.is_dir():
        call(tokenize, prepared=prepared, out=codes)
    return codes


def trained(root, seed, prepared, factors, options):
    """The runs of one training seed, by the names of their configurations."""
    quick = QUICK_TRAINING if options.quick else {}
    common = {"data__prepared": prepared, "seed": seed, "data__seed": seed, "progress": "false", **quick}
    further = options.methods if seed in options.method_seeds else []
    before = ["semantic_pretrain"] if any(name.startswith("semantic_") for name in further) else []
    runs = {name: root / f"{name}-{seed}" for name in ("pretrain", "gbpo", "mpo", *before, *further)}
    for name, out in runs.items():
        if (out / "run.json").is_file():
            continue
        prefix = "semantic_" if name.startswith("semantic_") else ""
        start = {} if name == f"{prefix}pretrain" else {"init_from": runs[f"{prefix}pretrain"]}
        if prefix:
            start["policy__init_args__codes"] = codes_of(root, prepared)
        if name == "mpo" or name in further:
            start["reward__init_args__factors"] = factors
        call(train, config=configurations(options.configs, name), out=out, overwrite="true", **common, **start)
    tilted = root / f"tilted-{seed}"
    if not (tilted / "run.json").is_file():
        named = {"run": runs["mpo"], "factors": factors, "prepared": prepared}
        call(tilt, **named, lower_bound=1.0, out=tilted, overwrite="true")
    return [*runs.values(), *([tilted] if (tilted / "run.json").is_file() else [])]


def evaluated(world, options):
    """The contenders of a world: name -> metrics."""
    root = options.work / f"{world.kind}-{world.seed}"
    log, prepared, factors = prepared_world(world, root, options)
    runs = [path for seed in options.seeds for path in trained(root, seed, prepared, factors, options)]
    out = root / "evaluation"
    call(
        evaluate,
        prepared=prepared,
        contenders=json.dumps([*options.baselines, ALLRANK, *map(str, runs), str(factors)]),
        truth=log / "truth",
        ks="[10]",
        segments="false",
        out=out,
        overwrite="true",
    )
    document = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    found = {one["name"]: metrics_of(one) for one in document["contenders"] if "true_reward@10" in one["metrics"]}
    # where no temperature is better, the untilted policy is what tilting gives
    return {f"tilted-{seed}": found[f"mpo-{seed}"] for seed in options.seeds} | found


def metrics_of(contender):
    """Means of ``METRICS``, and the off-policy values; nan where there is none."""
    found = {name: value["mean"] for name, value in contender["metrics"].items()} | contender["totals"]
    found |= {one["estimator"]: one["value"] for one in contender["off_policy"] if one["target"] == "top_10"}
    names = dict.fromkeys([*METRICS, *ESTIMATORS])
    return {name: np.nan if found.get(name) is None else float(found[name]) for name in names}


def table(kind, worlds, seeds, columns=METRICS):
    """Means over worlds and seeds; paired differences to the strongest baseline and the reward model.

    ``columns`` has the title of every metric that is shown.
    """
    first = next(iter(worlds.values()))
    baselines = [name for name in BASELINES if name in first]
    strongest = max(baselines, key=lambda name: np.mean([found[name]["true_reward@10"] for found in worlds.values()]))
    shown = Table(title=f"{kind}: worlds {[world.seed for world in worlds]}, training seeds {list(seeds)}")
    references = (strongest, REWARD_MODEL)
    for column in ("contender", *columns.values(), *(f"true value - {name}" for name in references)):
        shown.add_column(column, justify="left" if column == "contender" else "right")
    of_runs = {name.rsplit("-", 1)[0] for name in first if name.rsplit("-", 1)[-1].isdigit()}
    for name in [*(name for name in first if name.rsplit("-", 1)[0] not in of_runs), *sorted(of_runs)]:
        members = [f"{name}-{seed}" for seed in seeds if f"{name}-{seed}" in first] if name in of_runs else [name]
        values = {metric: [found[one][metric] for found in worlds.values() for one in members] for metric in columns}
        cells = [f"{np.mean(column):.4f}" for column in values.values()]
        for reference in references:
            against = [found[reference]["true_reward@10"] for found in worlds.values() for _ in members]
            gain = [own - other for own, other in zip(values["true_reward@10"], against, strict=True)]
            cells.append("" if name == reference else difference(gain))
        shown.add_row(name, *cells)
    Console(width=170).print(shown)


def difference(gain):
    """A mean of paired differences, with its interval where there are several."""
    if len(gain) < 2:
        return f"{gain[0]:+.4f}"
    found = estimate_over_seeds(gain)
    return f"{found.mean:+.4f} ± {found.half_width:.4f}"


def agreement(found):
    """Kendall's tau between the off-policy and the true values of a world's contenders, by estimator.

    Of methods, whose runs of several training seeds are averaged, and of all runs: those of one method differ by less
    than either value is known.
    """
    methods = {}
    for name in found:
        methods.setdefault(name.rsplit("-", 1)[0] if name.rsplit("-", 1)[-1].isdigit() else name, []).append(name)
    taus = {"kendall_tau": {}, "kendall_tau_of_runs": {}}
    for estimator in ESTIMATORS:
        both = {name: (one[estimator], one["true_reward@10"]) for name, one in found.items()}
        of_methods = [np.mean([both[name] for name in members], 0) for members in methods.values()]
        taus["kendall_tau"][estimator] = tau(of_methods)
        taus["kendall_tau_of_runs"][estimator] = tau(list(both.values()))
    return taus


def tau(pairs):
    """Kendall's tau of pairs of values, without those of which one is not known."""
    known = np.array(pairs)[~np.isnan(np.array(pairs)).any(1)]
    return float(kendalltau(*known.T).statistic)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/value"))
    worlds = ["default:11", "default:12", "default:13", "confounded:14", "confounded:15"]
    parser.add_argument("--worlds", type=World.parse, nargs="+", default=[World.parse(world) for world in worlds])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of training")
    add_arguments(parser)
    options = parser.parse_args()
    options.simulation = {}
    if options.quick:
        options.worlds, options.seeds = options.worlds[:1], options.seeds[:2]
        options.simulation = {"users": 80, "items": 60, "events": 5000}
    results = measured(options)
    for kind in dict.fromkeys(world.kind for world in results):
        table(kind, {world: found for world, found in results.items() if world.kind == kind}, options.seeds)


def add_arguments(parser):
    """The options that all benchmarks of true values share."""
    parser.add_argument("--configs", type=Path, default=Path("configs"))
    parser.add_argument("--methods", nargs="*", default=[], help="further configurations: grpo, ppo, semantic_grpo...")
    parser.add_argument("--method-seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of those")
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=BASELINES)
    parser.add_argument("--quick", action="store_true", help="tiny worlds and one epoch, to see that it runs")


def measured(options, more=None):
    """The contenders of every world, one printed line each; ``more`` adds metrics to those of a world."""
    results = {}
    for world in options.worlds:
        results[world] = evaluated(world, options)
        if more is not None:
            more(world, results[world], options)
        for name, metrics in results[world].items():
            print(json.dumps({"world": world.kind, "seed": world.seed, "contender": name, **metrics}), flush=True)
        print(json.dumps({"world": world.kind, "seed": world.seed, **agreement(results[world])}), flush=True)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}))
    return results


if __name__ == "__main__":
    main()

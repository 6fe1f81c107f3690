r"""A recipe from the log to the numbers of published tables: leave-one-out, full ranking, two training seeds.

    python benchmarks/published.py --recipe catalog --dataset Beauty --log beauty/log.parquet --work runs/beauty
    python benchmarks/published.py --recipe catalog_features --dataset Toys --log toys/log.parquet \
        --items toys/items.parquet --work runs/toys
    python benchmarks/published.py --recipe semantic --log sports/log.parquet --work runs/sports --seeds 0
    python benchmarks/published.py --recipe catalog --dataset ML-1M --log ml-1m/ratings.dat --work runs/ml-1m \
        --preset movielens

Prepares the log, trains and evaluates. The same command continues after a kill: finished steps are skipped, and
interrupted training is resumed. Only the files and ``--seeds`` differ between data sets. Sizes follow from the size of
the log (``recpo.training.recipes.sizes_of``; docs/training.md), all other options are in configs/published_*.yaml, and
the checkpoint is the one with the best NDCG@10 of the validation events. ``--budget 3600`` also searches around these
sizes for about so many CPU-seconds, on validation events, with the first seed (``published_search.py``); its decision
is kept in the directory, and ``--trials`` repeats it on another machine. The trained policy is then tilted by
sequential rules (``recpo tilt``), at a temperature that validation events choose. A seed is a pipeline of its own: the
codes of a semantic policy come from the catalog softmax with the same seed. The log has the columns user_id, item_id
and pos (the place of an event in its user's sequence), or those of a preset of ``recpo prepare``. Unknown options go to
``recpo prepare`` (``--columns.item_id asin``).

Prints one JSON line per seed, then a table: Recall@10 and NDCG@10 of the test events with and without the items of the
user's past among the candidates, of the trained policy, the tilted one and the rules alone, and the published numbers
of the data set (``PUBLISHED``). ``cpu_s`` counts what this process did for the seed.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from published_search import RULES, chosen_variant, variants
from rich.console import Console
from rich.table import Table

import recpo
from recpo.cli.main import main as verb
from recpo.training.recipes import counts_of, sizes_of

CONFIGS = Path(recpo.__file__).parent / "configs"
K = 10
LEAVE_ONE_OUT = ["--label", "EveryEvent", "--split", "LeaveLastOut", "--catalog", "log"]
QUICK = {"trainer.limit_train_batches": 2, "data.max_validation_users": 32}
WITHOUT, KEPT = "without the past", "past kept"
RULES_ALONE = "sequential_rules"


class Recipe(NamedTuple):
    """A policy of the published tables.

    Attributes:
        configs: its files in ``configs``; each changes what those before it say.
        step: the rules for its sizes (``recpo.training.recipes.sizes_of``).
        reads_items: reads a table of items.
        has_codes: generates codes, which are made from the item vectors of a catalog softmax.
    """

    configs: tuple[str, ...]
    step: str = "ranking"
    reads_items: bool = False
    has_codes: bool = False


RECIPES = {
    "catalog": Recipe(("published_catalog",)),
    "catalog_features": Recipe(("published_catalog", "features_pretrain"), reads_items=True),
    "semantic": Recipe(("published_semantic",), "semantic", has_codes=True),
}


class Published(NamedTuple):
    """Recall@10 and NDCG@10 of a paper per data set, and whether the user's past is among the candidates."""

    source: str
    past: str
    rows: dict[str, tuple[float, float | None]]


# Policies that generate codes search all items. The tables for the others do not say what they rank; no user of the
# Amazon sets has an item twice, so they stand where the numbers are higher.
PUBLISHED = [
    Published(
        "SASRec, sampled softmax (arXiv 2508.06450)",
        WITHOUT,
        {
            "Beauty": (0.0921, 0.0531),
            "Sports": (0.0569, 0.0314),
            "Toys": (0.0970, 0.0580),
            "ML-1M": (0.2929, 0.1684),
        },
    ),
    Published(
        "eSASRec (arXiv 2508.06450)",
        WITHOUT,
        {
            "Beauty": (0.0928, 0.0523),
            "Sports": (0.0560, 0.0323),
            "Toys": (0.0939, 0.0538),
            "ML-1M": (0.3133, 0.1772),
        },
    ),
    Published("HSTU (arXiv 2508.06450)", WITHOUT, {"Beauty": (0.0788, 0.0439), "ML-1M": (0.3037, 0.1719)}),
    Published("FuXi-alpha (arXiv 2508.06450)", WITHOUT, {"Beauty": (0.0809, 0.0451), "ML-1M": (0.3164, 0.1813)}),
    Published("ActionPiece (quoted there)", KEPT, {"Beauty": (0.0775, 0.0424), "Sports": (0.0500, 0.0264)}),
    Published(
        "TIGER (phonism/genrec)",
        KEPT,
        {"Beauty": (0.0721, 0.0378), "Sports": (0.0414, 0.0224), "Toys": (0.0647, 0.0350)},
    ),
    Published(
        "OpenOneRec GRLM (its README)",
        KEPT,
        {"Beauty": (0.0924, None), "Sports": (0.0547, None), "Toys": (0.0953, None)},
    ),
]


def prepared(options: argparse.Namespace, recipe: Recipe, more: list[str]) -> Path:
    """The prepared log, with the table of items if the policy, or the one that its codes come from, reads it."""
    reads_items = recipe.reads_items or (recipe.has_codes and options.items is not None)
    out = options.work / ("prepared_with_items" if reads_items else "prepared")
    if not (out / "manifest.json").is_file():
        files = ["--log", str(options.log), "--out", str(out)]
        files += ["--items", str(options.items)] if reads_items else []
        start = ["--config", str(CONFIGS / "published_prepare.yaml")]
        if options.preset is not None:
            start = ["--preset", options.preset, *LEAVE_ONE_OUT]
        if verb(["prepare", *start, *files, *more]):
            raise SystemExit("the log could not be prepared")
    return out


def trained(options: argparse.Namespace, name: str, seed: int, more: list[str]) -> recpo.Run:
    """The finished run of a recipe, by the rules or of the variant that a search chose."""
    data = prepared(options, RECIPES[name], more)
    sizes = sizes_of(RECIPES[name].step, counts_of(recpo.Prepared.open(data)))
    changes = variants(name, sizes)
    epochs = 1 if options.quick else sizes.epochs

    def train(variant: str, seed: int, until: int) -> recpo.Run:
        out = options.work / "_".join([name, str(seed), *([] if variant == RULES else [variant])])
        settings = {**sizes.options, **changes[variant], "seed": seed, "data.seed": seed}
        settings |= QUICK if options.quick else {}
        if RECIPES[name].has_codes:
            settings["policy.init_args.codes"] = str(codes(options, seed, data, more))
        return trained_until(data, RECIPES[name].configs, out, until, settings)

    def score(variant: str, until: int) -> float:
        return best_validation(train(variant, options.seeds[0], until), until)[f"validation NDCG@{K}"]

    limit = options.budget if options.trials is None else options.trials
    variant = RULES
    if limit is not None:
        variant = chosen_variant(options.work / f"search_{name}.json", list(changes), epochs, score, limit)
    return train(variant, seed, epochs)


def trained_until(data: Path, configs: tuple[str, ...], out: Path, epochs: int, settings: dict[str, Any]) -> recpo.Run:
    """A run of so many epochs or more; trains it, or resumes training, if there is none."""
    if (out / "run.json").is_file():
        resolved = yaml.safe_load((out / "resolved.yaml").read_text(encoding="utf-8"))
        if resolved["trainer"]["init_args"]["max_epochs"] >= epochs:
            return recpo.load(out)
    resume = (out / "checkpoints" / "last.ckpt").is_file()
    files = [CONFIGS / f"{config}.yaml" for config in configs]
    settings = settings | {"trainer.max_epochs": epochs}
    return recpo.train(data, config=files, out=out, resume=resume, overwrite=not resume, progress=True, **settings)


def codes(options: argparse.Namespace, seed: int, data: Path, more: list[str]) -> Path:
    """Codes from the item vectors of the catalog softmax of the same seed: the one with features if items are given."""
    source = "catalog" if options.items is None else "catalog_features"
    out = options.work / f"codes_{source}_{seed}"
    if not (out / "manifest.json").is_file():
        run = trained(options, source, seed, more)
        files = ["--prepared", str(data), "--vectors.run", str(run.root), "--out", str(out)]
        if verb(["tokenize", "--config", str(CONFIGS / "published_codes.yaml"), *files]):
            raise SystemExit("no codes could be made")
    return out


def tilted(options: argparse.Namespace, run: recpo.Run, data: Path) -> recpo.Run:
    """The run, tilted by sequential rules; itself, where no temperature is better."""
    out = options.work / f"{run.root.name}_tilted"
    if not (out / "run.json").is_file():
        return recpo.tilt(run, RULES_ALONE, data, out=out, progress=True).run or run
    return recpo.load(out)


def measured(options: argparse.Namespace, contender: recpo.Run | str, data: Path) -> dict[str, float]:
    """Recall and NDCG of the test events, without the past among the candidates and with it."""
    found: dict[str, float] = {}
    name = contender if isinstance(contender, str) else contender.root.name
    for past in (WITHOUT, KEPT):
        out = options.work / f"{name}_test{'_past_kept' if past == KEPT else ''}"
        if not (out / "metrics.json").is_file():
            settings: dict[str, Any] = {
                "off_policy": None,
                "baselines": False,
                "segments": False,
                "ks": (K,),
                "repeats": past == KEPT,
            }
            recpo.evaluate(data, [contender], out=out, **settings)
        rows = recpo.load(out).to_pandas().set_index("metric")["mean"]
        found |= {f"{metric}@{K}, {past}": float(rows[f"{metric}@{K}"]) for metric in ("Recall", "NDCG")}
    return found


def best_validation(run: recpo.Run, epochs: int | None = None) -> dict[str, float]:
    """The validation with the best NDCG, that of the checkpoint; one file per start of a run that was resumed.

    Args:
        run: a run.
        epochs: only the validations of the first so many epochs; None = of all.
    """
    rows: list[dict[str, str]] = []
    for file in sorted(run.root.glob("logs/version_*/metrics.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            rows += [row for row in csv.DictReader(lines) if row.get(f"val/NDCG@{K}")]
    done = [row for row in rows if epochs is None or int(row["epoch"]) < epochs]
    best = max(done, key=lambda row: float(row[f"val/NDCG@{K}"]))
    numbers = {f"validation {name}@{K}": float(best[f"val/{name}@{K}"]) for name in ("HitRate", "NDCG")}
    return numbers | {"best epoch": int(best["epoch"]) + 1, "epochs": max(int(row["epoch"]) for row in done) + 1}


def table(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> Table:
    """Test numbers of the contenders, and the published numbers."""
    columns = [f"{metric}@{K}, {past}" for past in (WITHOUT, KEPT) for metric in ("Recall", "NDCG")]
    shown = Table("", *columns, title=f"{options.dataset or options.log}: test events")
    for name, numbers in found.items():
        shown.add_row(name, *(f"{numbers[column]:.4f}" for column in columns))
    for source, past, rows in PUBLISHED:
        if options.dataset in rows:
            pair = ["" if number is None else f"{number:.4f}" for number in rows[options.dataset]]
            shown.add_row(source, *(["", "", *pair] if past == KEPT else [*pair, "", ""]))
    return shown


def refuse_other_inputs(options: argparse.Namespace, more: list[str]) -> None:
    """Finished steps are skipped, so the results of one directory must come from one log."""
    file, preset = options.work / "inputs.json", [] if options.preset is None else ["--preset", options.preset]
    inputs = {"--log": str(options.log.resolve()), "--quick": options.quick, "options of prepare": preset + more}
    inputs |= {} if options.items is None else {"--items": str(options.items.resolve())}
    known = json.loads(file.read_text()) if file.is_file() else {}
    for name, value in inputs.items():
        if known.get(name, value) != value:
            raise SystemExit(f"{options.work} has results with {name} {known[name]}, not {value}: name another --work")
    file.write_text(json.dumps(known | inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=sorted(RECIPES), required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--items", type=Path, help="table of items: item_id and its features")
    datasets = sorted({name for one in PUBLISHED for name in one.rows})
    parser.add_argument("--dataset", help=f"shows the published numbers for it: {', '.join(datasets)}")
    parser.add_argument("--work", type=Path, required=True, help="directory of everything that is made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--budget", type=float, help="CPU-seconds for a search on validation events (about)")
    parser.add_argument("--trials", type=int, help="number of variants that the search tries, instead of --budget")
    parser.add_argument("--preset", help="of recpo prepare, whose column names the log has: movielens, recbole")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    options, more = parser.parse_known_args()
    if RECIPES[options.recipe].reads_items and options.items is None:
        parser.error(f"the recipe {options.recipe} reads features of the items: name their table with --items")
    if options.trials is not None and options.budget is not None:
        parser.error("--trials and --budget both say how many variants are tried: name one")
    options.work.mkdir(parents=True, exist_ok=True)
    refuse_other_inputs(options, more)
    data = prepared(options, RECIPES[options.recipe], more)
    found: dict[str, dict[str, float]] = {}
    for seed in options.seeds:
        started, name = time.process_time(), f"recpo, {options.recipe}, seed {seed}"
        run = trained(options, options.recipe, seed, more)
        final = tilted(options, run, data)
        found |= {name: measured(options, run, data), f"{name}, tilted": measured(options, final, data)}
        line = {"recipe": options.recipe, "data": options.dataset, "seed": seed, "run": run.root.name, **found[name]}
        line |= {"temperature": final.results.get("tilt/temperature"), "tilted": found[f"{name}, tilted"]}
        print(json.dumps(line | best_validation(run) | {"cpu_s": round(time.process_time() - started)}), flush=True)
    found["sequential rules alone"] = measured(options, RULES_ALONE, data)
    Console(width=150).print(table(options, found))


if __name__ == "__main__":
    main()

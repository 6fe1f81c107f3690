r"""A recipe from the log to the numbers of the published tables: leave-one-out, full ranking, two training seeds.

    python benchmarks/published.py --recipe catalog --dataset Beauty --log beauty/log.parquet --work runs/beauty
    python benchmarks/published.py --recipe catalog_features --dataset Toys --log toys/log.parquet \
        --items toys/items.parquet --work runs/toys
    python benchmarks/published.py --recipe semantic --log sports/log.parquet --work runs/sports --seeds 0
    python benchmarks/published.py --recipe catalog --dataset ML-1M --log ml-1m/ratings.dat --work runs/ml-1m \
        --preset movielens

Prepares the log, trains and evaluates; every step that is done is left out, and training that was cut short is resumed,
so the same command goes on after a kill. Nothing but the files and ``--seeds`` differs between data sets: the options
stand in configs/ (``RECIPES``), and the best checkpoint is the one with the best NDCG@10 of the validation events. The
log has the columns user_id, item_id and pos, the place of an event in its user's sequence, or those of a preset of
``recpo prepare``. Further options go to ``recpo prepare`` (``--columns.item_id asin``).

Prints one JSON line per seed, and a table: Recall@10 and NDCG@10 of the test events with and without the items of the
user's past among the candidates, and what was published for the data set (``PUBLISHED``). CPU seconds are those of this
process since it was started.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import recpo
from recpo.cli.main import main as verb

CONFIGS = Path(recpo.__file__).parent / "configs"
K = 10
LEAVE_ONE_OUT = ["--label", "EveryEvent", "--split", "LeaveLastOut", "--catalog", "log"]
QUICK = {"trainer.max_epochs": 1, "trainer.limit_train_batches": 2, "data.max_validation_users": 32}
PAST = {"without the past": True, "past kept": False}


class Recipe(NamedTuple):
    """Configurations in ``configs/``: of the run, and of its codes, which are made from the vectors of another run."""

    train: str
    reads_items: bool = False
    tokenize: str | None = None


RECIPES = {
    "catalog": Recipe("beauty_catalog.yaml"),
    "catalog_features": Recipe("beauty_catalog_categories.yaml", reads_items=True),
    "semantic": Recipe("beauty_semantic.yaml", tokenize="tokenize_trained.yaml"),
}

#: Recall@10 and NDCG@10. Codes in these sets hardly repeat an item, so papers keep the past or do not say.
PUBLISHED: dict[str, dict[str, tuple[float, float | None]]] = {
    "SASRec, sampled softmax (arXiv 2508.06450)": {
        "Beauty": (0.0921, 0.0531),
        "Sports": (0.0569, 0.0314),
        "Toys": (0.0970, 0.0580),
        "ML-1M": (0.2929, 0.1684),
    },
    "eSASRec (arXiv 2508.06450)": {
        "Beauty": (0.0928, 0.0523),
        "Sports": (0.0560, 0.0323),
        "Toys": (0.0939, 0.0538),
        "ML-1M": (0.3133, 0.1772),
    },
    "HSTU (arXiv 2508.06450)": {"Beauty": (0.0788, 0.0439), "ML-1M": (0.3037, 0.1719)},
    "FuXi-alpha (arXiv 2508.06450)": {"Beauty": (0.0809, 0.0451), "ML-1M": (0.3164, 0.1813)},
    "ActionPiece (quoted there)": {"Beauty": (0.0775, 0.0424), "Sports": (0.0500, 0.0264)},
    "TIGER (phonism/genrec)": {"Beauty": (0.0721, 0.0378), "Sports": (0.0414, 0.0224), "Toys": (0.0647, 0.0350)},
    "OpenOneRec GRLM (its README)": {"Beauty": (0.0924, None), "Sports": (0.0547, None), "Toys": (0.0953, None)},
}


def prepared(options: argparse.Namespace, recipe: Recipe, more: list[str]) -> Path:
    """The prepared log, with the table of items where the recipe, or that of its codes, reads it."""
    reads_items = recipe.reads_items or (recipe.tokenize is not None and options.items is not None)
    out = options.work / ("prepared_with_items" if reads_items else "prepared")
    if not (out / "manifest.json").is_file():
        files = ["--log", str(options.log), "--out", str(out)]
        files += ["--items", str(options.items)] if reads_items else []
        start = ["--config", str(CONFIGS / "beauty_prepare.yaml")]
        if options.preset is not None:
            start = ["--preset", options.preset, *LEAVE_ONE_OUT]
        if verb(["prepare", *start, *files, *more]):
            raise SystemExit("the log could not be prepared")
    return out


def trained(options: argparse.Namespace, name: str, seed: int, more: list[str]) -> recpo.Run:
    """The run of a recipe, trained, or resumed, where it is not there yet."""
    recipe, out = RECIPES[name], options.work / f"{name}_{seed}"
    if (out / "run.json").is_file():
        return recpo.load(out)
    data = prepared(options, recipe, more)
    settings: dict[str, Any] = {"seed": seed, "data.seed": seed, **(QUICK if options.quick else {})}
    if recipe.tokenize is not None:
        settings["policy.init_args.codes"] = str(codes(options, recipe, more))
    resume = (out / "checkpoints" / "last.ckpt").is_file()
    config = CONFIGS / recipe.train
    return recpo.train(data, config=config, out=out, resume=resume, overwrite=not resume, progress=True, **settings)


def codes(options: argparse.Namespace, recipe: Recipe, more: list[str]) -> Path:
    """Codes from the item vectors of the first seed's catalog softmax: the one with features if items are given."""
    source = "catalog" if options.items is None else "catalog_features"
    out = options.work / f"codes_{source}"
    if not (out / "manifest.json").is_file():
        run = trained(options, source, options.seeds[0], more)
        files = ["--prepared", str(prepared(options, recipe, more)), "--out", str(out)]
        if verb(["tokenize", "--config", str(CONFIGS / str(recipe.tokenize)), *files, "--vectors.run", str(run.root)]):
            raise SystemExit("no codes could be made")
    return out


def measured(options: argparse.Namespace, run: recpo.Run, data: Path) -> dict[str, float]:
    """Recall and NDCG of the test events, with the past among the candidates and without it."""
    found: dict[str, float] = {}
    for name, excludes in PAST.items():
        out = options.work / f"{run.root.name}_test{'' if excludes else '_past_kept'}"
        if not (out / "metrics.json").is_file():
            settings: dict[str, Any] = {"off_policy": None, "segments": False, "ks": (K,), "exclude_past": excludes}
            recpo.evaluate(data, [run], out=out, **settings)
        rows = recpo.load(out).to_pandas().set_index("metric")["mean"]
        found |= {f"{metric}@{K}, {name}": float(rows[f"{metric}@{K}"]) for metric in ("Recall", "NDCG")}
    return found


def table(options: argparse.Namespace, found: dict[int, dict[str, float]]) -> Table:
    """All seeds, their mean, and what was published."""
    columns = list(next(iter(found.values())))
    shown = Table("", *columns, title=f"{options.dataset or options.log}: test events")
    for seed, numbers in found.items():
        shown.add_row(f"recpo, {options.recipe}, seed {seed}", *(f"{numbers[name]:.4f}" for name in columns))
    means = [sum(numbers[name] for numbers in found.values()) / len(found) for name in columns]
    shown.add_row(f"recpo, {options.recipe}, mean", *(f"{mean:.4f}" for mean in means))
    for source, rows in PUBLISHED.items():
        if options.dataset in rows:
            recall, ndcg = rows[options.dataset]
            shown.add_row(source, f"{recall:.4f}", "" if ndcg is None else f"{ndcg:.4f}", "", "")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=sorted(RECIPES), required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--items", type=Path, help="table of items: item_id and its features")
    parser.add_argument("--dataset", help=f"shows what was published for it: {', '.join(known_datasets())}")
    parser.add_argument("--work", type=Path, required=True, help="directory of everything that is made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--preset", help="of recpo prepare, whose column names the log has: movielens, recbole")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    options, more = parser.parse_known_args()
    if RECIPES[options.recipe].reads_items and options.items is None:
        parser.error(f"the recipe {options.recipe} reads features of the items: name their table with --items")
    options.work.mkdir(parents=True, exist_ok=True)
    found: dict[int, dict[str, float]] = {}
    for seed in options.seeds:
        run = trained(options, options.recipe, seed, more)
        found[seed] = measured(options, run, prepared(options, RECIPES[options.recipe], more))
        line = {"recipe": options.recipe, "data": options.dataset, "seed": seed, **found[seed]}
        print(json.dumps(line | {"cpu_s": round(time.process_time())}), flush=True)
    Console().print(table(options, found))


def known_datasets() -> list[str]:
    """Names of the published columns."""
    return sorted({name for rows in PUBLISHED.values() for name in rows})


if __name__ == "__main__":
    main()

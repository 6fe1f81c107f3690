"""The loop: ways to log and training recipes, over rounds of serving and training on simulated users.

    python benchmarks/loop.py --work runs/loop                                   # every cell, world and seed
    python benchmarks/loop.py --work runs/loop --worlds default --seeds 0 1 --cells exploring:value greedy:value
    python benchmarks/loop.py --work runs/loop --repeat_after 1                  # an item may come back after a day

A cell is a way to serve and a recipe. Ways: ``unlogged`` (the best items, a log without propensities), ``greedy`` (the
best items, each with its propensity), ``exploring`` (drawn, with exact propensities). Recipes: ``imitation``
(pre-training, then the likelihood of positives), ``gbpo`` (pre-training, then GBPO against the logged propensities),
``value`` (pre-training, then MPO toward a factorization), ``tilted`` (pre-training, tilted by a factorization with
``--temperature``: the same value for a third of the time). The configurations are those of ``configs/`` with the sizes
of this benchmark.

Prints one JSON line per round, and a table per world: the true value's share of the oracle's as the last day was
served, as all days were, and of the last policy's best lists; regret per round; coverage and dislikes of the last day;
how often the day's earnings lay in the interval that was estimated before it; all with their Student 95 % intervals
over seeds. What is there already is not made again, and what is not there when ``--until`` (HH:MM) has come is left out
of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

import recpo
from recpo.evaluation.estimates import estimate_over_seeds

WAYS = ("unlogged", "greedy", "exploring")
RECIPES = {"imitation": ("likelihood_positives",), "gbpo": ("gbpo",), "value": ("mpo",), "tilted": ()}
CELLS = (
    "exploring:value",
    "greedy:value",
    "exploring:gbpo",
    "exploring:imitation",
    "unlogged:value",
    "unlogged:imitation",
)
COLUMNS = {
    "served": "last day, of the oracle",
    "days": "mean of the days, of the oracle",
    "lists": "last lists, of the oracle",
    "regret": "regret per round",
    "coverage": "coverage, last day",
    "dislikes": "dislikes, last day",
    "covered": "estimates that covered",
}


def configuration(name, options):
    """One of the shipped configurations at the sizes of this benchmark."""
    content = yaml.safe_load((options.configs / f"{name}.yaml").read_text(encoding="utf-8"))
    if name == "pretrain":  # the others take its policy
        policy = content["policy"]["init_args"]
        policy |= {"dim": options.dim, "layers": options.layers, "max_history": options.max_history}
        policy |= {"fold_in": options.fold_in}
        policy |= {"attention_length": min(policy["attention_length"], options.max_history)}
    layout = content["data"]["layout"].setdefault("init_args", {})
    layout["history_length"] = min(layout.get("history_length", 50), options.max_history)
    content["data"]["batch_size"] = options.batch_size
    content["trainer"]["max_epochs"] = {"pretrain": options.epochs, "mpo": options.mpo_epochs}.get(
        name, options.align_epochs or content["trainer"]["max_epochs"]
    )
    if name == "gbpo":
        content["old_policy"] = "logged"
    return content


def run_cell(cell, world, seed, options):
    """The loop of a cell; continues an existing one."""
    way, recipe = cell.split(":")
    explored = recpo.Exploration(options.temperature, options.epsilon, options.shortlist)

    def stop(made):
        print(f"{datetime.now():%H:%M} {world}:{seed} {cell} round {made.number}", file=sys.stderr, flush=True)
        if options.until is not None and f"{datetime.now():%H:%M}" >= options.until:
            raise TimeoutError

    rule = "" if options.repeat_after is None else f"-after{options.repeat_after:g}"
    out = options.work / f"{world}-{seed}-{way}-{recipe}{rule}"
    with redirect_stdout(sys.stderr):
        return recpo.loop(
            out,
            recipe=[configuration(name, options) for name in ("pretrain", *RECIPES[recipe])],
            rounds=options.rounds,
            world=world,
            seed=seed,
            exploration=explored if way == "exploring" else None,
            log_propensities=way != "unlogged",
            tilt=options.temperature if recipe == "tilted" else None,
            repeat_after=options.repeat_after,
            warm_epochs=options.warm_epochs,
            users=options.users,
            items=options.items,
            events=options.events,
            days=options.days,
            resume=True,
            on_round=stop,
        )


def numbers(done):
    """What the table shows of a loop."""
    days = [one.served for one in done.rounds if one.served is not None]
    last = done.rounds[-1].lists
    known = [one for one in done.outcomes if None not in (one.low, one.high, one.earned)]
    return {
        "served": days[-1].value / days[-1].oracle_value,
        "days": float(np.mean([day.value / day.oracle_value for day in days])),
        "lists": last.true_reward / last.oracle,
        "regret": float(np.mean([day.regret for day in days])),
        "coverage": days[-1].coverage,
        "dislikes": days[-1].dislikes,
        "covered": float(np.mean([one.low <= one.earned <= one.high for one in known])) if known else float("nan"),
    }


def lines(done, cell, world, seed):
    """A JSON line per round."""
    expected = {one.number: one._asdict() for one in done.outcomes}
    for one in done.rounds:
        day = one.served
        yield {
            "world": world,
            "seed": seed,
            "cell": cell,
            "round": one.number,
            "served": None if day is None else day.value,
            "oracle": None if day is None else day.oracle_value,
            "logging": None if day is None else day.logging_value,
            "dislikes": None if day is None else day.dislikes,
            "coverage": None if day is None else day.coverage,
            "lists": one.lists.true_reward,
            "lists_oracle": one.lists.oracle,
            "outcome": expected.get(one.number),
        }


def table(world, found, rounds):
    """Means over the seeds that are whole."""
    shown = Table(title=f"{world}, {rounds} rounds")
    for column in ("cell", "seeds", *COLUMNS.values()):
        shown.add_column(column, justify="left" if column == "cell" else "right")
    for cell in dict.fromkeys(cell for cell, _ in found):
        of_seeds = {seed: values for (name, seed), values in found.items() if name == cell}
        columns = [[values[name] for values in of_seeds.values()] for name in COLUMNS]
        shown.add_row(cell, " ".join(map(str, of_seeds)), *map(with_interval, columns))
    Console(width=180).print(shown)


def with_interval(values):
    """A mean over seeds and, of several, its Student interval."""
    if np.isnan(values).any() or len(values) < 2:
        return "-" if np.isnan(values).any() else f"{values[0]:.3f}"
    found = estimate_over_seeds(values)
    return f"{found.mean:.3f} ± {found.half_width:.3f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/loop"))
    parser.add_argument("--configs", type=Path, default=Path("configs"))
    parser.add_argument("--worlds", nargs="+", default=["default", "confounded"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of world, days and training")
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=8)
    for name, value in {"users": 2000, "items": 1000, "events": 200_000, "days": 14}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = {"dim": 64, "layers": 2, "max_history": 200, "fold_in": 16, "batch_size": 128}
    sizes |= {"epochs": 12, "warm_epochs": 3, "mpo_epochs": 3}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--temperature", type=float, default=0.3, help="of the exploring way")
    parser.add_argument("--epsilon", type=float, default=0.01, help="of the exploring way")
    parser.add_argument("--shortlist", type=int, default=100, help="of the exploring way")
    parser.add_argument("--temperature", type=float, default=0.025, help="of the recipe tilted")
    parser.add_argument("--align_epochs", type=int, help="of gbpo and imitation; as their files say")
    parser.add_argument("--repeat_after", type=float, help="days after which an item may be shown again; never")
    parser.add_argument("--until", help="HH:MM: begin no further round")
    parser.add_argument("--quick", action="store_true", help="a tiny world and two rounds, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        tiny = {"users": 60, "items": 80, "events": 3000, "days": 6, "rounds": 1, "dim": 16, "layers": 1}
        tiny |= {"max_history": 40, "epochs": 1, "warm_epochs": 1, "mpo_epochs": 1, "shortlist": 20}
        vars(options).update(tiny, worlds=options.worlds[:1], seeds=[0], cells=options.cells[:1])
    started, results = time.monotonic(), {}
    for seed in options.seeds:
        for world in options.worlds:
            for cell in options.cells:
                try:
                    done = run_cell(cell, world, seed, options)
                except TimeoutError:
                    continue
                results[world, cell, seed] = numbers(done)
                for line in lines(done, cell, world, seed):
                    print(json.dumps(line), flush=True)
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    print(json.dumps({**facts, "seconds": round(time.monotonic() - started)}))
    for world in options.worlds:
        table(world, {key[1:]: values for key, values in results.items() if key[0] == world}, options.rounds)


if __name__ == "__main__":
    main()

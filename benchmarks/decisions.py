"""Judges what `recpo fit` decides: by the truth where there is one, else by the test period, on many logs and seeds.

    python benchmarks/decisions.py --logs default sparse living default:blind --seeds 0 1 2 --minutes 2
    python benchmarks/decisions.py --logs replay --matrix matrix.parquet kuairand=log.parquet beauty=beauty_directory
    python benchmarks/decisions.py --logs books carts clips market news shop thumbs --world-seed 2

A log is the kind of a simulated world; with ``:blind`` its log has no propensities and no random exposures are marked;
with ``:positives`` it has users, items and times alone, of what was watched to four fifths and not disliked; one of
``generators.py``; or NAME=FILE, a log of your own (a directory: its tables of items and users are read too). One world
per kind (``--world-seed``): the seeds are those of `recpo fit`, so that they show whether one log gives one decision.

Every contender of a fit, those that lost too, is evaluated on the test period. What judges is the true value of the
top-k lists; without a truth, the criterion of the decision. A decision has two duties:

- regret: what the best contender has more than the choice, from paired differences over users, is at most one standard
  error of that difference;
- baseline: the choice is not below the strongest baseline of the test period beyond its 95 % interval.

Minutes are those of all calls of a fit, minutes of a processor those of the last one: on a machine that does other
things, they say how much of the budget it got. Appends one JSON row per fit to ``--work``/decisions.jsonl; rows that
are there are not made again, and a fit that was stopped continues. Prints the rows, and a table with a line per log.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import yaml
from generators import GENERATORS, START_MS
from rich.console import Console
from rich.table import Table

import recpo
from recpo.evaluation import Z95
from recpo.log.prepared import Prepared
from recpo.serving.histories import HistoryReader
from recpo.serving.recommending import moment_of_lists, recommend_lists, runtime_of
from recpo.serving.runtimes import Runtime
from recpo.training.run import Run
from recpo.verbs.contenders import is_baseline, served_baseline
from recpo.verbs.fit import Decision
from recpo.verbs.fit_steps import FitSteps, StepOptions, place_of
from recpo.worlds.log import Simulation
from recpo.worlds.parameters import WORLDS
from recpo.worlds.replay import REPLAY
from recpo.worlds.truth import Truth

ROWS = "decisions.jsonl"
BLIND, POSITIVES = "blind", "positives"
LOGGED = ("propensity", "is_random")
WATCHED = 0.8  # of the duration
LIVE = ("oracle", "logging policy")
QUICK = {"users": 120, "items": 60, "events": 6000}


class Log(NamedTuple):
    """A log to decide on: its name, and the file or directory of it; None = a simulated world."""

    name: str
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Log:
        """The log of ``world``, ``world:blind``, ``world:positives``, a generator or ``NAME=FILE``."""
        name, is_own, path = text.partition("=")
        if is_own:
            return cls(name, Path(path))
        kind, _, suffix = name.partition(":")
        is_world = kind in WORLDS and suffix in ("", BLIND, POSITIVES)
        if not is_world and name not in GENERATORS:
            expected = f"{', '.join(WORLDS)}, with or without :{BLIND} or :{POSITIVES}; or {', '.join(GENERATORS)}"
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        return cls(name)

    @property
    def directory(self) -> str:
        """Its name as that of a directory."""
        return self.name.replace(":", "-")


def generated(log: Log, options: argparse.Namespace) -> tuple[str, Path]:
    """What `recpo fit` gets of a generator: its log and tables, and the directory of a world that replays its truth."""
    root = options.work / f"{log.name}-{options.world_seed}"
    given, world = root / "given", root / "world"
    if not world.is_dir():
        shutil.rmtree(given, ignore_errors=True)
        given.mkdir(parents=True)
        sizes = {name: QUICK[name] for name in ("users", "items")} if options.quick else {}
        made, truth, tables = GENERATORS[log.name](np.random.default_rng(options.world_seed), **sizes)
        for name, table in {"log": made, **tables}.items():
            table.to_parquet(given / f"{name}.parquet", index=False)
        user, item = np.indices(truth.shape).reshape(2, -1)
        matrix = pd.DataFrame({"user_id": user, "item_id": item, "reward": truth.ravel()})
        matrix.to_parquet(root / "matrix.parquet", index=False)
        replayed = {"matrix": root / "matrix.parquet", "start_ms": START_MS}
        recpo.simulate(world, world=REPLAY, seed=options.world_seed, **replayed)
    return str(given), world


def simulated(log: Log, options: argparse.Namespace) -> tuple[Any, Path]:
    """What `recpo fit` gets of a world or a generator, and the directory of its truth."""
    if log.name in GENERATORS:
        return generated(log, options)
    kind, _, lacking = log.name.partition(":")
    root = options.work / f"world-{kind}-{options.world_seed}"
    if not root.is_dir():
        sizes = {"matrix": options.matrix} if kind == REPLAY else QUICK if options.quick else {}
        recpo.simulate(root, world=kind, seed=options.world_seed, **sizes)
    simulation = Simulation.open(root)
    if not lacking:
        return simulation, root
    file = options.work / f"{log.directory}-{options.world_seed}.parquet"
    if not file.is_file():
        table = ds.dataset(simulation.log).to_table()
        if lacking == POSITIVES:
            liked = pc.greater_equal(pc.divide(table["watch_time"], table["duration"]), WATCHED)
            table = table.filter(pc.and_not(liked, table["dislike"])).select(["user_id", "item_id", "timestamp"])
        pq.write_table(table.drop_columns([name for name in LOGGED if name in table.column_names]), file)
    return [str(one) for one in (file, simulation.items, simulation.users) if one], root


def decided(log: Log, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One fit, judged."""
    given, truth = (str(log.path), None) if log.path else simulated(log, options)
    root = options.work / f"{log.directory}-fit-{seed}"
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(f"# {log.name} {seed}: {text[:150]}", flush=True)

    used = time.process_time()
    settings = {"minutes": options.minutes, "k": options.k, "seed": seed, "truth": truth, "on_step": say}
    decision = recpo.fit(given, root, resume=root.is_dir(), **settings)
    facts, processor = decision.facts, time.process_time() - used
    took = {"took": facts["seconds"] / 60, "processor": processor / 60}
    row = {"log": log.name, "seed": seed, "minutes": options.minutes, "choice": decision.chosen}
    row |= judged(decision, truth, options.k)
    row |= {
        "criterion": facts["criterion"]["metric"],
        **took,
        **{name: facts[name] for name in ("effort", "trials", "left_out", "p_value")},
    }
    return row | {"said": [" ".join(text.split()) for text in said if "left out" in text or "no search" in text]}


def judged(decision: Decision, truth: Path | None, k: int) -> dict[str, Any]:
    """The choice against the best contender on the test period, and what ships against the strongest baseline.

    What ships was made again on all events: by the truth, its lists at the end of the log are compared with those of
    baselines that have the same events, and ``value_before`` is that of its lists before it was made again.
    """
    root, names, chosen = decision.root, list(decision.to_pandas()["name"]), decision.chosen
    metric = f"true_reward@{k}" if truth else decision.facts["criterion"]["metric"]
    value, kinds, found = values(root, names, truth, k, metric)
    best = max(value, key=lambda name: value[name])
    regret, decided = paired(found, best, chosen, metric), value
    row = {"metric": metric, "best": best, "best_value": value[best], "decided_value": value[chosen]}
    baselines = [name for name in value if kinds[name] == "baseline"]
    lists = served(decision, truth, k, baselines) if truth and (root / "final").is_dir() else {}
    if lists:
        value = {name: float(np.nanmean(one)) for name, one in lists.items()}
        row["value_before"] = value["decided"]
    baseline = max(baselines, key=lambda name: value[name])
    gain = paired(found, chosen, baseline, metric)
    if lists:
        difference = lists[chosen] - lists[baseline]
        error = np.nanstd(difference) / np.sqrt(np.isfinite(difference).sum())
        gain = float(np.nanmean(difference)), float(Z95 * error)
    return row | {
        "value": value[chosen],
        "regret": regret[0],
        "regret_error": regret[1] / Z95,
        "baseline": baseline,
        "baseline_value": value[baseline],
        "gain": gain[0],
        "gain_half_width": gain[1],
        "values": decided,
    }


def served(decision: Decision, truth: Path, k: int, baselines: Sequence[str]) -> dict[str, np.ndarray]:
    """True values by user of lists at the end of the log: of what ships and of baselines, fitted on all events.

    ``decided`` is what ships as it was before it was made again: it knows the same histories.
    """
    steps = FitSteps(decision.root, StepOptions(k=k))
    steps.data = decision.prepared
    final = steps.on_all_events(Prepared.open(decision.root / "final" / "prepared"))
    known, histories = Truth.load(truth), pd.read_parquet(final.data.root / "histories.parquet")
    day, users = float(known.day_of(final.data.manifest["boundaries"]["last_ms"])), known.user_ids
    users = users[np.isin(users, histories["user_id"].unique())]
    table = yaml.safe_load((decision.root / "prepare.yaml").read_text("utf-8")).get("users")
    people = None if table is None else ds.dataset(table).to_table().to_pandas()
    wanted = [("decided", steps, decision.chosen), *((name, final, name) for name in {*baselines} - {decision.chosen})]
    listers = {name: lister(place_of(of.root, contender), of) for name, of, contender in wanted}
    listers[decision.chosen] = decision.bundle.runtime, decision.bundle.reader
    found = {}
    for name, (runtime, reader) in listers.items():
        at = moment_of_lists(None, reader.items, lambda: histories)
        read = reader.read(histories, users=list(users), user_features=people, at=at)
        lists = recommend_lists(runtime, reader.items, read, k=k).table.to_pandas().sort_values(["user_id", "rank"])
        found[name] = known.top_k_value(np.sort(users), lists["item_id"].to_numpy().reshape(len(users), -1), day)
    return found


def lister(place: str | Path, of: FitSteps) -> tuple[Runtime, HistoryReader]:
    """What ranks with a run or a baseline, and reads the histories for it."""
    if is_baseline(place):
        return served_baseline(place, of.data, of.root / "baselines", of.baseline_options).runtime(of.data)
    return runtime_of(Run.open(place))


def values(
    root: Path, names: Sequence[str], truth: Path | None, k: int, metric: str
) -> tuple[dict[str, float], dict[str, str], dict[str, Any]]:
    """Values and kinds of contenders by name, and their evaluation on the test period."""
    runs = {name: root / "runs" / name for name in names} | {"factors": root / "factors"}
    found = recpo.evaluate(
        root / "prepared",
        [runs[name] if runs[name].is_dir() else name for name in names],
        ks=[k],
        truth=truth,
        baselines=False,
        baseline_cache=root / "baselines",
        segments=False,
        off_policy=None,
    ).document
    known = {one["name"]: one for one in found["contenders"] if one["name"] not in LIVE and metric in one["metrics"]}
    value = {name: one["metrics"][metric]["mean"] for name, one in known.items()}
    return value, {name: one["kind"] for name, one in known.items()}, found


def paired(document: dict[str, Any], one: str, other: str, metric: str) -> tuple[float, float]:
    """Mean of one - other over the same users, and the half-width of its 95 % interval; 0 for equal weights."""
    for pair in document["differences"]:
        if {pair["contender"], pair["against"]} == {one, other}:
            found = pair["metrics"][metric]
            return found["mean"] * (1 if pair["contender"] == one else -1), found["half_width"]
    return 0.0, 0.0


def duties(row: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the regret is within its standard error, and whether the choice is not below the strongest baseline."""
    return row["regret"] <= row["regret_error"], row["gain"] + row["gain_half_width"] >= 0


def table(rows: Sequence[dict[str, Any]]) -> None:
    """A line per log, its seeds side by side."""
    shown = Table(title="what recpo fit decided; values of the test period, seeds side by side")
    columns = ("log", "ships", "value", "best", "regret ± error", "strongest baseline", "gain ± half-width", "duties")
    for column in (*columns, "minutes (of a processor)", "length, trials", "seeds agree"):
        shown.add_column(column)
    for name in dict.fromkeys(row["log"] for row in rows):
        own = [row for row in rows if row["log"] == name]
        cells = [
            *("\n".join(str(text) for text in column) for column in zip(*map(cells_of, own), strict=True)),
            "yes" if len({row["choice"] for row in own}) == 1 else "no",
        ]
        shown.add_row(name, *cells)
    kept = [sum(one) for one in zip(*map(duties, rows), strict=True)]
    Console(width=200).print(shown)
    print(f"regret within its error: {kept[0]} of {len(rows)}; not below a baseline: {kept[1]} of {len(rows)}")


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    kept = ["regret", "baseline"]
    failed = [duty for duty, is_kept in zip(kept, duties(row), strict=True) if not is_kept]
    return (
        row["choice"],
        f"{row['value']:.4f}",
        f"{row['best']} {row['best_value']:.4f}",
        f"{row['regret']:.4f} ± {row['regret_error']:.4f}",
        f"{row['baseline']} {row['baseline_value']:.4f}",
        f"{row['gain']:+.4f} ± {row['gain_half_width']:.4f}",
        f"not: {', '.join(failed)}" if failed else "both",
        f"{row['took']:.1f} ({row['processor']:.1f})",
        f"{row['effort']:.3g}, {row['trials'] or 0}",
    )


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Log.parse, nargs="+", default=[Log(name) for name in WORLDS if name != REPLAY])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of recpo fit")
    parser.add_argument("--minutes", type=float, default=2.0, help="of every fit")
    parser.add_argument("--world-seed", type=int, default=0)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--matrix", type=Path, help="rewards of world replay (real_truth.py writes them)")
    parser.add_argument("--work", type=Path, default=Path("runs/decisions"))
    parser.add_argument("--quick", action="store_true", help="tiny worlds, two seeds, seconds of training")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.minutes = options.seeds[:2], 0.1
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / ROWS
    for log in options.logs:
        for seed in options.seeds:
            if (log.name, seed) not in {(row["log"], row["seed"]) for row in rows_of(file)}:
                row = decided(log, seed, options)
                with file.open("a", encoding="utf-8") as rows:
                    rows.write(json.dumps(row) + "\n")
    rows = rows_of(file)
    for row in rows:
        print(json.dumps(row))
    table(rows)


if __name__ == "__main__":
    main()

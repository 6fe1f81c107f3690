"""``recpo demo``: every step on a simulated log, printed as commands."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.table import Table

from recpo.artifacts import directory_of_steps, write_json
from recpo.cli.evaluate import evaluate
from recpo.cli.export import export
from recpo.cli.factorize import factorize
from recpo.cli.main import run
from recpo.cli.output import console
from recpo.cli.prepare import prepare
from recpo.cli.recommend import recommend
from recpo.cli.simulate import simulate
from recpo.cli.tilt import tilt
from recpo.cli.tokenize import tokenize
from recpo.cli.train import train
from recpo.cli.verb_results import VerbResult, after_demo, configurations
from recpo.errors import RecpoError
from recpo.evaluation.estimates import Estimate, estimate_over_seeds
from recpo.evaluation.evaluation import METRICS
from recpo.simulation.parameters import SimulationParameters
from recpo.training.run import FINISHED

_METRICS = {
    "NDCG@10": "NDCG@10 on positives",
    "disliked@10": "disliked@10",
    "true_reward@10": "true expected reward",
    "true_dislike@10": "true dislikes",
}
# contenders without a seed, by the names of their rows
_BASELINES = {
    "popularity": "popularity",
    "implicit_als": "implicit_als",
    "factorization": "factorization",
    "reward model": "factors",
    "oracle": "oracle",
}
# the training steps of a policy, in order, and the names of its rows
_ROAD = {"pretrain": "pre-trained", "gbpo": "GBPO-aligned", "mpo": "value-aligned"}
_TILTED = "tilted"
# the demo's catalog is small: three levels of this size have many times as many tuples
_CODEBOOK_SIZE = 32


class _Family(NamedTuple):
    """One kind of policy: the prefix of its rows, configurations and runs, and the steps of ``_ROAD`` that it takes."""

    label: str
    prefix: str
    road: tuple[str, ...]
    options: tuple[object, ...]

    @property
    def configurations(self) -> list[str]:
        """Its training configurations."""
        return [f"{self.prefix}{step}.yaml" for step in self.road]


def demo(
    out: Path = Path("demo"),
    configs: Path | None = None,
    policy: Literal["CatalogSoftmaxPolicy", "SemanticIdPolicy"] = "CatalogSoftmaxPolicy",
    seeds: int = 3,
    users: int = 2000,
    items: int = 1000,
    events: int = 200_000,
    epochs: int | None = None,
    overwrite: bool = False,
) -> VerbResult:
    """Runs every step on a simulated log: prepare, pre-train, align, evaluate, export and recommend.

    Ends with a table of popularity, two matrix factorizations, pre-trained policies, policies aligned from the log
    (GBPO), policies aligned for value (MPO with a variational factorization as its reward model), the lists of that
    reward model itself, and the value-aligned policies tilted by it. The true expected reward is known, because the
    users are simulated. The oracle has the maximum that any list can have.

    Args:
        out: output directory for all files of the demo.
        configs: directory of the YAML files for training; null = ``configs`` here, or else the files installed with
            recpo.
        policy: policy class to export; with SemanticIdPolicy, items also get codes, and both classes are trained and
            compared.
        seeds: number of policies to train of each kind; they differ in their random numbers, not in their data.
        users: number of simulated users.
        items: number of simulated items.
        events: number of simulated events.
        epochs: epochs of every training, for a quick trial; null = as in the YAML files.
        overwrite: replace ``out`` if an earlier demo wrote it.
    """
    SimulationParameters(users=users, items=items, events=events)  # raises now the error that would end the first step
    families = [_Family("", "", tuple(_ROAD), ())]
    if policy == "SemanticIdPolicy":
        options = ("--policy.init_args.codes", out / "codes")
        families.append(_Family("semantic ids, ", "semantic_", ("pretrain", "gbpo"), options))
    configs = configs or configurations()
    _validate_options(seeds, configs, families)
    with directory_of_steps(out, kind="demo", overwrite=overwrite):
        started = time.monotonic()
        log, prepared, factors = out / "log", out / "prepared", out / "factors"
        _step(simulate, "--out", log, "--users", users, "--items", items, "--events", events)
        _step(prepare, "--log", log / "log", "--out", prepared)
        _step(factorize, "--prepared", prepared, "--out", factors)
        if policy == "SemanticIdPolicy":
            _step(tokenize, "--prepared", prepared, "--out", out / "codes", "--codebook_size", _CODEBOOK_SIZE)
        runs = _train_all(out, configs, families, seeds, epochs)
        _evaluate(out, runs)
        _serve(out, out / f"{families[-1].prefix}{families[-1].road[-1]}-0")
        content = json.loads((out / "evaluation" / METRICS).read_text(encoding="utf-8"))
        summary = _summary(content, families, seeds)
        write_json(out / "summary.json", summary)
        console().print(_table(summary, seeds))
        print(f"the demo took {time.monotonic() - started:.0f} s; everything it wrote is in {out}")
    return after_demo(out, {"summary": summary})


def _train_all(out: Path, configs: Path, families: list[_Family], seeds: int, epochs: int | None) -> list[Path]:
    """Trains every kind of policy with every seed, and tilts the value-aligned ones; returns the runs."""
    prepared, factors = out / "prepared", out / "factors"
    hurry = [] if epochs is None else ["--trainer.max_epochs", epochs]
    runs = []
    for family in families:
        for seed in range(seeds):
            common = ["--data.prepared", prepared, "--seed", seed, "--data.seed", seed, *family.options, *hurry]
            runs += _train(out, configs, family, seed, common)
            if "mpo" in family.road:
                tilted = out / f"{_TILTED}-{seed}"
                named = ("--run", out / f"mpo-{seed}", "--factors", factors, "--prepared", prepared)
                _step(tilt, *named, "--lower_bound", 1.0, "--out", tilted)
                runs += [tilted] if (tilted / FINISHED).is_file() else []
    return runs


def _evaluate(out: Path, runs: list[Path]) -> None:
    baselines = json.dumps(["popularity", "implicit_als", "factorization"])
    compared = ("--run", json.dumps([str(path) for path in runs]), "--baselines", baselines)
    data = ("--prepared", out / "prepared", "--factors", out / "factors", "--truth", out / "log" / "truth")
    _step(evaluate, *data, *compared, "--out", out / "evaluation")


def _serve(out: Path, run_directory: Path) -> None:
    bundle, histories = out / "bundle", out / "prepared" / "histories.parquet"
    _step(export, "--run", run_directory, "--out", bundle)
    lists = ("--out", out / "recommendations.parquet", "--k", 10, "--show", 3)
    _step(recommend, "--bundle", bundle, "--histories", histories, *lists)


def _validate_options(seeds: int, configs: Path, families: list[_Family]) -> None:
    if seeds < 2:
        raise RecpoError(f"seeds is {seeds}; the table gives intervals over seeds, which need at least 2")
    absent = [file for one in families for name in one.configurations if not (file := configs / name).is_file()]
    if absent:
        raise RecpoError(f"{absent[0]} is missing: leave --configs out, or name a directory that has it")


def _train(out: Path, configs: Path, family: _Family, seed: int, common: list[object]) -> list[Path]:
    """Pre-trains a policy and aligns it in several ways, each from the pre-trained policy; returns the runs."""
    pretrained, *aligned = (out / f"{family.prefix}{step}-{seed}" for step in family.road)
    first, *others = (configs / name for name in family.configurations)
    _step(train, "--config", first, *common, "--out", pretrained)
    for config, run_directory in zip(others, aligned, strict=True):
        reward = ["--reward.init_args.factors", out / "factors"] if config.name == "mpo.yaml" else []
        _step(train, "--config", config, *common, *reward, "--init_from", pretrained, "--out", run_directory)
    return [pretrained, *aligned]


def _step(verb: Callable[..., VerbResult | None], *options: object) -> None:
    words = [str(option) for option in options]
    print(f"\n$ recpo {verb.__name__} {shlex.join(words)}", flush=True)
    run(verb, words)


def _summary(document: dict[str, Any], families: list[_Family], seeds: int) -> dict[str, Any]:
    """Means over seeds with intervals, and paired differences over the seeds."""
    metrics = {contender["name"]: contender["metrics"] for contender in document["contenders"]}
    for seed in range(seeds):  # where no beta is better, the untilted policy is what tilting gives
        metrics.setdefault(f"{_TILTED}-{seed}", metrics.get(f"mpo-{seed}", {}))

    def of(kind: str, metric: str) -> list[float]:
        return [metrics[f"{kind}-{seed}"][metric]["mean"] for seed in range(seeds)]

    def of_baseline(name: str, metric: str) -> list[float]:
        return [metrics[_BASELINES[name]][metric]["mean"]] * seeds

    def over_seeds(values: Callable[[str], list[float]]) -> dict[str, Any]:
        return {name: estimate_over_seeds(values(name))._asdict() for name in _METRICS}

    summary = {row: {metric: metrics[name][metric] for metric in _METRICS} for row, name in _BASELINES.items()}
    for family in families:
        runs = {step: partial(of, f"{family.prefix}{step}") for step in family.road}
        for step, values in runs.items():
            summary[f"{family.label}{_ROAD[step]}"] = over_seeds(values)
        gain = partial(_differences, runs["gbpo"], runs["pretrain"])
        summary[f"{family.label}GBPO-aligned - pre-trained"] = over_seeds(gain)
        last = family.road[-1]
        gain = partial(_differences, runs[last], partial(of_baseline, "factorization"))
        summary[f"{family.label}{_ROAD[last]} - factorization"] = over_seeds(gain)
        if last == "mpo":
            values = partial(of, _TILTED)
            summary["tilted"] = over_seeds(values)
            for other in ("factorization", "reward model"):
                summary[f"tilted - {other}"] = over_seeds(partial(_differences, values, partial(of_baseline, other)))
    return summary


def _differences(after: Callable[[str], list[float]], before: Callable[[str], list[float]], name: str) -> list[float]:
    return [a - b for a, b in zip(after(name), before(name), strict=True)]


def _table(summary: dict[str, Any], seeds: int) -> Table:
    caption = f"mean ± half of the 95 % interval, over {seeds} seeds (baselines, oracle: over users)"
    table = Table(title="test period", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("policy")
    for heading in _METRICS.values():
        table.add_column(heading, justify="right")
    for row, values in summary.items():
        cells = [Estimate(**values[name]) for name in _METRICS]
        table.add_row(row, *map(_cell, cells))
    return table


def _cell(value: Estimate) -> str:
    """With few users, means or intervals may be undefined; they are null in the evaluation."""
    if value.mean is None or value.half_width is None:
        return "-" if value.mean is None else f"{value.mean:.4f}"
    return f"{value.mean:.4f} ± {value.half_width:.4f}"

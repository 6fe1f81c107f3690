"""The verb ``demo``: every step on a simulated log."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from recpo.artifacts import directory_of_steps, write_json
from recpo.base.errors import RecpoError
from recpo.base.ranges import PositiveInt
from recpo.evaluation.estimates import estimate_over_seeds
from recpo.evaluation.evaluation import METRICS
from recpo.training.run import FINISHED
from recpo.verbs.verb import PYTHON_ONLY, Verb, configurations
from recpo.worlds.parameters import SimulationParameters

METRICS_SHOWN = {
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


class DemoSummary(NamedTuple):
    """What the demo found.

    Attributes:
        out: its directory.
        seeds: number of policies of each kind.
        rows: a row of the table -> metric -> mean, half_width and n.
    """

    out: Path
    seeds: int
    rows: dict[str, Any]


@dataclass(frozen=True)
class Demo(Verb[DemoSummary]):
    """Runs every step on a simulated log: prepare, pre-train, align, evaluate, export and recommend.

    Ends with a table of popularity, two matrix factorizations, pre-trained policies, policies aligned from the log
    (GBPO), policies aligned for value (MPO with a variational factorization as its reward model), the lists of that
    reward model itself, and the value-aligned policies tilted by it. The true expected reward is known, because the
    users are simulated. The oracle has the maximum that any list can have.
    """

    first_day: ClassVar = ("out", "policy", "seeds", "users", "items", "events")

    out: Path = Path("demo")
    """output directory for all files of the demo"""
    configs: Path | None = None
    """directory of the YAML files for training; null = ``configs`` here, or else the files installed with recpo"""
    policy: Literal["CatalogSoftmaxPolicy", "SemanticIdPolicy"] = "CatalogSoftmaxPolicy"
    """policy class to export; with SemanticIdPolicy, items also get codes, and both classes are trained and
    compared"""
    seeds: PositiveInt = 3
    """number of policies to train of each kind; they differ in their random numbers, not in their data"""
    users: PositiveInt = 2000
    """number of simulated users"""
    items: PositiveInt = 1000
    """number of simulated items"""
    events: PositiveInt = 200_000
    """number of simulated events"""
    epochs: PositiveInt | None = None
    """epochs of every training, for a quick trial; null = as in the YAML files"""
    overwrite: bool = False
    """replace ``out`` if an earlier demo wrote it"""

    step: Callable[[str, list[str]], object] = field(default=lambda verb, words: None, metadata=PYTHON_ONLY)
    """runs one verb with the words of a command line; the command line gives it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        SimulationParameters(users=self.users, items=self.items, events=self.events)  # what would end the first step
        if self.seeds < 2:
            raise RecpoError(
                f"seeds is {self.seeds}; the table gives intervals over seeds, which need at least 2",
                field="seeds",
                code="out_of_range",
            )

    def execute(self) -> DemoSummary:
        """Runs every step, then summarizes the evaluation over the seeds."""
        configs = self.configs or configurations()
        for family in self._families:
            for name in family.configurations:
                if not (configs / name).is_file():
                    raise RecpoError(
                        f"{configs / name} is missing: leave --configs out, or name a directory that has it",
                        field="configs",
                        code="missing_file",
                    )
        with directory_of_steps(self.out, kind="demo", overwrite=self.overwrite):
            log, prepared, factors = self.out / "log", self.out / "prepared", self.out / "factors"
            self._step("simulate", "--out", log, "--users", self.users, "--items", self.items, "--events", self.events)
            self._step("prepare", "--log", log / "log", "--out", prepared)
            self._step("factorize", "--prepared", prepared, "--out", factors)
            if self.policy == "SemanticIdPolicy":
                codes = ("--out", self.out / "codes", "--codebook_size", _CODEBOOK_SIZE)
                self._step("tokenize", "--prepared", prepared, *codes)
            self._evaluate(self._train_all(configs))
            self._serve()
            content = json.loads((self.out / "evaluation" / METRICS).read_text(encoding="utf-8"))
            summary = summary_of(content, self._families, self.seeds)
            write_json(self.out / "summary.json", summary)
        return DemoSummary(self.out, self.seeds, summary)

    @property
    def _families(self) -> Sequence[_Family]:
        families = [_Family("", "", tuple(_ROAD), ())]
        if self.policy == "SemanticIdPolicy":
            options = ("--policy.init_args.codes", self.out / "codes")
            families.append(_Family("semantic ids, ", "semantic_", ("pretrain", "gbpo"), options))
        return families

    def _train_all(self, configs: Path) -> list[Path]:
        """Trains every kind of policy with every seed, and tilts the value-aligned ones; returns the runs."""
        prepared, factors = self.out / "prepared", self.out / "factors"
        hurry: list[object] = [] if self.epochs is None else ["--trainer.max_epochs", self.epochs]
        runs = []
        for family in self._families:
            for seed in range(self.seeds):
                common = ["--data.prepared", prepared, "--seed", seed, "--data.seed", seed, *family.options, *hurry]
                runs += self._train(configs, family, seed, common)
                if "mpo" in family.road:
                    tilted = self.out / f"{_TILTED}-{seed}"
                    named = ("--run", self.out / f"mpo-{seed}", "--factors", factors, "--prepared", prepared)
                    self._step("tilt", *named, "--lower_bound", 1.0, "--out", tilted)
                    runs += [tilted] if (tilted / FINISHED).is_file() else []
        return runs

    def _train(self, configs: Path, family: _Family, seed: int, common: Sequence[object]) -> list[Path]:
        """Pre-trains a policy and aligns it in several ways, each from the pre-trained policy; returns the runs."""
        pretrained, *aligned = (self.out / f"{family.prefix}{step}-{seed}" for step in family.road)
        first, *others = (configs / name for name in family.configurations)
        self._step("train", "--config", first, *common, "--out", pretrained)
        for config, out in zip(others, aligned, strict=True):
            reward = ["--reward.init_args.factors", self.out / "factors"] if config.name == "mpo.yaml" else []
            self._step("train", "--config", config, *common, *reward, "--init_from", pretrained, "--out", out)
        return [pretrained, *aligned]

    def _evaluate(self, runs: Sequence[Path]) -> None:
        compared = ("popularity", "implicit_als", "factorization", *runs, self.out / "factors")
        data = ("--prepared", self.out / "prepared", "--truth", self.out / "log" / "truth")
        self._step("evaluate", *data, "--contenders", *compared, "--out", self.out / "evaluation")

    def _serve(self) -> None:
        last = self._families[-1]
        bundle, histories = self.out / "bundle", self.out / "prepared" / "histories.parquet"
        self._step("export", "--run", self.out / f"{last.prefix}{last.road[-1]}-0", "--out", bundle)
        lists = ("--out", self.out / "recommendations.parquet", "--k", 10, "--show", 3)
        self._step("recommend", "--source", bundle, "--histories", histories, *lists)

    def _step(self, verb: str, *words: object) -> None:
        self.step(verb, [str(word) for word in words])


def summary_of(document: dict[str, Any], families: Sequence[_Family], seeds: int) -> dict[str, Any]:
    """Means over seeds with intervals, and paired differences over the seeds."""
    metrics = {contender["name"]: contender["metrics"] for contender in document["contenders"]}
    for seed in range(seeds):  # where no temperature is better, the untilted policy is what tilting gives
        metrics.setdefault(f"{_TILTED}-{seed}", metrics.get(f"mpo-{seed}", {}))

    def of(kind: str, metric: str) -> list[float]:
        return [metrics[f"{kind}-{seed}"][metric]["mean"] for seed in range(seeds)]

    def of_baseline(name: str, metric: str) -> list[float]:
        return [metrics[_BASELINES[name]][metric]["mean"]] * seeds

    def over_seeds(values: Callable[[str], list[float]]) -> dict[str, Any]:
        return {name: estimate_over_seeds(values(name))._asdict() for name in METRICS_SHOWN}

    summary = {row: {metric: metrics[name][metric] for metric in METRICS_SHOWN} for row, name in _BASELINES.items()}
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

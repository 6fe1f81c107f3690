"""``recpo demo``: the whole road on a simulated log, each step printed as the command that it is."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recpo.atomic import write_json
from recpo.cli.evaluate import METRICS, evaluate
from recpo.cli.export import export
from recpo.cli.main import run
from recpo.cli.prepare import prepare
from recpo.cli.recommend import recommend
from recpo.cli.simulate import simulate
from recpo.cli.train import train
from recpo.errors import RecpoError
from recpo.evaluation.intervals import Estimate
from recpo.evaluation.seeds import estimate_over_seeds

_METRICS = {"NDCG@10": "NDCG@10 on positives", "disliked@10": "disliked@10", "true_reward@10": "true expected reward"}


def demo(
    out: Path = Path("demo"),
    configs: Path = Path("configs"),
    seeds: int = 3,
    users: int = 2000,
    items: int = 1000,
    events: int = 200_000,
    epochs: int | None = None,
    overwrite: bool = False,
) -> None:
    """Simulates a log, prepares it, pre-trains and aligns policies, evaluates them, exports one and recommends.

    Ends with a table of popularity, pre-trained and aligned policies in which the true expected reward is known,
    because the users are simulated.

    Args:
        out: directory for everything that the demo writes.
        configs: directory of the YAML files that it trains with.
        seeds: how many policies are trained of each kind; they differ in their random numbers, not in their data.
        users: simulated users.
        items: simulated items.
        events: simulated events.
        epochs: epochs of pre-training and of alignment, to try the road in a hurry; null = what the YAML files say.
        overwrite: replace ``out`` if it exists.
    """
    if seeds < 2:
        raise RecpoError(f"seeds is {seeds}; the table gives intervals over seeds, which need at least 2")
    if out.exists():
        if not overwrite:
            raise RecpoError(f"{out} exists already: choose another output or pass --overwrite true")
        shutil.rmtree(out)
    started = time.monotonic()
    log, prepared, bundle = out / "log", out / "prepared", out / "bundle"
    _step(simulate, "--out", log, "--users", users, "--items", items, "--events", events)
    _step(prepare, "--log", log / "log", "--out", prepared)
    hurry = [] if epochs is None else ["--trainer.max_epochs", epochs]
    runs = []
    for seed in range(seeds):
        pretrained, aligned = out / f"pretrain-{seed}", out / f"gbpo-{seed}"
        common = ["--data.prepared", prepared, "--seed", seed, "--data.seed", seed, *hurry]
        _step(train, "--config", configs / "pretrain.yaml", *common, "--out", pretrained)
        _step(train, "--config", configs / "gbpo.yaml", *common, "--init_from", pretrained, "--out", aligned)
        runs += [pretrained, aligned]
    listed = [str(path) for path in runs]
    evaluation = out / "evaluation"
    _step(evaluate, "--prepared", prepared, "--run", json.dumps(listed), "--truth", log / "truth", "--out", evaluation)
    _step(export, "--run", runs[1], "--prepared", prepared, "--out", bundle)
    histories, lists = prepared / "histories.parquet", out / "recommendations.parquet"
    _step(recommend, "--bundle", bundle, "--histories", histories, "--out", lists, "--k", 10, "--show", 3)
    summary = _summary(json.loads((evaluation / METRICS).read_text(encoding="utf-8")), seeds)
    write_json(out / "summary.json", summary)
    Console().print(_table(summary, seeds))
    print(f"the whole road took {time.monotonic() - started:.0f} s; everything it wrote is in {out}")


def _step(verb: Callable[..., None], *options: object) -> None:
    words = [str(option) for option in options]
    print(f"\n$ recpo {verb.__name__} {shlex.join(words)}", flush=True)
    run(verb, words)


def _summary(document: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Means over seeds with intervals, and the paired difference of aligned and pre-trained policies."""
    metrics = {contender["name"]: contender["metrics"] for contender in document["contenders"]}

    def of(kind: str, metric: str) -> list[float]:
        return [metrics[f"{kind}-{seed}"][metric]["mean"] for seed in range(seeds)]

    summary: dict[str, Any] = {"popularity": {name: metrics["popularity"][name] for name in _METRICS}}
    for label, kind in (("pre-trained", "pretrain"), ("GBPO-aligned", "gbpo")):
        summary[label] = {name: estimate_over_seeds(of(kind, name))._asdict() for name in _METRICS}
    summary["aligned - pre-trained"] = {
        name: estimate_over_seeds(
            [a - p for a, p in zip(of("gbpo", name), of("pretrain", name), strict=True)]
        )._asdict()
        for name in _METRICS
    }
    return summary


def _table(summary: dict[str, Any], seeds: int) -> Table:
    caption = f"mean ± half of the 95 % interval, over {seeds} seeds (popularity: over users)"
    table = Table(title="test period", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("policy")
    for heading in _METRICS.values():
        table.add_column(heading, justify="right")
    for row, values in summary.items():
        cells = [Estimate(**values[name]) for name in _METRICS]
        table.add_row(row, *[f"{cell.mean:.4f} ± {cell.half_width:.4f}" for cell in cells])
    return table

"""``recpo calibrate``: calibrates reward models and compares rewards on later data."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from recpo.artifacts import kind_of
from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command, configuration, path_of
from recpo.evaluation.reward_comparison import CalibrationReport
from recpo.training.learned_reward import CALIBRATION
from recpo.verbs.calibrate import Calibrate


def show(verb: Calibrate, report: CalibrationReport) -> VerbResult:
    """Prints the tables; the first calibrated reward model aligns a policy next."""
    print_report(report)
    following = None
    named = verb.rewards if isinstance(verb.rewards, list) else []
    runs = [one for one in named if isinstance(one, str) and kind_of(one) == "run"]
    if runs:
        reward = ("--reward", "LearnedReward", "--reward.init_args.run", runs[0])
        words = ("--config", configuration("mpo.yaml"), "--data.prepared", path_of(verb.prepared), *reward)
        following = command("train", *words, "--init_from", "runs/pretrain", "--out", "runs/mpo")
    return VerbResult(() if report.path is None else (str(report.path),), following, report.content)


def print_report(report: CalibrationReport) -> None:
    """The tables of the test period; a path is never read as markup."""
    terminal, content = console(), report.content
    terminal.print(_errors(content))
    terminal.print(_values(content))
    for note in content["notes"]:
        terminal.print(f"note: {note}", soft_wrap=True)
    for name, fitted in report.calibrations.items():
        error = fitted["targets"]["dislike"]["test"]["all"]
        before, after = (_shown(error[f"calibration_error{end}"]) for end in ("_uncalibrated", ""))
        terminal.print(
            f"{name}: {CALIBRATION} written; calibration error of dislikes {before} before, {after} after",
            soft_wrap=True,
        )
    if report.path is not None:
        terminal.print(f"{report.path}: every number with its 95 % interval", soft_wrap=True)


def _errors(content: dict[str, Any]) -> Table:
    table = _table("test period", ("reward", "shown"), ("number", "RMSE", "rank corr.", "per user", "dislike AUC"))
    for name, entry in content["rewards"].items():
        for group, found in entry["test"].items():
            metrics = ("rmse", "rank_correlation", "rank_correlation_per_user", "dislike_auc")
            table.add_row(name, group, f"{found['exposures']:,}", *(_shown(found.get(metric)) for metric in metrics))
    return table


def _values(content: dict[str, Any]) -> Table:
    title = f"greedy lists of {content['k']}, mean reward per place"
    table = _table(title, ("reward",), ("from the log (SNIPS)", "95 %", "true", "true dislikes"))
    rows = {**{name: entry["lists"] for name, entry in content["rewards"].items()}}
    for name, found in {**rows, "logging policy": content["logging_policy"]}.items():
        estimated = found.get("off_policy")
        interval = "-" if estimated is None else "-".join(_number(estimated[end]) for end in ("low", "high"))
        table.add_row(
            name, _shown(estimated), interval, _shown(found.get("true_reward")), _shown(found.get("true_dislike"), 4)
        )
    return table


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _shown(metric: dict[str, float | None] | None, digits: int = 3) -> str:
    return _number(None if metric is None else metric["value"], digits)


def _number(number: float | None, digits: int = 3) -> str:
    return "-" if number is None else f"{number:.{digits}f}"

"""``recpo calibrate``: calibrates reward models and compares rewards on later data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_calibrate
from recpo.contracts import RewardFunction
from recpo.evaluation.calibration import CalibrationReport
from recpo.training.learned_reward import CALIBRATION
from recpo.workflows.calibrate import Source
from recpo.workflows.calibrate import calibrate as calibrate_rewards


def calibrate(
    prepared: str | Path,
    run: list[Path] | Path = [],  # noqa: B006  jsonargparse prints it
    factors: list[Path] | Path = [],  # noqa: B006
    reward: list[RewardFunction] = [],  # noqa: B006
    truth: Path | None = None,
    out: Path | None = None,
    trust: list[str] = [],  # noqa: B006
    **options: Any,
) -> VerbResult:
    """Calibrates reward models on the validation period and compares rewards on the test period.

    For every run of a PointwiseReward objective, fits ``sigmoid(scale * score + shift)`` (Platt, 1999) to the exposures
    of the validation period and writes it into the run (calibration.json), where LearnedReward reads it. Then measures
    every reward on the exposures of the test period, and on the random exposures among them: error and rank correlation
    of the grade, and AUC of dislikes. Also measures the reward's greedy lists: their value estimated from the log
    (SNIPS with logged propensities) and, for a simulated log, their true value.

    Args:
        prepared: directory written by ``recpo prepare``, of the same items.
        run: run directory of a PointwiseReward or PairwiseReward objective, or a list of them, ``[runs/a, runs/b]``.
        factors: directory written by ``recpo factorize``, or a list of them; user vectors are folded in from the
            history.
        reward: more rewards to compare, ``[{class_path: EnsembleReward, init_args: {...}}]``.
        truth: directory written by ``recpo simulate``; adds the true value of the lists on the first day of the period.
        out: JSON file for the comparison, with every interval; null = none.
        trust: packages, in addition to recpo, whose classes the configurations of the runs may name.
        **options: those of ``recpo.workflows.calibrate.calibrate``.
    """
    directories = [path for paths in (run, factors) for path in ([paths] if isinstance(paths, Path) else paths)]
    named: list[Source] = [*directories, *reward]
    report = calibrate_rewards(prepared, rewards=named, truth=truth, out=out, trust=trust, progress=True, **options)
    print_report(report)
    runs = [run] if isinstance(run, Path) else run
    return after_calibrate(runs, report.path, str(prepared), report.content)


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

"""``recpo calibrate``: makes a reward model's scores probabilities, and says on later data how good they are."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from recpo.cli.output import console
from recpo.evaluation.calibration import CalibrationReport
from recpo.training.learned_reward import Checkpoint
from recpo.workflows.calibrate import calibrate as calibrate_run


def calibrate(
    run: Path,
    prepared: str | Path,
    checkpoint: Checkpoint = "best",
    batch_size: int = 512,
    resamples: int = 200,
    seed: int = 0,
    device: str = "auto",
    trust: list[str] = [],  # noqa: B006  jsonargparse prints it
) -> None:
    """Calibrates a pointwise reward model on the validation period and measures it on the test period.

    Per target, ``probability = sigmoid(scale * score + shift)`` (Platt, 1999) is fitted to the exposures of the
    validation period. On the exposures of the test period, and on those among them that the log showed at random, it
    reports the AUC (of all exposures, and the mean over users), the expected calibration error and the log loss before
    and after, and the base rate, with 95 % intervals over users. Writes calibration.json into the run, which
    LearnedReward reads.

    Args:
        run: run directory of a PointwiseReward objective, written by ``recpo train``.
        prepared: directory written by ``recpo prepare``, of the same items.
        checkpoint: which checkpoint of the run.
        batch_size: users scored at once.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        device: where the model runs: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on.
        trust: packages beside recpo whose classes the configuration of the run may name.
    """
    report = calibrate_run(
        run,
        prepared,
        checkpoint=checkpoint,
        batch_size=batch_size,
        resamples=resamples,
        seed=seed,
        device=device,
        trust=trust,
    )
    print_report(report)


def print_report(report: CalibrationReport) -> None:
    """The table of the test period; a path is never read as markup."""
    table = Table(title="test period", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("target", "shown"):
        table.add_column(column, no_wrap=True)
    for column in ("number", "rate", "AUC", "95 %", "per user", "ECE before", "after"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, target in report.content["targets"].items():
        for group, found in target["test"].items():
            value = {key: _shown(number["value"]) for key, number in found.items() if isinstance(number, dict)}
            interval = "-".join(_shown(found["auc"][end]) for end in ("low", "high"))
            ranks = value["auc"], interval, value["auc_per_user"]
            errors = value["calibration_error_uncalibrated"], value["calibration_error"]
            table.add_row(name, group, f"{found['exposures']:,}", value["base_rate"], *ranks, *errors)
    terminal = console()
    terminal.print(table)
    terminal.print(f"ECE: expected calibration error; every number with its interval: {report.path}", soft_wrap=True)


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"

"""``recpo tilt``: combines a trained policy with factors of grades into one policy, written as a run."""

from __future__ import annotations

import math
from dataclasses import asdict

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, evaluation_of, path_of
from recpo.training.tilting import TiltResult, TiltTrial
from recpo.verbs.tilt import Tilt

_NAMES = {
    "grade": "grade of the lists by a factorization of this period",
    "top_k": "off-policy value of the lists (SNIPS)",
    "policy": "off-policy value of the policy (SNIPS)",
    "auc": "AUC of positives against other exposures",
    "monitor_reward": "monitor reward of the lists",
}


def show(verb: Tilt, found: TiltResult) -> VerbResult:
    """Prints the table of temperatures; the run, or the untilted one if it is kept, is evaluated next."""
    print_tilt(found)
    facts = {
        "temperature": found.temperature,
        "lower_bound": found.lower_bound,
        "trials": [asdict(one) for one in found.trials],
    }
    wrote = () if found.run is None else (str(found.run.root),)
    run = path_of(verb.run) if found.run is None else found.run.root
    return VerbResult(wrote, evaluation_of(run, path_of(verb.prepared or "prepared")), facts)


def print_tilt(found: TiltResult) -> None:
    """Prints the table of temperatures and the chosen one; a path is never read as markup."""
    terminal = console()
    if found.trials:
        terminal.print(_table(found))
    if found.run is None:
        terminal.print(
            "no temperature is better than the untilted policy: keep the run as it is; nothing was written. "
            "--temperature NUMBER writes a tilted run regardless",
            soft_wrap=True,
        )
        return
    if found.trials and _taken(found).value < found.trials[0].value:
        terminal.print("warning: by this criterion the untilted policy is worth more", style="yellow", soft_wrap=True)
    terminal.print(
        f"{found.run.root}: tilted with temperature {found.temperature:g}, lower bound {found.lower_bound:g}",
        soft_wrap=True,
    )


def _taken(found: TiltResult) -> TiltTrial:
    return next(trial for trial in found.trials if trial.temperature == found.temperature)


def _table(found: TiltResult) -> Table:
    assert found.criterion is not None
    table = Table(
        title=f"validation period, lists of {found.k}; value: {_NAMES[found.criterion]}",
        caption="± half of the 95 % interval; behind: the best less this one ± its standard error, same users",
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for column in (
        "temp.",
        "value",
        "±",
        "behind",
        "±",
        "rows",
        "grade",
        "SNIPS",
        "AUC",
        "NDCG",
        "coverage",
        "KL",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in found.trials:
        name = "base" if trial.temperature == math.inf else f"{trial.temperature:g}"
        numbers = (trial.value, trial.half_width, trial.loss, trial.loss_error)
        others = (trial.grade, trial.top_k, trial.auc, trial.ndcg, trial.coverage)
        rows = "-" if math.isnan(trial.effective_rows) else f"{trial.effective_rows:,.0f}"
        kl = "-" if math.isnan(trial.kl) else f"{trial.kl:.2f}"
        name += " *" if trial.temperature == found.temperature else ""
        table.add_row(name, *map(_shown, numbers), rows, *map(_shown, others), kl)
    return table


def _shown(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.4f}"

"""``recpo tilt``: combines a trained policy with factors of grades into one policy, written as a run."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_tilt
from recpo.rewards import LoggedReward
from recpo.workflows.tilt import BETAS, Tilt, TiltTrial
from recpo.workflows.tilt import tilt as _tilt

_NAMES = {
    "grade": "grade of the lists by a factorization of this period",
    "top_k": "off-policy value of the lists (SNIPS)",
    "policy": "off-policy value of the policy (SNIPS)",
    "auc": "AUC of positives against other exposures",
    "monitor_reward": "monitor reward of the lists",
}


def tilt(
    run: Path,
    factors: Path,
    out: Path,
    prepared: str | Path | None = None,
    betas: list[float] = list(BETAS),  # noqa: B006  jsonargparse prints it
    reward: LoggedReward = LoggedReward(),  # noqa: B008  frozen
    trust: list[str] = [],  # noqa: B006  jsonargparse prints it
    **options: Any,
) -> VerbResult:
    """Tilts a trained policy toward the grades that a factor model predicts, and writes it as a run.

    The new run is self-contained: evaluate, export and recommend take it like any other run. Its policy is ``pi(i | h)
    ∝ base(i | h) exp(grade(h, i) / beta)``, the optimum of ``E_pi[grade] - beta KL(pi || base)``. Prints the value of
    every beta in the validation period, how far it moves the policy, and the chosen beta. If no beta is better than the
    untilted policy, prints this and writes nothing, unless beta is a number.

    Args:
        run: run directory written by ``recpo train``.
        factors: directory written by ``recpo factorize``, of the same items.
        out: output run directory.
        prepared: directory written by ``recpo prepare``, of the same items; beta is chosen on its validation period.
            null = beta is given.
        betas: values to try if beta is auto.
        reward: reward of logged items, for the off-policy value.
        trust: packages, in addition to recpo, whose classes the configuration of the run may name.
        **options: those of ``recpo.workflows.tilt.tilt``.
    """
    found = _tilt(run, factors, prepared, out=out, betas=betas, reward=reward, trust=trust, progress=True, **options)
    print_tilt(found)
    facts = {"beta": found.beta, "lower_bound": found.lower_bound, "trials": [asdict(one) for one in found.trials]}
    return after_tilt(run, None if found.run is None else found.run.root, str(prepared or "prepared"), facts)


def print_tilt(found: Tilt) -> None:
    """Prints the table of betas and the chosen one; a path is never read as markup."""
    terminal = console()
    if found.trials:
        terminal.print(_table(found))
    if found.run is None:
        terminal.print(
            "no temperature (beta) is better than the untilted policy: keep the run as it is; nothing was written. "
            "--beta NUMBER writes a tilted run regardless",
            soft_wrap=True,
        )
        return
    if found.trials and _taken(found).value < found.trials[0].value:
        terminal.print("warning: by this criterion the untilted policy is worth more", style="yellow", soft_wrap=True)
    terminal.print(
        f"{found.run.root}: tilted with beta {found.beta:g}, lower bound {found.lower_bound:g}", soft_wrap=True
    )


def _taken(found: Tilt) -> TiltTrial:
    return next(trial for trial in found.trials if trial.beta == found.beta)


def _table(found: Tilt) -> Table:
    assert found.criterion is not None
    table = Table(
        title=f"validation period, lists of {found.k}; value: {_NAMES[found.criterion]}",
        caption="± half of the 95 % interval; behind: the best less this one ± its standard error, same users",
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for column in ("beta", "value", "±", "behind", "±", "rows", "grade", "SNIPS", "AUC", "NDCG", "coverage", "KL"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in found.trials:
        name = "base" if trial.beta == math.inf else f"{trial.beta:g}"
        numbers = (trial.value, trial.half_width, trial.loss, trial.loss_error)
        others = (trial.grade, trial.top_k, trial.auc, trial.ndcg, trial.coverage)
        rows = "-" if math.isnan(trial.effective_rows) else f"{trial.effective_rows:,.0f}"
        kl = "-" if math.isnan(trial.kl) else f"{trial.kl:.2f}"
        name += " *" if trial.beta == found.beta else ""
        table.add_row(name, *map(_shown, numbers), rows, *map(_shown, others), kl)
    return table


def _shown(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.4f}"

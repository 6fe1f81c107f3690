"""``recpo factorize``: fits a matrix factorization of graded feedback, as a reward and as a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_factorize
from recpo.data.prepared import Prepared
from recpo.factorization.factors import Factors
from recpo.workflows.factorize import factorize as _factorize
from recpo.workflows.factorize import similar_lists


def factorize(
    prepared: str,
    out: Path,
    method: Literal["variational", "als"] = "variational",
    ranks: list[int] | None = None,
    ridges: list[float] = [1.0, 2.0, 4.0, 8.0],  # noqa: B006 as YAML says it
    progress: bool = True,
    **options: Any,
) -> VerbResult:
    """Fits a matrix factorization of graded feedback, for FactorReward and as a baseline.

    Writes factors.safetensors and manifest.json. If several ranks and ridges are given, the one with the smallest
    squared error on the validation period is chosen.

    Args:
        prepared: directory written by ``recpo prepare``.
        out: output directory.
        method: "variational" keeps a posterior of every user and item and learns their priors from the data (Lim and
            Teh, 2007); "als" is alternating least squares with one ridge.
        ranks: numbers of factors to try; null = 8 and 16, with "als" also 4.
        ridges: ridges that "als" tries: the weight of the squared factors and biases, relative to a weight of 1 per
            event.
        progress: show a progress bar on a terminal.
        **options: those of ``recpo.workflows.factorize.factorize``.
    """
    factors = _factorize(prepared, out, method=method, ranks=ranks, ridges=ridges, progress=progress, **options)
    _print(factors, out)
    caution = similar_lists(factors, Prepared.open(prepared))
    if caution is not None:
        console().print(f"warning: {caution}", style="yellow", soft_wrap=True)
    facts = {"rank": factors.rank, "ridge": factors.ridge, "squared_error": factors.noise, **factors.facts}
    facts["warnings"] = [] if caution is None else [caution]
    return after_factorize(out, prepared, facts)


def _print(factors: Factors, out: Path) -> None:
    terminal = console()
    table = Table(title="validation error", title_justify="left")
    ranks = sorted({tried["rank"] for tried in factors.facts["tried"]})
    errors = {(tried["rank"], tried["ridge"]): tried["squared_error"] for tried in factors.facts["tried"]}
    for name in ("ridge", *(f"rank {rank}" for rank in ranks)):
        table.add_column(name, justify="right")
    for ridge in sorted({ridge for _, ridge in errors}, key=lambda ridge: ridge or 0.0):
        cells = [errors[rank, ridge] for rank in ranks]
        table.add_row(
            "learned" if ridge is None else f"{ridge:g}",
            *("unknown" if error is None else f"{error:.5f}" for error in cells),
        )
    terminal.print(table)
    terminal.print(
        f"{out}: rank {factors.rank}, ridge {factors.ridge:.3g}, {factors.num_items:,} items, "
        f"{factors.facts['events']:,} graded events; squared error {factors.noise:.5f} on them",
        soft_wrap=True,
    )

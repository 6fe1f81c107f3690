"""``recpo factorize``: fits a matrix factorization of graded feedback, as a reward and as a baseline."""

from __future__ import annotations

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command, configuration, path_of
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors
from recpo.verbs.factorize import Factorize, similar_lists


def show(verb: Factorize, factors: Factors) -> VerbResult:
    """Prints the errors on the validation period; the reward of MPO comes next."""
    _print(factors, verb.out)
    caution = similar_lists(factors, Prepared.open(verb.prepared))
    if caution is not None:
        console().print(f"warning: {caution}", style="yellow", soft_wrap=True)
    facts = {"rank": factors.rank, "ridge": factors.ridge, "squared_error": factors.noise, **factors.facts}
    facts["warnings"] = [] if caution is None else [caution]
    data = ("--data.prepared", path_of(verb.prepared), "--reward.init_args.factors", verb.out)
    following = command(
        "train", "--config", configuration("mpo.yaml"), *data, "--init_from", "runs/pretrain", "--out", "runs/mpo"
    )
    return VerbResult((str(verb.out),), following, facts)


def _print(factors: Factors, out: object) -> None:
    terminal = console()
    table = Table(title="validation error", title_justify="left")
    tried = factors.facts["tried"]
    ranks = sorted({one["rank"] for one in tried})
    for name in ("ridge", "consumption", *(f"rank {rank}" for rank in ranks)):
        table.add_column(name, justify="right")
    for ridge, number in dict.fromkeys((one["ridge"], one["consumption"]) for one in tried):
        row = {
            one["rank"]: one["squared_error"] for one in tried if (one["ridge"], one["consumption"]) == (ridge, number)
        }
        cells = [_error(row.get(rank, "")) for rank in ranks]
        table.add_row("learned" if ridge is None else f"{ridge:g}", str(number), *cells)
    terminal.print(table)
    terminal.print(
        f"{out}: rank {factors.rank}, ridge {factors.ridge:.3g}, {factors.num_items:,} items, "
        f"{factors.facts['events']:,} graded events; squared error {factors.noise:.5f} on them",
        soft_wrap=True,
    )


def _error(value: float | str | None) -> str:
    """A squared error; None = unknown."""
    return "unknown" if value is None else value if isinstance(value, str) else f"{value:.5f}"

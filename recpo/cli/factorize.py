"""``recpo factorize``: fits a matrix factorization of graded feedback, as a reward and as a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    for name in ("ridge", "prior means from", *(f"rank {rank}" for rank in ranks)):
        table.add_column(name, justify="right")
    rows = dict[tuple[float | None, str], dict[int, float | None]]()
    for one in tried:
        rows.setdefault((one["ridge"], _prior(one)), {})[one["rank"]] = one["squared_error"]
    for (ridge, prior), errors in rows.items():
        cells = [_error(errors[rank]) if rank in errors else "" for rank in ranks]
        table.add_row("learned" if ridge is None else f"{ridge:g}", prior, *cells)
    terminal.print(table)
    terminal.print(
        f"{out}: rank {factors.rank}, ridge {factors.ridge:.3g}, {factors.num_items:,} items, "
        f"{factors.facts['events']:,} graded events; squared error {factors.noise:.5f} on them",
        soft_wrap=True,
    )
    weights = factors.facts["popularity_tried"]
    if any(one["weight"] for one in weights):
        values = [f"{one['weight']:g}: {one['AUC_mixed']:.4f}" for one in weights if "AUC_mixed" in one]
        told = f"; AUC_mixed by weight: {', '.join(values)}" if values else ""
        terminal.print(f"popularity {factors.facts['popularity']:g}{told}", soft_wrap=True)


def _prior(tried: Mapping[str, Any]) -> str:
    """What the prior means of a model depend on."""
    parts = [f"consumption ({tried['consumption']})"] * bool(tried["consumption"])
    return " + ".join(parts + ["item features"] * tried["item_features"]) or "-"


def _error(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.5f}"

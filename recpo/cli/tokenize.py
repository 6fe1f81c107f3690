"""``recpo tokenize``: gives every item a tuple of codes, so that a policy can generate items code by code."""

from __future__ import annotations

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, command, configuration, path_of
from recpo.items.tokenization import MANY_MOVED, Codes
from recpo.verbs.tokenize import Tokenize


def show(verb: Tokenize, codes: Codes) -> VerbResult:
    """Prints the report; a policy over these codes is pre-trained next."""
    _print(codes)
    config = configuration("semantic_pretrain.yaml")
    data = ("--data.prepared", path_of(verb.prepared), "--policy.init_args.codes", codes.root)
    following = command("train", "--config", config, *data, "--out", "runs/semantic_pretrain")
    return VerbResult((str(codes.root),), following, {"report": codes.report})


def _print(codes: Codes) -> None:
    report = codes.report
    terminal = console()
    table = Table(title="codes", title_justify="left")
    for name in ("level", "codebook", "used", "perplexity", "largest share", "error / variance"):
        table.add_column(name, justify="right")
    for number, level in enumerate(report["levels"]):
        cells = f"{level['utilization']:.1%}", f"{level['perplexity']:.1f}", f"{level['largest']:.2%}"
        error = f"{level['error']:.4f}" if "error" in level else ""
        table.add_row(str(number), f"{level['codebook_size']:,}", *cells, error)
    terminal.print(table)
    moves = f"{report['moved']:,} moved ({report['moved_share']:.1%}), {report['prefix_changed']:,} to another prefix"
    told_apart = "told apart by an extra code" if codes.manifest["collisions"] == "extra" else moves
    terminal.print(
        f"{codes.root}: {report['items']:,} items; {report['collisions']:,} collided, at most "
        f"{report['largest_tuple']:,} on one tuple; {told_apart}",
        soft_wrap=True,
    )
    if max(report["moved"], report["collisions"]) > MANY_MOVED * report["movable"]:
        terminal.print(
            "warning: many items hold codes that say little about them: take more levels or larger codebooks",
            style="yellow",
            soft_wrap=True,
        )

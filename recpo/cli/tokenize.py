"""``recpo tokenize``: gives every item a tuple of codes, so that a policy can generate items code by code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_tokenize
from recpo.tokenizer.cooccurrence import VectorsFromCooccurrence
from recpo.tokenizer.feature_vectors import VectorsFromFeatures
from recpo.tokenizer.report import MANY_MOVED
from recpo.tokenizer.sources import CodesFromFile, VectorsFromParquet, VectorSource
from recpo.tokenizer.tokenization import Codes
from recpo.workflows.tokenize import VectorsFromRun
from recpo.workflows.tokenize import tokenize as _tokenize

# Imported so that their short names work as class paths.
__all__ = [
    "CodesFromFile",
    "VectorsFromCooccurrence",
    "VectorsFromFeatures",
    "VectorsFromParquet",
    "VectorsFromRun",
    "tokenize",
]


def tokenize(
    prepared: str,
    out: Path,
    vectors: VectorSource | CodesFromFile = VectorsFromCooccurrence(),  # noqa: B008 frozen
    extends: Path | None = None,
    progress: bool = True,
    **options: Any,
) -> VerbResult:
    """Gives every item of a catalog a unique tuple of codes: residual k-means, then a pass that resolves collisions.

    Writes codes.parquet, manifest.json with a report, and codebooks.safetensors. Equal items, options and seed give
    equal bytes.

    Args:
        prepared: directory written by ``recpo prepare``.
        out: output directory.
        vectors: source of the codes: VectorsFromCooccurrence, VectorsFromFeatures, VectorsFromParquet, VectorsFromRun,
            or CodesFromFile for existing codes.
        extends: directory that this verb wrote for an earlier catalog. Its items keep their codes, and new items get
            free tuples of its codebooks.
        progress: show a progress bar on a terminal.
        **options: those of ``recpo.workflows.tokenize.tokenize``.
    """
    codes = _tokenize(prepared, out, vectors=vectors, extends=extends, progress=progress, **options)
    _print(codes)
    return after_tokenize(out, prepared, {"report": codes.report})


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

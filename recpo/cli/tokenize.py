"""``recpo tokenize``: the items of a catalog as tuples of codes, so that a policy can generate them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from recpo.artifacts import output_directory
from recpo.cli.config import write_resolved
from recpo.cli.item_sources import (
    CodesFromFile,
    EarlierCodes,
    VectorsFromCooccurrence,
    VectorsFromParquet,
    VectorsFromRun,
    VectorSource,
)
from recpo.cli.output import console
from recpo.data.id_map import IdMap
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.semantic_codes import CODES, MANIFEST, SemanticCodes
from recpo.tokenizer.codebooks import Codebooks, Normalization
from recpo.tokenizer.report import MANY_MOVED, collision_statistics, level_statistics, reconstruction_errors
from recpo.tokenizer.residual_kmeans import ResidualKMeans
from recpo.tokenizer.unique import extra_code, first_free, nearest_free
from recpo.workflows.devices import compute_device

# Imported so that their short names work as class paths.
__all__ = ["CodesFromFile", "VectorsFromCooccurrence", "VectorsFromParquet", "VectorsFromRun", "tokenize"]

Collisions = Literal["nearest", "extra", "first_free"]


class _Tokenized(NamedTuple):
    """Codes before (``wanted [V, T]``) and after they were made unique, and what they were made with."""

    wanted: Tensor
    codes: Tensor
    codebook_sizes: tuple[int, ...]
    facts: dict[str, Any]
    codebooks: Codebooks | None = None
    points: Tensor | None = None
    is_new: Tensor | None = None


def tokenize(
    prepared: str | Path,
    out: Path,
    vectors: VectorSource | CodesFromFile = VectorsFromCooccurrence(),  # noqa: B008 frozen
    codebooks: Path | None = None,
    levels: int = 3,
    codebook_size: int = 256,
    normalize: Normalization = "l2",
    capacity_slack: float | None = 2.0,
    iterations: int = 25,
    sample: int = 65_536,
    collisions: Collisions | None = None,
    device: str = "cpu",
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = True,
) -> None:
    """Gives every item of a catalog a tuple of codes of its own: residual k-means, then a pass that ends collisions.

    Writes codes.parquet, manifest.json with a report, and codebooks.safetensors. Equal items, options and seed give
    equal bytes.

    Args:
        prepared: directory written by ``recpo prepare``.
        out: directory to make.
        vectors: what codes are made from: VectorsFromCooccurrence, VectorsFromParquet, VectorsFromRun, or codes that
            exist already: CodesFromFile.
        codebooks: directory that this verb wrote for an earlier catalog: its items keep their codes, new items get
            free tuples by its codebooks.
        levels: codes of an item.
        codebook_size: codes of a level.
        normalize: vectors are brought to length 1 (l2), every dimension to mean 0 and variance 1 (standardize), or
            left alone (none).
        capacity_slack: balance the codes: none is given to more than this many times its equal share of the items;
            null = every item gets its nearest code.
        iterations: steps of k-means.
        sample: items that k-means is fitted on, at least 32 for each code.
        collisions: how items that share a tuple are told apart: nearest (the last code moves to the nearest free one
            under the same prefix; a full prefix overflows to the nearest one with room), extra (everybody gets one more
            code, 0 for items that are alone), or first_free (the smallest free last code, for codes without vectors);
            null = nearest where there are vectors, extra where there are none.
        device: where k-means runs: cpu, auto (a GPU if there is one), cuda, cuda:1 and so on.
        seed: of everything random.
        overwrite: replace ``out`` where it exists.
        progress: show a progress bar on a terminal.
    """
    data = Prepared.open(prepared)
    items = data.item_ids()
    quantizer = ResidualKMeans(levels, codebook_size, normalize, capacity_slack, iterations, sample)
    place = compute_device(device)
    with (
        output_directory(out, kind="codes", overwrite=overwrite, inputs=[prepared]) as partial,
        tqdm(total=levels + 3, desc="tokenize", unit="stage", disable=None if progress else True) as bar,
    ):
        if isinstance(vectors, CodesFromFile):
            result = _ready_made(vectors, items, quantizer, collisions, codebooks)
        elif codebooks is None:
            result = _fitted(vectors, data, items, quantizer, collisions, place, seed, bar.update)
        else:
            result = _frozen(vectors, data, items, quantizer, collisions, codebooks)
        report = _report(result)
        semantic = SemanticCodes(result.codes.cpu().numpy(), result.codebook_sizes, data.catalog_checksum)
        if result.codebooks is not None:
            result.codebooks.save(partial)
        write_resolved(partial / "resolved.yaml")
        facts = {"source": type(vectors).__name__, "seed": seed, **result.facts}
        semantic.save(partial, items.to_external(range(1, len(items) + 1)), {**facts, "report": report})
        bar.update(bar.total - bar.n)
    _print(report, out, str(result.facts["collisions"]))


def _ready_made(
    source: CodesFromFile,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    codebooks: Path | None,
) -> _Tokenized:
    if codebooks is not None:
        raise RecpoError("codebooks encode vectors: use a source of vectors with them, not CodesFromFile")
    _refuse_options(quantizer, "CodesFromFile has its codes already")
    if collisions == "nearest":
        raise RecpoError("collisions: nearest needs vectors, and codes from a file have none: use extra or first_free")
    values, sizes, facts = source.read(items)
    wanted = torch.from_numpy(values)
    if collisions == "first_free":
        return _Tokenized(wanted, first_free(wanted, sizes), sizes, facts | {"collisions": "first_free"})
    return _with_extra_code(_Tokenized(wanted, wanted, sizes, facts))


def _fitted(
    source: VectorSource,
    data: Prepared,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    device: torch.device,
    seed: int,
    finished: Callable[[], object],
) -> _Tokenized:
    _refuse_first_free(collisions)
    read = source.read(data, items, seed)
    finished()
    vectors = torch.from_numpy(read.values).to(device)
    codebooks, wanted = quantizer.fit(vectors, seed, finished)
    points = codebooks.normalize(vectors)
    result = _Tokenized(wanted, wanted, codebooks.codebook_sizes, read.facts, codebooks, points)
    if collisions == "extra":
        return _with_extra_code(result)
    codes = nearest_free(points, codebooks, wanted)
    return result._replace(codes=codes, facts=read.facts | {"collisions": "nearest"})


def _frozen(
    source: VectorSource,
    data: Prepared,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    root: Path,
) -> _Tokenized:
    """Codes by the codebooks of an earlier catalog; its items, known by their external ids, keep theirs."""
    _refuse_options(quantizer, "codebooks bring the options of k-means along")
    earlier, codebooks = SemanticCodes.load(root), Codebooks.load(root)
    has_extra = earlier.codes.shape[1] > codebooks.levels
    _refuse_first_free(collisions)
    if collisions is not None and (collisions == "extra") != has_extra:
        raise RecpoError(f"{root / MANIFEST}: its collisions were resolved the other way, leave collisions out")
    given, gone = _carried_over(earlier, root, items)
    is_new = given[:, 0] < 0
    wanted = given[:, : codebooks.levels].clone()
    read = source.read_new(data, items, EarlierCodes(codebooks, wanted, is_new))
    facts = read.facts | {"items_kept": int((~is_new).sum()), "items_gone": gone}
    points = codebooks.normalize(torch.from_numpy(read.values))
    wanted[is_new] = codebooks.encode(points[is_new])
    result = _Tokenized(wanted, wanted, codebooks.codebook_sizes, facts, codebooks, points, is_new)
    if has_extra:
        return _with_extra_code(result, given[:, -1], earlier.codebook_sizes[-1])
    unique = nearest_free(points, codebooks, wanted, kept=~is_new)
    return result._replace(codes=unique, facts=facts | {"collisions": "nearest"})


def _carried_over(earlier: SemanticCodes, root: Path, items: IdMap) -> tuple[Tensor, int]:
    """Codes ``[V, T]`` that items have already, -1 for new ones, and how many items are no longer in the catalog."""
    index = items.to_internal(pq.read_table(root / CODES, columns=["item_id"]).column(0))
    given = np.full((len(items), earlier.codes.shape[1]), -1)
    given[index[index > 0] - 1] = earlier.codes[index > 0]
    return torch.from_numpy(given), int((index == 0).sum())


def _refuse_options(quantizer: ResidualKMeans, reason: str) -> None:
    if quantizer != ResidualKMeans():
        raise RecpoError(f"{reason}: leave out levels, codebook_size, normalize, capacity_slack, iterations and sample")


def _refuse_first_free(collisions: Collisions | None) -> None:
    if collisions == "first_free":
        raise RecpoError("collisions: first_free is for codes without vectors; with vectors, use nearest or extra")


def _with_extra_code(result: _Tokenized, given: Tensor | None = None, size: int = 1) -> _Tokenized:
    extra = extra_code(result.wanted, given)
    codes = torch.cat([result.wanted, extra[:, None]], 1)
    sizes = (*result.codebook_sizes, max(size, int(extra.max()) + 1))
    return result._replace(codes=codes, codebook_sizes=sizes, facts=result.facts | {"collisions": "extra"})


def _report(result: _Tokenized) -> dict[str, Any]:
    """What goes into the manifest and is printed."""
    levels = level_statistics(result.codes, result.codebook_sizes)
    movable = len(result.codes) if result.is_new is None else int(result.is_new.sum())
    report = {
        "items": len(result.codes),
        "levels": levels,
        **collision_statistics(result.wanted, result.codes, movable),
    }
    if result.codebooks is None or result.points is None or not movable:
        return report
    chosen = slice(None) if result.is_new is None else result.is_new
    points = result.points[chosen]
    kept = result.codes[chosen, : result.codebooks.levels]  # an extra code stands for no vector
    errors = reconstruction_errors(points, result.codebooks, kept)
    for level, error in zip(levels, errors, strict=False):
        level["error"] = error
    report["error"] = errors[-1]
    report["error_before_moves"] = reconstruction_errors(points, result.codebooks, result.wanted[chosen])[-1]
    return report


def _print(report: dict[str, Any], out: Path, collisions: str) -> None:
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
    terminal.print(
        f"{out}: {report['items']:,} items; {report['collisions']:,} collided, at most {report['largest_tuple']:,} on "
        f"one tuple; {'told apart by an extra code' if collisions == 'extra' else moves}",
        soft_wrap=True,
    )
    if max(report["moved"], report["collisions"]) > MANY_MOVED * report["movable"]:
        terminal.print(
            "warning: many items hold codes that say little about them: take more levels or larger codebooks",
            style="yellow",
            soft_wrap=True,
        )

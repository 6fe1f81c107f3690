"""Codes for all items of a catalog: made from vectors, made by earlier codebooks, or read; then made unique."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recpo.artifacts.semantic_codes import CODES, MANIFEST, SemanticCodes
from recpo.base.errors import RecpoError
from recpo.base.frames import to_pandas
from recpo.items.codebooks import Codebooks
from recpo.items.report import collision_statistics, level_statistics, reconstruction_errors
from recpo.items.residual_kmeans import ResidualKMeans
from recpo.items.sources import CodesFromFile, EarlierCodes, VectorSource
from recpo.items.unique import extra_code, first_free, nearest_free
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared

if TYPE_CHECKING:
    import pandas as pd

Collisions = Literal["nearest", "extra", "first_free"]


@dataclass(frozen=True)
class Codes:
    """A directory of codes, as ``recpo tokenize`` writes it; accepted wherever its path is.

    Attributes:
        root: the directory.
        semantic_codes: the codes themselves.
        manifest: the parsed ``manifest.json``: how the codes were made.
    """

    root: Path
    semantic_codes: SemanticCodes
    manifest: dict[str, Any]

    @classmethod
    def open(cls, root: Path | str) -> Codes:
        """Opens a directory written by ``recpo tokenize``.

        Raises:
            RecpoError: it is not such a directory, of another version, or damaged.
        """
        root = Path(root)
        codes = SemanticCodes.load(root)
        return cls(root, codes, json.loads((root / MANIFEST).read_bytes()))

    def __fspath__(self) -> str:
        return str(self.root)

    @property
    def report(self) -> dict[str, Any]:
        """Use of the codebooks, error of the vectors, collisions (``recpo.items.report``)."""
        report: dict[str, Any] = self.manifest["report"]
        return report

    def to_pandas(self) -> pd.DataFrame:
        """One row per item: ``item_index`` (1..V), ``item_id`` (external), ``code_0``, ``code_1`` and so on."""
        return to_pandas(pq.read_table(self.root / CODES))


class Tokenization(NamedTuple):
    """Codes before (``wanted [V, T]``) and after they were made unique, with the codebooks and points behind them."""

    wanted: Tensor
    codes: Tensor
    codebook_sizes: tuple[int, ...]
    facts: dict[str, Any]
    codebooks: Codebooks | None = None
    points: Tensor | None = None
    is_new: Tensor | None = None


def make_codes(
    source: VectorSource | CodesFromFile,
    data: Prepared,
    items: IdMap,
    quantizer: ResidualKMeans,
    *,
    collisions: Collisions | None = None,
    codebooks: Path | None = None,
    device: torch.device,
    seed: int = 0,
    finished: Callable[[], object] = lambda: None,
) -> Tokenization:
    """Codes of the items 1..V of ``data``, all different; see ``recpo.verbs.tokenize.Tokenize`` for the options.

    Raises:
        RecpoError: options that contradict each other, items without vectors or codes, or more items than tuples.
    """
    if isinstance(source, CodesFromFile):
        return _ready_made(source, items, quantizer, collisions, codebooks)
    if codebooks is None:
        return _fitted(source, data, items, quantizer, collisions, device, seed, finished)
    return _frozen(source, data, items, quantizer, collisions, codebooks)


def _ready_made(
    source: CodesFromFile,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    codebooks: Path | None,
) -> Tokenization:
    if codebooks is not None:
        raise RecpoError("codebooks encode vectors: use a source of vectors with them, not CodesFromFile")
    _validate_no_options(quantizer, "CodesFromFile has its codes already")
    if collisions == "nearest":
        raise RecpoError("collisions: nearest needs vectors, and codes from a file have none: use extra or first_free")
    values, sizes, facts = source.read(items)
    wanted = torch.from_numpy(values)
    if collisions == "first_free":
        return Tokenization(wanted, first_free(wanted, sizes), sizes, facts | {"collisions": "first_free"})
    return _with_extra_code(Tokenization(wanted, wanted, sizes, facts))


def _fitted(
    source: VectorSource,
    data: Prepared,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    device: torch.device,
    seed: int,
    finished: Callable[[], object],
) -> Tokenization:
    _validate_collisions(collisions)
    read = source.read(data, items, seed)
    finished()
    vectors = torch.from_numpy(read.values).to(device)
    codebooks, wanted = quantizer.fit(vectors, seed, finished)
    points = codebooks.normalize(vectors)
    result = Tokenization(wanted, wanted, codebooks.codebook_sizes, read.facts, codebooks, points)
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
) -> Tokenization:
    """Codes by the codebooks of an earlier catalog. Its items, matched by external id, keep their codes."""
    _validate_no_options(quantizer, "codebooks bring the options of k-means along")
    earlier, codebooks = SemanticCodes.load(root), Codebooks.load(root)
    has_extra = earlier.codes.shape[1] > codebooks.levels
    _validate_collisions(collisions)
    if collisions is not None and (collisions == "extra") != has_extra:
        raise RecpoError(f"{root / MANIFEST}: its collisions were resolved the other way, leave collisions out")
    given, gone = _carried_over(earlier, root, items)
    is_new = given[:, 0] < 0
    wanted = given[:, : codebooks.levels].clone()
    read = source.read_new(data, items, EarlierCodes(codebooks, wanted, is_new))
    facts = read.facts | {"items_kept": int((~is_new).sum()), "items_gone": gone}
    points = codebooks.normalize(torch.from_numpy(read.values))
    wanted[is_new] = codebooks.encode(points[is_new])
    result = Tokenization(wanted, wanted, codebooks.codebook_sizes, facts, codebooks, points, is_new)
    if has_extra:
        return _with_extra_code(result, given[:, -1], earlier.codebook_sizes[-1])
    unique = nearest_free(points, codebooks, wanted, kept=~is_new)
    return result._replace(codes=unique, facts=facts | {"collisions": "nearest"})


def _carried_over(earlier: SemanticCodes, root: Path, items: IdMap) -> tuple[Tensor, int]:
    """Earlier codes ``[V, T]``, -1 for new items, and the number of items that are no longer in the catalog."""
    index = items.to_internal(pq.read_table(root / CODES, columns=["item_id"]).column(0))
    given = np.full((len(items), earlier.codes.shape[1]), -1)
    given[index[index > 0] - 1] = earlier.codes[index > 0]
    return torch.from_numpy(given), int((index == 0).sum())


def _validate_no_options(quantizer: ResidualKMeans, reason: str) -> None:
    if quantizer != ResidualKMeans():
        raise RecpoError(f"{reason}: leave out levels, codebook_size, normalize, capacity_slack, iterations and sample")


def _validate_collisions(collisions: Collisions | None) -> None:
    if collisions == "first_free":
        raise RecpoError("collisions: first_free is for codes without vectors; with vectors, use nearest or extra")


def _with_extra_code(result: Tokenization, given: Tensor | None = None, size: int = 1) -> Tokenization:
    extra = extra_code(result.wanted, given)
    codes = torch.cat([result.wanted, extra[:, None]], 1)
    sizes = (*result.codebook_sizes, max(size, int(extra.max()) + 1))
    return result._replace(codes=codes, codebook_sizes=sizes, facts=result.facts | {"collisions": "extra"})


def report_of(result: Tokenization) -> dict[str, Any]:
    """The report for the manifest: use of the codebooks, error of the vectors, and collisions."""
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
    kept = result.codes[chosen, : result.codebooks.levels]  # an extra code has no centroid
    errors = reconstruction_errors(points, result.codebooks, kept)
    for level, error in zip(levels, errors, strict=False):
        level["error"] = error
    report["error"] = errors[-1]
    report["error_before_moves"] = reconstruction_errors(points, result.codebooks, result.wanted[chosen])[-1]
    return report

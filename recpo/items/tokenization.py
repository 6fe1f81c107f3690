"""Codes for all items of a catalog: made from vectors, made by earlier codebooks, or read; then made unique."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recpo.artifacts.semantic_codes import CODES, MANIFEST, Codes
from recpo.base.errors import RecpoError
from recpo.items.code_report import collision_statistics, level_statistics, reconstruction_errors
from recpo.items.residual_kmeans import Codebooks, ResidualKMeans
from recpo.items.sources import CodesFromFile, EarlierCodes, VectorSource
from recpo.items.unique_codes import extra_code, first_free, nearest_free
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared

Collisions = Literal["nearest", "extra", "first_free"]


class Tokenization(NamedTuple):
    """The codes of a catalog, and what they were made from.

    Attributes:
        assigned: ``[V, T]``, codes before they were made unique.
        codes: ``[V, T]``, or ``[V, T + 1]`` with an extra code; unique.
        codebook_sizes: number of codes of every level of ``codes``.
        facts: for the manifest, such as the rows of a file that were read.
        codebooks: the codebooks of the codes; None = the codes came from a file.
        points: ``[V, d]`` normalized vectors; None as well.
        is_new: ``[V]`` bool, the items that earlier codes do not have; None = there are no earlier codes.
    """

    assigned: Tensor
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
    collisions: Collisions | None,
    earlier: Path | None,
    device: torch.device,
    seed: int,
    on_stage: Callable[[], object],
) -> Tokenization:
    """Codes of the items 1..V of ``data``, all different; see ``recpo.verbs.tokenize.Tokenize`` for the options.

    Args:
        source: source of the vectors or codes.
        data: the prepared data.
        items: their items.
        quantizer: makes the codebooks.
        collisions: how codes are made unique; None = nearest if there are vectors, else extra.
        earlier: directory of the codes of an earlier catalog, whose items keep their codes.
        device: device of k-means.
        seed: seed of all random numbers.
        on_stage: called after the vectors are read, and after every level.

    Raises:
        RecpoError: options that contradict each other, items without vectors or codes, or more items than tuples.
    """
    if isinstance(source, CodesFromFile):
        return _codes_from_file(source, items, quantizer, collisions, earlier)
    if collisions == "first_free":
        raise RecpoError(
            "collisions: first_free is for codes without vectors; with vectors, use nearest or extra",
            code="unsupported",
            field="collisions",
        )
    if earlier is not None:
        return _extended_codes(source, data, items, quantizer, collisions, earlier, seed)
    read = source.read(data, items, seed)
    on_stage()
    vectors = torch.from_numpy(read.values).to(device)
    codebooks, assigned = quantizer.fit(vectors, seed, on_stage)
    points = codebooks.normalize(vectors)
    result = Tokenization(assigned, assigned, codebooks.codebook_sizes, read.facts, codebooks, points)
    if collisions == "extra":
        return _with_extra_code(result)
    codes = nearest_free(points, codebooks, assigned)
    return result._replace(codes=codes, facts=read.facts | {"collisions": "nearest"})


def _codes_from_file(
    source: CodesFromFile,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    earlier: Path | None,
) -> Tokenization:
    if earlier is not None:
        raise RecpoError(
            "extends needs item vectors for the earlier codebooks, and CodesFromFile has none: use another source",
            code="conflicting_options",
            field="extends",
        )
    _validate_default(quantizer, "CodesFromFile has its codes already")
    if collisions == "nearest":
        raise RecpoError(
            "collisions: nearest needs vectors, and codes from a file have none: use extra or first_free",
            code="conflicting_options",
            field="collisions",
        )
    values, sizes, facts = source.read(items)
    codes = torch.from_numpy(values)
    if collisions == "first_free":
        return Tokenization(codes, first_free(codes, sizes), sizes, facts | {"collisions": "first_free"})
    return _with_extra_code(Tokenization(codes, codes, sizes, facts))


def _extended_codes(
    source: VectorSource,
    data: Prepared,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    root: Path,
    seed: int,
) -> Tokenization:
    """Codes by the codebooks of an earlier catalog. Its items, matched by external id, keep their codes."""
    _validate_default(quantizer, "earlier codes come with their options of k-means")
    earlier, codebooks = Codes.open(root), Codebooks.load(root)
    has_extra = earlier.codes.shape[1] > codebooks.levels
    if collisions is not None and (collisions == "extra") != has_extra:
        raise RecpoError(
            f"{root / MANIFEST}: its collisions were resolved the other way, leave collisions out",
            code="conflicting_options",
            field="collisions",
        )
    earlier_codes, num_gone = _codes_of_same_items(earlier, root, items)
    is_new = earlier_codes[:, 0] < 0
    assigned = earlier_codes[:, : codebooks.levels].clone()
    read = source.read(data, items, seed, EarlierCodes(codebooks, assigned, is_new))
    facts = read.facts | {"items_kept": int((~is_new).sum()), "items_gone": num_gone}
    points = codebooks.normalize(torch.from_numpy(read.values))
    assigned[is_new] = codebooks.encode(points[is_new])
    result = Tokenization(assigned, assigned, codebooks.codebook_sizes, facts, codebooks, points, is_new)
    if has_extra:
        return _with_extra_code(result, earlier_codes[:, -1], earlier.codebook_sizes[-1])
    unique = nearest_free(points, codebooks, assigned, kept=~is_new)
    return result._replace(codes=unique, facts=facts | {"collisions": "nearest"})


def _codes_of_same_items(earlier: Codes, root: Path, items: IdMap) -> tuple[Tensor, int]:
    """Earlier codes ``[V, T]``, -1 for new items, and the number of items that are no longer in the catalog."""
    index = items.to_internal(pq.read_table(root / CODES, columns=["item_id"]).column(0))
    codes = np.full((len(items), earlier.codes.shape[1]), -1)
    codes[index[index > 0] - 1] = earlier.codes[index > 0]
    return torch.from_numpy(codes), int((index == 0).sum())


def _validate_default(quantizer: ResidualKMeans, reason: str) -> None:
    if quantizer != ResidualKMeans():
        raise RecpoError(
            f"{reason}: leave out levels, codebook_size, normalize, capacity_slack, iterations and sample",
            code="unused_option",
        )


def _with_extra_code(result: Tokenization, earlier: Tensor | None = None, size: int = 1) -> Tokenization:
    """One more code for every item.

    Args:
        result: T codes per item.
        earlier: ``[V]``, the extra codes of earlier items, -1 for new ones.
        size: number of earlier extra codes.
    """
    extra = extra_code(result.assigned, earlier)
    codes = torch.cat([result.assigned, extra[:, None]], 1)
    sizes = (*result.codebook_sizes, max(size, int(extra.max()) + 1))
    return result._replace(codes=codes, codebook_sizes=sizes, facts=result.facts | {"collisions": "extra"})


def report_of(result: Tokenization) -> dict[str, Any]:
    """The report for the manifest: use of the codebooks, error of the vectors, and collisions."""
    levels = level_statistics(result.codes, result.codebook_sizes)
    movable = len(result.codes) if result.is_new is None else int(result.is_new.sum())
    report = {
        "items": len(result.codes),
        "levels": levels,
        **collision_statistics(result.assigned, result.codes, movable),
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
    report["error_before_moves"] = reconstruction_errors(points, result.codebooks, result.assigned[chosen])[-1]
    return report

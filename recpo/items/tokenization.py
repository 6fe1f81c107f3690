"""Codes for all items of a catalog: made from vectors, made by earlier codebooks, or read; then made unique.

Unique code tuples: an item that collides moves to a free tuple, or every item gets one more code.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recpo.artifacts.semantic_codes import CODES, MANIFEST, Codes
from recpo.base.errors import RecpoError
from recpo.items.residual_kmeans import Codebooks, ResidualKMeans, rank_within, settle, squared_distances, subtract
from recpo.items.sources import CodesFromFile, EarlierCodes, VectorSource
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared


def nearest_free(points: Tensor, codebooks: Codebooks, codes: Tensor, kept: Tensor | None = None) -> Tensor:
    """Moves items that collide to the nearest free tuple, level by level.

    A prefix may have more items than there are tuples below it. It then keeps its nearest items. The others move to
    the nearest prefix with free places on the same level, and their later codes follow from their new residuals. At the
    last level a code has one place: the item nearest to the centroid keeps its tuple, and the others take the nearest
    free last code. No other item moves.

    Args:
        points: ``[V, d]`` normalized vectors (``Codebooks.normalize``).
        codebooks: the codebooks of the codes.
        codes: ``[V, T]``.
        kept: ``[V]`` bool, items that must not move; their tuples are unique.

    Returns:
        Codes ``[V, T]``, all different.

    Raises:
        RecpoError: there are more items than tuples.
    """
    codes, residual = codes.clone(), points.clone()

    def distances(level: int, items: Tensor) -> Tensor:
        return squared_distances(residual[items], codebooks.centroids[level])

    def settled(level: int, moved: Tensor) -> None:
        subtract(residual, codebooks.centroids[level], codes[:, level])
        codes[moved, level + 1 :] = codebooks.encode(residual[moved], level + 1)

    def wanted(level: int) -> Tensor:
        after = residual.clone()
        subtract(after, codebooks.centroids[level], codes[:, level])
        return after.square_().sum(1)

    _separate(codes, codebooks.codebook_sizes, kept, wanted, distances, settled)
    return codes


def first_free(codes: Tensor, codebook_sizes: Sequence[int]) -> Tensor:
    """Moves items that collide, without vectors: the first one keeps its tuple, the others take the smallest free code.

    Raises:
        RecpoError: there are more items than tuples.
    """
    codes = codes.clone()

    def distances(level: int, items: Tensor) -> Tensor:
        return torch.arange(codebook_sizes[level], dtype=torch.float32).expand(len(items), -1)

    def wanted(_: int) -> Tensor:
        return torch.zeros(len(codes))

    _separate(codes, codebook_sizes, None, wanted, distances, lambda level, moved: None)
    return codes


def _separate(
    codes: Tensor,
    codebook_sizes: Sequence[int],
    kept: Tensor | None,
    wanted: Callable[[int], Tensor],
    distances: Callable[[int, Tensor], Tensor],
    settled: Callable[[int, Tensor], None],
) -> None:
    """Makes the rows of ``codes`` unique in place.

    Args:
        codes: ``[V, T]``.
        codebook_sizes: ``K_t`` of every level.
        kept: ``[V]`` bool, items that must not move.
        wanted: distance ``[V]`` of all items to their present code of a level.
        distances: distances ``[m, K_t]`` of items to all codes of a level.
        settled: called when the codes of a level are final, with the items ``[m]`` that changed on it.
    """
    if len(codes) > math.prod(codebook_sizes):
        raise RecpoError(
            f"{len(codes)} items do not fit into {' x '.join(map(str, codebook_sizes))} code tuples: "
            "take more levels or larger codebooks",
            code="out_of_range",
            field="codebook_size",
        )
    group = torch.zeros_like(codes[:, 0])
    for level, size in enumerate(codebook_sizes):
        distance = wanted(level)
        if kept is not None:
            distance = distance.masked_fill(kept, -1.0)
        code = settle(
            codes[:, level],
            distance,
            group,
            num_codes=size,
            capacity=min(math.prod(codebook_sizes[level + 1 :]), len(codes)),
            distances=partial(distances, level),
        )
        moved = (code != codes[:, level]).nonzero().squeeze(1)
        codes[:, level] = code
        settled(level, moved)
        group = (group * size + code).unique(return_inverse=True)[1]


def tuple_ids(codes: Tensor) -> Tensor:
    """Ids ``[V]`` int64 of the tuples ``codes [V, T]``, from 0: equal for equal rows."""
    ids = torch.zeros_like(codes[:, 0])
    for code in codes.T:
        ids = (ids * (code.max() + 1) + code).unique(return_inverse=True)[1]
    return ids


def extra_code(codes: Tensor, given: Tensor | None = None) -> Tensor:
    """One more code for every item: 0 if no other item has its tuple, else 0 .. n - 1 in the order of the items.

    Args:
        codes: ``[V, T]``.
        given: ``[V]``, earlier extra codes, -1 = none. The codes of new items continue after the largest one.

    Returns:
        ``[V]``.
    """
    tuples = tuple_ids(codes)
    if given is None:
        return rank_within(tuples, torch.zeros_like(tuples))
    largest = torch.full_like(tuples, -1).scatter_reduce_(0, tuples, given, "amax")
    is_old = (given >= 0).long()
    order = rank_within(2 * tuples + is_old, torch.zeros_like(tuples))
    return torch.where(given >= 0, given, largest[tuples] + 1 + order)


#: Above this share of moved items, codes carry little information about their items.
MANY_MOVED = 0.1


def level_statistics(codes: Tensor, codebook_sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Distribution of the codes over the items, for every level of ``codes [V, T]``.

    ``codebook_size`` K; ``utilization``, the share of the K codes with at least one item; ``entropy``
    ``H = -sum p log p`` in nats; ``perplexity`` ``exp(H)``, at most K, the number of equally frequent codes with the
    same entropy; ``largest``, the share p of the most frequent code.
    """
    levels = []
    for code, size in zip(codes.T, codebook_sizes, strict=True):
        share = torch.bincount(code, minlength=size).double() / len(codes)
        entropy = torch.special.entr(share).sum()
        levels.append(
            {
                "codebook_size": size,
                "utilization": float((share > 0).double().mean()),
                "entropy": float(entropy),
                "perplexity": float(entropy.exp()),
                "largest": float(share.max()),
            }
        )
    return levels


def reconstruction_errors(points: Tensor, codebooks: Codebooks, codes: Tensor) -> list[float]:
    """Mean squared error after 1, 2, .. T levels, divided by the variance of the points (1 = no better than the mean).

    Args:
        points: ``[n, d]`` normalized vectors.
        codebooks: T levels.
        codes: ``[n, T]``.
    """
    variance = float(torch.var(points, 0, correction=0).double().sum())
    residual, errors = points.clone(), []
    for centroids, code in zip(codebooks.centroids, codes.T, strict=True):
        subtract(residual, centroids, code)
        error = float(residual.square().sum(1).double().mean())
        errors.append(error / variance if variance > 0 else 0.0)
    return errors


def collision_statistics(before: Tensor, after: Tensor, movable: int) -> dict[str, Any]:
    """Items that shared a code tuple, and items that moved to make tuples unique.

    Args:
        before: ``[V, T]``, codes before tuples were made unique.
        after: ``[V, T]``, or ``[V, T + 1]`` with an extra code; unique.
        movable: number of items that may move.

    Returns:
        ``movable``; ``collisions``, items beyond the first of their tuple; ``sharing``, items that shared a tuple;
        ``largest_tuple``, the most items on one tuple; ``largest_prefix``, the most items with one prefix of T - 1
        codes; ``moved`` and ``prefix_changed``, items whose T codes, or first T - 1 codes, changed; ``moved_share``,
        the share of the movable items that moved.
    """
    levels = before.shape[1]
    together = torch.bincount(tuple_ids(before))
    prefixes = torch.bincount(tuple_ids(before[:, :-1])) if levels > 1 else torch.tensor([len(before)])
    changed = before != after[:, :levels]
    moved = int(changed.any(1).sum())
    return {
        "collisions": len(before) - len(together),
        "sharing": int(together[together > 1].sum()),
        "largest_tuple": int(together.max()),
        "largest_prefix": int(prefixes.max()),
        "movable": movable,
        "moved": moved,
        "moved_share": moved / max(1, movable),
        "prefix_changed": int(changed[:, : levels - 1].any(1).sum()),
    }


Collisions = Literal["nearest", "extra", "first_free"]


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
    collisions: Collisions | None,
    codebooks: Path | None,
    device: torch.device,
    seed: int,
    finished: Callable[[], object],
) -> Tokenization:
    """Codes of the items 1..V of ``data``, all different; see ``recpo.verbs.tokenize.Tokenize`` for the options.

    Raises:
        RecpoError: options that contradict each other, items without vectors or codes, or more items than tuples.
    """
    if isinstance(source, CodesFromFile):
        return _ready_made(source, items, quantizer, collisions, codebooks)
    if collisions == "first_free":
        raise RecpoError(
            "collisions: first_free is for codes without vectors; with vectors, use nearest or extra",
            code="unsupported",
            field="collisions",
        )
    if codebooks is not None:
        return _frozen(source, data, items, quantizer, collisions, codebooks, seed)
    read = source.read(data, items, seed)
    finished()
    vectors = torch.from_numpy(read.values).to(device)
    fitted, wanted = quantizer.fit(vectors, seed, finished)
    points = fitted.normalize(vectors)
    result = Tokenization(wanted, wanted, fitted.codebook_sizes, read.facts, fitted, points)
    if collisions == "extra":
        return _with_extra_code(result)
    codes = nearest_free(points, fitted, wanted)
    return result._replace(codes=codes, facts=read.facts | {"collisions": "nearest"})


def _ready_made(
    source: CodesFromFile,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    codebooks: Path | None,
) -> Tokenization:
    if codebooks is not None:
        raise RecpoError(
            "codebooks encode vectors: use a source of vectors with them, not CodesFromFile",
            code="conflicting_options",
            field="codebooks",
        )
    _validate_no_options(quantizer, "CodesFromFile has its codes already")
    if collisions == "nearest":
        raise RecpoError(
            "collisions: nearest needs vectors, and codes from a file have none: use extra or first_free",
            code="conflicting_options",
            field="collisions",
        )
    values, sizes, facts = source.read(items)
    wanted = torch.from_numpy(values)
    if collisions == "first_free":
        return Tokenization(wanted, first_free(wanted, sizes), sizes, facts | {"collisions": "first_free"})
    return _with_extra_code(Tokenization(wanted, wanted, sizes, facts))


def _frozen(
    source: VectorSource,
    data: Prepared,
    items: IdMap,
    quantizer: ResidualKMeans,
    collisions: Collisions | None,
    root: Path,
    seed: int,
) -> Tokenization:
    """Codes by the codebooks of an earlier catalog. Its items, matched by external id, keep their codes."""
    _validate_no_options(quantizer, "codebooks bring the options of k-means along")
    earlier, codebooks = Codes.open(root), Codebooks.load(root)
    has_extra = earlier.codes.shape[1] > codebooks.levels
    if collisions is not None and (collisions == "extra") != has_extra:
        raise RecpoError(
            f"{root / MANIFEST}: its collisions were resolved the other way, leave collisions out",
            code="conflicting_options",
            field="collisions",
        )
    given, gone = _carried_over(earlier, root, items)
    is_new = given[:, 0] < 0
    wanted = given[:, : codebooks.levels].clone()
    read = source.read(data, items, seed, EarlierCodes(codebooks, wanted, is_new))
    facts = read.facts | {"items_kept": int((~is_new).sum()), "items_gone": gone}
    points = codebooks.normalize(torch.from_numpy(read.values))
    wanted[is_new] = codebooks.encode(points[is_new])
    result = Tokenization(wanted, wanted, codebooks.codebook_sizes, facts, codebooks, points, is_new)
    if has_extra:
        return _with_extra_code(result, given[:, -1], earlier.codebook_sizes[-1])
    unique = nearest_free(points, codebooks, wanted, kept=~is_new)
    return result._replace(codes=unique, facts=facts | {"collisions": "nearest"})


def _carried_over(earlier: Codes, root: Path, items: IdMap) -> tuple[Tensor, int]:
    """Earlier codes ``[V, T]``, -1 for new items, and the number of items that are no longer in the catalog."""
    index = items.to_internal(pq.read_table(root / CODES, columns=["item_id"]).column(0))
    given = np.full((len(items), earlier.codes.shape[1]), -1)
    given[index[index > 0] - 1] = earlier.codes[index > 0]
    return torch.from_numpy(given), int((index == 0).sum())


def _validate_no_options(quantizer: ResidualKMeans, reason: str) -> None:
    if quantizer != ResidualKMeans():
        raise RecpoError(
            f"{reason}: leave out levels, codebook_size, normalize, capacity_slack, iterations and sample",
            code="unused_option",
        )


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

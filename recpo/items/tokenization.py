"""Codes for all items of a catalog: made from vectors, made by earlier codebooks, or read; then made unique."""

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
    codes, residual, prefix = codes.clone(), points.clone(), torch.zeros_like(codes[:, 0])
    capacities = _capacities(codebooks.codebook_sizes, len(codes))
    for level, (centroids, capacity) in enumerate(zip(codebooks.centroids, capacities, strict=True)):
        before = codes[:, level]
        distance = _distances_to_own(residual, centroids, before)
        if kept is not None:
            distance.masked_fill_(kept, -1.0)
        code = settle(
            before,
            distance,
            prefix,
            num_codes=len(centroids),
            capacity=capacity,
            distances=partial(_distances_to_all, residual, centroids),
        )
        subtract(residual, centroids, code)
        moved = (code != before).nonzero().squeeze(1)
        codes[:, level] = code
        codes[moved, level + 1 :] = codebooks.encode(residual[moved], level + 1)
        prefix = tuple_ids(torch.stack([prefix, code], 1))
    return codes


def first_free(codes: Tensor, codebook_sizes: Sequence[int]) -> Tensor:
    """Moves items that collide, without vectors: the first one keeps its tuple, the others take the smallest free code.

    Raises:
        RecpoError: there are more items than tuples.
    """
    codes, prefix = codes.clone(), torch.zeros_like(codes[:, 0])
    equally_near = torch.zeros(len(codes))
    for level, (size, capacity) in enumerate(zip(codebook_sizes, _capacities(codebook_sizes, len(codes)), strict=True)):
        code = settle(
            codes[:, level],
            equally_near,
            prefix,
            num_codes=size,
            capacity=capacity,
            distances=partial(_codes_as_distances, size),
        )
        codes[:, level] = code
        prefix = tuple_ids(torch.stack([prefix, code], 1))
    return codes


def _capacities(codebook_sizes: Sequence[int], num_items: int) -> list[int]:
    """For every level, the number of tuples that begin with the same codes up to that level; at most ``num_items``.

    Raises:
        RecpoError: there are more items than tuples.
    """
    if num_items > math.prod(codebook_sizes):
        raise RecpoError(
            f"{num_items} items do not fit into {' x '.join(map(str, codebook_sizes))} code tuples: "
            "take more levels or larger codebooks",
            code="out_of_range",
            field="codebook_size",
        )
    return [min(math.prod(codebook_sizes[level + 1 :]), num_items) for level in range(len(codebook_sizes))]


def _distances_to_own(residual: Tensor, centroids: Tensor, code: Tensor) -> Tensor:
    """Squared distances ``[V]`` of all items to the centroids of their codes."""
    rest = residual.clone()
    subtract(rest, centroids, code)
    return rest.square_().sum(1)


def _distances_to_all(residual: Tensor, centroids: Tensor, items: Tensor) -> Tensor:
    """Squared distances ``[m, K]`` of ``items [m]`` to all centroids."""
    return squared_distances(residual[items], centroids)


def _codes_as_distances(num_codes: int, items: Tensor) -> Tensor:
    """``[m, K]``: code k has the distance k from every item, so that the smallest free code is the nearest."""
    return torch.arange(num_codes, dtype=torch.float32).expand(len(items), -1)


def tuple_ids(codes: Tensor) -> Tensor:
    """Ids ``[V]`` int64 of the tuples ``codes [V, T]``, from 0: equal for equal rows."""
    ids = torch.zeros_like(codes[:, 0])
    for code in codes.T:
        ids = (ids * (code.max() + 1) + code).unique(return_inverse=True)[1]
    return ids


def extra_code(codes: Tensor, earlier: Tensor | None = None) -> Tensor:
    """One more code for every item: 0 if no other item has its tuple, else 0 .. n - 1 in the order of the items.

    Args:
        codes: ``[V, T]``.
        earlier: ``[V]``, earlier extra codes, -1 = none. The codes of new items continue after the largest one.

    Returns:
        ``[V]``.
    """
    tuples = tuple_ids(codes)
    if earlier is None:
        return rank_within(tuples, torch.zeros_like(tuples))
    largest = torch.full_like(tuples, -1).scatter_reduce_(0, tuples, earlier, "amax")
    is_old = (earlier >= 0).long()
    order = rank_within(2 * tuples + is_old, torch.zeros_like(tuples))
    return torch.where(earlier >= 0, earlier, largest[tuples] + 1 + order)


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

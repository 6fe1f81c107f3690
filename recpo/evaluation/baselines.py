"""The models of the baselines: counts, and models that are fitted once per data and options.

Popularity and random lists do not learn from histories, and every policy must beat them. Fitted baselines are kept with
the evaluation (``BaselineCache``).
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from recpo.artifacts.checksums import sha256
from recpo.base.errors import RecpoError
from recpo.base.types import FeedbackBatch, Histories, Recommendations
from recpo.log.prepared import Prepared
from recpo.log.schema import MILLISECONDS_PER_DAY
from recpo.ops.ranking import is_member
from recpo.rewards.factors import Factors
from recpo.rewards.implicit import EASE, ImplicitALS, fit_ease, fit_implicit
from recpo.rewards.selection import fit_factors

_RATE_EVENTS: Final = 10.0


class Popularity:
    """The items with the highest counts, equal for all users except for excluded items. Ties are ordered by item id.

    Scores are ``log((count + 1) / (sum of counts + V))``.
    """

    def __init__(self, counts: Tensor) -> None:
        """``counts [V]`` of the items 1, 2, ..., V."""
        self._ranking = counts.argsort(descending=True, stable=True) + 1
        self._logp = torch.log((counts.double() + 1) / (counts.double().sum() + len(counts))).float()

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``."""
        depth = min(len(self._ranking), k + (0 if exclude is None else exclude.shape[1]))
        device = histories.item_ids.device
        candidates = self._ranking[:depth].to(device).expand(len(histories.item_ids), -1)
        item_ids = first_allowed(candidates, k, exclude)
        scores = self._logp.to(device)[(item_ids - 1).clamp_min(0)]
        return Recommendations(item_ids, scores.masked_fill(item_ids == 0, -torch.inf))

    def score(self, batch: FeedbackBatch) -> Tensor:
        """Scores ``[B, S]`` of the slates, equal for all users."""
        item_ids = batch.slates.item_ids
        return self._logp.to(item_ids.device)[(item_ids - 1).clamp_min(0)]


class UniformlyRandom:
    """A random list per user: every allowed item is equally likely at every place.

    One random order of the catalog is drawn, and every list starts at a different place in it, so the cost of a list of
    distinct items does not grow with the catalog. Scores are ``-log V``.
    """

    def __init__(self, num_items: int, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(num_items, generator=self._generator) + 1

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. Every call draws new lists."""
        num_items, batch = len(self._order), len(histories.item_ids)
        depth = min(num_items, k + (0 if exclude is None else exclude.shape[1]))
        begin = torch.randint(num_items, (batch, 1), generator=self._generator)
        candidates = self._order[(begin + torch.arange(depth)) % num_items].to(histories.item_ids.device)
        item_ids = first_allowed(candidates, k, exclude)
        score = -torch.log(torch.tensor(float(num_items), device=item_ids.device))
        return Recommendations(item_ids, torch.where(item_ids > 0, score, -torch.inf))


def first_allowed(candidates: Tensor, k: int, exclude: Tensor | None) -> Tensor:
    """The first ``k`` of ``candidates [B, C]`` that are not in ``exclude [B, M]``: ``[B, k]``, filled up with 0."""
    allowed = candidates.new_ones(candidates.shape, dtype=torch.bool)
    if exclude is not None:
        allowed = ~is_member(candidates, exclude)
    order = (~allowed).int().argsort(dim=1, stable=True)[:, :k]
    chosen = candidates.gather(1, order).masked_fill(~allowed.gather(1, order), 0)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[1]))


def by_place(items: Tensor) -> Recommendations:
    """Lists ``[B, k]``, padded with 0, whose scores are minus the places."""
    places = torch.arange(1, items.shape[1] + 1, device=items.device).float()
    return Recommendations(items, (-places).expand_as(items).masked_fill(items == 0, -torch.inf))


def item_scores(name: str, data: Prepared, half_life_days: float | None = None) -> np.ndarray:
    """Scores ``[V]`` of a baseline that ranks the same way for every user.

    ``item_rate`` is the share of positives among an item's events, shrunk toward that of all items as if ten more
    events had been seen: ``(positives + 10 rate) / (events + 10)``.

    Args:
        name: popularity, positives, item_rate or recency.
        data: prepared data.
        half_life_days: of recency; None = a tenth of the training period.
    """
    if name == "recency":
        return recent_counts(data, half_life_days)
    counts = data.item_counts("train_count")
    if name == "popularity":
        return counts
    positives = data.item_counts("train_positives")
    if name == "positives":
        return positives
    rate = positives.sum() / max(1, counts.sum())
    shrunk: np.ndarray = (positives + _RATE_EVENTS * rate) / (counts + _RATE_EVENTS)
    return shrunk


def recent_counts(data: Prepared, half_life_days: float | None) -> np.ndarray:
    """Training events of the items 1..V, weighted by recency: ``c_i = sum_e 2 ** ((t_e - end) / half_life)``, ``[V]``.

    An event at the end of the training period has weight 1, and one that is a half-life older one half. Two passes with
    one piece in memory at a time; the first one finds the start and the end of the training period.
    """
    first, last = np.inf, -np.inf
    for columns in data.train_columns(["timestamp"]):
        time = columns["timestamp"]
        if len(time):
            first, last = min(first, float(time.min())), max(last, float(time.max()))
    half_life = max(1.0, (last - first) / 10) if half_life_days is None else half_life_days * MILLISECONDS_PER_DAY
    counts = np.zeros(data.num_items)
    for item, time in (columns.values() for columns in data.train_columns(["item_index", "timestamp"])):
        weight = np.exp2((time - int(last)) / half_life)
        counts += np.bincount(item, weight, minlength=data.num_items + 1)[1:]
    return counts


#: Directory of fitted baselines within that of an evaluation.
BASELINES_DIRECTORY: Final = "baselines"
#: The baselines whose models are fitted, and kept.
FITTED: Final = ("factorization", "implicit_als", "allrank", "ease")
_VERSION: Final = 2  # version of the fitting methods; a new version fits again


@dataclass(frozen=True)
class BaselineCache:
    """The directories of fitted baselines.

    Attributes:
        reads: directory to read existing ones from; None = there is none.
        writes: directory to keep the used ones in; None = they are not kept.
    """

    reads: Path | None = None
    writes: Path | None = None


def fitted_model(
    name: str, data: Prepared, options: Any, cache: BaselineCache, progress: bool = False
) -> Factors | ImplicitALS | EASE:
    """The model of a baseline of ``FITTED``: an existing one of the cache, or a new one.

    Args:
        name: name of the baseline.
        data: prepared data; its manifest, which has the checksums of all files, identifies it.
        options: its options, a dataclass; a model with any other value is not reused.
        cache: where it is kept.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: the existing model is damaged.
    """
    recipes: dict[str, tuple[Callable[..., Any], Callable[[Path], Any], str]] = {
        "factorization": (fit_factors, Factors.open, ""),  # a directory
        "implicit_als": (fit_implicit, ImplicitALS.open, ".safetensors"),
        "allrank": (fit_implicit, ImplicitALS.open, ".safetensors"),
        "ease": (fit_ease, EASE.open, ".safetensors"),
    }
    fit, opened, suffix = recipes[name]
    content = {"version": _VERSION, "baseline": name, "options": asdict(options), "prepared": data.manifest}
    file = f"{name}-{sha256(json.dumps(content, sort_keys=True, default=str).encode())[:16]}{suffix}"
    kept = None if cache.reads is None else cache.reads / file
    model: Factors | ImplicitALS | EASE
    if kept is None or not kept.exists():
        model = fit(data, options, progress=progress)
    else:
        try:
            model = opened(kept)
        except RecpoError as error:
            message = f"the baseline that was kept in {kept} cannot be read: remove it to fit it again ({error})"
            raise RecpoError(message, code="damaged", field=file) from error
    if cache.writes is not None and not (cache.writes / file).exists():
        cache.writes.mkdir(parents=True, exist_ok=True)
        model.save(cache.writes / file)
    return model

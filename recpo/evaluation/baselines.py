"""Random lists, which every policy must beat, and baselines that are fitted once per data and options.

Fitted baselines are kept with the evaluation (``BaselineCache``).
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from recpo.artifacts.checksums import sha256
from recpo.base.errors import RecpoError
from recpo.base.types import Histories, Recommendations
from recpo.log.prepared import Prepared
from recpo.ops.ranking import first_allowed
from recpo.rewards.factors import Factors
from recpo.rewards.implicit import FittedPolicy, fit_ease, fit_implicit, open_fitted, save_fitted
from recpo.rewards.selection import fit_factors


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


def by_place(items: Tensor) -> Recommendations:
    """Lists ``[B, k]``, padded with 0, whose scores are minus the places."""
    places = torch.arange(1, items.shape[1] + 1, device=items.device).float()
    return Recommendations(items, (-places).expand_as(items).masked_fill(items == 0, -torch.inf))


#: Directory of fitted baselines within that of an evaluation.
BASELINES_DIRECTORY: Final = "baselines"
#: The baselines whose models are fitted, and kept.
FITTED: Final = ("factorization", "implicit_als", "allrank", "ease")
_VERSION: Final = 3  # version of the fitting methods and files; a new version fits again


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
) -> Factors | FittedPolicy:
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
    in_one_file = save_fitted, open_fitted, ".safetensors"
    recipes: dict[str, tuple[Callable[..., Any], Callable[[Any, Path], None], Callable[[Path], Any], str]] = {
        "factorization": (fit_factors, Factors.save, Factors.open, ""),  # a directory
        "implicit_als": (fit_implicit, *in_one_file),
        "allrank": (fit_implicit, *in_one_file),
        "ease": (fit_ease, *in_one_file),
    }
    fit, save, opened, suffix = recipes[name]
    content = {"version": _VERSION, "baseline": name, "options": asdict(options), "prepared": data.manifest}
    file = f"{name}-{sha256(json.dumps(content, sort_keys=True, default=str).encode())[:16]}{suffix}"
    kept = None if cache.reads is None else cache.reads / file
    model: Factors | FittedPolicy
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
        save(model, cache.writes / file)
    return model

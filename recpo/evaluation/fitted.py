"""Fitted baselines: fitted once per data and options, and kept with the evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from recpo.artifacts import sha256
from recpo.base.errors import RecpoError
from recpo.base.types import FeedbackBatch, Histories, Recommendations
from recpo.evaluation.measures import Recommender
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors

#: Directory of fitted baselines within that of an evaluation.
BASELINES_DIRECTORY: Final = "baselines"
_VERSION: Final = 1  # version of the fitting methods; a new version fits again


class Model(Protocol):
    """A fitted model: it recommends for any history and reads its last ``max_history`` events."""

    @property
    def max_history(self) -> int:
        """Number of events that it reads."""

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``."""

    def save(self, path: Path) -> None:
        """Writes the model."""


M = TypeVar("M", bound=Model)


class Recipe(NamedTuple, Generic[M]):
    """How a model is fitted and opened.

    Attributes:
        fit: ``(data, options, progress=...)`` fits it on prepared data.
        open: reads the output of its ``save``.
        suffix: suffix of the file; empty = a directory.
    """

    fit: Callable[..., M]
    open: Callable[[Path], M]
    suffix: str = ".safetensors"


@dataclass(frozen=True)
class BaselineCache:
    """The directories of fitted baselines.

    Attributes:
        reads: directory to read existing ones from; None = there is none.
        writes: directory to keep the used ones in; None = they are not kept.
    """

    reads: Path | None = None
    writes: Path | None = None

    def model(self, name: str, data: Prepared, options: Any, recipe: Recipe[M], progress: bool = False) -> M:
        """The existing model of the same data and options, or a newly fitted one.

        Args:
            name: name of the baseline.
            data: prepared data; its manifest, which has the checksums of all files, identifies it.
            options: a dataclass; a model with any other value is not reused.
            recipe: how it is fitted and opened.
            progress: show a progress bar on a terminal.

        Raises:
            RecpoError: the existing model is damaged.
        """
        file = f"{name}-{_key(name, data, options)}{recipe.suffix}"
        kept = None if self.reads is None else self.reads / file
        model = (
            recipe.fit(data, options, progress=progress) if kept is None or not kept.exists() else _opened(kept, recipe)
        )
        if self.writes is not None and not (self.writes / file).exists():
            self.writes.mkdir(parents=True, exist_ok=True)
            model.save(self.writes / file)
        return model


def _key(name: str, data: Prepared, options: Any) -> str:
    content = {"version": _VERSION, "baseline": name, "options": asdict(options), "prepared": data.manifest}
    return sha256(json.dumps(content, sort_keys=True, default=str).encode())[:16]


def _opened(path: Path, recipe: Recipe[M]) -> M:
    try:
        return recipe.open(path)
    except RecpoError as error:
        raise RecpoError(
            f"the baseline that was kept in {path} cannot be read: remove it to fit it again ({error})"
        ) from error


def recommender_of(model: Model, name: str, score: Callable[[FeedbackBatch], Tensor] | None = None) -> Recommender:
    """Runs a model on the CPU; histories may be on any device.

    Args:
        model: the model.
        name: name of the contender.
        score: scores held-out slates on the CPU, see ``Recommender.score``.
    """

    def recommend(histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        device = histories.item_ids.device
        found = model.recommend(histories.map(Tensor.cpu), k, None if exclude is None else exclude.cpu())
        return Recommendations(*(part.to(device) for part in found))

    def scored(batch: FeedbackBatch) -> Tensor:
        assert score is not None
        device = batch.slates.item_ids.device
        slates = batch.slates._replace(item_ids=batch.slates.item_ids.cpu())
        return score(batch._replace(histories=batch.histories.map(Tensor.cpu), slates=slates)).to(device)

    return Recommender(recommend, name=name, score=None if score is None else scored)


def of_items(scores: Tensor, batch: FeedbackBatch) -> Tensor:
    """Scores ``[B, S]`` of the slates' items, from ``scores [B, V]`` of all items."""
    return scores.gather(1, (batch.slates.item_ids - 1).clamp_min(0))


def factors_recommender(factors: Factors, name: str) -> Recommender:
    """The items with the highest predicted grade, or lower bound of it, for users folded in from their history."""

    def score(batch: FeedbackBatch) -> Tensor:
        return factors.bounded_grades(batch.histories, batch.slates.item_ids)

    return recommender_of(factors, name, score)

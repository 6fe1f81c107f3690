"""Whom ``recpo evaluate`` compares: runs, bundles and baselines, each as a recommender of internal ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.cli.training_curves import Curves, training_curves
from recpo.contracts import Policy
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.evaluation.baselines import Popularity, UniformlyRandom, decayed_counts
from recpo.evaluation.cooccurrence import Cooccurrence, CooccurrenceOptions, EventChunk, neighbors_of
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.result import LOGGING_POLICY
from recpo.serving.bundle import Bundle
from recpo.serving.histories import EncodedHistories
from recpo.serving.manifest import ITEMS
from recpo.training.run import RESOLVED, load_policy, refuse_other_items
from recpo.types import Histories, Recommendations

Baseline = Literal["popularity", "positives", "recency", "cooccurrence", "random"]

_MILLISECONDS_PER_DAY = 86_400_000


class Loaded(NamedTuple):
    """A candidate in memory.

    Attributes:
        recommender: what is evaluated.
        max_history: how many events of a history it reads.
        policy: whose items can be drawn; None = there are only lists.
    """

    recommender: Recommender
    max_history: int
    policy: Policy | None = None


@dataclass(frozen=True)
class Candidate:
    """Somebody to evaluate; loaded when asked for, so that one policy at a time is in memory.

    Attributes:
        name: unique among the candidates.
        kind: trained run, bundle or baseline.
        load: brings it into memory.
        facts: where it comes from, for the document.
        curves: of its training.
    """

    name: str
    kind: Literal["run", "bundle", "baseline"]
    load: Callable[[], Loaded]
    facts: dict[str, Any] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)


@dataclass(frozen=True)
class BaselineOptions:
    """Options of the baselines that have any.

    Attributes:
        recency_half_life: days after which a training event counts half; null = a tenth of the training period.
        cooccurrence: of the item co-occurrence.
    """

    recency_half_life: float | None = None
    cooccurrence: CooccurrenceOptions = field(default_factory=CooccurrenceOptions)

    def __post_init__(self) -> None:
        if self.recency_half_life is not None and not self.recency_half_life > 0:
            raise RecpoError(f"recency_half_life is {self.recency_half_life}; it is a positive number of days")


def runs(paths: Sequence[Path], data: Prepared, checkpoint: str, device: torch.device) -> list[Candidate]:
    """Trained runs; all are checked before the first one is loaded.

    Raises:
        RecpoError: no run, an unfinished one, or one on other items.
    """
    found = []
    for path, name in zip(paths, _names("run", paths), strict=True):
        refuse_other_items(path, data.catalog_checksum, data.root)
        facts = {
            "kind": "run",
            "path": str(path),
            "checkpoint": checkpoint,
            "configuration": (path / RESOLVED).read_text(encoding="utf-8"),
        }
        load = partial(_load_run, path, checkpoint, device)
        found.append(Candidate(name, "run", load, facts, training_curves(path)))
    return found


def bundles(paths: Sequence[Path], data: Prepared, longest: int) -> list[Candidate]:
    """Exported bundles, run by ONNX Runtime on the CPU: they rank, and give no log-probabilities of given items.

    Args:
        paths: their directories.
        data: whose items they must serve.
        longest: the longest list that they are asked for.

    Raises:
        RecpoError: no bundle, a damaged one, one of another catalog, or one with shorter lists.
    """
    found = []
    ids = np.arange(1, data.num_items + 1)
    expected = data.item_ids().to_external(ids)
    for path, name in zip(paths, _names("bundle", paths), strict=True):
        bundle = Bundle.load(path)
        if len(bundle.items) != data.num_items or not bundle.items.to_external(ids).equals(expected):
            raise RecpoError(f"{path / ITEMS} holds other items than {data.root}: name the bundle's own prepared data")
        if bundle.k < min(longest, data.num_items):
            raise RecpoError(
                f"{path} serves lists of up to {bundle.k}, and ks asks for {longest}: name smaller --ks, or export the "
                f"bundle again with --k {longest}"
            )
        facts = {"kind": "bundle", "path": str(path), "k": bundle.k, "origin": str(dict(bundle.manifest.origin))}
        found.append(Candidate(name, "bundle", partial(_load_bundle, bundle), facts))
    return found


def baseline(name: Baseline, data: Prepared, options: BaselineOptions) -> Candidate:
    """A baseline, counted from the training shards when it is loaded."""
    return Candidate(name, "baseline", partial(_load_baseline, name, data, options))


def check_names(candidates: Sequence[Candidate]) -> None:
    """Raises ``RecpoError`` where two candidates have the same name, or one that of the logging policy."""
    names = [LOGGING_POLICY, *(candidate.name for candidate in candidates)]
    if again := sorted({name for name in names if names.count(name) > 1}):
        raise RecpoError(f"two contenders are called {again[0]}: rename a directory, or leave one out")


def _names(option: str, paths: Sequence[Path]) -> list[str]:
    """The directories' own names where they differ, whole paths otherwise."""
    names = [path.resolve().name for path in paths]
    names = names if len(set(names)) == len(names) else [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise RecpoError(f"{option}: the same directory is named twice: {', '.join(names)}")
    return names


def _load_run(path: Path, checkpoint: str, device: torch.device) -> Loaded:
    policy = load_policy(path, checkpoint).to(device)
    return Loaded(
        Recommender(policy.recommend, policy.log_prob if policy.has_exact_log_prob else None),
        policy.max_history,
        policy,
    )


def _load_bundle(bundle: Bundle) -> Loaded:
    length = bundle.manifest.max_history

    def recommend(histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        if exclude is None:
            raise RecpoError("a bundle never shows what is in the history: evaluate its run with --exclude_seen false")
        ids, feedback, times = (
            torch.nn.functional.pad(values, (0, length - values.shape[1])).cpu().numpy()
            for values in (histories.item_ids, *(_or_zeros(v, histories) for v in histories[2:]))
        )
        excluded = torch.nn.functional.pad(exclude, (0, int(exclude.shape[1] == 0))).cpu().numpy()
        top_items, scores = bundle.runtime.recommend(EncodedHistories(ids, feedback, excluded, times), k)
        device = histories.item_ids.device
        return Recommendations(
            torch.from_numpy(top_items.copy()).to(device), torch.from_numpy(scores.copy()).to(device)
        )

    return Loaded(Recommender(recommend), length)


def _or_zeros(values: Tensor | None, histories: Histories) -> Tensor:
    return torch.zeros_like(histories.item_ids) if values is None else values


def _load_baseline(name: Baseline, data: Prepared, options: BaselineOptions) -> Loaded:
    if name == "random":
        return Loaded(Recommender(UniformlyRandom(data.num_items).recommend), 1)
    if name == "cooccurrence":
        neighbors = neighbors_of(partial(_training_events, data), data.num_items, options.cooccurrence)
        recent = options.cooccurrence.recent_events
        counts = torch.from_numpy(data.item_counts())
        return Loaded(Recommender(Cooccurrence(neighbors, counts, recent).recommend), recent)
    if name == "recency":
        counts = torch.from_numpy(_recent_counts(data, options.recency_half_life))
    else:
        counts = torch.from_numpy(data.item_counts("train_count" if name == "popularity" else "train_positives"))
    return Loaded(Recommender(Popularity(counts).recommend), 1)


def _training_events(data: Prepared) -> Iterator[EventChunk]:
    for shard in range(data.num_shards("train")):
        yield EventChunk(*data.columns("train", shard, ["user_index", "item_index"]).values())


def _recent_counts(data: Prepared, half_life_days: float | None) -> np.ndarray:
    shards = range(data.num_shards("train"))
    times = [data.columns("train", shard, ["timestamp"])["timestamp"] for shard in shards]
    first, last = min(time.min() for time in times), max(time.max() for time in times)
    half_life = max(1.0, (last - first) / 10) if half_life_days is None else half_life_days * _MILLISECONDS_PER_DAY
    counts = np.zeros(data.num_items)
    for shard in shards:
        item, time = data.columns("train", shard, ["item_index", "timestamp"]).values()
        counts += decayed_counts(item, time, num_items=data.num_items, end=int(last), half_life=half_life)
    return counts

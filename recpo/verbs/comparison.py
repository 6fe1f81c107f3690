"""Two bundles on the same logged requests: their lists in one numbering, the document, and the limits for a swap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from recpo import __version__
from recpo.artifacts import read_json, sha256, verify_sealed
from recpo.base.errors import RecpoError
from recpo.base.types import Recommendations
from recpo.batches.held_out import HeldOutHistories
from recpo.evaluation.candidates import begin_of, has_positions
from recpo.evaluation.contenders import Contender, Loaded
from recpo.evaluation.held_out_pass import HeldOut
from recpo.evaluation.measures import Recommender
from recpo.evaluation.reading import Document
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ITEM_ID, USER_ID, HistoryReader, ServingCounts
from recpo.serving.manifest import MANIFEST

COMPARE: Final = "compare.json"
SCHEMA_VERSION: Final = 1
OLD, NEW = "old", "new"

_GATED_ESTIMATOR = "SNIPS"
_RANKING = ("NDCG", "Recall", "HitRate", "MRR", "disliked")


@dataclass(frozen=True)
class Comparison:
    """The comparison of two bundles on the same logged requests.

    Attributes:
        document: every number, as in ``compare.json``; see ``compare``.
        path: the directory; None = the comparison is in memory only.
    """

    document: Document
    path: Path | None = None

    @classmethod
    def open(cls, path: Path | str) -> Comparison:
        """Reads a directory that ``compare`` wrote.

        Raises:
            RecpoError: there is no comparison, or it is damaged or of another format version.
        """
        root = Path(path)
        if not (root / COMPARE).is_file():
            raise RecpoError(f"{root} is not a comparison: {COMPARE} is missing; make one with `recpo compare`")
        document = read_json(root / COMPARE, "compare again")
        if document.get("schema_version") != SCHEMA_VERSION:
            raise RecpoError(
                f"{root / COMPARE} has the format version {document.get('schema_version')}, this recpo reads "
                f"{SCHEMA_VERSION}: compare again"
            )
        verify_sealed(root, [COMPARE], "compare again")
        return cls(document, root)

    @property
    def failures(self) -> list[str]:
        """Why the new bundle should not replace the old one, one sentence per violated limit; empty = it passes."""
        return list(self.document["gate"]["failures"])

    @property
    def warnings(self) -> list[str]:
        """Warnings to read before the numbers."""
        return list(self.document["warnings"])


def validate_bundle(name: str, bundle: Bundle, data: Prepared, k: int) -> None:
    """Raises ``RecpoError`` if a bundle cannot list k items, or reads feedback levels from other columns."""
    longest = min(bundle.k, data.num_items)
    if not 1 <= k <= longest:
        raise RecpoError(
            f"compare: k is {k}, expected 1 to {longest}, as the {name} bundle {bundle.root} serves lists of up to "
            f"{bundle.k} and the data have {data.num_items} items: choose another k, or export with a larger one"
        )
    if bundle.feedback.levels_from != data.feedback.levels_from:
        raise RecpoError(
            f"compare: the {name} bundle {bundle.root} reads feedback levels from {bundle.feedback.levels_from}, and "
            f"{data.root} has them from {data.feedback.levels_from}: prepare the log as that of the bundle"
        )


@dataclass(frozen=True)
class SharedItems:
    """One numbering of all items: those of the data are 1..V, as in the shards; others of the bundles follow.

    Attributes:
        numbers: for each bundle, ``[V_b + 1]``: the shared number of each of its items; 0 for 0.
        counts: how many items are in both bundles, in one of them, and not in the data.
    """

    numbers: Mapping[str, np.ndarray]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, known: IdMap, bundles: Mapping[str, Bundle]) -> SharedItems:
        """Numbers the items of the data, then those that only bundles know."""
        external = {name: one.items.to_external(np.arange(1, len(one.items) + 1)) for name, one in bundles.items()}
        places = {name: known.to_internal(ids) for name, ids in external.items()}
        strange = [ids.filter(pa.array(places[name] == 0)) for name, ids in external.items()]
        # as Python values, because integers of different widths, or short and long strings, are the same ids
        further = dict.fromkeys(value for ids in strange for value in ids.to_pylist())
        further_numbers = {value: number for number, value in enumerate(further, len(known) + 1)}
        numbers = {}
        for (name, place), ids in zip(places.items(), strange, strict=True):
            place[place == 0] = [further_numbers[value] for value in ids.to_pylist()]
            numbers[name] = np.concatenate([[0], place])
        old, new = (set(one[1:].tolist()) for one in numbers.values())
        counts = {"shared": len(old & new), "only_old": len(old - new), "only_new": len(new - old)}
        counts |= {f"{name}_not_in_data": len(ids) for name, ids in zip(bundles, strange, strict=True)}
        return cls(numbers, counts)


@dataclass
class Answers:
    """The lists of one bundle in the pass over held-out users, in the shared numbering.

    Attributes:
        bundle: the bundle.
        reader: reads raw events for it.
        numbers: see ``SharedItems``.
        histories: raw events of held-out users.
        known: items of the data.
        at: when the bundle's items must be available: the start of the period, or the last of the
            users' first held-out events; None for a log of positions.
        lists: ``[B, k]`` for every batch so far, in the order of users.
        served: counts of the events read.
    """

    bundle: Bundle
    reader: HistoryReader
    numbers: np.ndarray
    histories: HeldOutHistories
    known: IdMap
    at: int | None
    lists: list[Tensor] = field(default_factory=list)
    served: ServingCounts = field(default_factory=ServingCounts)

    @classmethod
    def of(cls, bundle: Bundle, numbers: np.ndarray, data: Prepared, split: HeldOut) -> Answers:
        """Before the first batch."""
        histories = HeldOutHistories(data, split, bundle.manifest.reads.batches)
        at = None if has_positions(data) else int(np.max(begin_of(data, split)))
        return cls(bundle, bundle.reader, numbers, histories, data.item_ids(), at)

    def recommend(self, users: Tensor, k: int, exclude: Tensor | None) -> Recommendations:
        """The lists as the evaluation reads them. An item that is not in the data leaves an empty place."""
        assert exclude is not None  # the evaluation uses exclude_past
        asked = users.numpy()
        row, column = np.nonzero(exclude.numpy())
        past = pa.table({USER_ID: asked[row], ITEM_ID: self.known.to_external(exclude.numpy()[row, column])})
        events, now = self.histories.events(asked), self.histories.requests(asked)
        people = self.histories.user_features(asked)
        self.reader.validate_columns(events, people, now)
        read = self.reader.read(events, exclude=past, users=asked, user_features=people, context=now, at=self.at)
        ((_, inputs),) = read.batches(len(asked))
        top_items, scores = self.bundle.runtime.recommend(inputs, k)
        numbers = torch.from_numpy(self.numbers[top_items])
        self.lists.append(numbers.int())
        self.served += replace(read.counts, short_lists=int((numbers == 0).any(1).sum()))
        known = numbers <= len(self.known)
        found = torch.from_numpy(scores.copy()).masked_fill(~known | (numbers == 0), -torch.inf)
        return Recommendations(numbers * known, found)

    def counts(self) -> dict[str, int]:
        """Counts of served and skipped events so far."""
        # past items outside the bundle's catalog cannot be listed anyway
        of_requests = {name: value for name, value in self.served.to_dict().items() if not name.startswith("unknown_")}
        strange = sum(int((one > len(self.known)).sum()) for one in self.lists)
        return of_requests | {
            "unknown_items": self.served.unknown_items,
            "places_of_items_not_in_data": strange,
        }


def contender_of(name: str, bundle: Bundle, answers: Answers) -> Contender:
    """A bundle as a contender that reads raw events, as a server does."""
    recommender = Recommender(
        recommend_to_users=answers.recommend,
        name=f"the {name} bundle",
        scores_are_logp=bundle.scores_are_log_probabilities,
    )
    loaded = partial(Loaded, recommender, bundle.manifest.max_history)
    return Contender(name, "bundle", loaded, {"kind": "bundle", "path": str(bundle.root)})


def bundle_facts(bundle: Bundle) -> Document:
    """What identifies a bundle, for the document."""
    return {
        "path": str(bundle.root),
        "checksum": sha256(bundle.root / MANIFEST),
        "origin": dict(bundle.manifest.origin),
        "items": len(bundle.items),
        "k": bundle.k,
    }


def comparison_document(evaluated: Document, k: int, agreed: Mapping[str, Document]) -> Document:
    """The parts of the document that come from the evaluation."""
    by_name = {one["name"]: one for one in evaluated["contenders"]}
    sides = {OLD: by_name[OLD], NEW: by_name[NEW]}
    (pair,) = (one for one in evaluated["differences"] if (one["contender"], one["against"]) == (NEW, OLD))
    ranking = {
        metric: {
            **{name: side["metrics"][metric] for name, side in sides.items()},
            "difference": {key: pair["metrics"][metric][key] for key in ("mean", "half_width", "n")},
        }
        for metric in (f"{name}@{k}" for name in _RANKING)
    }
    totals = (f"coverage@{k}", f"gini@{k}")
    setting = {name: evaluated["setting"][name] for name in ("split", "positive_threshold", "num_items")}
    setting |= {"prepared": evaluated["provenance"]["data"]["prepared"], "k": k}
    return {
        "schema_version": SCHEMA_VERSION,
        "recpo_version": __version__,
        "setting": setting | {"requests": sides[OLD]["counts"]["users"]},
        "agreement": dict(agreed),
        "lists": {name: {total: side["totals"][total] for total in totals} for name, side in sides.items()},
        "ranking": ranking,
        "value": _value(sides, pair["off_policy"], f"top_{k}"),
        "warnings": list(evaluated["warnings"]),
    }


def _value(sides: Mapping[str, Document], differences: Sequence[Document], target: str) -> Document | None:
    """Estimates of the lists' value with bootstrap intervals, by estimator; None if there are none."""
    entries = {
        name: {one["estimator"]: _ends(one) for one in side["off_policy"] if one["target"] == target}
        for name, side in sides.items()
    }
    paired = {one["estimator"]: _ends(one) for one in differences if one["target"] == target}
    nothing = {"value": None, "low": None, "high": None}
    return {
        estimator: {
            OLD: entries[OLD][estimator],
            NEW: entries[NEW][estimator],
            "difference": paired.get(estimator, nothing),
        }
        for estimator in entries[OLD]
    } or None


def _ends(entry: Document) -> Document:
    return {"value": entry["value"], **entry["intervals"]["bootstrap"]}


def unread_warnings(answers: Mapping[str, Answers]) -> list[str]:
    """Warnings about events and items that one of the bundles could not read or list."""
    found = []
    for name, one in answers.items():
        counts = one.counts()
        if skipped := counts["unknown_items"]:
            found.append(f"{name}: skipped {skipped:,} of {counts['events']:,} events, whose items it does not know")
        if strange := counts["places_of_items_not_in_data"]:
            found.append(
                f"{name}: {strange:,} places of its lists hold items that the prepared data do not know: they are "
                "compared in the agreement, and earn nothing in ranking and value"
            )
    return found


def gate(document: Document, k: int, max_loss: float | None, min_overlap: float | None) -> Document:
    """The limits, the measured numbers, and one sentence per violated limit. An unknown number violates its limit."""
    if document["value"] is None:
        measure, found = f"NDCG@{k}", document["ranking"][f"NDCG@{k}"]["difference"]
        mean, half_width = found["mean"], found["half_width"]
        low, high = (None, None) if half_width is None else (mean - half_width, mean + half_width)
    else:
        measure, found = f"{_GATED_ESTIMATOR} of top_{k}", document["value"][_GATED_ESTIMATOR]["difference"]
        low, high = found["low"], found["high"]
    overlap = document["agreement"][f"overlap@{k}"]["mean"]
    failures = []
    if max_loss is not None and low is None:
        failures.append(f"{measure} of new - old has no interval, so a loss above {max_loss:g} cannot be ruled out")
    elif max_loss is not None and low is not None and low < -max_loss:
        failures.append(
            f"{measure}: new - old lies between {low:+.4g} and {high:+.4g}, a loss of more than {max_loss:g} cannot be "
            "ruled out"
        )
    if min_overlap is not None and not overlap >= min_overlap:
        failures.append(
            f"the lists share {overlap:.3f} of their items (overlap@{k}), expected at least {min_overlap:g}"
        )
    limits = {"max_loss": max_loss, "min_overlap": min_overlap}
    return limits | {"measure": measure, "lower_end": low, "overlap": overlap, "failures": failures}

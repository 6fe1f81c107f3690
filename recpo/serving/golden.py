"""Golden requests: requests with known answers that are part of a bundle.

``recpo export`` sends them to the finished program and stores the answers. A server sends them again before it accepts
requests. A checksum shows that the files are the exported ones. Golden requests show that this machine, with its
versions of ONNX Runtime and recpo, computes the same lists from raw events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from recpo.artifacts import parse_json
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import Category, Number, Vector
from recpo.base.feedback import FeedbackDefinition

if TYPE_CHECKING:
    from recpo.serving.bundle import Bundle

GOLDEN: Final = "golden.json"
TOLERANCE: Final = 1e-4
"""Allowed difference of natural-log probabilities. Items this close may swap places."""

_REQUESTS, _LISTED = 8, 10
_LEFT_OUT: Final = 0.2  # share of the features that are missing in a request
_FIRST_TIME_MS, _LONGEST_GAP_MS = 1_600_000_000_000, 86_400_000
_REMEDY: Final = "export the bundle again with this version of recpo and ONNX Runtime"


def write_golden(bundle: Bundle, path: Path, *, seed: int = 0) -> None:
    """Sends requests to ``bundle`` and writes them with its answers.

    The first request has no history, and the last history is longer than the policy reads. Some events lack their
    outcome, and every request has items to exclude.
    """
    generator = np.random.default_rng(seed)
    lengths = np.linspace(0, bundle.manifest.max_history + 2, _REQUESTS).round().astype(int)
    requests = [_request(bundle, int(length), generator) for length in lengths]
    k = min(_LISTED, bundle.k)
    content = [{**request, "k": k, "answer": _answer(bundle, request, k)} for request in requests]
    path.write_text(json.dumps({"tolerance": TOLERANCE, "requests": content}, allow_nan=False) + "\n", encoding="utf-8")


def check_golden(bundle: Bundle) -> int:
    """Sends the golden requests of a bundle again.

    Returns:
        The number of requests; 0 for a bundle that was exported without them.

    Raises:
        RecpoError: an answer differs from the answer at export.
    """
    path = bundle.root / GOLDEN
    if GOLDEN not in bundle.manifest.files:
        return 0
    content = parse_json(path.read_bytes(), path, _REMEDY)
    try:
        requests = content["requests"]
        for number, request in enumerate(requests):
            expected = [(item, float(score)) for item, score in request["answer"]]
            found = _answer(bundle, request, request["k"])
            _compare(expected, found, f"{path}: request {number}")
    except (KeyError, TypeError, ValueError) as error:
        raise RecpoError(f"{path} is damaged ({error!r}): {_REMEDY}", code="damaged", field=path.name) from error
    return len(requests)


def _request(bundle: Bundle, length: int, generator: np.random.Generator) -> dict[str, Any]:
    items: list[Any] = bundle.items.listed(generator.integers(1, len(bundle.items) + 1, length + 2))
    times = _FIRST_TIME_MS + generator.integers(1, _LONGEST_GAP_MS, length).cumsum()
    history = [{"item_id": item, "timestamp": int(time)} for item, time in zip(items[2:], times, strict=True)]
    known = bundle.features
    for event in history:
        event |= _outcome(bundle.feedback, generator)
        event |= {name: bool(generator.random() < 0.3) for name in known.behaviors}
        event |= {} if known.context is None else _features(known.context, generator, by_name=True)
    request: dict[str, Any] = {"history": history, "exclude": items[:2]}
    if known.user is not None:
        request["user"] = _features(known.user, generator)
    if known.context is not None:
        request["context"] = _features(known.context, generator, by_name=True)
    return request


def _answer(bundle: Bundle, request: Mapping[str, Any], k: int) -> list[tuple[Any, float]]:
    """The answer at any time: items that are not available yet, or no longer, are ranked as well."""
    parts = request["history"], request["exclude"], request.get("user"), request.get("context")
    return bundle.ranked(bundle.reader.read_request(*parts), k)


def _features(fitted: FittedFeatures, generator: np.random.Generator, by_name: bool = False) -> dict[str, Any]:
    """Raw values of some features: values of the vocabulary and unknown values; other features are left out."""
    found: dict[str, Any] = {}
    for feature in fitted.features:
        if generator.random() < _LEFT_OUT:
            continue
        name = feature.name if by_name else feature.source
        if isinstance(feature, Number):
            found[name] = round(float(abs(generator.normal(feature.mean or 0.0, feature.std or 1.0))), 3)
        elif isinstance(feature, Vector):
            found[name] = generator.normal(size=feature.width or 0).round(3).tolist()
        else:
            drawn = _of_vocabulary(fitted.vocabularies[feature.name].values, generator)
            if isinstance(feature, Category):
                found[name] = drawn
            else:
                found[name] = [drawn] if getattr(feature, "separator", None) is None else str(drawn)
    return found


def _of_vocabulary(values: pa.Array, generator: np.random.Generator) -> Any:
    place = int(generator.integers(len(values) + 1))
    strange = "?" if pa.types.is_string(values.type) else -(2**31)
    return strange if place == len(values) else values[place].as_py()


def _outcome(feedback: FeedbackDefinition, generator: np.random.Generator) -> dict[str, Any]:
    """The outcome of an event. All feedback levels occur, including unknown."""
    if generator.random() < 0.1:
        return {}
    disliked = {"dislike": bool(generator.random() < 0.1)}
    if not feedback.cutoffs:
        return {"label": round(float(generator.random()), 3), **disliked}
    bucket = list(feedback.cutoffs)[int(generator.integers(len(feedback.cutoffs)))]
    duration = float(feedback.duration_base) ** (bucket + 0.5)
    longest = 2 * max(feedback.cutoffs[bucket][-1], 0.5)
    return {
        "watch_time": round(float(generator.random()) * longest, 3),
        "duration": round(duration, 3),
        **disliked,
    }


def _compare(expected: Sequence[tuple[Any, float]], found: Sequence[tuple[Any, float]], where: str) -> None:
    gaps = [abs(mine - theirs) for (_, mine), (_, theirs) in zip(found, expected, strict=False)]
    if len(found) != len(expected) or any(not gap <= TOLERANCE for gap in gaps):
        raise RecpoError(
            f"{where}: {len(found)} items whose scores differ by up to {max(gaps, default=0.0):.2g} from those of the "
            f"export ({len(expected)} items, {TOLERANCE:g} is allowed): {_REMEDY}",
            code="mismatch",
            field="scores",
        )
    score_of = dict(expected)
    last = expected[-1][1] if expected else 0.0  # an item outside the list scores at most as much as its last place
    moved = [
        item
        for (item, score), (other, _) in zip(found, expected, strict=True)
        if item != other and abs(score_of.get(item, last) - score) > TOLERANCE
    ]
    if moved:
        raise RecpoError(
            f"{where}: other items than at the export, {moved[0]!r} among them: {_REMEDY}",
            code="mismatch",
            field="items",
        )

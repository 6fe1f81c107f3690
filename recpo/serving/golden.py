"""Golden requests: questions with known answers that travel with a bundle.

``recpo export`` asks the finished program and keeps the answers; whoever serves the bundle asks again before it takes
requests. A checksum shows that the files are those of the export; golden requests show that this machine, with its
versions of ONNX Runtime and recpo, gives the same lists from raw events.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from recpo.artifacts import parse_json
from recpo.errors import RecpoError
from recpo.feedback import FeedbackDefinition

if TYPE_CHECKING:
    from recpo.serving.bundle import Bundle

GOLDEN: Final = "golden.json"
TOLERANCE: Final = 1e-4
"""Difference of natural-log probabilities; items that are closer may swap places."""

_REQUESTS, _LISTED = 8, 10
_FIRST_TIME_MS, _LONGEST_GAP_MS = 1_600_000_000_000, 86_400_000
_REMEDY: Final = "export the bundle again with this version of recpo and ONNX Runtime"


def write_golden(bundle: Bundle, path: Path, *, seed: int = 0) -> None:
    """Asks ``bundle`` some requests and writes them with its answers.

    The first has no history, the last one is longer than the policy reads; some events lack their outcome, and every
    request has items to exclude.
    """
    generator = np.random.default_rng(seed)
    lengths = np.linspace(0, bundle.manifest.max_history + 2, _REQUESTS).round().astype(int)
    requests = [_request(bundle, int(length), generator) for length in lengths]
    k = min(_LISTED, bundle.k)
    content = [
        {**request, "k": k, "answer": bundle.recommend_one(request["history"], k, request["exclude"])}
        for request in requests
    ]
    path.write_text(json.dumps({"tolerance": TOLERANCE, "requests": content}, allow_nan=False) + "\n", encoding="utf-8")


def check_golden(bundle: Bundle) -> int:
    """Asks the golden requests of a bundle again.

    Returns:
        How many there are; 0 of a bundle that was exported before there were any.

    Raises:
        RecpoError: an answer differs from that of the export.
    """
    path = bundle.root / GOLDEN
    if GOLDEN not in bundle.manifest.files:
        return 0
    content = parse_json(path.read_bytes(), path, _REMEDY)
    try:
        requests = content["requests"]
        for number, request in enumerate(requests):
            expected = [(item, float(score)) for item, score in request["answer"]]
            found = bundle.recommend_one(request["history"], request["k"], request["exclude"])
            _compare(expected, found, f"{path}: request {number}")
    except (KeyError, TypeError, ValueError) as error:
        raise RecpoError(f"{path} is damaged ({error!r}): {_REMEDY}") from error
    return len(requests)


def _request(bundle: Bundle, length: int, generator: np.random.Generator) -> dict[str, Any]:
    items: list[Any] = bundle.items.to_external(generator.integers(1, len(bundle.items) + 1, length + 2)).to_pylist()
    times = _FIRST_TIME_MS + generator.integers(1, _LONGEST_GAP_MS, length).cumsum()
    history = [{"item_id": item, "timestamp": int(time)} for item, time in zip(items[2:], times, strict=True)]
    for event in history:
        event |= _outcome(bundle.feedback, generator)
    return {"history": history, "exclude": items[:2]}


def _outcome(feedback: FeedbackDefinition, generator: np.random.Generator) -> dict[str, Any]:
    """What may come of an event: every feedback level occurs, unknown among them."""
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
            f"export ({len(expected)} items, {TOLERANCE:g} is allowed): {_REMEDY}"
        )
    score_of = dict(expected)
    last = expected[-1][1] if expected else 0.0  # what is not in the list scores no more than its last place
    moved = [
        item
        for (item, score), (other, _) in zip(found, expected, strict=True)
        if item != other and abs(score_of.get(item, last) - score) > TOLERANCE
    ]
    if moved:
        raise RecpoError(f"{where}: other items than at the export, {moved[0]!r} among them: {_REMEDY}")

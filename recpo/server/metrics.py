"""What operators see of a worker: the metrics of ``/metrics``, and process logs as JSON.

Metrics have the text format of Prometheus. With several workers, their values are summed
(``PROMETHEUS_MULTIPROC_DIR``, which the parent sets).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Final

from recpo.server.bundles import LoadedBundle
from recpo.server.impressions import Settled
from recpo.serving.histories import ServingCounts

SHARED: Final = "PROMETHEUS_MULTIPROC_DIR"
_LATENCIES: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one worker.

    Args:
        variants: names of the variants; () = there are none, and no metrics of them.
    """

    def __init__(self, variants: Sequence[str] = ()) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # of the extra `serve`

        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_LATENCIES)
        self.requests = counter("recpo_requests", "Requests by route and status.", ["route", "status"])
        seconds = "Time from request to answer."
        self.latency = histogram("recpo_request_seconds", seconds, ["route"])
        self.batch_size = histogram("recpo_batch_size", "Requests that were ranked together.", buckets=_SIZES)
        seconds = "Time of reading and ranking a batch."
        self.batch_seconds = histogram("recpo_batch_seconds", seconds)
        waiting = "Requests that wait for a batch."
        self.queue = gauge("recpo_queue_depth", waiting, multiprocess_mode="livesum")
        left_out = "What was left out of histories: unknown_items, impossible_values, events_without_feedback, ..."
        self.left_out = counter("recpo_histories_left_out", left_out, ["what"])
        self.short_lists = counter("recpo_short_lists", "Answers with fewer items than asked for.")
        self.items = counter("recpo_items_shown", "Items in answers.", ["explored"])
        wrong = "Slates that were neither sent nor logged because their propensities are not probabilities."
        self.invalid_propensities = counter("recpo_invalid_propensities", wrong)
        self.impressions = counter("recpo_impressions", "Impressions on disk.")
        self.outcomes = counter("recpo_outcomes", "Outcomes on disk.")
        self.published = counter("recpo_published_rows", "Rows in Parquet files.")
        self.lost = counter("recpo_log_lost_bytes", "Bytes of incomplete records.")
        self.swaps = counter("recpo_bundle_swaps", "Bundles that took over, the first one included.")
        serves, labels = "1 for the bundle that serves, 0 for those before it.", ["name", "version", "checksum"]
        self.bundle = gauge("recpo_bundle_info", serves, labels, multiprocess_mode="livemax")
        self._serving: dict[str, tuple[str, str, str]] = {}
        self._of_routes: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # looking labels up costs more
        self._of_variants: tuple[Counter, Gauge] | None = None
        if variants:
            answers = "Answers of each variant, or interleaved."
            ended = "1 for a variant that a guard ended: its users get the control."
            self._of_variants = (
                counter("recpo_variant_answers", answers, ["variant"]),
                gauge("recpo_variant_ended", ended, ["variant"], multiprocess_mode="livemax"),
            )
            self.of_ended(variants, ())

    def of_request(self, route: str, status: int, seconds: float) -> None:
        """Records an answer that was sent."""
        of_route = self._of_routes.get((route, status))
        if of_route is None:
            of_route = self.requests.labels(route, str(status)), self.latency.labels(route)
            self._of_routes[route, status] = of_route
        of_route[0].inc()
        of_route[1].observe(seconds)

    def of_histories(self, counts: ServingCounts) -> None:
        """Records the histories of a batch."""
        for what, number in counts.to_dict().items():
            if number and what not in ("users", "events"):
                self.left_out.labels(what).inc(number)

    def of_bundle(self, variant: str, bundle: LoadedBundle) -> None:
        """Records that a bundle started to serve."""
        before = self._serving.get(variant)
        self._serving[variant] = bundle.name, bundle.version, bundle.checksum
        if before is not None and before not in self._serving.values():
            self.bundle.labels(*before).set(0)
        self.bundle.labels(*self._serving[variant]).set(1)
        self.swaps.inc()

    def of_answer(self, variant: str | None) -> None:
        """Records an answer of a variant; None = an interleaved one, or there are no variants."""
        if self._of_variants is not None:
            self._of_variants[0].labels(variant or "interleaved").inc()

    def of_ended(self, variants: Sequence[str], ended: Collection[str]) -> None:
        """Records which variants were ended."""
        if self._of_variants is not None:
            for name in variants:
                self._of_variants[1].labels(name).set(name in ended)

    def of_settled(self, settled: Settled) -> None:
        """Records published rows."""
        self.published.inc(settled.rows)
        self.lost.inc(settled.lost_bytes)

    def text(self) -> bytes:
        """The values of this worker, or the sum over all workers."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        if SHARED not in os.environ:
            return generate_latest(self._registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)
        return generate_latest(shared)


REQUEST: Final = "request"  # the message of the line of a request
_MOST_WAITING: Final = 100
_LOG = logging.getLogger("recpo.server")
_ENCODER: Final = json.JSONEncoder(default=str)


class JsonFormatter(logging.Formatter):
    """``time``, ``level``, ``logger``, ``message``, and the fields of ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _ENCODER.encode(line)


class _Lines(logging.Handler):
    """Writes lines to standard error; those of requests together, because a system call for each costs too much."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line. One of a request waits for the next other line, for 100 of its kind, or for ``flush``."""
        try:
            self._waiting.append(self.format(record) + "\n")
            if record.msg != REQUEST or len(self._waiting) >= _MOST_WAITING:
                self.flush()
        except Exception:  # such as a closed pipe: no request fails for its line
            self.handleError(record)

    def flush(self) -> None:
        """Writes the lines that wait."""
        with self.lock or nullcontext():
            lines, self._waiting = self._waiting, []
            if lines:
                sys.stderr.write("".join(lines))
                sys.stderr.flush()


def flush_logs() -> None:
    """Writes the lines of requests that wait."""
    for handler in _LOG.handlers:
        handler.flush()


def log_as_json() -> None:
    """Sends the log records of recpo's server and of uvicorn to standard error."""
    handler = _Lines()
    handler.setFormatter(JsonFormatter())
    for name in ("recpo.server", "uvicorn", "uvicorn.error", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").disabled = True  # the gate writes a line for each request, with its id

"""One worker: the bundle that serves, the batches, the log, and what operators see of it.

Metrics (``/metrics``) have the text format of Prometheus. With several workers, their values are summed
(``PROMETHEUS_MULTIPROC_DIR``, which the parent sets). Process logs are JSON.
"""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from recpo.base.errors import RecpoError, validate_range
from recpo.base.feature_encoding import PolicyFeatures
from recpo.server.bundles import LoadedBundle, feature_kinds
from recpo.server.impressions import ImpressionLog, LogLayout, settle, validate_propensities
from recpo.server.options import ServerOptions
from recpo.server.ranking import Batcher, Query, Ranker, Shown
from recpo.server.variants import EndedVariants, Watch, assigned, open_variants
from recpo.server.wire import FeedbackRequest, RecommendRequest, known_features, validate_names
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ServingCounts
from recpo.serving.recommending import validate_k

_LOOK_S = 1.0  # how often a worker checks for another version and for segments to publish
SHARED: Final = "PROMETHEUS_MULTIPROC_DIR"
_LATENCIES: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REQUEST: Final = "request"  # the message of the line of a request
_MOST_WAITING: Final = 100
_ENCODER: Final = json.JSONEncoder(default=str)
_LOG = logging.getLogger("recpo.server")


class InvalidAnswerError(Exception):
    """The server computed an answer that must be neither sent nor logged."""


class UnknownRequestError(Exception):
    """No impression has this id, or its outcomes are no longer accepted."""


class LogUnavailableError(Exception):
    """The log could not be written, so the answer is not sent."""


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
        for what, number in asdict(counts).items():
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

    def text(self) -> bytes:
        """The values of this worker, or the sum over all workers."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        if SHARED not in os.environ:
            return generate_latest(self._registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)
        return generate_latest(shared)


class Service:
    """All parts of a worker except HTTP.

    Args:
        path: a bundle, or a directory of bundles; None = the options have variants.
        options: see ``ServerOptions``.

    Raises:
        RecpoError: the bundle cannot serve, or the log cannot be written.
    """

    def __init__(self, path: Path | None, options: ServerOptions) -> None:
        self.options = options
        self.variants = options.variants
        self.metrics = Metrics([one.name for one in self.variants])
        self.of_variant = open_variants(path, options, self.metrics.of_bundle)
        self.versions = next(iter(self.of_variant.values()))
        self._ranker = Ranker(options.exploration, self.metrics.of_histories, options.reranking)
        self.log = None if options.log is None else _open_log(options.log, self.versions.current.bundle, options)
        self.ended = None if self.log is None or not self.variants else EndedVariants(self.log.root, options.experiment)
        self._watch = None
        if options.guard is not None and self.ended is not None:
            self._watch = Watch(options.guard, [one.name for one in self.variants], self.ended)
        self.draining = False
        self._batcher = Batcher(
            self._rank,
            max_batch=options.max_batch,
            max_wait_ms=options.max_wait_ms,
            max_queue=options.max_queue,
            on_batch=self.metrics.batch_size.observe,
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        """Whether the worker is ready for requests."""
        return not self.draining and (self.log is None or self.log.writable)

    def start(self) -> None:
        """Starts answering. Call it in the event loop."""
        self._batcher.start()
        look: list[Callable[[], object]] = [one.follow for one in self.of_variant.values()]
        look += [self._follow_ended, flush_logs, lambda: self.metrics.queue.set(self._batcher.waiting), self._settle]
        look += [] if self._watch is None else [self._watch.look]
        self._tasks = [asyncio.get_running_loop().create_task(_repeat(call)) for call in look]

    async def stop(self) -> None:
        """Returns when every query has its answer and every record is on disk."""
        self.draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._batcher.close()
        if self.log is not None:
            await asyncio.to_thread(self.log.close)
            await asyncio.to_thread(self._settle)
        if self._watch is not None:
            self._watch.close()

    async def recommend(self, request: RecommendRequest) -> tuple[Shown, str | None]:
        """A slate, and its id if it is logged. The impression is on disk when this returns.

        Raises:
            RecpoError: the request cannot be answered.
            QueueFullError: too many requests are waiting.
            TimeoutError: the request has waited too long.
            InvalidAnswerError: the propensities are not probabilities of a slate.
            LogUnavailableError: the impression cannot be written.
        """
        variant = self._variant(request.user_id)
        self._validate(request, variant)
        query = self._query(request, variant)
        async with asyncio.timeout(self.options.timeout_s):
            shown = await self._batcher.submit(query)
        try:
            validate_propensities(shown.items, shown.propensity)
        except RecpoError as error:
            self.metrics.invalid_propensities.inc()
            _LOG.error("a slate is neither sent nor logged: %s", error)
            raise InvalidAnswerError("a fault of the server: its propensities are wrong; its log has more") from error
        wanted = self._longest(query.variant) if request.k is None else request.k
        self.metrics.short_lists.inc(len(shown.items) < wanted)
        self.metrics.items.labels("false").inc(len(shown.items) - sum(shown.explored))
        self.metrics.items.labels("true").inc(sum(shown.explored))
        self.metrics.of_answer(shown.variant)
        if self.log is None or not shown.items:
            return shown, None
        try:
            is_random = [shown.is_random] * len(shown.items)
            of_variants = {"variant": shown.variant, "team": shown.team, "credit": shown.credit}
            identifier, written = self.log.add(
                request.user_id, shown.items, shown.propensity, is_random, query.context, **of_variants
            )
            await asyncio.wrap_future(written)
        except RecpoError as error:
            raise _unavailable(error) from error
        self.metrics.impressions.inc()
        return shown, identifier

    async def feedback(self, request: FeedbackRequest) -> int:
        """Logs outcomes and returns their number. They are on disk when this returns.

        Raises:
            RecpoError: outcomes of items that were not shown, or of a kind that this log does not have.
            UnknownRequestError: see there.
            LogUnavailableError: they cannot be written.
        """
        if self.log is None:
            message = "this server logs nothing (--log): it takes no feedback"
            raise RecpoError(message, code="missing_option", field="log")
        found = self.log.find(request.request_id)
        if found is None:
            raise UnknownRequestError(
                f"no impression with this request_id takes outcomes: ids count for {self.options.outcome_window_s:g} s"
            )
        address, impression = found
        outcomes = _outcomes(request, impression.items, self.log.layout)
        try:
            await asyncio.wrap_future(self.log.add_outcomes(address, outcomes))
        except RecpoError as error:
            raise _unavailable(error) from error
        if not self.log.still_open(address):
            raise UnknownRequestError("the rows of this impression have just been published")
        self.metrics.outcomes.inc(len(outcomes))
        return len(outcomes)

    def _query(self, request: RecommendRequest, variant: str) -> Query:
        """The query for a request, with the features and behaviors that the bundle reads.

        Raises:
            RecpoError: features or behaviors that the bundle does not read, or invalid values.
        """
        explores = self.options.exploration is not None and request.explore is not False
        known = self.versions.current.bundle.features
        user = known_features(known, "user", request.user, "user")
        context = known_features(known, "context", request.context, "context")
        if user:
            columns = {feature.name: feature.source for feature in known.user.features}
            user = {columns[name]: value for name, value in user.items()}
        history = [
            _event(event, known, f"history.{place}") if "behaviors" in event or "context" in event else event
            for place, event in enumerate(request.history)
        ]
        return Query(history, request.exclude, user, context, request.k, explores, request.allow, request.deny, variant)

    def _rank(self, queries: Sequence[Query]) -> list[Shown | Exception]:
        with self.metrics.batch_seconds.time():
            if self.options.interleave is not None:
                both = {name: versions.current for name, versions in self.of_variant.items()}
                return self._ranker.interleave(self.options.interleave, both, queries)
            answers: dict[int, Shown | Exception] = {}
            for name, versions in self.of_variant.items():
                rows = [row for row, query in enumerate(queries) if query.variant == name]
                if rows:
                    shown = self._ranker.rank(versions.current, [queries[row] for row in rows])
                    answers.update(zip(rows, shown, strict=True))
            return [answers[row] for row in range(len(queries))]

    def _variant(self, user_id: int | str) -> str:
        """The variant of a user; "" without variants, and for interleaved lists."""
        if not self.variants or self.options.interleave is not None:
            return ""
        name = assigned(user_id, self.options.experiment, self.variants)
        return self.variants[0].name if self.ended is not None and name in self.ended.names else name

    def _longest(self, variant: str) -> int:
        """Maximum list length of a variant; of interleaved lists, that of both."""
        asked = [self.of_variant[variant]] if variant in self.of_variant else self.of_variant.values()
        return min(one.current.bundle.k for one in asked)

    def _follow_ended(self) -> None:
        if self.ended is not None:
            self.metrics.of_ended([one.name for one in self.variants], self.ended.follow())

    def _settle(self) -> None:
        if self.log is not None:
            settled = settle(self.log.root, self.log.outcome_window_s)
            self.metrics.published.inc(settled.rows)
            self.metrics.lost.inc(settled.lost_bytes)

    def _validate(self, request: RecommendRequest, variant: str) -> None:
        """Cheap checks before a request waits, for errors that would cost the complete batch."""
        options, bundle = self.options, self.versions.current.bundle
        for name, length, most in (
            ("history", len(request.history), options.max_events),
            ("exclude", len(request.exclude), options.max_exclude),
        ):
            validate_range(length <= most, name, f"must have at most {most:,} entries, the most recent ones", length)
        if request.k is not None:
            validate_k(request.k, self._longest(variant))
        if request.explore and options.exploration is None:
            message = "explore: this server does not explore (--exploration)"
            raise RecpoError(message, code="unsupported", field="explore")
        logged = None if self.log is None else self.log.layout.user_id
        if logged is not None and type(request.user_id) is not (str if logged == "string" else int):
            message = (
                f"user_id: got {request.user_id!r:.80}, but this server logs ids of the type {logged}: send such "
                "ids, or start the server with another --user_ids"
            )
            raise RecpoError(message, code="wrong_type", field="user_id")
        named = [*(event["item_id"] for event in request.history), *request.exclude]
        expected: type = str if bundle.items.is_text else int
        if set(map(type, named)) - {expected}:
            wrong = next(item for item in named if type(item) is not expected)
            message = f"item ids of this bundle are {'strings' if expected is str else 'integers'}, got {wrong!r:.80}"
            raise RecpoError(message, code="wrong_type", field="item_id")


def _event(event: Mapping[str, Any], known: PolicyFeatures, where: str) -> dict[str, Any]:
    """An event with its behaviors and the features of its request as columns."""
    behaviors = event.get("behaviors") or {}
    validate_names(behaviors, known.behaviors, "behaviors", f"{where}.behaviors")
    plain = {name: value for name, value in event.items() if name not in ("behaviors", "context")} | behaviors
    return plain | (known_features(known, "context", event.get("context"), f"{where}.context") or {})


def _unavailable(error: RecpoError) -> LogUnavailableError:
    """The message for the client. Paths of this machine appear only in its own log."""
    _LOG.error("the log cannot be written: %s", error)
    return LogUnavailableError("the log cannot be written, so nothing is acknowledged: try again, or another server")


def _open_log(root: Path, bundle: Bundle, options: ServerOptions) -> ImpressionLog:
    known = bundle.features
    layout = LogLayout(
        options.user_ids or bundle.manifest.origin.get("user_ids") or "integer",
        "string" if bundle.items.is_text else "integer",
        graded=not bundle.feedback.cutoffs,
        behaviors=known.behaviors,
        context=feature_kinds(known.context),
        experiment=options.experiment if options.variant else None,
        interleaving=options.interleave,
    )
    names = layout.schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        message = (
            f"log: the bundle reads {', '.join(twice)}, a name that a column of the log has: rename the behavior or "
            "the feature"
        )
        raise RecpoError(message, code="duplicate", field=twice[0])
    return ImpressionLog(
        root,
        layout,
        outcome_window_s=options.outcome_window_s,
        max_bytes=int(options.rotate_mb * (1 << 20)),
        max_age_s=options.rotate_s,
        sync=options.sync,
    )


def _outcomes(request: FeedbackRequest, shown: Sequence[Any], layout: LogLayout) -> dict[Any, dict[str, float | bool]]:
    """The outcomes by item; a later outcome of the same item replaces earlier values."""
    outcomes: dict[Any, dict[str, float | bool]] = {}
    for outcome in request.outcomes:
        if outcome.item_id not in shown:
            message = f"item {outcome.item_id!r:.80} was not in this recommendation"
            raise RecpoError(message, code="unknown_name", field="item_id")
        values = outcome.values()
        if strange := values.keys() - set(layout.outcomes):
            message = f"{min(strange)}: outcomes of this log are {', '.join(layout.outcomes)}"
            raise RecpoError(message, code="unknown_name", field=min(strange))
        outcomes.setdefault(outcome.item_id, {}).update(values)
    return outcomes


async def _repeat(call: Callable[[], object]) -> None:
    """Calls a function periodically in a thread. An error is logged and does not stop it."""
    while True:
        await asyncio.sleep(_LOOK_S)
        begun = time.monotonic()
        try:
            await asyncio.to_thread(call)
        except Exception as error:
            _LOG.error("%s failed after %.1f s: %s", getattr(call, "__name__", "task"), time.monotonic() - begun, error)


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

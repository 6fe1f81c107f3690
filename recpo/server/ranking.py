"""Turns queries into slates, in batches: histories, program, re-ranking, exploration.

Queries that arrive while a batch runs form the next batch (``Batcher``). A single thread does the work, so a program
has all cores to itself, and queries wait in the event loop. Without load, a query is processed at once;
``max_wait_ms`` makes it wait for others.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recpo.base.errors import RecpoError
from recpo.lists.exploration import Exploration, Pool, Slate
from recpo.lists.interleaving import Interleaving, interleave
from recpo.lists.reranking import reranked
from recpo.server.bundles import LoadedBundle, Reranking
from recpo.serving.bundle import Bundle
from recpo.serving.histories import EncodedHistories, Request, ServingCounts
from recpo.serving.recommending import Wanted, milliseconds, validate_k
from recpo.serving.runtimes import excluded


@dataclass(frozen=True)
class Query(Request):
    """A query to the policy.

    Attributes:
        k: length of the slate; None = the bundle's maximum.
        explore: draw the slate; otherwise the best items in order.
        allow: attribute -> values: only items that have one of the values of each attribute.
        deny: attribute -> values: no items that have one of the values.
        variant: the variant that ranks; "" = there are no variants, or two of them are interleaved.
    """

    k: int | None = None
    explore: bool = False
    allow: Wanted | None = None
    deny: Wanted | None = None
    variant: str = ""


@dataclass(frozen=True)
class Shown:
    """A slate, in the order in which it is shown.

    Attributes:
        bundle: the bundle that ranked it.
        items: external ids, at most k.
        scores: natural-log probabilities under the policy; None for an item that the policy did not list.
        propensity: probability of each item at a uniformly drawn place of the slate; None if it has no closed form.
        explored: the item is not among the best items, which would be shown without exploration.
        is_random: the complete slate was drawn uniformly.
        variant: the variant that ranked it; None = there are no variants, or the slate is interleaved.
        team: the variant that contributed each item of an interleaved slate.
        credit: the credit of the second variant for each item of an interleaved slate, -1 to 1.
    """

    bundle: LoadedBundle
    items: list[Any]
    scores: list[float | None]
    propensity: Sequence[float | None]
    explored: list[bool]
    is_random: bool
    variant: str | None = None
    team: list[str] | None = None
    credit: list[float] | None = None


class Ranker:
    """Ranks batches, one at a time.

    Args:
        exploration: how slates are drawn for queries that explore; None = no query may explore.
        on_counts: called with the counts of what was left out of the histories.
        reranking: how complete slates are chosen before any is drawn; None = in the policy's order.
        seed: seed of all draws; None = from the operating system, so that every worker draws differently.
    """

    def __init__(
        self,
        exploration: Exploration | None = None,
        on_counts: Callable[[ServingCounts], None] = lambda _: None,
        reranking: Reranking | None = None,
        seed: int | None = None,
    ) -> None:
        self._exploration, self._on_counts, self._reranking = exploration, on_counts, reranking
        self._generator = np.random.default_rng(seed)

    def rank(self, bundle: LoadedBundle, queries: Sequence[Query]) -> list[Shown | Exception]:
        """A slate, or the error of the query, for each query.

        The histories of all queries are read together, which costs little more than reading one. If one of them cannot
        be read, each is read separately, so that an error only affects the client who caused it.
        """
        try:
            return list(self._rank(bundle, queries))
        except RecpoError as error:
            if len(queries) == 1:
                return [error]
            return [answer for query in queries for answer in self.rank(bundle, [query])]

    def interleave(
        self, method: Interleaving, bundles: Mapping[str, LoadedBundle], queries: Sequence[Query]
    ) -> list[Shown | Exception]:
        """A slate of two variants, or the error of the query, for each query.

        Each variant ranks the first k items; the slate names the bundle of the first one.
        """
        rankings = [self.rank(bundle, queries) for bundle in bundles.values()]
        shortest = min(bundle.bundle.k for bundle in bundles.values())
        found: list[Shown | Exception] = []
        for query, first, second in zip(queries, *rankings, strict=True):
            if isinstance(first, Exception) or isinstance(second, Exception):
                found.append(first if isinstance(first, Exception) else second)
                continue
            both = interleave(method, first.items, second.items, query.k or shortest, self._generator)
            scores = [dict(zip(one.items, one.scores, strict=True)) for one in (first, second)]
            found.append(
                replace(
                    first,
                    items=both.items,
                    scores=[scores[team][item] for item, team in zip(both.items, both.team.tolist(), strict=True)],
                    propensity=[None] * len(both.items) if both.propensity is None else both.propensity.tolist(),
                    explored=[False] * len(both.items),
                    team=[list(bundles)[team] for team in both.team.tolist()],
                    credit=both.credit.tolist(),
                )
            )
        return found

    def _rank(self, loaded: LoadedBundle, queries: Sequence[Query]) -> list[Shown]:
        bundle = loaded.bundle
        lengths = [bundle.k if query.k is None else validate_k(query.k, bundle.k) for query in queries]
        read = bundle.reader.read_requests(queries, milliseconds(None))
        ((_, inputs),) = read.batches(len(queries))
        inputs = inputs._replace(allowed=_masks(bundle, queries))
        top_items, scores = bundle.runtime.recommend(inputs, bundle.k)
        self._on_counts(read.counts)
        own = scores  # scores of the policy; slates are drawn from scores that decrease along the list
        if self._reranking is not None and loaded.known is not None:
            method, shortlist = self._reranking.method, self._reranking.options.shortlist
            order = reranked(method, top_items, scores, lengths, loaded.known, inputs.item_ids, shortlist)
            top_items, own = (np.take_along_axis(values, order, 1) for values in (top_items, scores))
        slates: list[Slate] = [_best(top_items[row, :k]) for row, k in enumerate(lengths)]
        exploring: dict[int, list[int]] = defaultdict(list)
        for row, query in enumerate(queries):
            if query.explore:
                exploring[lengths[row]].append(row)
        for k, rows in exploring.items():
            for row, slate in zip(rows, self._drawn(inputs, (top_items, scores), bundle, k, rows), strict=True):
                slates[row] = slate
        external = bundle.items.listed(np.concatenate([slate.items for slate in slates]))
        ends = np.cumsum([len(slate.items) for slate in slates]).tolist()
        return [
            _shown(loaded, query, slate, external[end - len(slate.items) : end], scores)
            for query, slate, end, scores in zip(queries, slates, ends, own, strict=True)
        ]

    def _drawn(
        self, inputs: EncodedHistories, top: tuple[np.ndarray, np.ndarray], bundle: Bundle, k: int, rows: list[int]
    ) -> list[Slate]:
        """Slates of some rows of the batch."""
        assert self._exploration is not None
        width = max(self._exploration.shortlist, k)
        pools, exclude = None, excluded(inputs, bundle.manifest.repeats)
        if self._exploration.epsilon > 0 and self._exploration.uniform_over == "catalog":
            pools = [
                Pool.of(
                    len(bundle.items),
                    exclude=exclude[row],
                    ids=None if inputs.allowed is None else np.flatnonzero(inputs.allowed[row][1:]) + 1,
                )
                for row in rows
            ]
        shortlist, scores = (values[rows, :width] for values in top)
        batch = self._exploration.sample_batch(shortlist, scores, k, self._generator, pools)
        return [batch.of(place) for place in range(len(rows))]


def _masks(bundle: Bundle, queries: Sequence[Query]) -> np.ndarray | None:
    """The items that may be listed, ``[B, V + 1]``; None if no query filters.

    Computed here for the catalog of the bundle that ranks the batch, because another bundle may have taken over since
    the request arrived.
    """
    if not any(query.allow or query.deny for query in queries):
        return None
    masks = [bundle.filters.allowed(query.allow, query.deny) for query in queries]
    return np.stack([np.ones(len(bundle.items) + 1, bool) if mask is None else mask for mask in masks])


def _best(top_items: np.ndarray) -> Slate:
    """The deterministic slate: the n best items, each with propensity 1 / n."""
    listed = int(np.count_nonzero(top_items))  # empty places are at the end
    places = np.arange(listed)
    return Slate(top_items[:listed], np.full(listed, 1 / max(1, listed)), np.zeros(listed, bool), False, places)


def _shown(bundle: LoadedBundle, query: Query, slate: Slate, items: list[Any], scores: np.ndarray) -> Shown:
    of_places = scores.tolist()
    known = [of_places[place] if place >= 0 else None for place in slate.positions.tolist()]
    propensity, explored = slate.propensity.tolist(), slate.explored.tolist()
    return Shown(bundle, items, known, propensity, explored, slate.is_random, query.variant or None)


_SHORT_S = 0.004  # a batch that is done sooner may keep the event loop waiting


class QueueFullError(Exception):
    """More requests are waiting than the options allow."""


class ClosedError(Exception):
    """The batcher was closed."""


@dataclass(eq=False)
class _Waiting:
    """A query and the future of its answer. Instances compare by identity."""

    query: Query
    future: asyncio.Future[Shown]
    taken: bool = False


class Batcher:
    """Passes batches of queries to a function that runs in its own thread.

    Args:
        work: returns one answer per query, in order; an answer that is an exception is raised for that query only.
        max_batch: maximum number of queries in a batch.
        max_wait_ms: how long the first query of a batch waits for others.
        max_queue: maximum number of waiting queries; further queries are rejected.
        on_batch: called with the size of every batch.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Query]], Sequence[Shown | Exception]],
        *,
        max_batch: int,
        max_wait_ms: float = 0.0,
        max_queue: int = 1024,
        on_batch: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._work, self._on_batch = work, on_batch
        self._max_batch, self._max_wait_s, self._max_queue = max_batch, max_wait_ms / 1000, max_queue
        self._queue: deque[_Waiting] = deque()
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "recpo-batch")
        self._task: asyncio.Task[None] | None = None
        self._query_s = math.inf  # time of the last batch, for each of its queries
        self._unanswered = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of queries that are not in a batch yet."""
        return len(self._queue)

    def start(self) -> None:
        """Starts accepting queries. Call it in the event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, query: Query) -> Shown:
        """The answer to one query. A canceled query leaves the queue.

        Raises:
            ClosedError: ``close`` was called.
            QueueFullError: too many queries are waiting.
            Exception: the answer was this exception.
        """
        if self._closed:
            raise ClosedError("this server stops: try another one")
        if len(self._queue) >= self._max_queue:
            raise QueueFullError("too many requests wait: try again in a second")
        waiting = _Waiting(query, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._unanswered += 1
        self._arrived.set()
        if len(self._queue) >= self._max_batch:
            self._full.set()
        try:
            return await waiting.future
        finally:
            self._unanswered -= 1
            if not waiting.taken:
                self._queue.remove(waiting)

    async def close(self) -> None:
        """Rejects further queries, and returns when every submitted query has its answer."""
        self._closed = True
        while self._unanswered:
            await asyncio.sleep(0.005)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            if self._max_wait_s and len(self._queue) < self._max_batch:
                self._full.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._full.wait(), self._max_wait_s)
            if batch := self._take():
                queries = [waiting.query for waiting in batch]
                self._on_batch(len(batch))
                begun = time.perf_counter()
                if self._query_s * len(batch) <= _SHORT_S:
                    answers = self._answers(queries)
                else:
                    answers = await asyncio.shield(loop.run_in_executor(self._thread, self._answers, queries))
                self._query_s = (time.perf_counter() - begun) / len(batch)
                for waiting, answer in zip(batch, answers, strict=True):
                    if waiting.future.done():
                        continue
                    if isinstance(answer, Exception):
                        waiting.future.set_exception(answer)
                    else:
                        waiting.future.set_result(answer)
                if self._queue:
                    await asyncio.sleep(0)  # for these answers, and for requests that have arrived

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._queue and len(batch) < self._max_batch:
            waiting = self._queue.popleft()
            waiting.taken = True
            if not waiting.future.done():  # its client has given up
                batch.append(waiting)
        if not self._queue:
            self._arrived.clear()
        return batch

    def _answers(self, queries: Sequence[Query]) -> Sequence[Shown | Exception]:
        try:
            return self._work(queries)
        except Exception as error:  # the queue continues; every client of this batch gets the error
            return [error] * len(queries)

"""Micro-batching: every query that was submitted gets an answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from recpo.server.ranking import Batcher, ClosedError


def test_closing_answers_the_batch_that_is_computed_and_the_queries_behind_it():
    begun, go_on = threading.Event(), threading.Event()

    def work(queries):
        begun.set()
        assert go_on.wait(30)
        return [query * 2 for query in queries]

    async def run():
        batcher = Batcher(work, max_batch=1)
        batcher.start()
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.to_thread(begun.wait, 30)
        second = asyncio.create_task(batcher.submit(2))
        await asyncio.sleep(0)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.02)
        assert not closing.done()
        go_on.set()
        await asyncio.wait_for(closing, 30)
        return [await asyncio.wait_for(query, 1) for query in (first, second)]

    assert asyncio.run(run()) == [2, 4]


def test_a_closed_batcher_rejects_queries():
    async def run():
        batcher = Batcher(list, max_batch=1)
        batcher.start()
        await batcher.close()
        await batcher.submit(1)

    with pytest.raises(ClosedError):
        asyncio.run(asyncio.wait_for(run(), 30))

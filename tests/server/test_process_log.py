"""The lines of the process log: JSON, those of requests together, and no fault of a request."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from recpo.server import service


@pytest.fixture
def logger():
    """The logger of the server, with its handler."""
    found, before = logging.getLogger("recpo.server"), list(logging.getLogger("recpo.server").handlers)
    found.handlers, level, found.propagate = [service._Lines()], found.level, False
    found.handlers[0].setFormatter(service.JsonFormatter())
    found.setLevel(logging.INFO)
    yield found
    found.handlers, found.propagate = before, True
    found.setLevel(level)


def test_lines_of_requests_are_written_together_and_in_order(logger, capsys):
    def written():
        return [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]

    logger.info(service.REQUEST, extra={"fields": {"status": 200}})
    assert written() == []
    logger.error("a fault")
    assert written() == ["request", "a fault"]
    logger.info(service.REQUEST)
    service.flush_logs()
    assert written() == ["request"]
    for _ in range(100):
        logger.info(service.REQUEST)
    assert written() == ["request"] * 100


def test_a_closed_standard_error_is_no_fault_of_a_request(logger, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    for _ in range(100):
        logger.info(service.REQUEST)
    logger.error("a fault")

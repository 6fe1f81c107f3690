"""Process logs as JSON, one object per line on standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

_QUIET: Final = ("uvicorn.access",)  # the gate writes a line for each request, with its id


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
        return json.dumps(line, default=str)


def log_as_json() -> None:
    """Sends the log records of recpo's server and of uvicorn to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("recpo.server", "uvicorn", "uvicorn.error", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    for name in _QUIET:
        logging.getLogger(name).disabled = True

"""The resolved configuration of the running verb, so that every result can say how it was made."""

from __future__ import annotations

from contextvars import ContextVar

#: YAML of every option of the running verb, defaults included; None when a verb is called from Python.
RESOLVED: ContextVar[str | None] = ContextVar("resolved_configuration", default=None)

"""Middleware for every HTTP request: an id (header X-Request-ID), an API key, a size limit, a log line, and metrics."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from recpo.server.metrics import Metrics
from recpo.server.options import Keys

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMIN: Final = "/v1/admin"
#: Probes, metrics and the interface's documentation pages need no key.
_OPEN: Final = ("/v2/health/", "/metrics", "/docs", "/openapi.json", "/redoc")
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LOG = logging.getLogger("recpo.server")


class _ClientGoneError(Exception):
    """The connection ended before the request was complete."""


class Gate:
    """Middleware around the application.

    Args:
        app: the application.
        metrics: metrics of this worker.
        max_body: bytes.
        api_keys: None = requests need no key.
        admin_keys: None = swaps are disabled.
        draining: whether the server stops, so that answers tell clients to close their connections.
    """

    def __init__(
        self,
        app: App,
        metrics: Metrics,
        *,
        max_body: int,
        api_keys: Keys | None,
        admin_keys: Keys | None,
        draining: Callable[[], bool],
    ) -> None:
        self.app, self._metrics, self._max_body, self._draining = app, metrics, max_body, draining
        self._api_keys, self._admin_keys = api_keys, admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request; passes everything that is not HTTP through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        x_request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["x_request_id"] = x_request_id
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", x_request_id.encode())]
                if self._draining():
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            refused = self._refusal(scope["path"], headers)
            body = b"" if refused else await self._body(receive)
            if refused is None and body is None:
                refused = 413, f"the body is larger than {self._max_body:,} bytes: send a shorter history"
            if refused is not None:
                await _send_fault(answer, *refused, x_request_id)
            else:
                await self.app(scope, _replay(body or b"", receive), answer)
        except _ClientGoneError:
            status = 499
        except Exception:
            _LOG.exception("request failed", extra={"fields": {"x_request_id": x_request_id, "path": scope["path"]}})
            if not status:
                await _send_fault(
                    answer, 500, "a fault of the server: its log has more under the x_request_id", x_request_id
                )
        finally:
            self._account(scope, status, time.perf_counter() - begun, x_request_id)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Status and reason if the request is rejected here."""
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            return 413, f"the body is larger than {self._max_body:,} bytes: send a shorter history"
        if path.startswith(ADMIN):
            if self._admin_keys is None:
                return 403, "this server was started without --admin_keys: its bundle cannot be swapped over HTTP"
            allowed = self._admin_keys
        elif self._api_keys is None or path.startswith(_OPEN):
            return None
        else:
            allowed = self._api_keys
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if kind.lower() != "bearer" or key.strip() not in allowed:
            return 401, "no valid key: send the header `Authorization: Bearer KEY`"
        return None

    async def _body(self, receive: Receive) -> bytes | None:
        """The complete body; None if it is too large."""
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._max_body:
                return None
        return b"".join(parts)

    def _account(self, scope: Scope, status: int, seconds: float, x_request_id: str) -> None:
        route = getattr(
            scope.get("route"), "path", "other"
        )  # a client must not be able to create labels from arbitrary paths
        self._metrics.of_request(route, status, seconds)
        if route.startswith("/v2/health") or route == "/metrics":
            return
        fields = {
            "x_request_id": x_request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(seconds * 1000, 2),
        }
        _LOG.info("request", extra={"fields": fields})


async def _send_fault(send: Send, status: int, detail: str, x_request_id: str) -> None:
    body = json.dumps({"detail": detail, "x_request_id": x_request_id}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that was already read, replayed for the application."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed

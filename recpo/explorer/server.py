"""Serves the pages on this machine. It answers GET and HEAD, changes nothing, and its pages run no script."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from markupsafe import escape

from recpo.artifacts.documents import describe_os_error
from recpo.base.errors import RecpoError
from recpo.explorer.pages import Pages

_LOG = logging.getLogger("recpo.explorer")
_LONGEST_ADDRESS: Final = 2_000
#: No script runs, nothing is loaded from elsewhere; pictures may be, because tables of items name them by address.
_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data: http: https:; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Answer:
    """An answer to a request.

    Attributes:
        status: HTTP status.
        body: its content.
        kind: its content type.
    """

    status: HTTPStatus
    body: bytes
    kind: str = "text/html; charset=utf-8"


def answer(pages: Pages, address: str) -> Answer:
    """The answer to an address: a page, a picture, or status 404."""
    parts = urlsplit(address)
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    search, other = given.get("q", "").strip(), given.get("with")
    order = {"order": given["by"]} if "by" in given else {}
    found: str | None = None
    if parts.path == "/":
        found = pages.overview()
    elif parts.path == "/users":
        found = pages.users(search, other=other, **order)
    elif parts.path == "/items":
        found = pages.items(search, other=other, **order)
    elif parts.path == "/policies":
        found = pages.policies()
    elif parts.path == "/server":
        found = pages.server()
    elif named := re.fullmatch(r"/(users|items|pictures)/(\d{1,18})", parts.path):
        kind, key = named[1], int(named[2])
        if kind == "pictures":
            picture = pages.catalog.picture(key)
            return _missing() if picture is None else Answer(HTTPStatus.OK, *picture)
        found = pages.user(key) if kind == "users" else pages.item(key)
    return _missing() if found is None else Answer(HTTPStatus.OK, found.encode())


class PageServer(ThreadingHTTPServer):
    """Serves ``pages`` until ``shutdown``.

    Args:
        pages: the pages.
        host: address to listen on.
        port: 0 = any free one.

    Raises:
        RecpoError: the address is taken or is not one of this machine.
    """

    daemon_threads = True

    def __init__(self, pages: Pages, host: str, port: int) -> None:
        self.pages = pages
        self.is_local = _is_local(host)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            said = describe_os_error(error, f"{host}:{port}") if isinstance(error, OSError) else str(error)
            message = f"cannot listen on {host}:{port} ({said}): choose another port; 0 = any free one"
            raise RecpoError(message, code="failed", field="port") from error

    @property
    def url(self) -> str:
        """The address of the first page."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "recpo"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.server.is_local and not _is_local(host.strip("[]")):
            # a page of another site, whose name was made to lead here, must not read what is shown here
            found = _failed(HTTPStatus.FORBIDDEN, "This page is for this machine alone: open it as 127.0.0.1.")
        elif len(self.path) > _LONGEST_ADDRESS:
            found = _failed(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
        else:
            found = self._page()
        self.send_response(found.status)
        for name, value in {**_HEADERS, "Content-Type": found.kind, "Content-Length": str(len(found.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(found.body)

    def _page(self) -> Answer:
        try:
            return answer(self.server.pages, self.path)
        except RecpoError as error:
            return _failed(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except ValueError:
            return _failed(HTTPStatus.BAD_REQUEST, "The address cannot be read.")

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.info(format, *args)


def _missing() -> Answer:
    return _failed(HTTPStatus.NOT_FOUND, "There is no such page.")


def _failed(status: HTTPStatus, message: str) -> Answer:
    body = f'<!doctype html><html lang="en"><title>{status.value}</title><p>{escape(message)} <a href="/">Overview</a>'
    return Answer(status, body.encode())


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The HTTP interface: routes, error responses, the OpenAPI page, and the gate that every request passes first.

``/v2/...`` are the health and metadata endpoints of the Open Inference Protocol, for platforms that use it
(https://github.com/open-inference/open-inference-protocol). ``Gate`` gives every request an id (header X-Request-ID),
checks its API key and its size, writes a log line, and counts it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from inspect import signature
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recpo import __version__
from recpo.base.errors import RecpoError
from recpo.server import wire
from recpo.server.bundles import Versions
from recpo.server.options import Keys
from recpo.server.ranking import ClosedError, QueueFullError
from recpo.server.service import REQUEST, InvalidAnswerError, LogUnavailableError, Service, UnknownRequestError
from recpo.serving.manifest import program_interface

_DESCRIPTION = """
Recommendations of a bundle from raw events, feedback on them, and a log of both in the columns that `recpo prepare`
reads. Where the server has keys, send `Authorization: Bearer KEY`; probes and metrics need none.
"""
_SHOWN_FAULTS = 5
_STATUS: dict[type[Exception], int] = {
    RecpoError: 422,
    UnknownRequestError: 404,
    QueueFullError: 429,
    InvalidAnswerError: 500,
    LogUnavailableError: 503,
    ClosedError: 503,
    TimeoutError: 504,
}
_HEADERS: dict[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    413: {"Connection": "close"},  # the rest of the body is not read
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}


def create_app(service: Service) -> Gate:
    """The ASGI application of a worker. Its lifespan starts and stops ``service``.

    Raises:
        RecpoError: a key file cannot be used.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(title="recpo serve", version=__version__, description=_DESCRIPTION, lifespan=lifespan)
    recommend = _recommend_routes(service)
    for router in (recommend, protocol_routes(service), _admin_routes(service)):
        app.include_router(router)

    @app.get("/metrics", tags=["Operations"], response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for kind in (RecpoError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    return Gate(app, service, [route for route in recommend.routes if isinstance(route, APIRoute)])


async def _answer_of(route: APIRoute, model: type[BaseModel], body: bytes, x_request_id: str) -> Response:
    """The answer of a route's function to a body, which is a ``model``, or the fault in it.

    The layers of FastAPI between the two would cost as much as reading and ranking a history.
    """
    try:
        answer: Response = await route.endpoint(model.model_validate_json(body))
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
        return _fault(x_request_id, 422, _wrong_fields([{**one, "loc": ("body", *one["loc"])} for one in wrong]))
    except tuple(_STATUS) as error:
        return _fault_of(x_request_id, error)
    return answer


def _recommend_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["Recommendations"], responses=_faults(400, 401, 413, 422, 503))

    @router.post("/recommend", response_model=wire.Recommendation, responses=_faults(429, 500, 504))
    async def recommend(body: wire.RecommendRequest) -> Response:
        """Recommends items for one user. With a log, the impression is on disk before the answer is sent."""
        shown, identifier = await service.recommend(body)
        columns = zip(shown.items, shown.scores, shown.propensity, shown.explored, strict=True)
        answer: dict[str, Any] = {
            "request_id": identifier,
            "bundle": shown.bundle.name,
            "version": shown.bundle.version,
            "checksum": shown.bundle.checksum,
            "items": [
                {"item_id": item, "score": score, "propensity": propensity, "explored": explored}
                for item, score, propensity, explored in columns
            ],
        }
        if service.variants:
            answer["variant"] = shown.variant
        for item, team in zip(answer["items"], shown.team or (), strict=False):
            item["team"] = team
        return Response(to_json(answer), media_type="application/json")

    @router.post("/feedback", response_model=wire.FeedbackAnswer, responses=_faults(404))
    async def feedback(body: wire.FeedbackRequest) -> Response:
        """Takes outcomes of the items of a recommendation. They are on disk before the answer is sent."""
        return JSONResponse({"accepted": await service.feedback(body)})

    return router


def _admin_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix=ADMIN, tags=["Operations"], responses=_faults(400, 401, 403, 422))

    def answer(versions: Versions) -> wire.VersionsAnswer:
        current = versions.current
        return wire.VersionsAnswer(
            name=current.name,
            version=current.version,
            checksum=current.checksum,
            golden_requests=current.golden,
            versions=versions.names,
            previous=versions.previous,
        )

    def of(variant: str | None) -> Versions:
        if variant is not None and variant not in service.of_variant:
            raise HTTPException(404, f"no variant {variant!r:.80}")
        return service.versions if variant is None else service.of_variant[variant]

    @router.get("/versions")
    async def versions(variant: str | None = None) -> wire.VersionsAnswer:
        """The version that serves, and the other versions; of the first variant unless another one is named."""
        return answer(of(variant))

    @router.post("/swap")
    async def swap(body: wire.SwapRequest, variant: str | None = None) -> wire.VersionsAnswer:
        """Switches to another version after it answered its golden requests. Other workers follow within seconds."""
        await asyncio.to_thread(of(variant).swap, body.version)
        return answer(of(variant))

    @router.post("/rollback")
    async def rollback(variant: str | None = None) -> wire.VersionsAnswer:
        """Switches back to the version that served before."""
        await asyncio.to_thread(of(variant).rollback)
        return answer(of(variant))

    return router


async def _on_error(request: Request, error: Exception) -> Response:
    return _fault_of(request.state.x_request_id, error)


def _fault_of(x_request_id: str, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _fault(x_request_id, error.status_code, str(error.detail), error.headers)
    if isinstance(error, RequestValidationError):
        return _fault(x_request_id, 422, _wrong_fields(error.errors()))
    status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
    return _fault(x_request_id, status, str(error) or "the request has waited for too long")


def _fault(x_request_id: str, status: int, detail: str, headers: Any = None) -> Response:
    headers = dict(headers or {}) | _HEADERS.get(status, {})
    detail = detail.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"detail": detail, "x_request_id": x_request_id}, status, headers)


def _wrong_fields(errors: Sequence[Any]) -> str:
    """The location and kind of each error, without values, which may be secret, large, or not JSON."""
    shown = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors[:_SHOWN_FAULTS]]
    more = len(errors) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def _faults(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error responses for the OpenAPI page."""
    meaning = {
        400: "the body is not JSON",
        401: "no valid key",
        403: "not on this server",
        404: "unknown, or too old",
        413: "the body is too large",
        422: "the request is wrong: the detail says where",
        429: "too many requests wait",
        500: "a fault of the server",
        503: "not on disk, and therefore not answered; or the server stops",
        504: "waited for too long",
    }
    return {status: {"model": wire.Fault, "description": meaning[status]} for status in statuses}


_PLATFORM = "onnxruntime_onnx"
_DATATYPES = {"int64": "INT64", "float32": "FP32", "bool": "BOOL"}


def protocol_routes(service: Service) -> APIRouter:
    """``/v2/...``: liveness, readiness, metadata of server and model. Inference is ``/v1/recommend``."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("", summary="Server metadata")
    async def server() -> dict[str, Any]:
        return {"name": "recpo", "version": __version__, "extensions": []}

    @router.get("/health/live", summary="The process answers")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/health/ready", summary="Requests should come here", responses={503: {"description": "not now"}})
    async def ready() -> JSONResponse:
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    @router.get("/models/{name}", summary="Model metadata", responses={404: {"description": "no such model"}})
    async def model(name: str) -> dict[str, Any]:
        _validate(service, name)
        return model_metadata(service)

    @router.get("/models/{name}/ready", summary="The model answers", responses={404: {"description": "no such model"}})
    async def model_ready(name: str) -> JSONResponse:
        _validate(service, name)
        return JSONResponse({"name": name, "ready": service.ready}, 200 if service.ready else 503)

    return router


def model_metadata(service: Service) -> dict[str, Any]:
    """Name, versions, and the tensors of the program."""
    bundle = service.versions.current
    tensors = program_interface(replace(bundle.bundle.manifest, index=None))  # of what ranks, with an index as well
    described = {
        side: [
            {
                "name": name,
                "datatype": _DATATYPES[one["type"]],
                "shape": [size if isinstance(size, int) else -1 for size in one["shape"]],
            }
            for name, one in named.items()
        ]
        for side, named in tensors.items()
    }
    return {"name": bundle.name, "versions": service.versions.names, "platform": _PLATFORM, **described}


def _validate(service: Service, name: str) -> None:
    if name != service.versions.name:
        raise HTTPException(404, f"no model {name!r:.80}: this server has {service.versions.name!r}")


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
        service: the worker; while it drains, answers tell clients to close their connections.
        direct: routes of POST that are called without the application.
    """

    def __init__(self, app: ASGIApp, service: Service, direct: Sequence[APIRoute]) -> None:
        self._direct = {
            route.path: (route, signature(route.endpoint, eval_str=True).parameters["body"].annotation)
            for route in direct
        }
        self.app, self._service, options = app, service, service.options
        self._max_body = options.max_body_kb << 10
        self._too_large = 413, f"the body is larger than {self._max_body:,} bytes: send a shorter history"
        self._api_keys, self._admin_keys = (
            None if file is None else Keys(file) for file in (options.api_keys, options.admin_keys)
        )

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
                if self._service.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self._handle(scope, headers, receive, answer)
        except _ClientGoneError:
            status = 499
        except Exception:
            _LOG.exception("request failed", extra={"fields": {"x_request_id": x_request_id, "path": scope["path"]}})
            if not status:
                detail = "a fault of the server: its log has more under the x_request_id"
                await _fault(x_request_id, 500, detail)(scope, receive, answer)
        finally:
            self._account(scope, status, time.perf_counter() - begun, x_request_id)

    async def _handle(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        x_request_id = scope["state"]["x_request_id"]
        refused = self._refusal(scope["path"], headers)
        body = b"" if refused else await self._body(receive)
        if refused is not None or body is None:
            await _fault(x_request_id, *(refused or self._too_large))(scope, receive, send)
        elif scope["method"] == "POST" and scope["path"] in self._direct:
            route, model = self._direct[scope["path"]]
            scope["route"] = route
            response = await _answer_of(route, model, body, x_request_id)
            await response(scope, receive, send)
        else:
            await self.app(scope, _replay(body, receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Status and reason if the request is rejected here."""
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            return self._too_large
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
        # a client must not be able to create labels from arbitrary paths
        route = getattr(scope.get("route"), "path", "other")
        self._service.metrics.of_request(route, status, seconds)
        if route.startswith("/v2/health") or route == "/metrics":
            return
        fields = {
            "x_request_id": x_request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(seconds * 1000, 2),
        }
        _LOG.info(REQUEST, extra={"fields": fields})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that was already read, replayed for the application."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed

"""The HTTP interface: routes, error responses, and the OpenAPI page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from recpo import __version__
from recpo.base.errors import RecpoError
from recpo.server.batcher import ClosedError, QueueFullError
from recpo.server.gate import ADMIN, Gate
from recpo.server.options import Keys
from recpo.server.protocol import protocol_routes
from recpo.server.service import InvalidAnswerError, LogUnavailableError, Service, UnknownRequestError
from recpo.server.wire import (
    Fault,
    FeedbackAnswer,
    FeedbackRequest,
    Recommendation,
    RecommendRequest,
    SwapRequest,
    VersionsAnswer,
)

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


def create_app(service: Service) -> Gate:
    """The ASGI application of a worker. Its lifespan starts and stops ``service``.

    Raises:
        RecpoError: a key file cannot be used.
    """
    options = service.options

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(title="recpo serve", version=__version__, description=_DESCRIPTION, lifespan=lifespan)
    for router in (_recommend_routes(service), protocol_routes(service), _admin_routes(service)):
        app.include_router(router)
    _add_metrics(app, service)
    _add_faults(app)
    return Gate(
        app,
        service.metrics,
        max_body=options.max_body_kb << 10,
        api_keys=None if options.api_keys is None else Keys(options.api_keys),
        admin_keys=None if options.admin_keys is None else Keys(options.admin_keys),
        draining=lambda: service.draining,
    )


def _recommend_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["Recommendations"], responses=_faults(400, 401, 413, 422, 503))

    @router.post("/recommend", response_model=Recommendation, responses=_faults(429, 500, 504))
    async def recommend(body: RecommendRequest) -> Response:
        """Recommends items for one user. With a log, the impression is on disk before the answer is sent."""
        shown, identifier = await service.recommend(body)
        columns = zip(shown.items, shown.scores, shown.propensity, shown.explored, strict=True)
        answer = {
            "request_id": identifier,
            "bundle": shown.bundle.name,
            "version": shown.bundle.version,
            "checksum": shown.bundle.checksum,
            "items": [
                {"item_id": item, "score": score, "propensity": propensity, "explored": explored}
                for item, score, propensity, explored in columns
            ],
        }
        return JSONResponse(answer)

    @router.post("/feedback", response_model=FeedbackAnswer, responses=_faults(404))
    async def feedback(body: FeedbackRequest) -> Response:
        """Takes outcomes of the items of a recommendation. They are on disk before the answer is sent."""
        return JSONResponse({"accepted": await service.feedback(body)})

    return router


def _admin_routes(service: Service) -> APIRouter:
    router = APIRouter(prefix=ADMIN, tags=["Operations"], responses=_faults(400, 401, 403, 422))

    def answer() -> VersionsAnswer:
        current = service.versions.current
        return VersionsAnswer(
            name=current.name,
            version=current.version,
            checksum=current.checksum,
            golden_requests=current.golden,
            versions=service.versions.names,
            previous=service.versions.previous,
        )

    @router.get("/versions")
    async def versions() -> VersionsAnswer:
        """The version that serves, and the other versions."""
        return answer()

    @router.post("/swap")
    async def swap(body: SwapRequest) -> VersionsAnswer:
        """Switches to another version after it answered its golden requests. Other workers follow within seconds."""
        await asyncio.to_thread(service.versions.swap, body.version)
        return answer()

    @router.post("/rollback")
    async def rollback() -> VersionsAnswer:
        """Switches back to the version that served before."""
        await asyncio.to_thread(service.versions.rollback)
        return answer()

    return router


def _add_metrics(app: FastAPI, service: Service) -> None:
    @app.get("/metrics", tags=["Operations"], response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_faults(app: FastAPI) -> None:
    async def of_request(request: Request, error: Exception) -> Response:
        status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
        return _fault(request, status, str(error) or _reason(status))

    async def of_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _fault(request, 422, _wrong_fields(error.errors()))

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _fault(request, error.status_code, str(error.detail), error.headers)

    for kind in _STATUS:
        app.add_exception_handler(kind, of_request)
    app.add_exception_handler(RequestValidationError, of_body)
    app.add_exception_handler(HTTPException, of_http)


def _fault(request: Request, status: int, detail: str, headers: Any = None) -> Response:
    headers = dict(headers or {}) | ({"Retry-After": "1"} if status in (429, 503) else {})
    detail = detail.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"detail": detail, "x_request_id": request.state.x_request_id}, status, headers)


def _wrong_fields(errors: Sequence[Any]) -> str:
    """The location and kind of each error, without values, which may be secret, large, or not JSON."""
    shown = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors[:_SHOWN_FAULTS]]
    more = len(errors) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def _reason(status: int) -> str:
    return {
        429: "too many requests wait: try again in a second",
        503: "this server stops: try another one",
        504: "the request has waited for too long",
    }[status]


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
    return {status: {"model": Fault, "description": meaning[status]} for status in statuses}

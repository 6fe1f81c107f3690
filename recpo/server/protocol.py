"""Health and metadata endpoints of the Open Inference Protocol (v2), for platforms that use it.

https://github.com/open-inference/open-inference-protocol
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException
from starlette.responses import JSONResponse

from recpo import __version__
from recpo.server.service import Service
from recpo.serving.program_inputs import program_inputs

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
    manifest = bundle.bundle.manifest
    inputs = [
        {
            "name": one.name,
            "datatype": _DATATYPES[one.type],
            "shape": [-1, *(size if isinstance(size, int) else -1 for size in one.shape)],
        }
        for one in program_inputs(manifest.max_history, manifest.reads)
    ]
    return {
        "name": bundle.name,
        "versions": service.versions.names,
        "platform": _PLATFORM,
        "inputs": inputs,
        "outputs": [
            {"name": "top_items", "datatype": "INT64", "shape": [-1, manifest.k]},
            {"name": "scores", "datatype": "FP32", "shape": [-1, manifest.k]},
        ],
    }


def _validate(service: Service, name: str) -> None:
    if name != service.versions.name:
        raise HTTPException(404, f"no model {name!r:.80}: this server has {service.versions.name!r}")

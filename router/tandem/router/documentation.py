"""The OpenAPI document, and the pages that show it."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html

routes = APIRouter(include_in_schema=False)

DOCUMENT = "/openapi.json"
_TITLE = "Tandem"


@routes.get(DOCUMENT)
async def openapi(request: Request) -> Response:
    """Answer with the document of this server."""
    return Response(msgspec.json.encode(request.app.openapi()), media_type="application/json")


@routes.get("/docs")
async def docs(request: Request) -> Response:
    """Answer with a page on which requests can be tried."""
    return get_swagger_ui_html(openapi_url=_url(request), title=_TITLE)


@routes.get("/redoc")
async def redoc(request: Request) -> Response:
    """Answer with a page to read."""
    return get_redoc_html(openapi_url=_url(request), title=_TITLE)


def _url(request: Request) -> str:
    root: str = request.scope.get("root_path", "")
    return root.rstrip("/") + DOCUMENT

"""The OpenAPI document; ``ui`` has the page that shows it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tandem.router.shared_answers import SharedAnswers

routes = APIRouter(include_in_schema=False)

DOCUMENT = "/openapi.json"


@routes.get(DOCUMENT)
async def openapi(request: Request) -> Response:
    """Answer with the document of this server."""
    answers: SharedAnswers = request.app.state.answers
    content = await answers.get("openapi", lambda: request.app.state.document, owner="openapi")
    return Response(content, media_type="application/json")

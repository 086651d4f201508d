"""The OpenAPI document; ``ui`` has the page that shows it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tandem.router.endpoints import Routes
from tandem.router.shared_answers import SharedAnswers

routes = Routes()

DOCUMENT = "/openapi.json"


@routes.get(DOCUMENT)
async def openapi(request: Request) -> Response:
    """Answer with the document of this server."""
    answers: SharedAnswers = request.app.state.answers
    content = await answers.get("openapi", lambda: request.app.state.document, owner="openapi")
    return Response(content, media_type="application/json")

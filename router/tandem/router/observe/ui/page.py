"""``/ui`` and ``/docs``, and their files.

They contain no data, so they require no key. A policy forbids loading from other hosts.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from tandem.router.endpoints import Routes

routes = Routes()

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_STATIC = {each.name: each.read_bytes() for each in (files(__package__) / "static").iterdir()}
_PAGES = {"index.html": ("/ui",), "docs.html": ("/docs", "/redoc")}


def _serve(name: str) -> None:
    kind, content = _KINDS[name.rpartition(".")[2]], _STATIC[name]

    async def serve(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    for path in _PAGES.get(name, (f"/ui/{name}",)):
        routes.get(path)(serve)


for _name in _STATIC:
    _serve(_name)

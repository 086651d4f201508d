"""Client for the debug endpoints of a running router."""

from __future__ import annotations

from typing import Any

import httpx

from tandem.cli.serve import listening
from tandem.cli.settings.secret_flags import api_key_of
from tandem.protocol.errors import InvalidParameter, TandemError
from tandem.protocol.names import ROUTER_PORT

ANSWER_SECONDS = 30.0


def check_url(param: str, url: str) -> None:
    """Raise InvalidParameter unless ``url`` is http:// or https:// with a host."""
    allowed = f"a URL such as http://127.0.0.1:{ROUTER_PORT}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidParameter(param, url, f"{allowed} ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidParameter(param, url, allowed)


def key_headers(key: str | None) -> dict[str, str]:
    """Return headers with the API key, given or from the environment.

    InvalidParameter hides the key.
    """
    key = api_key_of(key)
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable() and key.strip()):
        raise InvalidParameter("--api-key", "(not shown)", "printable ASCII, one character or more")
    return {"Authorization": f"Bearer {key}"}


class RouterClient:
    """Connection for several requests."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        check_url("--url", url)
        self.url = url
        headers = key_headers(api_key)
        self._client = httpx.Client(
            base_url=url, headers=headers, timeout=ANSWER_SECONDS, mounts=listening.mounts(url)
        )

    def get(self, path: str) -> dict[str, Any]:
        """Return the object at ``path``. Raises TandemError."""
        try:
            answer = self._client.get(path)
            content = answer.json()
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise TandemError(f"no server answers at {self.url} ({reason})") from error
        except ValueError as error:
            raise TandemError(f"{self.url} does not answer as a router does") from error
        if not isinstance(content, dict):
            raise TandemError(f"{self.url} does not answer as a router does")
        if answer.status_code != 200:
            raise TandemError(_message(content, answer.status_code))
        return content

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _message(content: dict[str, Any], status: int) -> str:
    error = content.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"[{status}] {message or 'no reason is given'}"

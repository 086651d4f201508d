"""`tandem explain`: draws where the time of one of a server's last calls went."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import httpx

from tandem.cli.chat import check_url
from tandem.cli.command import Parser
from tandem.cli.explained import drawn
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT


def run(argv: list[str]) -> int:
    """Print it; 1 if the server does not know the call."""
    parser = Parser(prog="tandem explain", description=__doc__)
    parser.add_argument("request_id", help="the call's x-request-id, or the id of its answer")
    parser.add_argument("--url", default=f"http://127.0.0.1:{ROUTER_PORT}", help="the router's URL")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--width", type=int, default=100, help="columns of the drawing")
    options = parser.read(argv)
    check_url("--url", options.url)
    if not 60 <= options.width <= 400:
        raise InvalidParameter("--width", options.width, "an integer, 60 to 400")
    content = _asked(options)
    if content is None:
        return 1
    print(drawn(content, options.width))
    return 0


def _asked(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the server keeps of the call; None after an error, which is printed."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        with httpx.Client(base_url=options.url, headers=headers, timeout=30.0) as client:
            answer = client.get(f"/debug/requests/{options.request_id}")
        content: dict[str, Any] = answer.json()
    except httpx.HTTPError as error:
        _fail(f"no server answers at {options.url} ({error})")
        return None
    except ValueError:
        _fail(f"{options.url} does not answer as a router does")
        return None
    if answer.status_code == 200:
        return content
    _fail(str(content.get("error", {}).get("message", answer.status_code)))
    return None


def _fail(text: str) -> None:
    print(f"tandem explain: {text}", file=sys.stderr)

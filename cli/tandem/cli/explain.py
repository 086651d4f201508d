"""`tandem explain`: draws where the time of one of a server's last calls went.

`tandem explain service NAME` is `explain_service`.
"""

from __future__ import annotations

from urllib.parse import quote

from tandem.cli.asking_router import RouterClient
from tandem.cli.command import Parser
from tandem.cli.explained import drawn
from tandem.cli.secret_flags import ENV_API_KEY
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT


def run(argv: list[str]) -> int:
    """Print it. Raises NoAnswer, also if the server does not know the call."""
    if argv[:1] == ["service"]:
        from tandem.cli import explain_service  # the operator's needs are not a router's

        return explain_service.run(argv[1:])
    parser = Parser(
        prog="tandem explain",
        description="Draw where the time of one of a server's last calls went.",
        epilog="`tandem explain service NAME` tells what the operator would do for an LLMService.",
    )
    parser.add_argument("request_id", help="the call's x-request-id, or the id of its answer")
    parser.add_argument("--url", default=f"http://127.0.0.1:{ROUTER_PORT}", help="the router's URL")
    parser.add_argument(
        "--api-key", help=f"sent as a bearer token; {ENV_API_KEY} says the same, unseen"
    )
    parser.add_argument("--width", type=int, default=100, help="columns of the drawing")
    options = parser.read(argv)
    if not 60 <= options.width <= 400:
        raise InvalidParameter("--width", options.width, "an integer, 60 to 400")
    with RouterClient(options.url, options.api_key) as client:
        content = client.get(f"/debug/requests/{quote(options.request_id, safe='')}")
    print(drawn(content, options.width))
    return 0

"""`tandem top`: a running router's workers, links, queues and rates, live in the terminal."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from tandem.cli.asking_router import RouterClient
from tandem.cli.command import Parser
from tandem.cli.fleet_drawn import Frame, drawn
from tandem.cli.secret_flags import ENV_API_KEY
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT

FLEET = "/debug/fleet"
RECENT = "/debug/requests?limit=12"
SHORTEST, LONGEST = 0.2, 3600.0
"""Bounds of the seconds between two requests."""
_PIPE_COLUMNS = 140


def run(argv: list[str]) -> int:
    """Show the fleet until Ctrl-C. Return 1 if the router does not answer, or refuses."""
    parser = Parser(prog="tandem top", description=__doc__)
    parser.add_argument("--url", default=f"http://127.0.0.1:{ROUTER_PORT}", help="the router's URL")
    parser.add_argument(
        "--api-key", help=f"sent as a bearer token; {ENV_API_KEY} says the same, unseen"
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print one frame and leave")
    parser.add_argument(
        "--json", action="store_true", help="print the router's own words, a line for each look"
    )
    options = parser.read(argv)
    if not (math.isfinite(options.interval) and SHORTEST <= options.interval <= LONGEST):
        allowed = f"a number from {SHORTEST:g} to {LONGEST:g}"
        raise InvalidParameter("--interval", options.interval, allowed)
    with RouterClient(options.url, options.api_key) as client:
        try:
            if options.json:
                _print_json(client, options.interval, once=options.once)
            elif options.once:
                _console().print(drawn(_look(client), None))
            else:
                _watch(client, options.interval)
        except KeyboardInterrupt:
            return 0
    return 0


def _look(client: RouterClient) -> Frame:
    """Return the router's current state. Raises NoAnswer."""
    fleet, recent = client.get(FLEET), client.get(RECENT)
    return Frame(client.url, time.strftime("%H:%M:%S"), fleet, recent.get("requests", []))


def _watch(client: RouterClient, interval: float) -> None:
    """Refresh the screen repeatedly. The terminal is restored on every exit."""
    frame = _look(client)
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(drawn(frame, console.height), refresh=True)
            time.sleep(interval)
            frame = _look(client)


def _print_json(client: RouterClient, interval: float, *, once: bool) -> None:
    while True:
        fleet: dict[str, Any] = client.get(FLEET)
        print(json.dumps(fleet), flush=True)
        if once:
            return
        time.sleep(interval)


def _console() -> Console:
    """Return a console with the terminal's width, or wide enough for all columns without one."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_COLUMNS)

"""`tandem top`: a running router's workers, links, queues and rates, live in the terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.cli.inspect.explain import plain
from tandem.cli.inspect.requests import RouterClient
from tandem.cli.settings.command import Parser
from tandem.cli.settings.secret_flags import ENV_API_KEY
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT

Json = Mapping[str, Any]

WIDTH = 40
"""Columns of a bar for a whole call."""
_CALL_STYLES = {"client": "blue", "router": "magenta", "prefill": "yellow", "decode": "green"}
_BAD = 400


def calls_table(calls: Sequence[Json]) -> Table:
    """Return a table with a row for each call, the latest first."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("call", no_wrap=True, overflow="ellipsis", max_width=26)
    table.add_column("status", no_wrap=True)
    for name in ("in", "out", "first token", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(_legend(), no_wrap=True)
    for each in calls:
        first = each["first_token_ms"]
        table.add_row(
            literal(f"{each['path'].removeprefix('/v1/')} {each['request_id'][:8]}"),
            _status(each),
            f"{each['num_prompt_tokens']:,}",
            f"{each['num_tokens']:,}",
            "" if first is None else f"{first:,.1f} ms",
            f"{each['total_ms']:,.1f} ms",
            bar_of(each),
        )
    return table


def literal(text: str, style: str = "") -> Text:
    """Return a cell with foreign text, without markup and control characters."""
    return Text(plain(text), style)


def bar_of(call: Json) -> Text:
    """Return a bar of ``WIDTH`` time slices, each in the colour of its longest owner."""
    total = max(call["total_ms"], 1e-9)
    shares: list[dict[str, float]] = [{} for _ in range(WIDTH)]
    for owner, _, begin, length in call["parts"]:
        _spread(shares, owner, begin / total * WIDTH, (begin + length) / total * WIDTH)
    text = Text()
    for each in shares:
        owner = max(each, key=lambda name: each[name], default="")
        text.append("█" if owner else " ", _CALL_STYLES.get(owner, "dim"))
    return text


def _spread(shares: list[dict[str, float]], owner: str, begin: float, end: float) -> None:
    for column in range(max(0, int(begin)), min(WIDTH, int(end) + 1)):
        covered = min(end, column + 1) - max(begin, column)
        if covered > 0:
            shares[column][owner] = shares[column].get(owner, 0.0) + covered


def _status(call: Json) -> Text:
    if call["running"]:
        return Text("runs", "cyan")
    status = call["status"]
    return Text(str(status or ""), "red" if status is None or status >= _BAD else "green")


def _legend() -> Text:
    text = Text()
    for owner, style in _CALL_STYLES.items():
        text.append("█ ", f"not dim {style}").append(f"{owner}  ", "dim")
    return text


BAR = 10
"""Columns of a bar."""
_STYLES = {"up": "green", "down": "red", "quarantined": "bold red", "suspect": "yellow"}
_OTHER_STYLE = "yellow"
_WORST_FIRST = ("quarantined", "down", "resting", "up")
_AROUND = 19
"""Lines of a frame besides its rows."""
_FEWEST = 4
"""Minimum rows of a table."""
_PHASES = {
    "admission": "router's queue",
    "no_worker": "no worker",
    "sent": "sent",
    "prefill": "prefill",
    "handoff": "hand-off",
    "decode": "decode",
    "client": "client reads",
}


@dataclass(frozen=True, slots=True)
class Frame:
    """Data of one refresh."""

    url: str
    clock: str
    fleet: Json
    calls: Sequence[Json]


def drawn(frame: Frame, height: int | None) -> RenderableType:
    """Return the frame, cut to ``height`` lines; None for any number."""
    fleet = frame.fleet
    workers: Sequence[Json] = fleet["workers"]
    links: Sequence[Json] = fleet["handoff_links"]
    rooms = _rooms(height, [len(workers), len(links), len(frame.calls)])
    blocks: list[RenderableType] = [
        _head(frame, workers),
        _rates(fleet["rates"]),
        _workers(workers, rooms[0]),
    ]
    if links:
        left_out = fleet.get("handoff_links_left_out", 0)
        blocks.append(_links(links, workers, rooms[1], left_out))
    blocks += [_underway(fleet["underway"]), _queue(fleet["queue"])]
    lost = [f"{at} ({state})" for at, state in fleet["links"].items() if state != "up"]
    if lost:
        blocks.append(_cut(f"no worker answers at {', '.join(lost)}", "yellow"))
    if frame.calls:
        blocks += [Text(""), calls_table(frame.calls[: rooms[2]])]
    return Group(*blocks)


def _rooms(height: int | None, wanted: Sequence[int]) -> list[int]:
    """Return the rows of each table: all, or an equal share."""
    if height is None:
        return list(wanted)
    left, rooms = max(0, height - _AROUND), []
    for index, rows in enumerate(wanted):
        room = min(rows, max(_FEWEST, left // (len(wanted) - index)))
        rooms.append(room)
        left = max(0, left - room)
    return rooms


def _head(frame: Frame, workers: Sequence[Json]) -> Text:
    roles = [each["role"] for each in workers]
    models = ", ".join(dict.fromkeys(str(each["model"]) for each in workers)) or "no model yet"
    counts = f"{roles.count('prefill')} prefill, {roles.count('decode')} decode"
    head = Text.assemble(("tandem top", "bold"), f"  {frame.url}  {frame.clock}  ")
    return head.append(plain(models), "bold cyan").append(f"  {counts}")


def _rates(rates: Json) -> Text:
    if not rates.get("window_s"):
        return Text("rates: not known yet", "dim")
    shown = [
        f"{rates['requests_per_s']:.1f} requests/s",
        f"{rates['prompt_tokens_per_s']:,.0f} prompt tokens/s",
        f"{rates['outputs_per_s']:,.0f} outputs/s",
    ]
    if rates["ttft_ms"] is not None:
        shown.append(f"first token {rates['ttft_ms']:,.1f} ms")
    if rates["itl_ms"] is not None:
        shown.append(f"between tokens {rates['itl_ms']:,.2f} ms")
    if rates["cached_share"] is not None:
        shown.append(f"{rates['cached_share']:.0%} of prompts cached")
    text = Text("  ".join(shown))
    if rates["failed_per_s"]:
        text.append(f"  {rates['failed_per_s']:.2f} failed/s", "bold red")
    return text.append("\n")


def _workers(workers: Sequence[Json], room: int) -> Table:
    table = _table("worker", "health", left=2)
    for name in ("run", "wait", "KV", "steps/s", "prompt t/s", "new t/s", "beat"):
        table.add_column(name, justify="left" if name == "KV" else "right", no_wrap=True)
    ordered = sorted(workers, key=lambda each: (each["role"] != "prefill", each["name"]))
    for each in ordered[:room]:
        health, beat = each["health"], each["heard_ms_ago"]
        table.add_row(
            literal(f"{each['role']} {each['pod'] or each['endpoint']}"),
            literal(health, _STYLES.get(health, _OTHER_STYLE)),
            f"{each['running']}/{each['max_running']}",
            str(each["waiting"]),
            _bar(each["kv_use"]),
            _number(each["steps_per_s"], 1),
            _number(each["prompt_tokens_per_s"], 0),
            _number(each["generated_tokens_per_s"], 0),
            "" if beat is None else f"{beat / 1000:.1f} s",
        )
    return _more(table, len(workers) - room)


def _links(links: Sequence[Json], workers: Sequence[Json], room: int, left_out: int) -> Table:
    table = _table("hand-off", "state", "over", left=3)
    for name in ("GB/s", "waiting", "under way", "done", "failed", "/s"):
        table.add_column(name, justify="right", no_wrap=True)
    places = {each["incarnation"]: each["pod"] or each["endpoint"] for each in workers}
    for each in sorted(links, key=_rank)[:room]:
        state = each["state"]
        ends = (places.get(each[end], each[end][:8]) for end in ("prefill", "decode"))
        reason = f": {each['reason'][:40]}" if each["reason"] else ""
        table.add_row(
            literal(" → ".join(ends)),
            literal(f"{state}{reason}", _STYLES.get(state, _OTHER_STYLE)),
            literal(each["transport"] or ""),
            f"{each['gb_per_s']:.2f}" if each["gb_per_s"] else "",
            f"{each['waiting_bytes'] / 1e6:,.1f} MB" if each["waiting_bytes"] else "",
            str(each["underway"]),
            f"{each['handoffs']:,}",
            Text(str(each["failed"]), "red" if each["failed"] else ""),
            f"{each['handoffs_per_s']:.1f}",
        )
    return _more(table, len(links) - room + left_out)


def _rank(link: Json) -> tuple[int, float, str]:
    """Return the sort key: worst first, then busiest."""
    return _WORST_FIRST.index(link["state"]), -link["handoffs_per_s"], link["decode"]


def _underway(underway: Mapping[str, int]) -> Text:
    text = Text(f"under way {sum(underway.values())}", "bold")
    for phase, count in underway.items():
        text.append(f"  {_PHASES.get(phase, phase)} ", "not bold")
        text.append(str(count), "bold" if count else "dim not bold")
    return text


def _queue(queue: Json) -> Text:
    waits = f", the oldest for {queue['oldest_wait_s']:.1f} s" if queue["waiting"] else ""
    words = (
        f"router's queue: {queue['waiting']:,} of {queue['max_waiting']:,} wait{waits}; "
        f"{queue['running']:,} of {queue['max_running']:,} run"
    )
    refused = ", ".join(f"{count:,} by {why}" for why, count in queue["rejected"].items())
    text = Text(words)
    return text.append(f"; refused: {refused}", "yellow") if refused else text


def _table(*names: str, left: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names[:left]:
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    return table


def _more(table: Table, count: int) -> Table:
    if count > 0:
        table.add_row(Text(f"… {count:,} more", "dim"))
    table.add_row("")
    return table


def _bar(share: float | None) -> Text:
    if share is None:
        return Text("")
    full = round(max(0.0, min(1.0, share)) * BAR)
    style = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"
    text = Text("█" * full, style).append("░" * (BAR - full), "dim")
    return text.append(f" {share:>4.0%}", "not dim")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _cut(text: str, style: str) -> Text:
    return Text(plain(text), style, overflow="ellipsis", no_wrap=True)


FLEET = "/debug/fleet"
RECENT = "/debug/requests?limit=12"
SHORTEST, LONGEST = 0.2, 3600.0
"""Bounds of the refresh interval in seconds."""
_PIPE_COLUMNS = 140


def run(argv: list[str]) -> int:
    """Show the fleet until Ctrl-C. Return 1 if the router does not answer."""
    parser = Parser(prog="tandem top", description=__doc__)
    parser.add_argument("--url", default=f"http://127.0.0.1:{ROUTER_PORT}", help="the router's URL")
    parser.add_argument("--api-key", help=f"bearer token; default: {ENV_API_KEY}")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two updates")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument(
        "--json", action="store_true", help="print the router's JSON, one line per update"
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
    fleet, recent = client.get(FLEET), client.get(RECENT)
    return Frame(client.url, time.strftime("%H:%M:%S"), fleet, recent.get("requests", []))


def _watch(client: RouterClient, interval: float) -> None:
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
    """Return a console with the terminal's width, or one wide enough."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_COLUMNS)

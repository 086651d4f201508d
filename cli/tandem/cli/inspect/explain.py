"""`tandem explain`: draws where the time of one of a server's last calls went.

`tandem explain service NAME` is `explain_service`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from tandem.cli.inspect.requests import RouterClient
from tandem.cli.settings.command import Parser
from tandem.cli.settings.secret_flags import ENV_API_KEY
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT

Json = Mapping[str, Any]

STALL_MS = 150.0
"""Minimum duration of a reported stall."""
_STALLS = {
    "stood still": "stood still",
    "not taken yet": "did not take the request",
    "no word of it": "had the request but sent no message",
    "no word of it, then lost": "had the request and was lost",
}
MAX_ROWS = 200


def plain(text: str) -> str:
    """Return the text with control characters and bidirectional marks escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def drawn(content: Json, width: int) -> str:
    """Return the whole text, ``width`` columns wide."""
    return "\n".join(
        plain(line.rstrip())
        for block in (
            _head(content),
            _bars(content, width),
            _attempts(content),
            _stream(content),
            _verdict(content),
        )
        for line in block
    )


def _head(content: Json) -> Iterator[str]:
    state = "still running" if content["running"] else f"status {content['status']}"
    yield f"{content['path']}  {content['request_id']}  {state}  {content['started']}"
    if content["trace_id"]:
        yield f"trace {content['trace_id']}"
    first = content["first_token_ms"]
    first_text = "" if first is None else f", first token after {first:.1f} ms"
    counts = f"{content['num_prompt_tokens']} tokens in, {content['num_tokens']} out"
    yield f"{content['total_ms']:.1f} ms in all{first_text}; {counts}"
    yield ""


def _bars(content: Json, width: int) -> Iterator[str]:
    """Yield a row for each part, with a bar at its time."""
    total = max(content["total_ms"], 1e-9)
    room = width - 56
    parts: Sequence[Json] = content["parts"]
    for part in parts[:MAX_ROWS]:
        left = min(room - 1, int(part["begin_ms"] / total * room))
        length = max(1, min(room - left, round(part["ms"] / total * room)))
        name = f"{part['owner']}: {part['name']}"
        if part["name"] == "chunk":
            name += f" of {part['amount']} tokens"
        times = f"{part['begin_ms']:>10.1f} {part['ms']:>10.1f} ms"
        yield f"{name[:30]:<30} {times} {' ' * left}{'#' * length}"
    if len(parts) > MAX_ROWS:
        yield f"... {len(parts) - MAX_ROWS} parts more"
    whole = sum(part["ms"] for part in parts)
    yield f"{'sum of the parts':<30} {'':>10} {whole:>10.1f} ms"


def _attempts(content: Json) -> Iterator[str]:
    for attempt in content["attempts"]:
        yield ""
        yield f"attempt {attempt['number']} ({attempt['kind']}): {attempt['rule']}"
        for each in attempt["candidates"]:
            yield _candidate(each)
        for leg in attempt["legs"]:
            yield from _leg(leg)
        if attempt["failure"]:
            yield f"  failed after {attempt['end_ms'] - attempt['begin_ms']:.1f} ms: "
            yield f"    {attempt['failure']}"


def _candidate(each: Json) -> str:
    shown = ("cached_tokens", "pending_tokens")
    numbers = [f"{name.replace('_', ' ')} {each[name]:g}" for name in shown if name in each]
    numbers.append(f"requests {each['requests']}")
    if each["prefill_tokens_per_s"]:
        numbers.append(f"{each['prefill_tokens_per_s']:g} tokens/s")
    if each.get("link_wait_ms"):
        numbers.append(f"its link has a backlog of {each['link_wait_ms']:.1f} ms")
    numbers += [name for name in ("draining", "suspect") if each.get(name)]
    return f"  {'->' if each['chosen'] else '  '} {each['worker']}: {', '.join(numbers)}"


def _leg(leg: Json) -> Iterator[str]:
    yield f"  {leg['worker']}: sent at {leg['sent_ms']:.1f} ms"
    if leg["notes"] is None:
        yield "    no timeline from this worker"
        return
    yield f"    placed to within {leg['off_by_at_most_ms']:.1f} ms"
    for note in leg["notes"]:
        amount, rate = note.get("amount"), note.get("gb_per_s")
        unit = {"chunk": "tokens", "part": "bytes", "load": "bytes"}.get(note["name"], "")
        more = f", {amount} {unit}".rstrip() if amount else ""
        more += f", {rate:.3f} GB/s" if rate else ""
        yield f"    {note['name']:<12} {note['begin_ms']:>10.1f} {note['ms']:>10.1f} ms{more}"
    if leg["dropped"]:
        yield f"    {leg['dropped']} notes more"


def _stream(content: Json) -> Iterator[str]:
    stream = content["stream"]
    if not stream["outputs"]:
        return
    yield ""
    yield (
        f"stream: {stream['outputs']} outputs, {stream['waiting_ms']:.1f} ms waiting for workers "
        f"between them, {stream['writing_ms']:.1f} ms writing to the client"
    )
    waits = stream["longest_waits"][:4]
    if waits:
        listed = ", ".join(f"{each['ms']:.1f} ms until {each['end_ms']:.1f}" for each in waits)
        yield f"longest waits between tokens: {listed}"


def _verdict(content: Json) -> Iterator[str]:
    """Yield the parties that stalled or were lost, and whether the client was slow."""
    stalls = [
        part for part in content["parts"] if part["name"] in _STALLS and part["ms"] >= STALL_MS
    ]
    if stalls:
        yield ""
    for part in sorted(stalls, key=lambda each: -each["ms"]):
        what = _STALLS[part["name"]]
        who = part.get("worker", part["owner"])
        yield f"! {who} {what} for {part['ms'] / 1000:.2f} s, from {part['begin_ms']:.1f} ms on"
    writing = content["stream"]["writing_ms"]
    if writing >= STALL_MS and writing >= content["total_ms"] / 4:
        yield f"! the client took {writing / 1000:.2f} s to read its answer"


def run(argv: list[str]) -> int:
    """Print a call. Raises TandemError, also for an unknown call."""
    if argv[:1] == ["service"]:
        from tandem.cli.inspect import explain_service  # needs the operator's packages

        return explain_service.run(argv[1:])
    parser = Parser(
        prog="tandem explain",
        description="Draw where the time of one of a server's last calls went.",
        epilog="`tandem explain service NAME` shows what the operator would do for an LLMService.",
    )
    parser.add_argument("request_id", help="the call's x-request-id, or the id of its answer")
    parser.add_argument("--url", default=f"http://127.0.0.1:{ROUTER_PORT}", help="the router's URL")
    parser.add_argument("--api-key", help=f"bearer token; default: {ENV_API_KEY}")
    parser.add_argument("--width", type=int, default=100, help="width of the drawing, in columns")
    options = parser.read(argv)
    if not 60 <= options.width <= 400:
        raise InvalidParameter("--width", options.width, "an integer, 60 to 400")
    with RouterClient(options.url, options.api_key) as client:
        content = client.get(f"/debug/requests/{quote(options.request_id, safe='')}")
    print(drawn(content, options.width))
    return 0

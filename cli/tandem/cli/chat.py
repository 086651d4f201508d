"""`tandem chat`: a conversation with a running server, streamed, in the terminal.

Reasoning is dim on a terminal, and is not part of later turns. If the output is not a terminal, it
has the answers only; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import httpx

from tandem.cli.inspect.requests import check_url, key_headers
from tandem.cli.serve import listening
from tandem.cli.settings.command import Parser
from tandem.cli.settings.secret_flags import ENV_API_KEY
from tandem.protocol.names import ROUTER_PORT

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_MARK = "[thought] "
"""Prefix of reasoning without dim text."""


class AnswerDrawn:
    """Writer of one answer. Call ``end`` even after an error."""

    def __init__(self) -> None:
        self.text = ""
        """Content so far, without reasoning."""
        self._thinks = False
        self._together = sys.stdout.isatty()
        """Whether content and reasoning go to one terminal."""
        self._aside = sys.stdout if self._together else sys.stderr
        self._dims = self._aside.isatty() and os.environ.get("TERM") != "dumb"

    def think(self, piece: str) -> None:
        if piece and not self._thinks:
            self._thinks = True
            gap = "\n\n" if self.text and self._together else ""
            _write(self._aside, gap + (_DIM if self._dims else _MARK))
        _write(self._aside, piece)

    def write(self, piece: str) -> None:
        if piece:
            self._leave_thought("\n\n" if self._together else "\n")
        self.text += piece
        _write(sys.stdout, piece)

    def note(self, words: str) -> None:
        """Write how the answer ended, unless normally."""
        self._leave_thought("" if self._together else "\n")
        _write(self._aside, f" [{words}]" if self._together else f"[{words}]\n")

    def end(self) -> None:
        self._leave_thought("" if self._together else "\n")
        _write(sys.stdout, "\n")

    def _leave_thought(self, gap: str) -> None:
        if self._thinks:
            _write(self._aside, (_PLAIN if self._dims else "") + gap)
            self._thinks = False  # before the write, so that ``end`` resets an interrupted one


def _write(stream: TextIO, text: str) -> None:
    print(text, end="", file=stream, flush=True)


_HELP = "Type a message. /reset starts over, /system TEXT sets the system prompt, /quit leaves."


def run(argv: list[str]) -> int:
    """Chat until the input ends; 1 if the server fails."""
    parser = Parser(prog="tandem chat", description=__doc__)
    parser.add_argument("--url", default=f"http://127.0.0.1:{ROUTER_PORT}", help="the router's URL")
    parser.add_argument("--model", help="model name; default: the first one served")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=512,
        help="maximum tokens of an answer, including reasoning",
    )
    parser.add_argument("--api-key", help=f"bearer token; default: {ENV_API_KEY}")
    parser.add_argument(
        "message", nargs="*", help="one message; the command exits after its answer"
    )
    options = parser.read(argv)
    check_url("--url", options.url)
    with httpx.Client(
        base_url=options.url,
        headers=key_headers(options.api_key),
        timeout=300.0,
        mounts=listening.mounts(options.url),
    ) as client:
        try:
            return _converse(client, options)
        except httpx.ConnectError as error:
            return _fail(f"no server answers at {options.url} ({error}); `tandem up` starts one")
        except httpx.HTTPError as error:
            return _fail(f"{options.url} broke off: {str(error) or type(error).__name__}")


def _fail(text: str) -> int:
    print(f"tandem chat: {text}", file=sys.stderr)
    return 1


def _first_model(client: httpx.Client) -> str | None:
    """Return the first model in the server's list; None after a printed error."""
    response = client.get("/v1/models")
    if response.status_code != 200:
        _fail(f"[{response.status_code}] {_message(response)}")
        return None
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        _fail(f"{client.base_url} answers, but names no model as an OpenAI server does")
        return None


class StreamError(Exception):
    """A stream ended with the server's error."""


def _converse(client: httpx.Client, options: argparse.Namespace) -> int:
    model = options.model or _first_model(client)
    if model is None:
        return 1
    history: list[dict[str, str]] = _opening(options.system)
    if options.message:
        history.append({"role": "user", "content": " ".join(options.message)})
        return 0 if _answer(client, model, history, options) is not None else 1
    print(f"{model} at {options.url}. {_HELP}")
    while True:
        try:
            line = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/reset":
            history = _opening(options.system)
        elif line.startswith("/system"):
            options.system = line.removeprefix("/system").strip() or None
            history = _opening(options.system)
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            history.append({"role": "user", "content": line})
            answer = _answer(client, model, history, options)
            if answer is None:
                history.pop()  # no answer: the user may ask again
            else:
                history.append({"role": "assistant", "content": answer})


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _answer(
    client: httpx.Client, model: str, history: list[dict[str, str]], options: argparse.Namespace
) -> str | None:
    """Write the answer as it arrives. Return its content, or None after a printed error."""
    body = {
        "model": model,
        "messages": history,
        "stream": True,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    printer = AnswerDrawn()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            _fail(f"[{response.status_code}] {_message(response)}")
            return None
        try:
            _draw_all(printer, response, options.max_tokens)
        except StreamError as error:
            _fail(str(error))
            return None
    return printer.text


def _draw_all(printer: AnswerDrawn, response: httpx.Response, max_tokens: int) -> None:
    try:
        for event in _events(response):
            _draw(printer, event, max_tokens)
    except KeyboardInterrupt:
        printer.note("stopped")
    finally:
        printer.end()


def _events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield line.removeprefix("data: ")


def _draw(printer: AnswerDrawn, text: str, max_tokens: int) -> None:
    """Write the content of an event. Raises StreamError."""
    try:
        event = json.loads(text)
        if "error" in event:
            raise StreamError(str(event["error"]["message"]))
        for choice in event["choices"]:
            delta = choice["delta"]
            printer.think(delta.get("reasoning") or delta.get("reasoning_content") or "")
            printer.write(delta.get("content") or "")
            if choice.get("finish_reason") == "length":
                printer.note(f"cut at {max_tokens} tokens; --max-tokens allows more")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StreamError(f"the server sent an invalid event: {text[:200]}") from error


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]

"""`tandem chat`: a conversation with a running server, streamed, in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import httpx

from tandem.protocol.names import ROUTER_PORT

_HELP = "Type a message. /reset starts over, /system TEXT sets the system prompt, /quit leaves."


def run(argv: list[str]) -> int:
    """Talk until the input ends."""
    parser = argparse.ArgumentParser(prog="tandem chat", description=__doc__)
    parser.add_argument("--url", default=f"http://127.0.0.1:{ROUTER_PORT}", help="the router's URL")
    parser.add_argument("--model", help="model name; default: the first one served")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("message", nargs="*", help="one message: answer it and leave")
    options = parser.parse_args(argv)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with httpx.Client(base_url=options.url, headers=headers, timeout=300.0) as client:
        try:
            return _converse(client, options)
        except httpx.ConnectError as error:
            print(f"no server answers at {options.url} ({error}); start one with `tandem up`")
            return 1


def _converse(client: httpx.Client, options: argparse.Namespace) -> int:
    model = options.model or client.get("/v1/models").json()["data"][0]["id"]
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
            history.append({"role": "assistant", "content": answer or ""})


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _answer(
    client: httpx.Client, model: str, history: list[dict[str, str]], options: argparse.Namespace
) -> str | None:
    """Print the answer as it comes; None after an error, which is printed."""
    body = {
        "model": model,
        "messages": history,
        "stream": True,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            print(f"[{response.status_code}] {_message(response)}")
            return None
        try:
            for piece in _pieces(response):
                text += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
    print()
    return text


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            yield f"\n[error] {event['error'].get('message', event['error'])}"
        for choice in event.get("choices", ()):
            yield choice.get("delta", {}).get("content") or ""


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]

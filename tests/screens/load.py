"""A little load on a router: chats of several lengths, streamed, until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

import httpx

TOPICS = ("rivers", "bridges", "lighthouses", "trains", "clouds", "bread", "maps", "violins")

AFTER_REFUSAL = 0.3
"""Seconds until who was refused asks again."""
Asked = Callable[[int, int], str]
"""What a client (its number) asks at a turn."""


def own(client: int, turn: int) -> str:
    topic = _topic(client + turn)
    facts = f"Note {client}-{turn} on {topic}. " * (6 + 12 * ((client + turn) % 4))
    return f"{facts}Tell me about {topic}."


def shared(client: int, turn: int) -> str:
    """What others ask as well, but for its end: some 500 tokens that are new every other turn."""
    topic = _topic(turn // 2)
    return f"Note {turn // 2} on {topic}. " * 45 + f"Tell me {client} things about {topic}."


def _topic(number: int) -> str:
    return TOPICS[number % len(TOPICS)]


@contextmanager
def loaded(
    url: str, *, clients: int, key: str = "", max_tokens: int = 96, asked: Asked = own
) -> Iterator[None]:
    """While the block runs, so many clients ask, one request after the other."""
    stop = threading.Event()
    threads = [
        threading.Thread(
            target=_ask_on, args=(url, key, number, max_tokens, asked, stop), daemon=True
        )
        for number in range(clients)
    ]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in threads:
            each.join(60)


def _ask_on(
    url: str, key: str, client: int, max_tokens: int, asked: Asked, stop: threading.Event
) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=60.0) as http:
        for turn in count():
            if stop.is_set():
                return
            body = {
                "messages": [{"role": "user", "content": asked(client, turn)}],
                "max_tokens": max_tokens,
                "stream": True,
            }
            with suppress(httpx.HTTPError):
                _read(http, body, stop)


def _read(http: httpx.Client, body: object, stop: threading.Event) -> None:
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            stop.wait(AFTER_REFUSAL)
        for _ in answer.iter_lines():
            if stop.is_set():
                return

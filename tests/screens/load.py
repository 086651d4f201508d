"""A little load on a router: chats of several lengths, streamed, until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import httpx

TOPICS = ("rivers", "bridges", "lighthouses", "trains", "clouds", "bread", "maps", "violins")

AFTER_REFUSAL = 0.3
"""Seconds until who was refused asks again."""


@contextmanager
def loaded(url: str, *, clients: int, key: str = "", max_tokens: int = 96) -> Iterator[None]:
    """While the block runs, so many clients ask, one request after the other."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=_ask_on, args=(url, key, number, max_tokens, stop), daemon=True)
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


def _ask_on(url: str, key: str, client: int, max_tokens: int, stop: threading.Event) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=60.0) as http:
        for turn in count():
            if stop.is_set():
                return
            topic = TOPICS[(client + turn) % len(TOPICS)]
            facts = f"Note {client}-{turn} on {topic}. " * (6 + 12 * ((client + turn) % 4))
            body = {
                "messages": [{"role": "user", "content": f"{facts}Tell me about {topic}."}],
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

"""Clients: they ask what the schedule says, streamed or not, and some leave before the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.chaos.schedule import Ask, Question

LATE = 10.0
"""Seconds beyond the deadline after which a request counts as one that hangs."""


@dataclass(slots=True)
class Answer:
    status: int = 0
    """Of HTTP; 0 if there was none."""
    texts: list[str] = field(default_factory=list)
    """Of each choice, as far as it came."""
    finishes: list[str | None] = field(default_factory=list)
    error: str | None = None
    """What the server said, before the answer or in its middle."""
    retry_after: str | None = None
    broken: str | None = None
    """What the client's library said where the connection failed."""
    left: bool = False
    """The client went away of its own."""
    hung: bool = False
    sent: float = 0.0
    seconds: float = 0.0


class Clients:
    """A bounded number of users over one URL."""

    def __init__(self, url: str, model: str, *, at_once: int, deadline: float) -> None:
        self._model = model
        self._at_once = at_once
        self._deadline = deadline
        self._waiting: dict[int, tuple[Answer, asyncio.Timeout]] = {}
        """Requests that have heard nothing yet, by number."""
        limits = httpx.Limits(max_connections=at_once + 1, max_keepalive_connections=at_once + 1)
        timeout = httpx.Timeout(deadline + 2 * LATE)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask_all(
        self,
        asks: Iterable[Ask],
        questions: tuple[Question, ...],
        sending: Callable[[int], None] = lambda number: None,
    ) -> dict[int, Answer]:
        """Answers by number of the request; ``sending`` hears of each before it goes out."""
        waiting = iter(asks)
        answers: dict[int, Answer] = {}

        async def user() -> None:
            for ask in waiting:
                sending(ask.number)
                answers[ask.number] = await self.ask(ask, questions[ask.question])

        await asyncio.gather(*(user() for _ in range(self._at_once)))
        return answers

    def leave(self) -> int:
        """Every client that has heard nothing yet goes away; how many they were. For the thread of
        the loop."""
        now, gone = asyncio.get_running_loop().time(), list(self._waiting.values())
        self._waiting.clear()
        for answer, patience in gone:
            answer.left = True
            patience.reschedule(now)
        return len(gone)

    async def ask(self, ask: Ask, question: Question) -> Answer:
        """One request to its end, whichever that is."""
        answer = Answer(texts=[""] * question.n, finishes=[None] * question.n)
        answer.sent = time.monotonic()
        asking = self._stream if ask.stream else self._whole
        try:
            async with asyncio.timeout(self._deadline + LATE) as patience:
                self._waiting[ask.number] = answer, patience
                await asking(ask, question, answer)
        except TimeoutError:
            answer.hung = not answer.left
        except httpx.TimeoutException:
            answer.hung = True
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            answer.broken = repr(error)
        self._waiting.pop(ask.number, None)
        answer.seconds = time.monotonic() - answer.sent
        return answer

    async def _whole(self, ask: Ask, question: Question, answer: Answer) -> None:
        body = question.body(self._model, stream=False)
        response = await self._http.post("/v1/completions", json=body)
        if not _began(response, answer):
            answer.error = _words(response.json())
            return
        for choice in response.json()["choices"]:
            answer.texts[choice["index"]] = choice["text"]
            answer.finishes[choice["index"]] = choice["finish_reason"]

    async def _stream(self, ask: Ask, question: Question, answer: Answer) -> None:
        body = question.body(self._model, stream=True)
        count = 0
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if not _began(response, answer):
                answer.error = _words(json.loads(await response.aread()))
                return
            async for line in response.aiter_lines():
                if count == ask.leaves_after:
                    answer.left = True
                    return
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = _words(event)
                    return
                count += 1
                self._waiting.pop(ask.number, None)
                for choice in event["choices"]:
                    answer.texts[choice["index"]] += choice["text"]
                    answer.finishes[choice["index"]] = choice["finish_reason"]


def _began(response: httpx.Response, answer: Answer) -> bool:
    answer.status = response.status_code
    answer.retry_after = response.headers.get("retry-after")
    return response.status_code == 200


def _words(body: Any) -> str:
    """Of an error in OpenAI's form, or whatever came in its place."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)

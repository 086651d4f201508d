"""A load of streams whose every token is known: greedy answers, held to the reference.

Runs in a thread of its own while a test hurts the cluster. A connection that could not be made is
tried again and counted apart: no request was in it. What breaks after that is a failure. Every
connection leaves an ``Attempt``, so that a test can say which router each was with.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import httpx
from client import Answer, stream
from reference import Row, rows
from tests.e2e_cluster.attempts import Attempt, Recording

STREAMS = 4
TOKENS = 32
PROMPTS = 16
"""Only the shortest quarter: a long prompt takes two cores longer than what is tested."""
MOST_REST = 5.0
"""Seconds. A stream rests for as long as its answer took, up to this: streams that ask without a
pause take two cores whole, and pods that start meanwhile wait for them."""
CONNECT_SECONDS, CONNECT_EVERY = 2.0, 2.2
"""How long a stream tries to connect, and how often at most: also where it is told no sooner."""
TIMEOUT = httpx.Timeout(180.0, connect=CONNECT_SECONDS)
CONNECT_TRIES = 30


class Failure(NamedTuple):
    reason: str
    sent: float
    """When, of ``time.monotonic``."""
    seconds: float
    """From then to its end."""

    def __str__(self) -> str:
        """With the time of day at which it was sent, to look for in logs."""
        ago = time.monotonic() - self.sent
        since = time.strftime("%X", time.localtime(time.time() - ago))
        return f"{self.reason} (sent {since}, after {self.seconds:.1f} s)"


@dataclass
class Tally:
    served: int = 0
    reconnects: int = 0
    failures: list[Failure] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = Counter(str(failure).splitlines()[0][:80] for failure in self.failures)
        return (
            f"{self.served} served, {len(self.failures)} failed, {len(self.wrong)} wrong, "
            f"{self.reconnects} connections tried again {dict(kinds) if kinds else ''}"
        )


class Load:
    """``with Load(url) as load``: streams run until the block ends, then finish."""

    def __init__(self, url: str, *, streams: int = STREAMS, model: str = "smollm2") -> None:
        self.tally = Tally()
        self.attempts: list[Attempt] = []
        """All connections, in the order in which they began."""
        self._url, self._streams, self._model = url, streams, model
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT.read or 0.0)
        assert not self._thread.is_alive(), "streams do not end"

    def wait_served(self, count: int, seconds: float) -> None:
        """Until so many more requests have been served; fails at the deadline."""
        wanted, end = self.tally.served + count, time.monotonic() + seconds
        while self.tally.served < wanted:
            assert time.monotonic() < end, f"waited {seconds:g} s for {count} answers: {self.tally}"
            time.sleep(0.1)

    def assert_clean(self) -> None:
        """No request failed and no token was wrong, and there was a load at all."""
        assert not self.tally.failures, f"{self.tally}\n" + "\n".join(
            map(str, self.tally.failures[:5])
        )
        self.assert_right()

    def assert_right(self) -> None:
        """No token was wrong, and there was a load at all."""
        assert not self.tally.wrong, f"{self.tally}\n" + "\n".join(self.tally.wrong[:5])
        assert self.tally.served, "nothing was served"

    async def _run(self) -> None:
        await asyncio.gather(*(self._stream(each) for each in range(self._streams)))

    async def _stream(self, index: int) -> None:
        transport = Recording(self.attempts)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=TIMEOUT, transport=transport
        ) as client:
            while not self._stop.is_set():
                began = time.monotonic()
                await self._one(client, transport, shortened(rows()[index % PROMPTS]))
                index += self._streams
                await asyncio.sleep(min(MOST_REST, time.monotonic() - began))

    async def _one(self, client: httpx.AsyncClient, transport: Recording, row: Row) -> None:
        start = time.monotonic()
        try:
            answer = await self._connected(client, transport, row)
        except httpx.HTTPError as error:
            self._fail(f"{type(error).__name__}: {error}", start, transport.latest)
            return
        transport.latest.ended = time.monotonic()
        if answer.status != 200 or answer.error is not None:
            self._fail(f"{answer.status} {answer.error}", start, transport.latest)
            return
        verdict = row.verdict(answer.tokens)
        if verdict not in ("equal", "excused"):
            self.tally.wrong.append(verdict)
        self.tally.served += 1
        self.tally.latencies.append(time.monotonic() - start)

    async def _connected(self, client: httpx.AsyncClient, transport: Recording, row: Row) -> Answer:
        for left in reversed(range(CONNECT_TRIES)):
            try:
                return await stream(client, row.prompt, model=self._model, max_tokens=TOKENS)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                transport.latest.broke(type(error).__name__)
                self.tally.reconnects += 1
                if not left:
                    raise
                began = transport.latest.began
                await asyncio.sleep(max(0.0, began + CONNECT_EVERY - time.monotonic()))
        raise AssertionError("unreachable")

    def _fail(self, reason: str, start: float, attempt: Attempt) -> None:
        attempt.broke(reason)
        self.tally.failures.append(Failure(reason, start, time.monotonic() - start))


def shortened(row: Row) -> Row:
    """The same prompt with fewer tokens to come."""
    return Row(row.prompt, row.tokens[:TOKENS], row.gaps[:TOKENS])

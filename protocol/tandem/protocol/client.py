"""The one way to a running engine: in this process, in another, or behind the router."""

from collections.abc import AsyncIterator
from typing import Protocol

from tandem.protocol.card import ModelCard
from tandem.protocol.commands import Command, Reply
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.outputs import Accepted, EngineOutput
from tandem.protocol.requests import EngineCoreRequest


class EngineCoreClient(Protocol):
    """``InprocClient`` (engine in this process) and the router's ``Dispatcher`` (many workers,
    hand-off, failure ladder)."""

    def stream(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> AsyncIterator[EngineOutput | Accepted]:
        """Yield the outputs of all choices until each has finished; then stop. Of a request that is
        pooled that is one ``PooledOutput``, of others each is an ``EngineCoreOutput``. Before the
        first there may be one ``Accepted``, if ``context.tells_accepted``.

        Positions of one choice come in order without gaps or repeats. Closing the iterator
        (``aclose``) aborts the request wherever it is and frees what it holds.

        Raises RequestRefused when nothing was started, RequestFailed when it ended without an
        answer (after the request's budget at the latest), InvalidParameter for bad parameters and
        for a route where there is one way only.
        """
        ...

    async def call(self, command: Command) -> Reply:
        """Run a command on the engine (the router: on every worker)."""
        ...

    async def describe(self) -> ModelCard:
        """What is served. Waits until it is known; raises RequestFailed at the deadline."""
        ...

    async def close(self) -> None:
        """Abort what runs and let go of sockets and threads. May be called twice."""
        ...

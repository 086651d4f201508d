"""Interface of a running engine: in this process, in another, or through the router."""

from collections.abc import AsyncIterator
from typing import Protocol

from tandem.protocol.card import ModelCard
from tandem.protocol.commands import Command, Reply
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.outputs import Accepted, EngineOutput
from tandem.protocol.requests import EngineCoreRequest


class EngineCoreClient(Protocol):
    """Implemented by ``InprocClient`` (engine in this process) and the router's ``Dispatcher``
    (many workers, hand-off, failure ladder)."""

    def stream(
        self, request: EngineCoreRequest, context: RequestContext = ORDINARY
    ) -> AsyncIterator[EngineOutput | Accepted]:
        """Yield the outputs of all choices until each has finished, then stop. A pooled request
        yields one ``PooledOutput``; any other request yields ``EngineCoreOutput`` objects. One
        ``Accepted`` may precede them if ``context.tells_accepted``.

        Positions of one choice come in order without gaps or repeats. Closing the iterator
        (``aclose``) aborts the request in every process and frees its blocks.

        Raises RequestRefused if no work was started. Raises RequestFailed if the request ended
        without an answer, at the latest after its budget. Raises InvalidParameter for bad
        parameters, and for a route if the client has only one engine.
        """
        ...

    async def call(self, command: Command) -> Reply:
        """Run a command on the engine (the router: on every worker)."""
        ...

    async def describe(self) -> ModelCard:
        """Wait for and return the served model's card. Raises RequestFailed at the deadline."""
        ...

    async def close(self) -> None:
        """Abort running requests and close sockets and threads. May be called twice."""
        ...

"""Calls that run, by their ids, so that another call may end them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import TandemError
from tandem.router.rpc.call import Call


class Aborted(TandemError):
    """The call was ended by Abort."""


@dataclass(eq=False, slots=True)
class _Call:
    task: asyncio.Task[Any]
    is_aborted: bool = False


class Calls:
    """Calls by their tenant and id: a call of one tenant ends nothing of another's."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], list[_Call]] = {}

    @contextmanager
    def running(self, request_id: str, context: Call) -> Iterator[None]:
        """While a call runs in this task. Raises Aborted where Abort has ended it."""
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        call, name = _Call(task), (context.tenant.id, request_id)
        self._running.setdefault(name, []).append(call)
        try:
            yield
        except asyncio.CancelledError:
            if not call.is_aborted:
                raise
            task.uncancel()
            raise Aborted(f"the call {request_id} was aborted") from None
        finally:
            calls = self._running[name]
            calls.remove(call)
            if not calls:
                del self._running[name]

    def abort(self, request_id: str, context: Call) -> int:
        """End all calls of an id; how many there were."""
        calls = self._running.get((context.tenant.id, request_id), [])
        for call in calls:
            call.is_aborted = True
            call.task.cancel()
        return len(calls)

"""Has every process of a stack, and the client, note when it stands still, and where.

``install`` is called as ``imports.py`` says; ``moments.py`` joins what was noted with the client's
late gaps. A thread of each process wakes every 2 ms. When whom it watches (the router's and the
client's event loop, a worker's step loop) has not come round for long, it notes where all threads
of the process stand, up to three times a stall. It needs the interpreter for that: where it comes
late itself, somebody held the interpreter, or the process had no processor, which the process's CPU
time tells apart. Beside that each pass of the collector over 2 ms is noted, and of workers what
``slow_turns.py`` says; both ends of a link from a worker note when no tokens went over it for a
while. Notes are of the machine's monotonic clock, a line of JSON each, in
``FOLDER/PID.stalls``.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.pair import imports
from bench.pair.stalls import device_calls, slow_turns
from bench.pair.stalls.watcher import Collector, LoopHeart, Notes, Quiet, Watcher

FOLDER = "TANDEM_STALLS"
"""The variable that names where notes are written."""


@contextmanager
def watched(who: str, folder: Path) -> Iterator[None]:
    """In a running event loop: note what this process does while the block lasts."""
    notes = Notes(who, folder)
    collector = Collector(notes)
    watcher = Watcher(notes, LoopHeart(notes, asyncio.get_running_loop()))
    watcher.start()
    try:
        yield
    finally:
        collector.stop()
        watcher.stop()


def _of_router(dispatcher: ModuleType) -> None:
    was = dispatcher.Dispatcher.start

    def start(self: Any) -> None:
        was(self)
        notes = Notes("router", Path(os.environ[FOLDER]))
        Collector(notes)
        Watcher(notes, LoopHeart(notes, asyncio.get_running_loop())).start()
        _watch_links(notes)

    dispatcher.Dispatcher.start = start


def _watch_links(notes: Notes) -> None:
    """Note when no tokens were heard of a worker that the router has a link to."""
    connection = importlib.import_module("tandem.router.workers.connection")
    owner = connection.WorkerConnection
    was, links = owner._deliver, dict[int, Quiet]()

    def deliver(self: Any, message: Any, *args: Any) -> Any:
        # Tokens behind the first: a prefill worker says one now and then.
        if any(getattr(each, "position", 0) for each in message.outputs):
            quiet = links.get(id(self))
            if quiet is None:
                name = f"heard no tokens of {self.endpoint}"
                quiet = links[id(self)] = Quiet(notes, name)
            quiet.came()
        return was(self, message, *args)

    owner._deliver = deliver


def _of_worker(engine_proc: ModuleType) -> None:
    notes = Notes(str(imports.role()), Path(os.environ[FOLDER]))
    Collector(notes)
    slow_turns.watch(notes, engine_proc)


def install() -> None:
    """In a process of a stack, before its modules are imported."""
    if FOLDER in os.environ:
        imports.once_imported(
            {
                "tandem.router.dispatch.dispatcher": _of_router,
                "tandem.worker.engine_proc": _of_worker,
                "tandem.engine.worker.runner": device_calls.watch_graphs,
                "triton.runtime.jit": device_calls.watch_kernels,
                "triton.compiler.compiler": device_calls.watch_kernels,
            }
        )

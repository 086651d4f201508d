"""Loaded by every Python of a traced server (trace.py puts this folder on PYTHONPATH): notes when
functions on a first token's way begin and end, and writes that down.

Modules are not imported for it: each is changed once it has been, by an import hook.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = "TANDEM_MARKS"
WRITE_SECONDS = 1.0
PLACES = {
    "tandem.router.openai.completions": ("read_body", "_prepare"),
    "tandem.llm.async_llm": ("AsyncLLM.prepare", "AsyncLLM.stream"),
    "tandem.router.workers.connection": ("WorkerConnection.submit", "WorkerConnection._deliver"),
    "tandem.router.openai.answers.sse": ("_send_part",),
    "tandem.worker.engine_proc": ("EngineCoreProc._submit",),
    "tandem.engine.scheduler.scheduler": ("Scheduler.plan", "Scheduler.update_from_output"),
    "tandem.engine.worker.input_batch": ("InputBatch.apply",),
    "tandem.engine.worker.inputs": ("StepStager.stage",),
    "tandem.engine.worker.graphs": ("StepGraphs.replay",),
    "tandem.engine.worker.runner": ("ModelRunner.hidden", "ModelRunner._draw"),
    "tandem.engine.executor.uniproc": ("UniProcExecutor.execute", "StepFuture.result"),
    "tandem.worker.io": ("IOThread._on_frame", "IOThread.flush"),
}
"""Module to functions; those without requests (starts, graphs) are left out by trace.py."""
marks: list[tuple[int, str]] = []
note = marks.append
now = time.monotonic_ns


def marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function``, with a mark before it and, once it has returned, one after it."""
    begin, end = f"{name} begins", f"{name} ends"
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **named: Any) -> Any:
            note((now(), begin))
            return function(*args, **named)

        return generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **named: Any) -> Any:
            note((now(), begin))
            try:
                return await function(*args, **named)
            finally:
                note((now(), end))

        return coroutine

    @functools.wraps(function)
    def plain(*args: Any, **named: Any) -> Any:
        note((now(), begin))
        try:
            return function(*args, **named)
        finally:
            note((now(), end))

    return plain


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of PLACES as they are, and changes them when they have run."""

    def __init__(self) -> None:
        self._plain: dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own, with this loader around its own."""
        if name not in PLACES or name in self._plain:
            return None
        self._plain[name] = None
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._plain[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        made: ModuleType | None = self._plain[spec.name].create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run it, then put marks around its functions."""
        self._plain[module.__name__].exec_module(module)
        for place in PLACES[module.__name__]:
            *owners, name = place.split(".")
            owner: Any = functools.reduce(getattr, owners, module)
            setattr(owner, name, marked(getattr(owner, name), place))


def write() -> None:
    """All marks of this process so far, every second: some processes end by a signal."""
    path = os.path.join(os.environ[FOLDER], f"{os.getpid()}.txt")
    written = 0
    while True:
        time.sleep(WRITE_SECONDS)
        if written < len(marks):
            until = len(marks)
            with open(path, "a") as file:
                file.writelines(f"{at} {name}\n" for at, name in marks[written:until])
            written = until


if FOLDER in os.environ:
    sys.meta_path.insert(0, Hook())
    threading.Thread(target=write, name="marks", daemon=True).start()

"""Has the processes of a stack note when a request's tokens and KV come by, for ``joins.py``.

``install`` is called as ``imports.py`` says.
Stamps are of the machine's monotonic clock, which all of its processes read, and are written to
``FOLDER/PID.stamps``, a line each: seconds, name. They cost a microsecond or two each.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.pair import imports

FOLDER = "TANDEM_STAMPS"
"""The variable that names where stamps are written."""
WRITE_SECONDS = 0.25

_stamps: list[tuple[float, str]] = []


def note(name: str) -> None:
    """Now."""
    _stamps.append((time.monotonic(), name))


def _write_always(path: Path) -> None:
    with path.open("w") as file:
        while True:
            time.sleep(WRITE_SECONDS)
            while _stamps:
                at, name = _stamps.pop(0)
                file.write(f"{at:.7f} {name}\n")
            file.flush()


def stamp(
    owner: Any,
    name: str,
    before: str = "",
    after: str = "",
    *,
    args_of: str = "",
    gives: bool = False,
) -> None:
    """Have a function note its calls: all, those with an argument (or its message or event) whose
    class is called ``args_of``, or those that return something."""
    was = getattr(owner, name)

    @functools.wraps(was)
    def noted(*args: Any, **kwargs: Any) -> Any:
        counts = not args_of or any(
            type(part).__name__ == args_of
            for each in args
            for part in (each, getattr(each, "message", None))
        )
        if before and counts:
            note(before)
        found = was(*args, **kwargs)
        if after and counts and (found or not gives):
            note(after)
        return found

    setattr(owner, name, noted)


def _of_worker(role: str) -> None:
    def the(module: str) -> Any:
        return importlib.import_module(f"tandem.{module}")

    core, shell = the("engine.core.engine_core").EngineCore, the("worker.engine_proc")
    stamp(core, "_update", after=f"{role} token known")
    stamp(shell.EngineCoreProc, "_send", after=f"{role} said")
    stamp(the("engine.scheduler.scheduler").Scheduler, "plan", after=f"{role} planned", gives=True)
    executor = the("engine.executor.uniproc").UniProcExecutor
    stamp(executor, "execute", f"{role} launches", f"{role} launched")
    mover = the("kvtransfer.mover.mover").Mover
    if role == "prefill":
        producer = the("kvtransfer.mover.producer").ProducerMover
        service = the("kvtransfer.service.producer").HandoffProducer
        stamp(service, "computed", "prefill chunk to hand over")
        stamp(service, "final", "prefill FINAL asked for")
        stamp(producer, "_see_fences", "", "prefill sees KV written", gives=True)
        stamp(producer, "say", "prefill says READY", args_of="Ready")
        stamp(producer, "say", "prefill says FINAL", args_of="Final")
        control = the("kvtransfer.control.server").ControlServer
        stamp(control, "on_item", "", "prefill FINAL out", args_of="Final")
        return
    consumer = the("kvtransfer.mover.consumer")
    client = the("kvtransfer.control.client").ControlClient
    for kind in ("Ready", "Final"):
        stamp(client, "from_peer", f"decode {kind.upper()} in", args_of=kind)
        stamp(consumer.ConsumerMover, "take", f"decode takes {kind.upper()}", args_of=kind)
    stamp(the("kvtransfer.service.consumer").HandoffConsumer, "begin_load", "decode reserves")
    stamp(the("kvtransfer.mover.reads").Reads, "start", "decode read begun")
    stamp(consumer.ConsumerMover, "_read_ended", "decode end of read seen")
    stamp(consumer, "fault_of_copy", "", "decode tags compared")
    stamp(mover, "tell", "decode KV told", args_of="Loaded")
    connector = the("decode.connector").DecodeConnector
    stamp(connector, "poll", "", "decode engine sees KV", gives=True)


def _of_router(_: str) -> None:
    connection = importlib.import_module("tandem.router.workers.connection")
    stamp(connection.WorkerConnection, "_deliver", "router hears", "router has heard")
    dealer = importlib.import_module("tandem.router.workers.dealer")
    stamp(dealer.Dealer, "_on_readable", "router wakes")


def _begin(watched: Callable[[str], None], _: ModuleType) -> None:
    role = imports.role()
    assert role is not None, "modules are looked at in processes with a role"
    watched(role)
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.stamps"
    threading.Thread(target=_write_always, args=(path,), daemon=True).start()


def install() -> None:
    """In a process of a stack, before its modules are imported."""
    if FOLDER in os.environ:
        imports.once_imported(
            {
                "tandem.worker.engine_proc": functools.partial(_begin, _of_worker),
                "tandem.router.workers.connection": functools.partial(_begin, _of_router),
            }
        )

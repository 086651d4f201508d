"""A process that has imported what every worker imports, and forks workers that only have to run.

    python -m tests.fork_server SOCKET worker|router|rank|handoff|operator

The same for routers and operators, which have no torch, for an engine's ranks, for agents of nodes,
and for ends of a hand-off without an engine (tests/kvtransfer/worker_process.py). Started by
tests/forked.py with the environment of what it forks, and with the number of its end of a socket
pair. Each packet asks for one process: its arguments and environment as JSON, and beside them what
takes its output, where it talks its input, and what else it is given. The answer is its process id.
It ends when the other end closes.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
from typing import NoReturn

from tandem.engine.threads import spin_briefly

IMPORTED = {
    "worker": (
        *("tandem.cli.__main__", "tandem.cli.serve.prefill", "tandem.cli.serve.decode"),
        *("tandem.prefill.worker", "tandem.decode.worker"),
        *("tandem.engine.executor.uniproc", "tandem.engine.worker"),
    ),
    "router": ("tandem.cli.__main__", "tandem.cli.serve.router", "tandem.router.app", "uvloop"),
    "rank": ("tandem.engine.executor.rank", "tandem.engine.worker"),
    "handoff": (
        *("tests.kvtransfer.worker_process", "tandem.cli.__main__"),
        "tandem.kvtransfer.nodeagent.run",
    ),
    "operator": ("tandem.cli.__main__", "tandem.cli.serve.operator", "tandem.operator.run"),
}
"""What a process has imported when it is ready. No agent of nixl's: that one looks at the machine,
and has threads."""
MOST_BYTES, MOST_FILES = 1 << 17, 3
"""Of a packet: an environment is a few thousand bytes."""


def asked_for(server: socket.socket) -> list[str] | None:
    """In a new process: its arguments. In this process: None, when nobody asks any more."""
    while True:
        packet, files, _, _ = socket.recv_fds(server, MOST_BYTES, MOST_FILES)
        if not packet:
            return None
        reads, writes = os.pipe()
        between = os.fork()
        if between:
            for number in (writes, *files):
                os.close(number)
            os.waitpid(between, 0)  # whoever asked is the parent now
            with os.fdopen(reads, "rb") as pid:
                server.send(pid.read())
            continue
        between = os.getpid()
        if ahead := json.loads(packet)["ahead"]:
            from tests.chaos.clocks import set_clock

            set_clock(ahead)
        child = os.fork()
        if child:
            os.write(writes, str(child).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        os.setsid()
        for number in (reads, writes):
            os.close(number)
        server.close()
        return become(json.loads(packet), files)


def become(order: dict[str, object], files: list[int]) -> list[str]:
    """Take over what a started process would begin with; its arguments."""
    nothing = os.open(os.devnull, os.O_RDWR)
    talks, output = order["talks"], files[0]
    taken = files[: 2 if talks else 1]
    ends = (files[1], output, nothing) if talks else (nothing, output, output)
    for number, at in enumerate(ends):
        os.dup2(at, number)
    for number in (nothing, *taken):
        os.close(number)
    arguments, environment = order["arguments"], order["environment"]
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    return [*arguments, *map(str, files[len(taken) :])]


def run(what: str, arguments: list[str]) -> int:
    """What was asked for, to its end; its exit status."""
    sys.argv[1:] = arguments
    if what == "rank":
        from tandem.engine.executor.rank import main as rank

        return rank(int(arguments[0]))
    if what == "handoff" and arguments[0] != "node-agent":
        from tests.kvtransfer.worker_process import main as handoff

        handoff()
        return 0
    if what == "operator":
        from kubernetes.config import kube_config

        faulthandler.enable()
        # The library reads the variable when it is imported.
        kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ["KUBECONFIG"]
    from tandem.cli.__main__ import main as command

    return command(arguments)


def main() -> int:
    """The exit status of what was forked, or 0."""
    server = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # until all is imported, none of which is garbage
    spin_briefly()  # before torch brings its threads, as the commands do
    for name in IMPORTED[sys.argv[2]]:
        importlib.import_module(name)
    gc.freeze()  # pages that are not written to stay shared
    gc.enable()
    what = sys.argv[2]
    arguments = asked_for(server)
    return 0 if arguments is None else run(what, arguments)


def end(status: int) -> NoReturn:
    """End as the interpreter does, but leave memory as it is: to look at each object costs most of
    what a short life does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end(main())

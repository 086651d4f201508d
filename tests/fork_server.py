"""A process that has imported what every worker imports, and forks workers that only have to run.

    python -m tests.fork_server SOCKET worker|router

The same for routers, which have no torch. Started by tests/forked.py with the environment of what
it forks, and with the number of its end of a socket pair. Each packet asks for one process: its
arguments and environment as JSON, and beside them what takes its output. The answer is its process
id. It ends when the other end is closed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time

from tandem.engine.threads import spin_briefly

IMPORTED = {
    "worker": (
        *("tandem.cli.__main__", "tandem.cli.prefill", "tandem.cli.decode"),
        *("tandem.prefill.worker", "tandem.decode.worker"),
        *("tandem.engine.executor.uniproc", "tandem.engine.worker"),
    ),
    "router": ("tandem.cli.__main__", "tandem.cli.router", "tandem.router.app", "uvloop"),
}
"""What a process has imported when it is ready. No agent of nixl's: that one looks at the machine,
and has threads."""
MOST_BYTES = 1 << 17
"""Of a packet: an environment is a few thousand bytes."""


def asked_for(server: socket.socket) -> list[str] | None:
    """In a new process: its arguments. In this process: None, when nobody asks any more."""
    while True:
        packet, files, _, _ = socket.recv_fds(server, MOST_BYTES, 1)
        if not packet:
            return None
        reads, writes = os.pipe()
        between = os.fork()
        if between:
            os.close(writes)
            os.close(files[0])
            os.waitpid(between, 0)  # whoever asked is the parent now
            with os.fdopen(reads, "rb") as pid:
                server.send(pid.read())
            continue
        between = os.getpid()
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
        return become(json.loads(packet), files[0])


def become(order: dict[str, object], output: int) -> list[str]:
    """Take over what a started process would begin with; its arguments."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    arguments, environment = order["arguments"], order["environment"]
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    return arguments


def main() -> int:
    """The exit status of what was forked, or 0."""
    server = socket.socket(fileno=int(sys.argv[1]))
    spin_briefly()  # before torch brings its threads, as the commands do
    for name in IMPORTED[sys.argv[2]]:
        importlib.import_module(name)
    gc.freeze()  # pages that are not written to stay shared
    arguments = asked_for(server)
    if arguments is None:
        return 0
    from tandem.cli.__main__ import main as command

    sys.argv[1:] = arguments
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""A `tandem serve` process that ends with the command that started it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from tandem.cli.serve import listening
from tandem.cli.serve.children import ENV_PARENT
from tandem.cli.serve.listening import LOOPBACK, free_ports
from tandem.protocol.errors import InvalidParameter, TandemError


@contextmanager
def loading() -> Iterator[None]:
    """Disable the garbage collector during imports, a sixth of a worker's import time. Afterwards
    freeze the imported objects, so that later collections skip them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@dataclass(frozen=True, slots=True)
class OwnServer:
    """Process and URL of the server."""

    process: subprocess.Popen[bytes]
    url: str

    def wait_ready(self, seconds: float, *, poll: float) -> None:
        """Return when it serves. Raises TandemError if it ends before, or takes longer."""
        import httpx  # images of workers and routers lack it

        deadline = time.monotonic() + seconds
        with httpx.Client(mounts=listening.mounts(self.url), timeout=5) as client:
            while True:
                try:
                    if client.get(f"{self.url}/ready").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                code = self.process.poll()
                if code is not None:
                    raise TandemError(f"the server ended with status {code} before it was ready")
                if time.monotonic() > deadline:
                    raise TandemError(f"the server was not ready within {seconds:g} s")
                time.sleep(poll)


def command(port: int, flags: Sequence[str]) -> list[str]:
    """Return the command line. The address is set here; ``flags`` have precedence."""
    words = [sys.executable, "-m", "tandem.cli", "serve", "--host", LOOPBACK, "--port", str(port)]
    return [*words, *flags]


def check_flags(param: str, flags: Sequence[str]) -> None:
    """Raise InvalidParameter for flags that change the address."""
    for word in flags:
        if word.partition("=")[0] in ("--host", "--port"):
            raise InvalidParameter(param, word, f"unset: the server uses a free port of {LOOPBACK}")


@contextmanager
def own_server(
    flags: Sequence[str],
    *,
    stop_seconds: float,
    output: IO[Any],
) -> Iterator[OwnServer]:
    """Yield a running server, with its output in ``output``.

    It has ``stop_seconds`` to end before it is killed.
    """
    (port,) = free_ports(1)
    process = subprocess.Popen(
        command(port, flags),
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, ENV_PARENT: str(os.getpid())},
    )
    try:
        yield OwnServer(process, f"http://{LOOPBACK}:{port}")
    finally:
        process.terminate()
        try:
            process.wait(stop_seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # its own processes end with it
            process.wait()

"""`tandem up`: a whole stack on this machine, supervised in the foreground.

Prepares the model before any process starts, starts workers and router on free loopback ports,
shows readiness as it comes, restarts what dies, and leaves no process behind.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from dataclasses import dataclass

from tandem.cli.children import Child, stop_all
from tandem.cli.command import parse, set_up_logging
from tandem.cli.flags import Section
from tandem.cli.gpus import environment_of, visible_gpus
from tandem.cli.ports import free_ports
from tandem.cli.stack import Ports, router_child, worker_child
from tandem.hub.source import DEFAULT_MODEL
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ROUTER_PORT
from tandem.protocol.settings import setting

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
STOP_GRACE_SECONDS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Settings of a local stack."""

    model: str = setting(
        DEFAULT_MODEL, "Folder, GGUF file, hub id, or package:NAME of an installed package."
    )
    revision: str | None = setting(None, "Revision of a hub id.")
    served_model_name: str | None = setting(None, "Name under which the model is served.")
    prefill: int = setting(1, "Prefill workers; 0 serves without hand-off.")
    decode: int = setting(1, "Decode workers.")
    host: str = setting("127.0.0.1", "Address on which the router listens.")
    port: int = setting(ROUTER_PORT, "Port on which the router listens.")
    worker_flags: str = setting("", "Further flags for every worker, as one string.")
    prefill_flags: str = setting("", "Further flags for prefill workers, as one string.")
    decode_flags: str = setting("", "Further flags for decode workers, as one string.")
    router_flags: str = setting("", "Further flags for the router, as one string.")
    ready_seconds: float = setting(300.0, "Give up if the stack cannot serve by then.")
    log_level: str = setting("warning", "Least severe messages to show of the processes.")

    def __post_init__(self) -> None:
        for name, low in (("prefill", 0), ("decode", 1)):
            if not low <= getattr(self, name) <= 64:
                raise InvalidParameter(name, getattr(self, name), f"an integer, {low} to 64")


def run(argv: list[str]) -> int:
    """Run until a signal; 1 if the stack could not serve or a part died too often."""
    given = parse("up", __doc__.splitlines()[0], [Section("Stack", UpConfig)], argv)
    return Supervisor(UpConfig(**given[UpConfig])).run()


class Supervisor:
    """The children of one stack and the loop that watches them."""

    def __init__(self, config: UpConfig) -> None:
        self.config = config
        self.children: list[Child] = []
        self._stop = threading.Event()
        self._signals = 0

    def run(self) -> int:
        """Prepare, start, watch, stop."""
        set_up_logging(self.config.log_level)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        started = time.monotonic()
        path, name = self._prepare()
        self.children = self._plan(path, name)
        try:
            for child in self.children:
                child.start(sys.stderr)
            if not self._wait_ready(started):
                return 0 if self._stop.is_set() else 1
            self._greet(name)
            return self._watch()
        finally:
            self._say("stopping")
            stop_all(self.children, STOP_GRACE_SECONDS)
            self._say("all processes have ended")

    def _prepare(self) -> tuple[str, str]:
        from tandem.hub import prepare

        config = self.config
        flags = f"{config.worker_flags} {config.decode_flags}".replace("=", " ").split()
        prepared = prepare(config.model, revision=config.revision, weights="dummy" not in flags)
        self._say(f"model {prepared.source}: {prepared.path}")
        return str(prepared.path), self.config.served_model_name or served_name(prepared.source)

    def _plan(self, path: str, name: str) -> list[Child]:
        config = self.config
        numbers = iter(free_ports(4 * (config.prefill + config.decode)))
        children: list[Child] = []
        workers: list[int] = []
        gpus = visible_gpus()
        shared = ["--served-model-name", name, "--log-level", config.log_level]
        shared += config.worker_flags.split()
        roles = [("prefill", config.prefill, config.prefill_flags)]
        roles.append(("decode", config.decode, config.decode_flags))
        for role, count, flags in roles:
            for index in range(count):
                ports = Ports(next(numbers), next(numbers), next(numbers), next(numbers))
                workers.append(ports.worker)
                child = worker_child(role, index, path, ports, [*shared, *flags.split()])
                child.environment = environment_of(len(children), gpus)
                children.append(child)
        flags_of_router = ["--served-model-name", name, "--log-level", config.log_level]
        flags_of_router += ["--ready-prefill", str(config.prefill)]
        flags_of_router += ["--ready-decode", str(config.decode), *config.router_flags.split()]
        router = router_child(path, config.host, config.port, workers, flags_of_router)
        return [*children, router]

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            for child in self.children:
                child.signal(signal.SIGKILL)

    def _wait_ready(self, started: float) -> bool:
        deadline = started + self.config.ready_seconds
        waiting = list(self.children)
        while waiting and not self._stop.wait(POLL_SECONDS):
            for child in list(waiting):
                if child.exit_code is not None:
                    self._say(f"{child.name} ended with status {child.exit_code} before it served")
                    return False
                if child.check_ready():
                    waiting.remove(child)
                    self._say(f"{child.name} ready after {time.monotonic() - child.started:.1f} s")
            if time.monotonic() > deadline:
                names = ", ".join(child.name for child in waiting)
                self._say(f"not ready within {self.config.ready_seconds:g} s: {names}")
                return False
        return not waiting

    def _greet(self, name: str) -> None:
        url = f"http://{self.config.host}:{self.config.port}"
        self._say(f"serving {name} at {url}")
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": '
        body += '"What is the capital of France?"}], "temperature": 0}'
        print(
            f"\n  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{body}'\n\n  Ctrl-C stops everything.\n",
            flush=True,
        )

    def _watch(self) -> int:
        while not self._stop.wait(POLL_SECONDS):
            for child in self.children:
                if child.exit_code is None:
                    continue
                self._say(f"{child.name} ended with status {child.exit_code}")
                if not child.may_restart(time.monotonic()):
                    self._say(f"{child.name} ends too often: giving up")
                    return 1
                child.start(sys.stderr)
                self._say(f"{child.name} restarted")
        return 0

    def _say(self, text: str) -> None:
        print(f"tandem | {text}", flush=True)


def served_name(source: str) -> str:
    """The name clients use for a model source: the last part, without scheme and ending."""
    name = source.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return name.removesuffix(".gguf") or source

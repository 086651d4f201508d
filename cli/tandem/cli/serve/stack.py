"""Processes of a local stack and their arguments."""

from __future__ import annotations

import signal
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException

from tandem.base.settings import (
    check_choices,
    check_integer,
    setting,
)
from tandem.cli.serve.children import Child
from tandem.cli.serve.gpus import environment_of
from tandem.cli.serve.listening import DIRECT, LOOPBACK
from tandem.cli.serve.overrides import Overrides
from tandem.cli.settings.secret_flags import take_secrets
from tandem.hub.source import DEFAULT_MODEL
from tandem.protocol.names import ROUTER_PORT

POLL_SECONDS = 0.1
SAY_SECONDS = 5.0
MARGIN_SECONDS = 8.0
"""Seconds after its drain for a process to close."""
_COUNTED = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")


@dataclass(frozen=True, slots=True)
class Graces:
    """Seconds for running requests, by process."""

    router: float
    workers: float


def stop(
    children: list[Child],
    graces: Graces,
    *,
    hurried: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """End the processes; none runs afterwards. ``hurried`` ends every wait early."""
    routers = [child for child in children if child.arguments[0] == "router"]
    workers = [child for child in children if child not in routers]
    try:
        for group, grace in ((routers, graces.router), (workers, graces.workers)):
            for child in group:
                child.signal(signal.SIGTERM)
            _wait(group, workers, grace + MARGIN_SECONDS, hurried=hurried, say=say)
    finally:
        for child in children:
            child.kill()


def _wait(
    group: list[Child],
    workers: list[Child],
    seconds: float,
    *,
    hurried: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    started = reported_at = time.monotonic()
    while any(child.is_running for child in group) and not hurried():
        now = time.monotonic()
        if now - started > seconds:
            names = ", ".join(child.name for child in group if child.is_running)
            say(f"{names} did not end within {seconds:g} s")
            return
        if now - reported_at > SAY_SECONDS or (reported_at == started and now - started > 1.0):
            reported_at = now
            say(_progress(workers, seconds - (now - started)))
        time.sleep(POLL_SECONDS)


def _progress(workers: list[Child], left: float) -> str:
    count = sum(_requests(child) for child in workers if child.arguments[0] == "decode")
    what = "1 request is" if count == 1 else f"{count} requests are"
    return f"{what} under way, for {left:.0f} s more at most; Ctrl-C again ends at once"


def _requests(child: Child) -> int:
    """Return the number of requests of a worker; 0 if it does not answer."""
    url = child.ready_url.removesuffix("/ready") + "/metrics"
    try:
        with DIRECT.open(url, timeout=1.0) as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(_COUNTED))
    except (HTTPException, urllib.error.URLError, OSError, ValueError):
        return 0


MAX_WORKERS = 64
READY_SECONDS = 900.0
"""Seconds in which started processes must be able to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Settings of a local stack."""

    model: str = setting(
        DEFAULT_MODEL, "Folder, GGUF file, hub id, or package:NAME of an installed package."
    )
    revision: str | None = setting(None, "Revision of a hub id.")
    served_model_name: tuple[str, ...] = setting(
        (), "Names of the model in requests. Answers contain the first one."
    )
    prefill: int = setting(1, "Number of prefill workers. 0: no hand-off.")
    decode: int = setting(
        1, "Number of decode workers. 0: prefill workers serve vectors and scores only."
    )
    host: str = setting("127.0.0.1", "Address on which the router listens.")
    port: int = setting(ROUTER_PORT, "Port on which the router listens.")
    log_level: str = setting(
        "info",
        "Lowest level of log messages to show, for all processes.",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        check_integer("prefill", self.prefill, 0, MAX_WORKERS)
        check_integer("decode", self.decode, 0 if self.prefill else 1, MAX_WORKERS)
        check_integer("port", self.port, 1, 65535)
        check_choices(self)


PORTS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one worker."""

    worker: int
    probe: int
    control: int
    data: int


def plan(
    config: UpConfig,
    model: str,
    names: Sequence[str],
    ports: Sequence[int],
    gpus: list[str],
    overrides: Overrides = Overrides(),  # noqa: B008 - frozen, and holds nothing
) -> list[Child]:
    """Return a stack's processes, the router last."""
    numbers = iter(ports)
    shared = ["--served-model-name", names[0], "--log-level", config.log_level]
    children: list[Child] = []
    workers: list[int] = []
    for role, index in _roles(config):
        own = Ports(next(numbers), next(numbers), next(numbers), next(numbers))
        further = [*shared, *overrides.flags.get(role, ())]
        child = worker_child(role, index, model, own, further)
        child.environment = {**overrides.environment, **environment_of(len(children), gpus)}
        workers.append(own.worker)
        children.append(child)
    further_names = [word for name in names[1:] for word in ("--served-model-name", name)]
    flags_of_router = [*shared, *further_names, "--ready-prefill", str(config.prefill)]
    flags_of_router += ["--ready-decode", str(config.decode)]
    flags_of_router += overrides.flags.get("router", ())
    router = router_child(model, config.host, config.port, workers, flags_of_router)
    for child in [*children, router]:
        child.arguments, keys = take_secrets(child.arguments)
        child.environment |= keys
    return [*children, router]


def _roles(config: UpConfig) -> Iterator[tuple[str, int]]:
    for role, count in (("prefill", config.prefill), ("decode", config.decode)):
        for index in range(count):
            yield role, index


def worker_child(role: str, index: int, model: str, ports: Ports, extra: list[str]) -> Child:
    """Return a prefill or decode worker that listens on the loopback."""
    arguments = [role, "--model", model, "--host", LOOPBACK, "--port", str(ports.worker)]
    arguments += ["--probe-port", str(ports.probe), "--kv-control-host", LOOPBACK]
    arguments += ["--kv-control-port", str(ports.control), "--kv-data-port", str(ports.data)]
    return Child(
        name=f"{role}-{index}",
        arguments=[*arguments, *extra],
        ready_url=f"http://{LOOPBACK}:{ports.probe}/ready",
    )


def router_child(model: str, host: str, port: int, workers: list[int], extra: list[str]) -> Child:
    """Return the router over these worker ports."""
    arguments = ["router", "--model", model, "--host", host, "--port", str(port)]
    for worker in workers:
        arguments += ["--workers", f"{LOOPBACK}:{worker}"]
    return Child(
        name="router", arguments=[*arguments, *extra], ready_url=f"{router_url(host, port)}/ready"
    )


def router_url(host: str, port: int) -> str:
    """Return the URL of a router that listens on ``host``, for this machine."""
    bare = host.strip("[]")
    if bare in ("0.0.0.0", "::"):
        bare = LOOPBACK
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"

"""Processes of a local stack and their arguments: a pure function, so that it can be inspected.

The supervisor in ``up`` starts the processes that this returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.cli.children import Child
from tandem.cli.command import words
from tandem.cli.gpus import environment_of
from tandem.cli.overrides import FOR_ALL, Overrides
from tandem.cli.ports import LOOPBACK
from tandem.cli.secret_flags import take_secrets
from tandem.cli.up_config import UpConfig

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
    """Return a stack's processes, the router last. Raises InvalidParameter for an open quote."""
    numbers = iter(ports)
    shared = ["--served-model-name", names[0], "--log-level", config.log_level]
    shared += ["--log-format", config.log_format]
    children: list[Child] = []
    workers: list[int] = []
    for role, index, flags in _roles(config):
        own = Ports(next(numbers), next(numbers), next(numbers), next(numbers))
        further = [*shared, *flags, *overrides.flags.get(role, ())]
        child = worker_child(role, index, model, own, further)
        child.environment = {**overrides.environment, **environment_of(len(children), gpus)}
        workers.append(own.worker)
        children.append(child)
    further_names = [word for name in names[1:] for word in ("--served-model-name", name)]
    flags_of_router = [*shared, *further_names, "--ready-prefill", str(config.prefill)]
    flags_of_router += ["--ready-decode", str(config.decode)]
    flags_of_router += words("router_flags", config.router_flags)
    flags_of_router += overrides.flags.get("router", ())
    router = router_child(model, config.host, config.port, workers, flags_of_router)
    told = overrides.environment
    router.environment = {name: told[name] for name in FOR_ALL & told.keys()}
    for child in [*children, router]:
        child.arguments, keys = take_secrets(child.arguments)
        child.environment |= keys
    return [*children, router]


def _roles(config: UpConfig) -> Iterator[tuple[str, int, list[str]]]:
    """Yield role, number and further flags of each worker."""
    every = words("worker_flags", config.worker_flags)
    prefill = [*every, *words("prefill_flags", config.prefill_flags)]
    decode = [*every, *words("decode_flags", config.decode_flags)]
    for role, count, flags in (
        ("prefill", config.prefill, prefill),
        ("decode", config.decode, decode),
    ):
        for index in range(count):
            yield role, index, flags


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
    """Return the router over the given worker ports."""
    arguments = ["router", "--model", model, "--host", host, "--port", str(port)]
    for worker in workers:
        arguments += ["--workers", f"{LOOPBACK}:{worker}"]
    return Child(
        name="router", arguments=[*arguments, *extra], ready_url=f"{router_url(host, port)}/ready"
    )


def router_url(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a router that listens on ``host``."""
    bare = host.strip("[]")
    if bare in ("0.0.0.0", "::"):
        bare = LOOPBACK
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"

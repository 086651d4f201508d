"""Which processes a local stack has and with which arguments: pure, so that it can be read.

The supervisor in ``up`` starts what this returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.cli.children import Child
from tandem.cli.ports import LOOPBACK


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one worker."""

    worker: int
    probe: int
    control: int
    data: int


def worker_child(role: str, index: int, model: str, ports: Ports, extra: list[str]) -> Child:
    """A prefill or decode worker that listens on the loopback."""
    arguments = [role, "--model", model, "--host", LOOPBACK, "--port", str(ports.worker)]
    arguments += ["--probe-port", str(ports.probe), "--kv-control-host", LOOPBACK]
    arguments += ["--kv-control-port", str(ports.control), "--kv-data-port", str(ports.data)]
    return Child(
        name=f"{role}-{index}",
        arguments=[*arguments, *extra],
        ready_url=f"http://{LOOPBACK}:{ports.probe}/ready",
    )


def router_child(model: str, host: str, port: int, workers: list[int], extra: list[str]) -> Child:
    """The router over the given worker ports."""
    arguments = ["router", "--model", model, "--host", host, "--port", str(port)]
    for worker in workers:
        arguments += ["--workers", f"{LOOPBACK}:{worker}"]
    address = LOOPBACK if host in ("0.0.0.0", "::") else host
    return Child(
        name="router", arguments=[*arguments, *extra], ready_url=f"http://{address}:{port}/ready"
    )

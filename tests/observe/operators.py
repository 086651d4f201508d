"""`make alerts-operator`: operators beside a real API server, a Prometheus each, and faults."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.observe import operator_faults
from tests.observe.operator_faults import Fault, Ground, Stage
from tests.observe.prometheus import Prometheus, Target
from tests.operator.control_plane import OPERATOR_TOKEN, ControlPlane, missing
from tests.operator.harness import Harness, OperatorProcess
from tests.operator.node import FakeRouter, Node
from tests.operator.prepared import let_lead, make_namespace, prepared
from tests.waiting import wait_for

from tandem.cli.serve.listening import free_ports
from tandem.operator.cluster import Cluster

LOOK_EVERY, UP_SECONDS, CALM_SECONDS = 1.0, 60.0, 20.0


class World(NamedTuple):
    """An API server, and what stands in for the nodes of all namespaces."""

    plane: ControlPlane
    cluster: Cluster
    node: Node
    router: FakeRouter


class Played(NamedTuple):
    stage: Stage
    ground: Ground
    prometheus: Prometheus


@contextmanager
def world(home: Path) -> Iterator[World]:
    """While the block runs; an error that names the programs that are not there."""
    if absent := missing():
        raise FileNotFoundError(
            f"{', '.join(absent)}: not in TANDEM_KUBE_BIN, .cluster/bin (`make cluster` builds "
            "them) or PATH"
        )
    with ExitStack() as open_:
        plane = open_.enter_context(prepared(home))
        cluster = Cluster(kubeconfig=plane.kubeconfig())
        node, router = Node(cluster), FakeRouter()
        open_.callback(router.stop)
        node.start()
        open_.callback(node.stop)
        yield World(plane, cluster, node, router)


@contextmanager
def operated(world: World, name: str) -> Iterator[tuple[Ground, Target]]:
    """A namespace with an operator of its own, and where that is scraped."""
    make_namespace(world.plane, name)
    let_lead(world.plane, name)
    [port] = free_ports(1)
    flags = ("--port", str(port), "--namespaces", name)
    config = world.plane.kubeconfig(token=OPERATOR_TOKEN)
    process = OperatorProcess(
        world.plane.home, name, config, *flags, "--lease-name", "tandem-operator",
        namespace=name,
        **operator_faults.TIMINGS,
    )  # fmt: skip
    harness = Harness(world.plane, world.cluster, name)
    with ExitStack() as open_:
        open_.callback(process.stop)
        ground = Ground(harness, process, world.node, world.router, open_)
        yield ground, Target(f"{name}-operator-0", "", port, "")


def watch(
    folder: Path, only: Collection[str], seconds: float, open_: ExitStack
) -> dict[tuple[str, str], float | None]:
    """Raise the stages that those alerts need, strike, and look until all have fired or time is
    over: seconds by alert and fault."""
    made = open_.enter_context(world(folder))
    played = [
        _raise(made, stage, folder, open_)
        for stage in operator_faults.STAGES
        if any(fault.fires in only for fault in stage.faults)
    ]
    time.sleep(CALM_SECONDS)
    begun: dict[str, float] = {}
    for stage, ground, _ in played:
        for fault in _wanted(stage, only):
            begun[fault.fires] = time.monotonic()
            fault.strike(ground)
    end = time.monotonic() + seconds
    seen: dict[str, float] = {}
    while len(seen) < len(begun) and time.monotonic() < end:
        for stage, _, prometheus in played:
            firing = prometheus.firing()
            for fault in _wanted(stage, only):
                if fault.fires not in seen and _key(fault) in firing:
                    seen[fault.fires] = time.monotonic() - begun[fault.fires]
                    print(f"{seen[fault.fires]:7.1f} s: {fault.fires}", flush=True)
        time.sleep(LOOK_EVERY)
    return {
        (fault.fires, fault.text): seen.get(fault.fires)
        for stage, _, _ in played
        for fault in _wanted(stage, only)
    }


def _wanted(stage: Stage, only: Collection[str]) -> list[Fault]:
    """Faults of a stage that are to be made: its first one may be that of others, too."""
    chosen = [fault for fault in stage.faults if fault.fires in only]
    shared = {fault.name for fault in chosen}
    return [fault for fault in stage.faults if fault.name in shared]


def _key(fault: Fault) -> tuple[str, str]:
    return ("" if fault.of_operator else fault.name, fault.fires)


def _raise(made: World, stage: Stage, folder: Path, open_: ExitStack) -> Played:
    """A stage's operator, its services once they are ready, and its Prometheus."""
    ground, target = open_.enter_context(operated(made, stage.name))
    place = folder / stage.name
    place.mkdir()
    prometheus = open_.enter_context(
        Prometheus.running(place, [target], operator_faults.SETTINGS, operator_faults.WAITS)
    )
    wait_for(lambda: prometheus.targets_up() == 1, UP_SECONDS)
    before = {fault.name: fault.changes for fault in stage.faults if fault.waits}
    for name, changes in before.items():
        ground.harness.create(name, **changes)
    for name in before:
        ground.harness.ready(name)
    return Played(stage, ground, prometheus)

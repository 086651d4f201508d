"""Peers that a worker must keep links to: those that hand over to it, and those that it pulls from.

Every decode worker connects to every prefill worker whose KV it can take over. A worker that pulls
prefixes also connects to other workers with its fingerprint, whose blocks are hashed as its own. It
connects to as many as its card states, those that follow it in the order of incarnations. So each
has about as many incoming links, whatever the size of the service, and every router computes the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import PeerHealth
from tandem.router.workers.worker import Worker


def controls_of(worker: Worker, workers: Iterable[Worker]) -> dict[str, Incarnation]:
    """Return the control sockets (``host:port``) to keep links to, with the incarnation of each."""
    able = [
        each
        for each in workers
        if each.card.control is not None
        and each.compatibility == worker.compatibility
        and each.incarnation != worker.incarnation
    ]
    takes = worker.role is WorkerRole.DECODE
    giving = [each for each in able if takes and each.role is WorkerRole.PREFILL]
    lending = [
        each
        for each in able
        if each.card.pull_peers and each.fingerprint == worker.fingerprint and each not in giving
    ]
    lending.sort(key=lambda each: (each.incarnation < worker.incarnation, each.incarnation))
    chosen = [*giving, *lending[: worker.card.pull_peers]]
    return {each.card.control: each.incarnation for each in chosen if each.card.control}


def handoff_peers(
    worker: Worker, workers: Mapping[Incarnation, Worker]
) -> Mapping[Incarnation, PeerHealth]:
    """Return a worker's links by which prompts are handed over to it: a decode worker's to all but
    decode workers, which only lend. Unknown peers are taken for prefill workers."""
    if worker.role is not WorkerRole.DECODE:
        return {}
    if not worker.card.pull_peers:
        return worker.peers
    lending = {each for each, known in workers.items() if known.role is WorkerRole.DECODE}
    return {peer: health for peer, health in worker.peers.items() if peer not in lending}

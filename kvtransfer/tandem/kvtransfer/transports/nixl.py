"""KV over NIXL (UCX backend) between host memories or those of GPUs, a READ for all its extents.

Without its progress thread, which occupies a core, a READ of 1.5.1 progresses only while both
processes call the library. So D's transfer thread calls it during reads, and P's always, as P does
not see the end of an abandoned read. Releasing a handle is no fence, so it is polled until DONE or
the peer's end.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import Blocks
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.transports.base import Extent, Progress, Ticket, Traits
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)

UCX_SETTINGS = {
    "UCX_TLS": "tcp",
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_TCP_SNDBUF": "4m",
    "UCX_TCP_RCVBUF": "4m",
}
"""Environment of UCX, unless set, for slots in host memory; between GPUs UCX chooses by itself."""

PRODUCER = "producer"
"""Role in the name of an agent whose slots are read."""
MISSING = "install tandem-serving[nixl]"
LOOPBACK_SETTINGS = {"UCX_NET_DEVICES": "lo"}
"""Added if peers are on this machine only: by default UCX listens on every network."""


class NixlCard(msgspec.Struct, frozen=True, array_like=True):
    """Card of P's send slots."""

    metadata: bytes
    address: Annotated[int, Meta(ge=0)]
    slot_bytes: Annotated[int, Meta(ge=1)]
    count: Annotated[int, Meta(ge=1)]
    gpu: Annotated[int, Meta(ge=0)] | None = None
    """P's number of the slots' GPU; None is the host."""
    digest: bytes = b""
    """Digest of the metadata. The library (1.5.1) never accepts metadata that it has refused."""


_cards = msgspec.msgpack.Decoder(
    NixlCard
)  # made once, as threads must not make it at the same time


def digest_of(metadata: bytes) -> bytes:
    """Return 16 bytes of blake2b, by which a card's metadata is checked."""
    return hashlib.blake2b(metadata, digest_size=16).digest()


def _agent_name(incarnation: Incarnation, role: str) -> str:
    return f"{incarnation.hex()}-{role}"


def _header_of(agent: str) -> bytes:
    """Return the start of an agent's metadata (nixlSerDes of 1.5.1). With another agent's name, a
    peer could have that agent's metadata refused permanently."""
    return b"nixlSerDes|Agent" + struct.pack("<Q", len(agent)) + agent.encode()


class _Remote:
    """A producer's agent in the library, for all links to that producer."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.pending = 0
        """Reads that are not terminal, which need the agent."""
        self.card: NixlCard | None = None
        """None if no link is up."""


class NixlTransport:
    """Transport of both ends; one agent a service."""

    traits = Traits(name="nixl", needs_advance=True, moves_gpu_memory=True, max_extents=64)

    def __init__(
        self, incarnation: Incarnation, role: str, *, on_gpu: bool = False, loopback: bool = False
    ) -> None:
        settings = {} if on_gpu else UCX_SETTINGS
        api = _load(settings | LOOPBACK_SETTINGS if loopback else settings)
        self._disconnected: tuple[type[Exception], ...] = _disconnect_errors()
        try:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(_agent_name(incarnation, role), config)
        except Exception as error:  # the bindings' errors have no common base
            raise TransportError(f"nixl: no agent: {error}") from error
        self._registered: Any = None
        self._memory: SlotMemory | None = None
        self._remotes: dict[str, _Remote] = {}
        self._links: dict[Incarnation, _Remote] = {}
        self._tickets = itertools.count()
        self._reads: dict[Ticket, tuple[Any, _Remote]] = {}
        self._ended: dict[Ticket, Progress] = {}
        self._doubted: set[Ticket] = set()

    def serve(self, memory: SlotMemory, blocks: Blocks | None = None) -> bytes:
        self._register(memory)
        metadata: bytes = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(
            NixlCard(
                metadata,
                memory.address,
                memory.slot_bytes,
                memory.count,
                memory.gpu,
                digest_of(metadata),
            )
        )

    def receive(self, memory: SlotMemory, blocks: Blocks | None = None) -> None:
        self._register(memory)

    def _register(self, memory: SlotMemory) -> None:
        self._memory = memory
        region = [(memory.address, memory.count * memory.slot_bytes, memory.gpu or 0, "")]
        try:
            self._registered = self._agent.register_memory(region, _kind(memory.gpu))
        except Exception as error:
            raise TransportError(f"nixl: cannot register {region}: {error}") from error

    def connect(self, peer: Incarnation, host: str, card: bytes) -> None:
        """Load the peer's metadata; UCX connects with the first read."""
        self.close(peer)
        try:
            where = _cards.decode(card)
            if where.digest != digest_of(where.metadata):
                raise TransportError("its metadata differ from what it sent")
            if not where.metadata.startswith(_header_of(_agent_name(peer, PRODUCER))):
                raise TransportError("its metadata is of another agent")
            name = self._agent.add_remote_agent(where.metadata)
        except Exception as error:
            raise TransportError(f"nixl: cannot load the peer: {error}") from error
        agent = name.decode() if isinstance(name, bytes) else name
        remote = self._remotes.setdefault(agent, _Remote(agent))
        remote.card = where
        self._links[peer] = remote

    def read(self, peer: Incarnation, extents: Sequence[Extent]) -> Ticket:
        ticket = Ticket(next(self._tickets))
        remote = self._links.get(peer)
        card = None if remote is None else remote.card
        if remote is None or card is None or not all(_lies_in(card, each) for each in extents):
            self._ended[ticket] = Progress.FAILED
            return ticket
        assert self._memory is not None
        here, there = self._memory.address, card.address
        agent = self._agent
        handle = None
        try:
            mine, theirs = self._memory.gpu, card.gpu
            into = agent.get_xfer_descs(
                [(here + each.local.offset, each.nbytes, mine or 0) for each in extents],
                _kind(mine),
            )
            source = agent.get_xfer_descs(
                [(there + each.remote.offset, each.nbytes, theirs or 0) for each in extents],
                _kind(theirs),
            )
            handle = agent.initialize_xfer("READ", into, source, remote.agent)
            state = agent.transfer(handle)
        except self._disconnected:
            self._ended[ticket] = Progress.FAILED
            return ticket
        except Exception as error:
            logger.warning("nixl: a read could not be posted: %s", error)
            state = "ERR" if handle is None else "UNKNOWN"
        if state == "ERR":
            self._ended[ticket] = Progress.FAILED
        else:
            remote.pending += 1
            self._reads[ticket] = (handle, remote)
        return ticket

    def poll(self, ticket: Ticket) -> Progress:
        """Poll the library. An error with a live peer may not be terminal: UNKNOWN is returned
        once, and the read may still end."""
        if ticket in self._ended:
            return self._ended.pop(ticket)
        handle, remote = self._reads[ticket]
        try:
            state = self._agent.check_xfer_state(handle)
        except self._disconnected:
            state = "GONE"
        except Exception as error:
            if ticket in self._doubted:
                return Progress.PENDING
            logger.warning("nixl: a read is in an unknown state: %s", error)
            self._doubted.add(ticket)
            return Progress.UNKNOWN
        if state == "PROC":
            return Progress.PENDING
        del self._reads[ticket]
        self._doubted.discard(ticket)
        remote.pending -= 1
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)
        self._forget(remote)
        return Progress.DONE if state == "DONE" else Progress.FAILED

    def tags_of(self, ticket: Ticket) -> bytes:
        return b""

    def advance(self) -> None:
        """Run UCX: the peers' reads of our slots progress only here."""
        self._agent.get_new_notifs()

    def filenos(self) -> list[int]:
        """Return none: UCX has no descriptor to wait on, so it is polled."""
        return []

    def close(self, peer: Incarnation) -> None:
        """Forget the peer once its last read is terminal."""
        remote = self._links.pop(peer, None)
        if remote is not None:
            remote.card = None
            self._forget(remote)

    def _forget(self, remote: _Remote) -> None:
        if remote.card is None and not remote.pending:
            self._remotes.pop(remote.agent, None)
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(remote.agent)

    def stop(self) -> None:
        """Destroy the agent, which ends every read, before the memory is freed."""
        for peer in list(self._links):
            self.close(peer)
        self._reads.clear()
        if self._registered is not None:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(self._registered)
            self._registered = None
        self._agent = None


def _lies_in(card: NixlCard, extent: Extent) -> bool:
    return extent.remote.offset + extent.nbytes <= card.count * card.slot_bytes


def _kind(gpu: int | None) -> str:
    return "DRAM" if gpu is None else "VRAM"


def _load(settings: Mapping[str, str]) -> Any:
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    raises = logging.raiseExceptions
    try:
        from nixl_cu13 import _api
    except ModuleNotFoundError as error:
        raise TransportError(f"nixl: cannot load: {error}; {MISSING}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise TransportError(f"nixl: cannot load: {error}") from error
    logging.raiseExceptions = raises  # importing it turns this off, and logs to stdout
    library = logging.getLogger("nixl")
    library.handlers.clear()
    library.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        library.setLevel(logging.WARNING)
    return _api


def _disconnect_errors() -> tuple[type[Exception], ...]:
    from nixl_cu13 import _bindings

    found = getattr(_bindings, "nixlRemoteDisconnectError", None)
    return () if found is None else (found,)

"""The tcp transport beside plain sockets: python bench/tcp.py [--rounds 7] [--streams 1,4].

Two processes each. Plain sockets write and read the same slots in the same sizes, a thread a
socket, and do nothing else: what the machine gives. The transport has its reads posted ``--ahead``
at a time, as by the transfer thread of D. Both in turn; prints JSON with the medians, in GB/s, and
their ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import select
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection

from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.extents import slot_extent
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.protocol.ids import new_incarnation

SLOTS = 8
PEER = new_incarnation()
SPAWN = multiprocessing.get_context("spawn")
"""A fork of a process whose torch has threads would hang in its first product."""
SECONDS = 60.0


def give_plain(ends: Connection, slot_bytes: int, total: int, streams: int) -> None:
    """Listen, say where, send each connection its share."""
    memory = SlotMemory(SLOTS, slot_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    ends.send(listener.getsockname()[1])

    def send(sock: socket.socket) -> None:
        left = total // streams
        while left > 0:
            left -= sock.send(memory.view(0, min(slot_bytes, left)))

    threads = [threading.Thread(target=send, args=(listener.accept()[0],)) for _ in range(streams)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(SECONDS)


def plain(slot_bytes: int, total: int, streams: int) -> float:
    """Seconds in which plain sockets bring ``total`` bytes."""
    mine, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=give_plain, args=(theirs, slot_bytes, total, streams), daemon=True)
    child.start()
    port, memory = mine.recv(), SlotMemory(SLOTS, slot_bytes)
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]

    def receive(slot: int, sock: socket.socket) -> None:
        left = total // streams
        while left > 0:
            left -= sock.recv_into(memory.view(slot, min(slot_bytes, left)))

    threads = [
        threading.Thread(target=receive, args=(index % SLOTS, sock))
        for index, sock in enumerate(socks)
    ]
    started = time.perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join(SECONDS)
    seconds = time.perf_counter() - started
    child.join(SECONDS)
    return seconds


def give(ends: Connection, slot_bytes: int) -> None:
    """P: serve until told to end."""
    transport = TcpTransport(PEER, host="127.0.0.1")
    ends.send(transport.serve(SlotMemory(SLOTS, slot_bytes)))
    ends.recv()
    transport.stop()


def transported(slot_bytes: int, total: int, ahead: int, options: dict[str, int]) -> float:
    """Seconds in which the transport does."""
    mine, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=give, args=(theirs, slot_bytes), daemon=True)
    child.start()
    transport = TcpTransport(new_incarnation(), host="127.0.0.1", **options)  # type: ignore[arg-type]
    transport.receive(SlotMemory(SLOTS, slot_bytes))
    transport.connect(PEER, "127.0.0.1", mine.recv())

    def post(slot: int) -> tuple[int, object]:
        extent = slot_extent(
            slot, slot, slot_bytes, slot_bytes=slot_bytes, remote_slot_bytes=slot_bytes
        )
        return slot, transport.read(PEER, [extent])

    pending: list[tuple[int, object]] = []
    warm = post(0)
    while transport.poll(warm[1]) is Progress.PENDING:  # type: ignore[arg-type]
        transport.advance()
    left = total // slot_bytes
    started = time.perf_counter()
    spare = list(range(ahead))
    done = 0
    poller = select.poll()
    while done < left:
        while spare and done + len(pending) < left:
            pending.append(post(spare.pop()))
        transport.advance()
        still = []
        for slot, ticket in pending:
            progress = transport.poll(ticket)  # type: ignore[arg-type]
            if progress is Progress.PENDING:
                still.append((slot, ticket))
            else:
                assert progress is Progress.DONE, progress
                done += 1
                spare.append(slot)
        if len(still) == len(pending):
            poller = select.poll()
            for each in transport.filenos():
                poller.register(each, select.POLLIN)
            poller.poll(50)
        pending = still
    seconds = time.perf_counter() - started
    mine.send(None)
    transport.stop()
    child.join(SECONDS)
    return seconds


def main() -> None:
    """Both in turn, for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--mib", type=int, default=512, help="of each run")
    parser.add_argument("--slot-mib", type=int, default=8)
    parser.add_argument("--ahead", type=int, default=4)
    options = parser.parse_args()
    slot_bytes, total = options.slot_mib << 20, options.mib << 20
    rows = []
    for streams in (int(each) for each in options.streams.split(",")):
        pairs = []
        for _ in range(options.rounds):
            raw = plain(slot_bytes, total, streams)
            ours = transported(slot_bytes, total, options.ahead, {"streams": streams})
            pairs.append((raw, ours))
        raw, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(raw / ours for raw, ours in pairs)
        rows.append(
            {
                "streams": streams,
                "plain_gb_s": round(total / raw / 1e9, 2),
                "tcp_gb_s": round(total / ours / 1e9, 2),
                "ratio": round(ratio, 3),
            }
        )
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

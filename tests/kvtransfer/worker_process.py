"""A worker of the tests in a process of its own, driven by lines on its standard input.

    python worker_process.py producer|consumer CONNECTOR [PORT]

Says ``ENDPOINT INCARNATION`` first. Commands of a producer: ``admit NAME TOKENS CONSUMER``,
``compute NAME UPTO``, ``end NAME``; of a consumer: ``meet ENDPOINT INCARNATION``,
``open NAME INCARNATION``, ``load NAME``; of both: ``seen``, ``quit``. Each is answered by a line
that begins with ``ok`` or ``refused``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tests.kvtransfer.builders import (
    BLOCK,
    Consumer,
    Producer,
    Switch,
    config_apart,
    kv_of,
    make_key,
    only,
)

from tandem.protocol.card import blocks_for
from tandem.protocol.ids import Incarnation


class ProducerChild(Producer):
    def __init__(self, connector: str, port: int) -> None:
        super().__init__(config_apart(kv_connector=connector, kv_control_port=port))
        self.endpoint = self.service.control
        self._tokens: dict[str, tuple[int, list[int]]] = {}
        self._next = 0

    def do_admit(self, name: str, num_tokens: str, consumer: str) -> str:
        count = int(num_tokens)
        refusal = self.admit(make_key(name), count, incarnation_of(consumer))
        blocks = [(self._next + n) % len(self.kv_cache) for n in range(blocks_for(count, BLOCK))]
        self._next = blocks[-1] + 1
        self._tokens[name] = (count, blocks)
        return "ok" if refusal is None else f"refused {refusal.message}"

    def do_compute(self, name: str, upto: str) -> str:
        count, blocks = self._tokens[name]
        used = blocks[: blocks_for(int(upto), BLOCK)]
        self.kv_cache[used] = kv_of(name, count)[: len(used)].to(self.kv_cache.device)
        if self.kv_cache.is_cuda:
            torch.cuda.synchronize()  # what the fence says has been written
        self.service.computed(make_key(name), only(used), int(upto), Switch(done=True))
        return "ok"

    def do_end(self, name: str) -> str:
        self.end(make_key(name))
        return "ok"


class ConsumerChild(Consumer):
    def __init__(self, connector: str, _port: int) -> None:
        super().__init__(config_apart(kv_connector=connector))
        self.endpoint = "-"

    def do_meet(self, endpoint: str, incarnation: str) -> str:
        producer = incarnation_of(incarnation)
        self.service.set_peers({endpoint: producer})
        self.until(lambda: self.service.peer_up(producer))
        return "ok"

    def do_open(self, name: str, incarnation: str) -> str:
        self.open(make_key(name), incarnation_of(incarnation))
        return "ok"

    def do_load(self, name: str) -> str:
        self.load(make_key(name), list(range(40)))
        return "ok"


def main() -> None:
    """Serve until told to quit, or killed."""
    logging.basicConfig(level=logging.INFO)
    role, connector, port = sys.argv[1:4]
    kind = ProducerChild if role == "producer" else ConsumerChild
    worker = kind(connector, int(port))
    say(f"{worker.endpoint} {worker.incarnation.hex()}")
    for line in sys.stdin:
        command, *words = line.split()
        worker.collect()
        if command == "quit":
            break
        if command == "seen":
            seen = (f"{type(e).__name__}:{e.key.request}" for e in worker.seen)
            say("ok " + " ".join(seen))
        else:
            say(getattr(worker, f"do_{command}")(*words))
    worker.service.close()


def incarnation_of(word: str) -> Incarnation:
    return Incarnation(bytes.fromhex(word))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

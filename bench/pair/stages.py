"""Where the host's time in a hand-off goes: python -m bench.pair.stages --out FOLDER.

Two processes linked by ``shm`` or ``shm_agent``, as in ``fabric.py``, with blocks of 2 KiB, so that
copying them takes next to nothing, and as many blocks in a copy as between GPUs. Stamps of the
machine's monotonic clock, which both processes read, say when each thread came by: "want" is a
prompt whose KV is all announced when D has its blocks, some time later; "cached" one for which D
has them as soon as that is announced; "ready" one for which D has reserved
while P computed, in one chunk or several, whose last comes with FINAL; "busy" the same beside step
loops that are at work at both ends, 2 ms of Python and 4 of waiting in turn. Threads sleep for
``--rest`` seconds between hand-offs, as on an idle pair. ``--before FOLDER``: another checkout,
whose code is measured in turn with this one's, on the same machine in the same minutes. Writes
stages.json and prints medians in microseconds from the beginning, a line a case.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.pair import fabric

from tandem.kvtransfer.control.client import ControlClient
from tandem.kvtransfer.control.server import ControlServer
from tandem.kvtransfer.events import Loaded
from tandem.kvtransfer.handoff.messages import Committed, Done, Final, Part, Ready, Taken, Want
from tandem.kvtransfer.mover import consumer as mover_d
from tandem.kvtransfer.mover import producer as mover_p
from tandem.kvtransfer.mover.mover import Mover
from tandem.kvtransfer.mover.packs import Packs
from tandem.kvtransfer.mover.reads import Reads
from tandem.kvtransfer.mover.unpacks import Unpacks
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.kvtransfer.transports.agent.transport import AgentTransport
from tandem.kvtransfer.transports.mapped import batches
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.link import naps
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.kv import FirstToken
from tandem.protocol.layout import KVGroup, KVLayout

PACKAGES = ("kernels", "kvtransfer", "link", "protocol", "engine", "cli", "worker")
LAYOUT = KVLayout(
    (KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=64, dtype="bfloat16"),)
)
KINDS = {each: each.__name__.upper() for each in (Ready, Final, Want, Part, Taken, Done, Committed)}
"""Messages that are watched."""
BLOCKS_OF_A_COPY = 512
"""As between GPUs; the host's copies are told of 16 at a time."""
BUSY_SECONDS = 0.002, 0.004
"""Of Python, and of waiting for the device, in each step of an engine that is at work."""
CASES = (
    *(("want", blocks, 1) for blocks in (4, 32, 128, 480)),
    *(("cached", blocks, 1) for blocks in (4, 32, 128, 480)),
    *(("ready", blocks, 1) for blocks in (4, 32, 128, 480)),
    ("ready", 480, 15),
    ("busy", 32, 1),
    ("busy", 480, 1),
)
"""How, blocks, chunks."""

Stamps = dict[str, float]


class Book:
    """When each point was passed in one hand-off: the first time, or the last."""

    def __init__(self) -> None:
        self.first: Stamps = {}
        self.last: Stamps = {}

    def note(self, name: str) -> None:
        """Now."""
        now = time.monotonic()
        self.first.setdefault(name, now)
        self.last[name] = now

    def taken(self) -> str:
        """All of them in one word, which are forgotten."""
        found = json.dumps([self.first, self.last], separators=(",", ":"))
        self.first, self.last = {}, {}
        return found.replace(" ", "_")


BOOK = Book()


def stamped(
    of: Any, name: str, before: str = "", after: str = "", only: type | None = None
) -> None:
    """Have a function note its calls, all or those with an argument of a type; or, where the stamps
    name ``{}``, those with a message that is watched, whose kind is put there."""
    was, by_kind = getattr(of, name), "{}" in before + after

    @functools.wraps(was)
    def noted(*args: Any, **kwargs: Any) -> Any:
        kind = kind_of(args) if by_kind else ""
        counts = bool(kind) if by_kind else only is None or isinstance(args[1], only)
        if before and counts:
            BOOK.note(before.format(kind))
        found = was(*args, **kwargs)
        if after and counts:
            BOOK.note(after.format(kind))
        return found

    setattr(of, name, noted)


def kind_of(args: tuple[Any, ...]) -> str:
    """Of the message that is watched, if one of these brings or is one."""
    for each in args[1:]:
        kind = KINDS.get(type(getattr(each, "message", each)))
        if kind is not None:
            return kind
    return ""


def watch_threads() -> None:
    """Stamps at every hop, of whichever end this process is."""
    reserved: type = mover_d.Reserved  # type: ignore[attr-defined]  # wherever a build has it
    HostCopier.at_once = BLOCKS_OF_A_COPY
    batches.LARGE_BYTES = 1  # blocks between GPUs are not joined
    stamped(HandoffProducer, "computed", "p engine says")
    stamped(mover_p.ProducerMover, "_tag", "", "p tags set")
    stamped(HandoffConsumer, "begin_load", "d engine says WANT")
    stamped(mover_d.ConsumerMover, "take", "d mover takes WANT", only=reserved)
    stamped(Reads, "start", "d read begun")
    stamped(HostCopier, "copy", "d copies begun", "d copies made")
    stamped(mover_d.ConsumerMover, "_read_ended", "d end seen")
    stamped(mover_d, "fault_of_copy", "", "d tags compared")
    stamped(AgentTransport, "read", "", "d agent asked")
    stamped(AgentTransport, "_take", "d agent heard")
    stamped(Packs, "begin", "p packs", "p packed")
    stamped(Unpacks, "begin", "d inspects", "d inspected")
    stamped(Mover, "tell", "d told", only=Loaded)
    stamped(mover_p.ProducerMover, "take", "p mover takes", only=mover_p.Computed)
    for end, mover, channel in (
        ("p", mover_p.ProducerMover, ControlServer),
        ("d", mover_d.ConsumerMover, ControlClient),
    ):
        stamped(mover, "say", end + " says {}")
        stamped(channel, "on_item", "", end + " {} out")
        stamped(channel, "from_peer", end + " {} in")
        stamped(mover, "take", end + " mover takes {}")


class Staged(fabric.Worker):
    """An end whose threads are stamped."""

    is_busy = False

    def begin(self, name: str, tokens: str, consumer: str) -> str:
        """P: the engine has blocks and begins."""
        count = int(tokens)
        self.service.admit(
            RequestKey(fabric.ROUTER, name, 0),
            num_tokens=count,
            num_blocks=count // fabric.BLOCK,
            consumer=Incarnation(bytes.fromhex(consumer)),
            budget_ms=None,
        )
        self.service.started(RequestKey(fabric.ROUTER, name, 0))
        return "ok"

    def compute(self, name: str, tokens: str, chunks: str) -> str:
        """P: so many chunks, the last of which comes with token 1."""
        key, count, parts = RequestKey(fabric.ROUTER, name, 0), int(tokens), int(chunks)
        table = fabric.table(name, count // fabric.BLOCK, self.num_blocks)
        hashes = fabric.hashes(name, len(table))
        each = len(table) // parts
        for part in range(1, parts + 1):
            if part == parts:
                BOOK.taken()
            upto = each * part
            done = fabric.Done()
            self.service.computed(key, table[:upto], upto * fabric.BLOCK, done, hashes[:upto])
            if part < parts:
                time.sleep(0.01)
        self.service.final(key, [FirstToken(0, 1)], None)
        self.service.finished(key)
        self.until(lambda: key in self.ended)
        return f"ok {BOOK.taken()}"

    def released(self, name: str) -> str:
        """P: wait until the blocks are its own again; all stamps."""
        super().released(name)
        return f"ok {BOOK.taken()}"

    def load(self, name: str) -> str:
        """D: WANT to usable."""
        key = RequestKey(fabric.ROUTER, name, 0)
        self.until(lambda: key in self.ready)
        time.sleep(0.02)
        BOOK.taken()
        return self.reserve(name) and self.usable(name)

    def follow(self, name: str) -> str:
        """D: reserve as soon as P has said what it has, then wait; all stamps."""
        BOOK.taken()
        return self.reserve(name) and self.usable(name)

    def reserve(self, name: str) -> str:
        """D: blocks are there for all that is announced, or will be."""
        key = RequestKey(fabric.ROUTER, name, 0)
        self.until(lambda: key in self.ready)
        count = self.ready[key]
        mine = fabric.table(f"d{name}", count // fabric.BLOCK, self.num_blocks)
        hashes = fabric.hashes(name, len(mine))
        self.service.begin_load(key, mine, 0, count, hashes)
        return "ok"

    def busy(self, yes: str) -> str:
        """Whether the engine has other work meanwhile."""
        self.is_busy = yes == "1"
        return "ok"

    def until(self, check: Callable[[], object]) -> None:
        """See Worker; between steps, if there are some."""
        if self.is_busy:
            wait = self.woken.wait

            def step(_seconds: float) -> None:
                end = time.monotonic() + BUSY_SECONDS[0]
                while time.monotonic() < end:
                    pass
                time.sleep(BUSY_SECONDS[1])

            self.woken.wait = step  # type: ignore[assignment]
            try:
                super().until(check)
            finally:
                self.woken.wait = wait  # type: ignore[method-assign]
        else:
            super().until(check)

    def usable(self, name: str) -> str:
        """D: wait until the engine knows; all stamps."""
        key = RequestKey(fabric.ROUTER, name, 0)
        self.until(lambda: key in self.ended)
        BOOK.note("d engine awake")
        return f"ok {BOOK.taken()}"

    def commands(self) -> dict[str, Callable[..., str]]:
        """See Worker."""
        names = ("begin", "busy", "compute", "follow", "reserve", "usable")
        return super().commands() | {name: getattr(self, name) for name in names}


def stamps(answer: list[str]) -> list[Stamps]:
    """Of an end: first and last."""
    found: list[Stamps] = json.loads(answer[1].replace("_", " "))
    return found


def one(ends: tuple[fabric.Child, fabric.Child], case: tuple[str, int, int], name: str) -> Stamps:
    """Microseconds from the beginning of a hand-off at which each point was passed last."""
    (producer, consumer), (how, blocks, chunks) = ends, case
    tokens = blocks * fabric.BLOCK
    consumer.tell(f"open {name} {producer.incarnation}")
    if how == "want":
        producer.tell(f"export {name} {tokens} {consumer.incarnation}")
        found = stamps(consumer.tell(f"load {name}"))[1]
        found |= stamps(producer.tell(f"released {name}"))[1]
        begun = found["d engine says WANT"]
    elif how == "cached":
        consumer.say(f"follow {name}")
        time.sleep(0.02)
        producer.tell(f"export {name} {tokens} {consumer.incarnation}")
        found = stamps(consumer.answer())[1]
        found |= stamps(producer.tell(f"released {name}"))[1]
        begun = found["d engine says WANT"]
    else:
        if how == "busy":
            producer.tell("busy 1")
            consumer.tell("busy 1")
        producer.tell(f"begin {name} {tokens} {consumer.incarnation}")
        consumer.tell(f"reserve {name}")
        consumer.say(f"usable {name}")
        time.sleep(0.02)
        there = stamps(producer.tell(f"compute {name} {tokens} {chunks}"))
        found = there[0] | stamps(consumer.answer())[1]
        if how == "busy":
            producer.tell("busy 0")
            consumer.tell("busy 0")
        begun = found["p engine says"]
    return {point: (at - begun) * 1e6 for point, at in found.items() if at >= begun}


def medians(rows: list[Stamps]) -> Stamps:
    """Of each point that all passed, in order."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    middle = {name: statistics.median(row[name] for row in rows) for name in names}
    return dict(sorted(middle.items(), key=lambda each: each[1]))


def measured(asked: argparse.Namespace, connector: str, builds: dict[str, str]) -> dict[str, Any]:
    """Of each case, each build; builds in turn, hand-off by hand-off."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        pairs = {}
        for build, path in builds.items():
            os.environ["PYTHONPATH"] = path
            pairs[build] = stack.enter_context(
                fabric.pair(asked, connector, ("-m", "bench.pair.stages"))
            )
        for case in (each for each in CASES if each[0] in asked.only.split(",")):
            rows: dict[str, list[Stamps]] = {build: [] for build in builds}
            for turn in range(asked.rounds + 3):
                for build, ends in pairs.items():
                    time.sleep(asked.rest)
                    rows[build].append(one(ends, case, f"{'-'.join(map(str, case))}-{turn}"))
            for build in builds:
                title = f"{connector} {case[0]} {case[1]} blocks {case[2]} chunks, {build}"
                found[title] = medians(rows[build][3:])
                print(title, {name: round(us) for name, us in found[title].items()}, flush=True)
    return found


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--connectors", default="shm,shm_agent")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="want,cached,ready,busy", help="of the cases")
    parser.add_argument("--rest", type=float, default=0.02)
    parser.add_argument("--before", type=Path, help="another checkout, measured beside this one")
    for name, default in (("--device", "cpu"), ("--role", None), ("--folder", None)):
        parser.add_argument(name, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=1024, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    fabric.LAYOUT = LAYOUT
    if asked.role:
        watch_threads()
        getattr(naps, "switch_soon", list)()  # as workers do, since they do
        Staged(asked.role, asked).serve()
        return
    asked.isolated = False
    builds = {"now": ""}
    if asked.before:
        builds["before"] = os.pathsep.join(str(asked.before.resolve() / each) for each in PACKAGES)
    found: dict[str, Any] = {}
    for connector in asked.connectors.split(","):
        with (
            tempfile.TemporaryDirectory() as asked.folder,
            fabric.agent_for(connector, asked.folder),
        ):
            found |= measured(asked, connector, builds)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "stages.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

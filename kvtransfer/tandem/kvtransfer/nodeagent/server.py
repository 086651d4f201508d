"""Single thread of the agent: receives requests, makes copies in turn, and answers.

A caller that violates the protocol loses its connection; a forbidden request is answered with its
fault. No caller delays another by more than one copy of a landing slot.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.nodeagent.registrations import (
    Consumer,
    Producer,
    Producers,
    Running,
)
from tandem.kvtransfer.transports.agent.wire import (
    MAX_FILES,
    MAX_MESSAGE,
    SOCKET_NAME,
    VERSION,
    Copy,
    Counts,
    Fault,
    Give,
    Hello,
    Refused,
    Registered,
    Rejected,
    Status,
    Take,
    ToAgent,
    ToWorker,
    encode,
    to_agent,
)
from tandem.kvtransfer.transports.mapped.files import close_all, receive, user_of
from tandem.kvtransfer.transports.mapped.wire import fresh
from tandem.kvtransfer.waiting import nap_before, watch
from tandem.link.naps import nap_precisely, sleep_on

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59
"""Value from asm-generic/socket.h; Python has no name for it."""
_MAX_GROUPS = 256
"""Maximum groups of a caller that are read; with more, only its own group counts."""
_BATCH = 64


class Garbage(Exception):
    """Data that is not of the protocol; the text names it."""


class Caller:
    """A worker that is registered or may register."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.since = time.monotonic()
        self.challenge = fresh()
        self.producer: Producer | None = None
        self.consumer: Consumer | None = None
        self.ended = False
        """Whether no more is read from it; queued answers are still sent."""
        self._unsaid: deque[tuple[bytes, int | None]] = deque()

    @property
    def is_registered(self) -> bool:
        return self.producer is not None or self.consumer is not None

    @property
    def has_unsaid(self) -> bool:
        """Return whether answers are queued because its socket is full."""
        return bool(self._unsaid)

    def may_call(self, group: int | None) -> bool:
        """Return whether it belongs to this process's user, or to ``group``."""
        level = socket.SOL_SOCKET
        credentials = self.sock.getsockopt(level, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, own_group = _CREDENTIALS.unpack(credentials)
        if user == os.geteuid() or group is None:
            return bool(user == os.geteuid())
        size, groups = struct.calcsize("I"), b""
        with contextlib.suppress(OSError):
            groups = self.sock.getsockopt(level, _SO_PEERGROUPS, _MAX_GROUPS * size)
        return group in (own_group, *struct.unpack(f"{len(groups) // size}I", groups))

    def messages(self) -> Generator[tuple[ToAgent, list[int]]]:
        """Yield received messages, a bounded number, with descriptors, which are closed after each.
        Set ``ended`` at the connection's end. Raises Garbage."""
        for _ in range(_BATCH):
            try:
                data, files = receive(self.sock, MAX_MESSAGE, MAX_FILES)
            except BlockingIOError:
                return
            except TransportError as error:
                raise Garbage(str(error)) from error
            except OSError:
                data, files = b"", []
            try:
                if not data:  # its end, or an empty packet, which has no meaning
                    self.ended = True
                    return
                yield self._read(data), files
            finally:
                close_all(files)

    def _read(self, data: bytes) -> ToAgent:
        try:
            return to_agent.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Garbage(f"no message: {error}") from error

    def send_message(self, message: ToWorker, slot: int | None = None) -> None:
        """Send an answer, now or when its socket has room; ``slot`` is free again once sent."""
        self._unsaid.append((encode(message), slot))
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsaid:
                data, slot = self._unsaid[0]
                try:
                    self.sock.send(data)
                except BlockingIOError:
                    raise
                except OSError:  # it is gone
                    self._unsaid.clear()
                    self.ended = True
                    return
                self._unsaid.popleft()
                if slot is not None and self.consumer is not None:
                    self.consumer.busy.discard(slot)

    def close(self) -> None:
        """Close the connection and its consumer; the owner ends a producer."""
        self.sock.close()
        if self.consumer is not None:
            self.consumer.close()


Who = TypeVar("Who")
What = TypeVar("What")


class InTurn(Generic[Who, What]):
    """Requests that have not begun, in the order of their turns."""

    def __init__(self, may: Callable[[Who], bool]) -> None:
        """``may`` returns whether a consumer's request may begin now; the others are skipped."""
        self._may = may
        self._waiting: dict[Who, deque[What]] = {}
        """Queues by consumer; the first is next, and a served one moves to the end."""
        self.waiting = 0

    def __bool__(self) -> bool:
        return any(self._may(who) for who in self._waiting)

    def add(self, who: Who, what: What) -> None:
        self._waiting.setdefault(who, deque()).append(what)
        self.waiting += 1

    def take(self) -> tuple[Who, What]:
        """Return the next one that may begin; there must be one."""
        who = next(each for each in self._waiting if self._may(each))
        queue = self._waiting.pop(who)
        what = queue.popleft()
        self.waiting -= 1
        if queue:
            self._waiting[who] = queue
        return who, what

    def drop(self, who: Who) -> None:
        self.waiting -= len(self._waiting.pop(who, ()))


logger = logging.getLogger(__name__)

MAX_CALLERS = 256
GREETING_SECONDS = 2.0
MAX_RUNNING = 4
"""Copies of one consumer under way at once; those of the host end at once."""
_LOOK_SECONDS = 1e-4
"""Pause between two polls of GPUs' copies."""
_COUNTED = (
    *("copies", "bytes", "garbage", "strangers", "turned away", "rejected"),
    *(f"refused: {fault.name.lower()}" for fault in Fault),
)


class NodeAgent:
    """Node agent: listens on construction; ``run`` serves until ``stop``."""

    def __init__(self, folder: Path, group: int | None = None) -> None:
        """``group`` may call, in addition to this process's user. Raises TransportError."""
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self.path = folder / SOCKET_NAME
        self._group = group
        self._producers = Producers()
        self._callers: dict[socket.socket, Caller] = {}
        self._in_turn: InTurn[Caller, Copy] = InTurn(_may_begin)
        self._running: list[tuple[Caller, Running]] = []
        self._listener = _listen(self.path, group)
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_reader, selectors.EVENT_READ)

    def stop(self) -> None:
        """End ``run``. Callable from any thread and signal handlers."""
        with contextlib.suppress(OSError):
            self._stop_writer.send(b"\0")

    def status(self) -> dict[str, int]:
        """Return the counters and current totals. Callable from any thread."""
        callers = list(self._callers.values())
        return dict(self.counts) | {
            "producers": sum(each.producer is not None for each in callers),
            "consumers": sum(each.consumer is not None for each in callers),
            "waiting": self._in_turn.waiting,
            "under way": len(self._running),
        }

    def run(self) -> None:
        nap_precisely()
        try:
            while self._turn():
                pass
        finally:
            for caller in list(self._callers.values()):
                self._close(caller)
            self.path.unlink(missing_ok=True)
            for each in (self._listener, self._stop_reader, self._stop_writer, self._selector):
                each.close()

    def _turn(self) -> bool:
        self._pause()
        for key, ready in self._selector.select(0 if self._running else self._rest()):
            if key.fileobj is self._stop_reader:
                return False
            if key.fileobj is self._listener:
                self._accept()
                continue
            assert isinstance(key.fileobj, socket.socket)
            caller = self._callers[key.fileobj]
            if ready & selectors.EVENT_WRITE:
                caller.flush()
            if ready & selectors.EVENT_READ:
                self._receive(caller)
        if self._in_turn:
            self._begin(*self._in_turn.take())
        self._see_ends()
        now = time.monotonic()
        for caller in list(self._callers.values()):
            if not caller.is_registered and not caller.ended:
                caller.ended = now - caller.since > GREETING_SECONDS
                self.counts["garbage"] += caller.ended
            if caller.ended:
                self._close(caller)
            else:
                self._watch(caller)
        return True

    def _pause(self) -> None:
        if not self._running or self._in_turn:
            return
        moments = [copy.mark.due for _, copy in self._running]
        if not watch(moments, self._stirs):
            nap = nap_before(moments)
            sleep_on([self._selector.fileno()], _LOOK_SECONDS if nap is None else nap)

    def _stirs(self) -> bool:
        return any(copy.ended() for _, copy in self._running) or bool(self._selector.select(0))

    def _rest(self) -> float | None:
        if self._in_turn:
            return 0
        return None if all(each.is_registered for each in self._callers.values()) else 0.2

    def _watch(self, caller: Caller) -> None:
        # A caller that does not read answers is not read, so that its queue is bounded.
        wanted = selectors.EVENT_WRITE if caller.has_unsaid else selectors.EVENT_READ
        if self._selector.get_key(caller.sock).events != wanted:
            self._selector.modify(caller.sock, wanted)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.warning("a call could not be taken: %s", error)
            time.sleep(0.05)  # out of descriptors: no busy loop
            return
        caller = Caller(sock)
        full = len(self._callers) >= MAX_CALLERS
        if full or not caller.may_call(self._group):
            self.counts["turned away" if full else "strangers"] += 1
            caller.close()
            return
        self._callers[sock] = caller
        self._selector.register(sock, selectors.EVENT_READ)
        caller.send_message(Hello(VERSION, caller.challenge))

    def _receive(self, caller: Caller) -> None:
        try:
            with contextlib.closing(caller.messages()) as messages:
                for message, files in messages:
                    self._take(caller, message, files)
                    if caller.ended or caller.has_unsaid:
                        return
        except Garbage as error:
            self.counts["garbage"] += 1
            logger.warning("a worker's connection ends: %s", error)
            caller.ended = True

    def _take(self, caller: Caller, message: ToAgent, files: list[int]) -> None:
        if isinstance(message, Status):
            caller.send_message(Counts(self.status()))
            return
        if isinstance(message, Copy):
            if caller.consumer is None or files:
                raise Garbage("a request of no consumer, or with descriptors")
            self._ask(caller, caller.consumer, message)
            return
        if caller.is_registered or len(files) != (3 if isinstance(message, Give) else 1):
            raise Garbage(f"{len(files)} descriptors, or a second registration")
        reason = self._register(caller, message, files)
        if reason is None:
            caller.send_message(Registered())
            return
        self.counts["rejected"] += 1
        logger.warning("a worker is not registered: %s", reason)
        caller.send_message(Rejected(reason))
        caller.ended = True

    def _register(self, caller: Caller, registration: Give | Take, files: list[int]) -> str | None:
        if registration.version != VERSION:
            return f"the worker speaks version {registration.version}, the agent {VERSION}"
        try:
            if isinstance(registration, Take):
                caller.consumer = Consumer(registration, files[0], caller.challenge)
            else:
                refused = self._producers.why_not(registration)
                if refused is not None:
                    return refused
                caller.producer = Producer(registration, files)
                self._producers.enter(caller.producer)
        except (TransportError, OSError) as error:
            return str(error)
        role = "consumer" if isinstance(registration, Take) else "producer"
        logger.info(
            "%s %s is registered, memory: %s",
            role,
            registration.incarnation.hex()[:8],
            registration.where,
        )
        return None

    def _ask(self, caller: Caller, consumer: Consumer, request: Copy) -> None:
        if request.consumer != consumer.incarnation:
            self._refuse(caller, request, Fault.STALE)
        elif request.slot in consumer.busy:
            self._refuse(caller, request, Fault.BUSY)
        else:
            consumer.busy.add(request.slot)
            self._in_turn.add(caller, request)

    def _refuse(self, caller: Caller, request: Copy, fault: Fault, slot: int | None = None) -> None:
        self.counts[f"refused: {fault.name.lower()}"] += 1
        caller.send_message(Refused(request.number, fault), slot)

    def _begin(self, caller: Caller, request: Copy) -> None:
        assert caller.consumer is not None, "it has asked"
        begun = self._producers.begin(request, caller.consumer)
        if isinstance(begun, Fault):
            self._refuse(caller, request, begun, request.slot)
        else:
            self._running.append((caller, begun))

    def _see_ends(self) -> None:
        ended = [each for each in self._running if each[1].ended()]
        for each in ended:
            self._running.remove(each)
            caller, copy = each
            request = copy.request
            if copy.failed:
                if not caller.ended:
                    self._refuse(caller, request, Fault.FAILED, request.slot)
                    caller.ended = True  # a failed GPU copies nothing more
                copy.end()
                continue
            self.counts["copies"] += 1
            self.counts["bytes"] += len(request.places) * request.size
            if not caller.ended:
                caller.send_message(copy.answer(), request.slot)
            copy.end()

    def _close(self, caller: Caller) -> None:
        caller.ended = True
        del self._callers[caller.sock]
        self._selector.unregister(caller.sock)
        self._in_turn.drop(caller)
        for each in (caller.producer, caller.consumer):
            if each is not None:
                logger.info("%s is gone", each.incarnation.hex()[:8])
        if isinstance(caller.producer, Producer):
            self._producers.leave(caller.producer)
        caller.close()


def _may_begin(caller: Caller) -> bool:
    return caller.consumer is not None and caller.consumer.under_way < MAX_RUNNING


def _listen(path: Path, group: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(GREETING_SECONDS)
            try:
                probe.connect(str(path))
                if user_of(probe) == os.geteuid():
                    raise TransportError(f"another agent serves {path}")
                path.unlink()  # another user's file; allowed in one's own folder
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
        listener.bind(str(path))
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(0o600 if group is None else 0o660)
        listener.listen(MAX_CALLERS)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise TransportError(f"no socket at {path}: {error}") from error
    except TransportError:
        listener.close()
        raise
    return listener

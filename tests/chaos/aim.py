"""Faults that are aimed at a pulled prefix: a frame of the pull is held while they strike.

A pull is over in milliseconds, so nobody hits one by chance. Between workers that pull stands a
proxy, which reads what passes: the first frame of the kind that is waited for, under a pull's key,
says that the pull is just there, whose it is, and where its KV lies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from tests.chaos.schedule import KV

from tandem.kvtransfer.handoff.messages import (
    KeyedToConsumer,
    KeyedToProducer,
    Part,
    Ready,
    decode_to_consumer,
    decode_to_producer,
)
from tandem.protocol.errors import WireError
from tandem.protocol.ids import RequestKey

BY_SLOTS = ("open", "ready", "want", "part", "taken", "final", "done", "committed")
BY_BLOCKS = ("open", "ready", "final")
"""Frames between the question and the end of a pull, as it goes by slots or by blocks: there it is
over when FINAL and all blocks have come."""
HOLD_SECONDS = 3.0
"""For so long a frame is held at most, less than a beat's timeout."""
_LONG = 2

Keyed = KeyedToProducer | KeyedToConsumer


def moments_of(connector: str) -> Sequence[str]:
    """Frames at which a pull over a connector can be hurt."""
    return BY_BLOCKS if connector.startswith("shm") else BY_SLOTS


def pull_of(unit: bytes) -> Keyed | None:
    """What a ZMQ message between workers says of a pull; None for all else."""
    parts = frames_of(unit)
    for decode in (decode_to_producer, decode_to_consumer):
        with suppress(WireError):
            message = decode(parts[-1])
            if isinstance(message, Keyed) and message.key.is_pull:
                return message
    return None


def frames_of(unit: bytes) -> list[bytes]:
    """Bodies of the frames of a ZMQ message, as it stands on the wire."""
    found, at = [], 0
    while at < len(unit):
        wide = 8 if unit[at] & _LONG else 1
        begin = at + 1 + wide
        at = begin + int.from_bytes(unit[at + 1 : begin], "big")
        found.append(unit[begin:at])
    return found


def fits(message: Keyed, moment: str) -> bool:
    """Whether a frame is the one that is waited for."""
    if moment == KV:
        return isinstance(message, Part) or (isinstance(message, Ready) and any(message.blocks))
    return bool(type(message).__struct_config__.tag == moment)


class Held:
    """A frame that stands in a proxy until it is released."""

    def __init__(self, message: Keyed, holder: str) -> None:
        self.message = message
        self.holder = holder
        """Name of the worker that has the prefix."""
        self._released = threading.Event()

    def release(self) -> None:
        """It goes on, if it still can."""
        self._released.set()

    def wait(self) -> None:
        self._released.wait(HOLD_SECONDS)


class Aim:
    """Waits for one frame of one pull, at any proxy."""

    def __init__(
        self,
        moment: str,
        claim: Callable[[str], bool] = lambda holder: True,
        key: RequestKey | None = None,
    ) -> None:
        """``claim`` says whether a holder may be hurt now; whoever is claimed is. ``key`` of the
        pull; None is any."""
        self._moment = moment
        self._key = key
        self._claim = claim
        self._lock = threading.Lock()
        self._found = threading.Event()
        self._held: Held | None = None
        self._over = False

    def take(self, message: Keyed, holder: str) -> Held | None:
        """The frame, if it is the first that fits; called by proxies' threads."""
        if not fits(message, self._moment) or self._key not in (None, message.key):
            return None
        with self._lock:
            if self._over or not self._claim(holder):
                return None
            self._over = True
            self._held = Held(message, holder)
        self._found.set()
        return self._held

    @property
    def held(self) -> Held | None:
        return self._held if self._found.is_set() else None

    def wait(self, seconds: float) -> Held | None:
        """The frame once it is held; None if none came in so many seconds, and then none will."""
        self._found.wait(seconds)
        with self._lock:
            self._over = True
            return self._held


class Aims:
    """All that are waited for, shared by the proxies of a line."""

    def __init__(self) -> None:
        self._aims: list[Aim] = []

    def add(self, aim: Aim) -> None:
        """From now on, until it is removed; from any thread."""
        self._aims = [*self._aims, aim]

    def remove(self, aim: Aim) -> None:
        self._aims = [each for each in self._aims if each is not aim]

    def take(self, unit: bytes, holder: str) -> Held | None:
        """The frame, if one of them waits for it; nothing is read while nobody waits."""
        aims = self._aims
        message = pull_of(unit) if aims else None
        if message is None:
            return None
        return next((held for aim in aims if (held := aim.take(message, holder))), None)

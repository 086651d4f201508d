"""A registrar that locks nothing, and knows what a driver would have locked."""

from __future__ import annotations

import ctypes

from tandem.memory.device import DeviceMemoryError


class Locks:
    """Ranges by address. With ``look`` it reads the first byte of what is unlocked, which must be
    there still."""

    def __init__(self, *, most: int = 1 << 62, broken: bool = False, look: bool = False) -> None:
        self.held: dict[int, int] = {}
        self.unlocked: list[int] = []
        self.seen: list[int] = []
        self._most, self._broken, self._look = most, broken, look

    @property
    def nbytes(self) -> int:
        return sum(self.held.values())

    def register(self, address: int, nbytes: int) -> None:
        if self.nbytes + nbytes > self._most:
            raise DeviceMemoryError("no more is locked")
        assert address not in self.held
        self.held[address] = nbytes

    def unregister(self, address: int) -> None:
        if self._broken:
            raise RuntimeError("the device has failed")
        if self._look:
            self.seen.append(ctypes.c_ubyte.from_address(address).value)
        del self.held[address]
        self.unlocked.append(address)

"""Progress of this process's engine and transfers, for beats to peers.

Written by the engine's and the transfer thread, read by the control thread; single words, so no
lock is needed.
"""


class ProgressBoard:
    """Counters that only grow, and whether there is work at all."""

    __slots__ = ("engine_turns", "has_work", "transfers")

    def __init__(self) -> None:
        self.engine_turns = 0
        """Turns of the engine's loop, stepping or idle: a loop that hangs makes none."""
        self.transfers = 0
        """Parts packed, read or unpacked."""
        self.has_work = False

    def note_engine(self, has_work: bool) -> None:
        """Record a turn of the engine's loop."""
        self.engine_turns += 1
        self.has_work = has_work

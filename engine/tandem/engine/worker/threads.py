"""How many of the CPU's threads a step uses: one where memory is the limit, all where sums are.

A step of few tokens reads every weight once, and one core nearly reaches the memory's rate. More
threads then gain a tenth at best and lose it again to waking and waiting (measured on two cores
with SmolLM2 in float32: 40 ms a step by one thread, 45 by two that sleep between regions, 35 by two
that spin and so take the second core from everybody else).
"""

from __future__ import annotations

import torch

FEW_TOKENS = 4
"""At most so many are a step for one thread."""


class StepThreads:
    """Sets torch's threads before each step of a CPU worker; called in the thread of the steps."""

    def __init__(self, device: torch.device) -> None:
        """All threads are those that torch has now; a device needs none of this."""
        self._all = torch.get_num_threads()
        self._now = self._all
        self._fixed = device.type != "cpu" or self._all == 1

    def set_for(self, num_tokens: int) -> None:
        """Use as many threads as a step of ``num_tokens`` gains from."""
        wanted = 1 if num_tokens <= FEW_TOKENS else self._all
        if not self._fixed and wanted != self._now:
            torch.set_num_threads(wanted)
            self._now = wanted

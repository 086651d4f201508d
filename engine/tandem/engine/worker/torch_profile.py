"""Profiles of a rank's steps by torch's profiler: CPU operations, and kernels where there is a GPU.

One at a time, in the thread that launches steps, since that is the one whose operations are
recorded. What nobody stops ends by itself: a trace grows with every operation.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from tandem.protocol.errors import TandemError

logger = logging.getLogger(__name__)

MOST_SECONDS = 20.0
"""After which a profile ends with the next step: of a GPU's, that is half a million kernels."""


WRITE_SECONDS = 60.0
"""In which a profile is written before its rank ends without it."""


class ProfileError(TandemError):
    """A profile that cannot be started, stopped or written; the text says why."""


class TorchProfile:
    """What one rank records."""

    def __init__(self, rank: int, *, on_gpu: bool, clock: Callable[[], float] = time.monotonic):
        """``clock`` gives seconds."""
        self._rank = rank
        self._clock = clock
        self._activities = [ProfilerActivity.CPU]
        if on_gpu:
            self._activities.append(ProfilerActivity.CUDA)
        self._running: tuple[profile, Path] | None = None
        self._until = 0.0
        self._writing: threading.Thread | None = None

    @property
    def overdue(self) -> bool:
        """Whether one runs that should have been stopped by now."""
        return self._running is not None and self._clock() >= self._until

    def warm(self) -> None:
        """Load what the first profile needs, before anybody waits for a step: it takes seconds."""
        recording = profile(activities=self._activities)
        recording.start()
        recording.stop()

    def start(self, folder: str) -> str:
        """Begin to record; the file that is going to be written."""
        if self._running is not None:
            raise ProfileError(f"a profile is being made already, for {self._running[1]}")
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ProfileError(f"no folder for profiles: {error}") from error
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{socket.gethostname()}-{os.getpid()}-rank{self._rank}-{stamp}.pt.trace.json.gz"
        recording = profile(activities=self._activities)
        recording.start()
        self._running, self._until = (recording, path / name), self._clock() + MOST_SECONDS
        logger.info("a profile begins, for at most %g s", MOST_SECONDS)
        return str(path / name)

    def stop(self) -> str:
        """End what ``start`` began; the file, which is there once it has been written: steps do
        not wait for that."""
        if self._running is None:
            raise ProfileError("no profile is being made")
        (recording, path), self._running = self._running, None
        recording.stop()
        part = path.with_name("writing-" + path.name)
        try:
            # Its own words for a file that cannot be made are a line of standard error.
            part.touch()
        except OSError as error:
            raise ProfileError(f"the profile could not be written: {error}") from error
        self._writing = threading.Thread(target=_write, args=(recording, part, path))
        self._writing.start()
        return str(path)

    def close(self) -> None:
        """End what is recorded, and wait until all is written."""
        self.end()
        if self._writing is not None:
            self._writing.join(WRITE_SECONDS)

    def end(self) -> None:
        """Stop one, if one is made; what that fails with is in the log."""
        if self._running is None:
            return
        try:
            self.stop()
        except ProfileError as error:
            logger.warning("%s", error)


def _write(recording: profile, part: Path, path: Path) -> None:
    try:
        recording.export_chrome_trace(str(part))
        part.rename(path)
    except (OSError, RuntimeError) as error:
        logger.warning("the profile could not be written: %s", error)
    else:
        logger.info("a profile was written: %s", path)

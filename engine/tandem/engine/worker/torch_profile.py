"""Profiles of a rank's steps by torch's profiler: CPU operations, and a GPU's kernels.

One at a time, in the thread that launches steps. A profile that is not stopped ends by itself.
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
"""Seconds after which a profile ends with the next step."""


WRITE_SECONDS = 60.0
"""Seconds to wait at a rank's end for a profile to be written."""


class ProfileError(TandemError):
    """A profile that cannot be started, stopped or written; the text has the reason."""


class TorchProfile:
    """Profiles of one rank."""

    def __init__(self, rank: int, *, on_gpu: bool, clock: Callable[[], float] = time.monotonic):
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
        """Return whether a profile runs for too long."""
        return self._running is not None and self._clock() >= self._until

    def warm(self) -> None:
        """Load the profiler before any request waits for a step: it takes seconds."""
        recording = profile(activities=self._activities)
        recording.start()
        recording.stop()

    def start(self, folder: str) -> str:
        """Begin to record; return the path of the file to be written."""
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
        """End the profile; return its path. The file is written later, in another thread."""
        if self._running is None:
            raise ProfileError("no profile is being made")
        (recording, path), self._running = self._running, None
        recording.stop()
        part = path.with_name("writing-" + path.name)
        try:
            # Otherwise the library reports a file that cannot be made on standard error only.
            part.touch()
        except OSError as error:
            raise ProfileError(f"the profile could not be written: {error}") from error
        self._writing = threading.Thread(target=_write, args=(recording, part, path))
        self._writing.start()
        return str(path)

    def close(self) -> None:
        """End a profile that is running, and wait until all are written."""
        self.end()
        if self._writing is not None:
            self._writing.join(WRITE_SECONDS)

    def end(self) -> None:
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

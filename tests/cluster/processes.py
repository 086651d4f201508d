"""Running commands and waiting, with a deadline on each; failures carry what the command said."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

COMMAND_SECONDS = 120.0

Argument = str | Path

_LASTING: list[subprocess.Popen[bytes]] = []
"""What was spawned here: a collected Popen of a running process would warn that it still runs."""


class ClusterError(Exception):
    """The cluster cannot be built, raised or used; the message says which step and why."""


def run(
    *command: Argument,
    seconds: float = COMMAND_SECONDS,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """A command's standard output. Raises ClusterError on failure and at the deadline."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=env,
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(words)}: not done after {seconds:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise ClusterError(f"{' '.join(words)}: exit {done.returncode}\n{said}")
    return done.stdout


def spawn(
    *command: Argument, log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process of its own session that outlives this one; both outputs go to ``log``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )
    _LASTING.append(process)
    return process


def wait_until(
    what: str,
    condition: Callable[[], bool],
    *,
    seconds: float = 60.0,
    alive: Mapping[Path, subprocess.Popen[bytes]] | None = None,
) -> None:
    """Poll ``condition``; gives up at the deadline, and at once when one of ``alive`` has ended.

    ``alive`` are processes by their logs, whose last lines then go into the error.
    """
    end = time.monotonic() + seconds
    while not condition():
        for log, process in (alive or {}).items():
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-8:]
                raise ClusterError(
                    f"{log.stem} ended while waiting for {what}:\n" + "\n".join(lines)
                )
        if time.monotonic() > end:
            raise ClusterError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)

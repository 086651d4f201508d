"""Host memory that this process can use, limited by the host and by its cgroups.

A pod that passes its limit is killed, whatever its node has left. Limits are nested, and the
tightest one counts. Cgroups above those that a container sees are not read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

GIB = 2**30
_UNLIMITED = 1 << 60
"""Least limit that a cgroup v1 reports without a limit: it gives the largest number of pages."""


class Available(NamedTuple):
    """Memory that programs can use without swapping, or being killed."""

    nbytes: int
    of: str
    """Name of the limit's owner, as a subject."""


class _Files(NamedTuple):
    """Names of a memory cgroup's files, and of its field that counts pages of files not used
    lately: these are reclaimed first."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def available(root: Path = Path("/")) -> Available:
    """Return the least of what the host and each cgroup around this process have left; ``root``
    holds the system's files."""
    least = Available(_of_host(root), "this host")
    for files, levels in _cgroups(root):
        for level in levels:
            left = _of_cgroup(level, files)
            if left is not None and left.nbytes < least.nbytes:
                least = left
    return least


def _of_host(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        logger.debug("no MemAvailable in /proc/meminfo; free pages are taken for available")
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_cgroup(level: Path, files: _Files) -> Available | None:
    """Return the cgroup's free memory; None without a limit, as at the top."""
    try:
        limit = int((level / files.limit).read_text())
        used = int((level / files.usage).read_text())
        fields = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
        used -= int(fields[files.reclaimable])
    except (OSError, KeyError, ValueError):  # memory.max says "max"
        return None
    if limit >= _UNLIMITED:
        return None
    whose = f"the cgroup at {level}, of {limit / GIB:.1f} GiB,"
    return Available(max(limit - max(used, 0), 0), whose)


def _cgroups(root: Path) -> Iterator[tuple[_Files, list[Path]]]:
    """Yield this process's cgroup and those around it, per hierarchy that limits memory."""
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}
    """Paths by controller; that of the second version has no name."""
    for line in own:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        before, _, behind = line.partition(" - ")
        top, mount = (_unescaped(each) for each in before.split()[3:5])
        kind, _, options = behind.split()[:3]
        if kind == "cgroup2" and "" in paths:
            yield _V2, _levels(root / mount.lstrip("/"), top, paths[""])
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
            yield _V1, _levels(root / mount.lstrip("/"), top, paths["memory"])


def _levels(mount: Path, top: str, path: str) -> list[Path]:
    """Return the folders from that of cgroup ``path`` up to ``mount``, which shows cgroup ``top``.
    A cgroup not below ``top`` is not visible: then it is the mount alone."""
    prefix = top.rstrip("/") + "/"
    below = path[len(prefix) :] if path.startswith(prefix) else ""
    level = mount / below.lstrip("/")
    levels = [level]
    while level != mount:
        level = level.parent
        levels.append(level)
    return levels


def _unescaped(text: str) -> str:
    """Decode mountinfo's octal escapes of spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)

"""The cgroups of the nodes, on both layouts: one hierarchy (v2), or one per controller (v1)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from tests.cluster import layout
from tests.cluster.processes import ClusterError

MOUNT = Path("/sys/fs/cgroup")
REMOVE_SECONDS = 10.0


def root_of(node: str) -> str:
    """The cgroup below which a node's pods are, as kubelet wants it."""
    return f"/{layout.CGROUP}/{node}"


def make(node: str) -> None:
    """Make a node's cgroup in every hierarchy, with all that its children may want to control."""
    unified = (MOUNT / "cgroup.controllers").exists()
    for hierarchy in [MOUNT] if unified else [each for each in MOUNT.iterdir() if each.is_dir()]:
        parent = hierarchy
        for name in (layout.CGROUP, node):
            if unified:
                _delegate(parent)
            level = parent / name
            level.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems") if hierarchy.name == "cpuset" else ():
                (level / file).write_text((parent / file).read_text())
            parent = level
        if unified:
            _delegate(parent)


def remove() -> None:
    """Remove what ``make`` and kubelet made; the processes in it have been killed before."""
    end = time.monotonic() + REMOVE_SECONDS
    while left := _tops():
        for top in left:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # busy until its last process is reaped
                    os.rmdir(folder)
        if time.monotonic() > end:
            raise ClusterError(f"cgroups {', '.join(map(str, left))} stay busy")
        time.sleep(0.05)


def _tops() -> list[Path]:
    places = [MOUNT, *(each for each in MOUNT.iterdir() if each.is_dir())]
    return [place / layout.CGROUP for place in places if (place / layout.CGROUP).is_dir()]


def _delegate(level: Path) -> None:
    """Let children of a v2 cgroup have every controller that it has itself."""
    names = (level / "cgroup.controllers").read_text().split()
    for name in names:
        with contextlib.suppress(OSError):  # one that cannot be handed on is not needed
            (level / "cgroup.subtree_control").write_text(f"+{name}")

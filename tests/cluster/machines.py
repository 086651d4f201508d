"""Machines made of namespaces: the control plane and each node is one.

A machine is a process that holds network, PID, mount, UTS and IPC namespaces of its own and is
joined to a bridge on the host. Ending that one process ends all that runs in the machine and takes
its mounts, links and firewall rules along. Machines are found again by a mark in the environment
of their first process, so that what a killed run left is found too. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import layout
from tests.cluster.processes import Argument, ClusterError, run, spawn, wait_until

PRIVATE = ("/run", "/var/lib", "/var/log")
"""kubelet and CNI write there whatever they are told, so each machine has its own."""
END_SECONDS = 10.0
Condition = Callable[[], bool]


@dataclass
class Machines:
    """The running machines: name to PID of the first process; and what was started in them."""

    holders: dict[str, int] = field(default_factory=dict)
    running: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Processes that this very process started, by their logs."""

    @classmethod
    def load(cls) -> Machines:
        """The machines of the cluster that runs now. Raises ClusterError if none does."""
        try:
            return cls(json.loads(layout.MACHINES.read_text()))
        except FileNotFoundError as error:
            raise ClusterError("no cluster runs: `python -m tests.cluster up`") from error

    def save(self) -> None:
        """Leave the machines' PIDs for later commands."""
        partial = layout.MACHINES.with_suffix(".partial")
        partial.write_text(json.dumps(self.holders))
        partial.replace(layout.MACHINES)

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, dead ones included."""
        return [name for name in self.holders if name != layout.CONTROL_PLANE]

    def start(self, name: str, address: str) -> None:
        """A new machine on the bridge; its default route is the host."""
        self.holders[name] = _hold(name)
        link = layout.LINK + name
        peer = ("peer", "name", "eth0", "netns", str(self.holders[name]))
        run("ip", "link", "add", link, "type", "veth", *peer)
        run("ip", "link", "set", link, "master", layout.BRIDGE, "up")
        self.inside(name, "ip", "link", "set", "lo", "up")
        self.inside(name, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self.inside(name, "ip", "link", "set", "eth0", "up")
        self.inside(name, "ip", "route", "add", "default", "via", layout.HOST)

    def inside(
        self, name: str, *command: Argument, stdin: str | None = None, seconds: float = 120.0
    ) -> str:
        """Output of a command in a machine. The folder changes: give absolute paths."""
        return run(*self._enter(name), *command, stdin=stdin, seconds=seconds)

    def spawn(self, name: str, title: str, *command: Argument) -> None:
        """A lasting process in a machine; its log is ``title``.log."""
        log = layout.LOG / f"{title}.log"
        self.running[log] = spawn(*self._enter(name), *command, log=log)

    def kill(self, name: str) -> None:
        """End a machine at once, as if its power were cut; its disk stays.

        The link goes first: from then on nobody hears anything of it. Its processes end one after
        the other, and the kernel would close the connections of each, which a power cut does not.
        """
        link = layout.LINK + name
        if (Path("/sys/class/net") / link).exists():
            run("ip", "link", "set", link, "down")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.holders[name], signal.SIGKILL)
        process = Path(f"/proc/{self.holders[name]}")
        wait_until(f"the end of {name}", lambda: not process.exists(), seconds=END_SECONDS)
        remove_link(link)

    def _enter(self, name: str) -> list[str]:
        if name not in self.holders:
            raise ClusterError(f"no machine {name!r}; there are {', '.join(self.holders)}")
        return ["nsenter", "-t", str(self.holders[name]), "-m", "-u", "-i", "-n", "-p", "--"]


def environment() -> dict[str, str]:
    """This process's environment with the mark by which ``down`` finds a process.

    Go's collector takes a fifth of what an API server computes at its own 100; memory is there.
    """
    return {"GOGC": "400", **os.environ, layout.MARK: str(layout.ROOT)}


def _hold(name: str) -> int:
    """PID of a new machine's first process, once its mounts are made."""
    mounts = " && ".join(f"mount -t tmpfs tmpfs {folder}" for folder in PRIVATE)
    script = (
        f"mount --make-rshared / && hostname {name} && {mounts} && mkdir /run/lock"
        " && trap '' CHLD && exec sleep infinity"  # with CHLD ignored the kernel reaps orphans
    )
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
    log = layout.LOG / f"machine-{name}.log"
    outer = spawn(
        "unshare", *spaces, "--mount-proc", "sh", "-c", script, log=log, env=environment()
    )
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")

    def sleeps() -> bool:
        first = children.read_text().split()
        return bool(first) and Path(f"/proc/{first[0]}/comm").read_text() == "sleep\n"

    wait_until(f"machine {name}", sleeps, alive={log: outer})
    return int(children.read_text().split()[0])


def marked() -> Iterator[int]:
    """PIDs of this cluster's own processes, of killed runs too; never this process."""
    mark = f"{layout.MARK}={layout.ROOT}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                pid = int(process.name)
                if pid != os.getpid():
                    yield pid


def end_all() -> None:
    """Kill every marked process by its PID, and remove the links that are left."""
    end = time.monotonic() + END_SECONDS
    while pids := list(marked()):
        if time.monotonic() > end:
            raise ClusterError(f"processes {pids} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for link in Path("/sys/class/net").glob(layout.LINK + "*"):
        remove_link(link.name)


def remove_link(name: str) -> None:
    """Remove a network link; the end of its peer's namespace may do so at the same moment."""
    link = Path("/sys/class/net") / name
    try:
        run("ip", "link", "del", name)
    except ClusterError:
        if link.exists():
            raise

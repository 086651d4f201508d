"""A throw-away Kubernetes on one machine, for tests: real components, no container engine.

    python -m tests.cluster build          compile the components, once
    python -m tests.cluster up [NODES]     raise a cluster (2 nodes); ends what an earlier run left
    python -m tests.cluster load FILE...   import image archives into every node
    python -m tests.cluster pack REFERENCE FOLDER FILE   make an image archive of a folder
    python -m tests.cluster kill NODE      cut a node's power
    python -m tests.cluster revive NODE    boot it again
    python -m tests.cluster env            print exports of KUBECONFIG and PATH for a shell
    python -m tests.cluster down           end all of it and leave nothing behind

Needs root and Linux; `build` says what else is missing.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import archives, build, layout, lifecycle
from tests.cluster.processes import ClusterError

LOCKED = ("build", "up", "load", "kill", "revive", "down")
"""Commands that change the cluster: one at a time."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("build")
    raising = commands.add_parser("up")
    raising.add_argument("nodes", type=int, nargs="?", default=2)
    raising.add_argument("--metrics-server", action="store_true", help="for `kubectl top` and HPA")
    commands.add_parser("load").add_argument("files", type=Path, nargs="+")
    packing = commands.add_parser("pack")
    packing.add_argument("reference")
    packing.add_argument("folder", type=Path)
    packing.add_argument("file", type=Path)
    for name in ("kill", "revive"):
        commands.add_parser(name).add_argument("node")
    commands.add_parser("env")
    commands.add_parser("down")
    return top


def perform(given: argparse.Namespace) -> None:
    match given.command:
        case "build":
            start = time.monotonic()
            done = "built" if build.build() else "already built"
            print(f"{done}: {layout.BIN} ({time.monotonic() - start:.1f} s)")
        case "up":
            lifecycle.up(given.nodes, metrics_server=given.metrics_server)
        case "load":
            lifecycle.load(given.files)
        case "pack":
            archives.pack(given.reference, given.folder, given.file)
        case "kill":
            lifecycle.kill_node(given.node)
        case "revive":
            lifecycle.revive_node(given.node)
        case "env":
            print(f"export KUBECONFIG={layout.KUBECONFIG} PATH={layout.BIN}:$PATH")
        case "down":
            lifecycle.down()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with the reason on standard error."""
    given = parser().parse_args(arguments)
    layout.ROOT.mkdir(parents=True, exist_ok=True)
    try:
        with (layout.ROOT / "lock").open("w") as lock:
            if given.command in LOCKED:
                fcntl.flock(lock, fcntl.LOCK_EX)
            perform(given)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

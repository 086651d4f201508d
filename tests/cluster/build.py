"""Compiling the components and packing the three images that a cluster itself needs.

Everything comes from Go modules (go.mod names them, go.sum pins them): Kubernetes, etcd,
containerd, CoreDNS, metrics-server, helm and the process that holds a pod's namespaces. Done once;
a stamp over the inputs says whether it has to be done again. Needs Go and Debian's runc,
containernetworking-plugins, iptables, nftables, openssl and iproute2.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from tests.cluster import archives, layout, nodes
from tests.cluster.processes import ClusterError, run

BUILD_SECONDS = 3600.0
SOURCES = ("go.mod", "go.sum", "pause/main.go", "coredns/main.go")
PROGRAMS = ("runc", "iptables", "nft", "openssl", "ip", "nsenter", "unshare", "sysctl")
PACKAGES = "runc containernetworking-plugins iptables nftables openssl iproute2 procps util-linux"
STAMPED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
OWN_IMAGES = ("pause", "coredns")
METRICS_SERVER = layout.ROOT / "extra" / "metrics-server.tar"
"""Not imported by every ``up``, but by ``up --metrics-server``."""


def build() -> bool:
    """Compile and pack what is not there yet, or wait for who does; whether anything was to do."""
    check_machine()
    layout.ROOT.mkdir(parents=True, exist_ok=True)
    with (layout.ROOT / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build()


def _build() -> bool:
    stamp, digest = layout.ROOT / "built", _digest()
    if stamp.exists() and stamp.read_text() == digest:
        return False
    for folder in (layout.BIN, layout.IMAGES, METRICS_SERVER.parent):
        folder.mkdir(parents=True, exist_ok=True)
    _compile()
    for name in OWN_IMAGES:
        _pack(name, layout.IMAGES / f"{name}.tar")
    _pack("metrics-server", METRICS_SERVER)
    stamp.write_text(digest)
    return True


def check_machine() -> None:
    """Raise ClusterError naming what this machine lacks and the packages that bring it."""
    if os.geteuid() != 0:
        raise ClusterError("needs root: machines are made of namespaces and network links")
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if not Path(nodes.CNI_PLUGINS, "bridge").exists():
        absent.append(f"{nodes.CNI_PLUGINS}/bridge")
    if absent:
        raise ClusterError(
            f"not installed: {', '.join(absent)}\n"
            f"on Debian: apt-get install --no-install-recommends {PACKAGES}"
        )


def _compile() -> None:
    if shutil.which("go") is None:
        raise ClusterError("Go is not installed; go.mod says which version is needed")
    numbers = layout.VERSION.removeprefix("v").split(".")
    facts = {"gitVersion": layout.VERSION, "gitMajor": numbers[0], "gitMinor": numbers[1]}
    facts["gitTreeState"] = "clean"
    stamps = [f"-X {package}.{key}={value}" for package in STAMPED for key, value in facts.items()]
    link = " ".join(["-s -w", *stamps])
    # Packages are named: `./...` would walk into folders of state as well.
    run(
        *("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", link),
        "-gcflags=all=-dwarf=false",  # the linker leaves it out; a fifth of what compiling takes
        *("-o", f"{layout.BIN}/", "./pause", "./coredns", "tool"),
        cwd=layout.HERE,
        # The compiler's collector takes a sixth of its time at Go's own 100.
        env={"GOGC": "400", **os.environ, "CGO_ENABLED": "0"},
        seconds=BUILD_SECONDS,
    )
    (layout.BIN / "server").replace(layout.BIN / "etcd")  # Go names it after its folder


def _pack(name: str, archive: Path) -> None:
    folder = layout.ROOT / "rootfs" / name
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(layout.BIN / name, folder)
    archives.pack(f"docker.io/local/{name}:1", folder, archive, command=[f"/{name}"])


def _digest() -> str:
    content = hashlib.sha256(layout.VERSION.encode())
    for source in SOURCES:
        content.update((layout.HERE / source).read_bytes())
    return content.hexdigest()

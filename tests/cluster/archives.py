"""Container images as archives: made from a folder, and imported into every node."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster import layout
from tests.cluster.machines import Machines
from tests.cluster.processes import ClusterError

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
LOAD_SECONDS = 300.0


def pack(
    reference: str,
    folder: Path,
    archive: Path,
    *,
    command: Sequence[str] = (),
    entrypoint: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """An archive as `docker save` writes it, of one layer; all its files belong to root."""
    partial, layer = archive.with_suffix(".partial"), archive.with_suffix(".layer")
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        for entry in sorted(os.listdir(folder)):
            tar.add(folder / entry, entry, filter=_of_root)
    with layer.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    variables = {"PATH": PATH, **(environment or {})}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "config": {
            "Entrypoint": list(entrypoint),
            "Cmd": list(command),
            "Env": [f"{k}={v}" for k, v in variables.items()],
        },
    }
    manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": ["layer.tar"]}]
    with tarfile.open(partial, "w") as tar:
        _add(tar, "manifest.json", json.dumps(manifest).encode())
        _add(tar, "config.json", json.dumps(config).encode())
        tar.add(layer, "layer.tar")
    layer.unlink()
    partial.replace(archive)


def load(machines: Machines, archives: Iterable[Path], nodes: Iterable[str] | None = None) -> None:
    """Import archives into nodes (all), one after the other on each, the nodes side by side."""
    files = [archive.resolve() for archive in archives]
    if absent := [str(file) for file in files if not file.is_file()]:
        raise ClusterError(f"no such archive: {', '.join(absent)}")
    chosen = list(machines.nodes if nodes is None else nodes)
    with ThreadPoolExecutor(max(1, len(chosen))) as pool:
        list(pool.map(lambda node: _import(machines, node, files), chosen))


def _import(machines: Machines, node: str, files: Iterable[Path]) -> None:
    for file in files:
        importer = (layout.BIN / "ctr", "-n", "k8s.io", "images", "import", "--local")
        machines.inside(node, *importer, file, seconds=LOAD_SECONDS)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))

"""A cluster of two nodes for one question, with a program of others in a pod of it.

What ``make observe-cluster`` and ``make traces-cluster`` share; the suite has a cluster of its own
life (``__main__``).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import archives, layout, lifecycle
from tests.e2e_cluster.__main__ import Steps, prepared
from tests.e2e_cluster.kube import Kube
from tests.e2e_cluster.setup import Setup


def pack(program: Path, image: str) -> None:
    """An image of a static program alone, which every node of the next cluster imports; made anew
    where the program is newer."""
    archive = layout.IMAGES / f"{program.name}.tar"
    if archive.exists() and archive.stat().st_mtime > program.stat().st_mtime:
        return
    layout.IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(program, Path(name) / program.name)
        for folder in ("data", "tmp"):
            (Path(name) / folder).mkdir()
        archives.pack(image, Path(name), archive, entrypoint=[f"/{program.name}"])


@contextmanager
def raised(program: Path, image: str) -> Iterator[tuple[Kube, Setup]]:
    """The cluster while the block runs, with images under test and that of ``program``; a table of
    what took how long is printed at the end."""
    steps = Steps()
    models = prepared(steps)
    pack(program, image)
    os.environ["PATH"] = f"{layout.BIN}:{os.environ['PATH']}"
    try:
        with steps.step("cluster"):
            lifecycle.up(2)
        mounted = str(layout.ROOT / "mounted")
        setup = Setup(str(layout.KUBECONFIG), True, mounted, str(models), None, None)
        yield Kube(str(layout.KUBECONFIG)), setup
    finally:
        with steps.step("down"):
            lifecycle.down()
        print(steps.table(), flush=True)

"""Writes ``recorded.json`` and ``chart.tgz`` from the commit of the release before."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.operator.older_release import CHART, RECORDED, REPOSITORY, extract


def record(source: Path) -> str:
    """What that release's code makes of the specs."""
    parts = [str(each.parent) for each in sorted(source.glob("*/tandem"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*parts, str(REPOSITORY)])}
    words = [sys.executable, "-m", "tests.operator.older_release.record"]
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout + "\n"


def pack(chart: Path) -> bytes:
    """The chart as helm packs it, the same bytes each time."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in sorted(each for each in chart.rglob("*") if each.is_file()):
            name = f"tandem/{path.relative_to(chart)}"
            found = tarfile.TarInfo(name)
            found.size, found.mode = path.stat().st_size, 0o644
            archive.addfile(found, io.BytesIO(path.read_bytes()))
    return gzip.compress(content.getvalue(), mtime=0)


def main() -> None:
    """Write both."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        extract(source)
        RECORDED.write_text(record(source))
        CHART.write_bytes(pack(source / "charts" / "tandem"))


if __name__ == "__main__":
    main()

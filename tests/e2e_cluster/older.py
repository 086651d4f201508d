"""The release before, on this cluster: its images from its commit, its chart from the repository.

The images are made by that release's own Dockerfiles and scripts, once, with a tag of their own. A
shallow clone does not have the commit: then there are no images, and the tests say so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster import archives, layout
from tests.cluster.machines import Machines
from tests.cluster.processes import ClusterError
from tests.e2e_cluster.images import PREFIX
from tests.operator import older_release

TAG = "older"
ROLES = ("operator", "router", "worker")
BUILD_SECONDS = 1800.0
CA = Path("/etc/ssl/certs/ca-certificates.crt")
_BUILD = """
import sys
from scripts.images import mounted
from scripts.images.__main__ import main
mounted.fill = lambda folder: None  # the packages of this release's worker are mounted
sys.exit(main(sys.argv[1:]))
"""


def folder() -> Path:
    return layout.ROOT / "older"


def reference(role: str) -> str:
    return f"{PREFIX}/tandem-{role}:{TAG}"


def tars() -> list[Path]:
    return [folder() / "images" / f"{role}.tar" for role in ROLES]


def make_images() -> None:
    """Make the images that are not there yet; none in a clone without the commit."""
    stamp = folder() / "commit"
    is_made = stamp.exists() and stamp.read_text() == older_release.COMMIT
    if not older_release.is_here() or (is_made and all(each.exists() for each in tars())):
        return
    source = folder() / "source"
    shutil.rmtree(source, ignore_errors=True)
    older_release.extract(source)
    words = ["--tool", "buildah", "--make-base", "--thin", "--tag", TAG]
    words += ["--save", str(folder() / "images"), "--work", str(layout.ROOT)]
    words += ["--ca", str(CA)] if CA.exists() else []
    command = [sys.executable, "-c", _BUILD, *words]
    done = subprocess.run(command, cwd=source, timeout=BUILD_SECONDS, check=False)
    if done.returncode:
        raise ClusterError("the images of the release before cannot be built")
    stamp.write_text(older_release.COMMIT)


def load_images() -> None:
    archives.load(Machines.load(), tars())

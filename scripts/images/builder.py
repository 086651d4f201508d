"""One way to build and save an image with docker, podman or buildah.

buildah runs without a daemon: in its own storage below the work folder, with chroot isolation,
which needs no container runtime. An image whose inputs are those of its archive is not built again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ROLES = ("operator", "router", "worker")
BUILD_SECONDS = 3600.0
CA_PATH = "/run/secrets/ca"
INPUTS = (".dockerignore", "LICENSE", "README.md", "pyproject.toml", "uv.lock")


class ImageError(Exception):
    """An image cannot be built; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """One image: its role's Dockerfile, its name and its build arguments."""

    role: str
    reference: str
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def dockerfile(self) -> Path:
        """Path of the Dockerfile."""
        return REPOSITORY / "images" / self.role / "Dockerfile"


@dataclass
class Builder:
    """A tool with its settings."""

    tool: str
    work: Path
    ca: Path | None = None
    base: str | None = None

    def command(self, *words: str | Path) -> list[str]:
        """The tool's command line."""
        return [*self._tool(), *map(str, words)]

    def build(self, recipe: Recipe, save: Path | None) -> None:
        """Build an image, and save it where asked to, unless that archive is up to date."""
        start, digest = time.monotonic(), self.digest(recipe)
        archive = None if save is None else save / f"{recipe.role}.tar"
        if archive is not None and is_current(archive, digest):
            print(f"{recipe.reference}: up to date", flush=True)
            return
        run(self._build(recipe), seconds=BUILD_SECONDS)
        if archive is not None:
            self.save(recipe.reference, archive)
            stamp_of(archive).write_text(digest)
        print(f"{recipe.reference}: built in {time.monotonic() - start:.1f} s", flush=True)

    def save(self, reference: str, archive: Path) -> None:
        """Write an image as an archive that containerd imports."""
        archive.parent.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        if self.tool == "buildah":
            run(self.command("push", "--quiet", reference, f"docker-archive:{partial}:{reference}"))
        else:
            run(self.command("save", "--output", partial, reference))
        partial.replace(archive)

    def digest(self, recipe: Recipe) -> str:
        """Digest over all that the image is made of."""
        content = hashlib.sha256(json.dumps([recipe.arguments, self.base, self.tool]).encode())
        sources = [path for path in REPOSITORY.glob("*/tandem/**/*") if path.is_file()]
        named = [recipe.dockerfile, *(REPOSITORY / name for name in INPUTS)]
        for path in [*named, *sorted(sources)]:
            if "__pycache__" not in path.parts:
                content.update(str(path.relative_to(REPOSITORY)).encode())
                content.update(path.read_bytes())
        return content.hexdigest()

    def _build(self, recipe: Recipe) -> list[str]:
        arguments = {**recipe.arguments, "REVISION": revision()}
        if self.base is not None:
            arguments["BASE"] = self.base
        words = ["build", "--quiet", "--file", str(recipe.dockerfile), "--tag", recipe.reference]
        if self.tool == "buildah":
            words += ["--isolation", "chroot", "--layers", "--format", "docker"]
            is_here = (self.base or "").startswith("localhost/")
            words += ["--pull-never"] if is_here else []
        if self.ca is not None:
            words += ["--secret", f"id=ca,src={self.ca}"]
            arguments |= {"PIP_CERT": CA_PATH, "SSL_CERT_FILE": CA_PATH}
        if self.base is not None:
            words += ["--label", f"org.opencontainers.image.base.name={self.base}"]
        for name, value in arguments.items():
            words += ["--build-arg", f"{name}={value}"]
        return self.command(*words, REPOSITORY)

    def _tool(self) -> list[str]:
        if self.tool != "buildah":
            return [self.tool]
        storage = self.work / "buildah"
        places = ["--root", storage / "root", "--runroot", storage / "run"]
        return ["buildah", *map(str, places), "--storage-driver", "overlay"]


def find_tool() -> str:
    """The first tool that works here. Raises ImageError when there is none."""
    for tool in ("docker", "podman"):
        if shutil.which(tool):
            told = subprocess.run([tool, "info"], capture_output=True, timeout=30, check=False)
            if told.returncode == 0:
                return tool
    if shutil.which("buildah"):
        return "buildah"
    raise ImageError("no docker daemon, podman or buildah; on Debian: apt-get install buildah")


def revision() -> str:
    """Commit of the checkout, or ``unknown``."""
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or "unknown"


def stamp_of(archive: Path) -> Path:
    """Return the path of the digest of an archive's inputs."""
    return archive.with_suffix(".inputs")


def is_current(archive: Path, digest: str) -> bool:
    """Return whether an archive was made of these inputs."""
    stamp = stamp_of(archive)
    return archive.is_file() and stamp.is_file() and stamp.read_text() == digest


def run(words: list[str], *, seconds: float = 600.0) -> None:
    """A command to its end; its errors are seen, its output is not."""
    subprocess.run(words, stdout=subprocess.DEVNULL, timeout=seconds, check=True)

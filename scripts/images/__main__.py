"""Builds Tandem's container images from images/*/Dockerfile, with whatever tool is there.

    python -m scripts.images                        all three, with docker, podman or buildah
    python -m scripts.images --make-base router     on a base made here, where no registry is
    python -m scripts.images --pin                  write the bases' digests into the Dockerfiles
    python -m scripts.images --thin --save FOLDER   a worker without torch, and archives of all

`--thin` builds the worker image from the same Dockerfile without the packages that weigh most
(torch and what it brings, nixl): they are put into a folder beside the archives, to be mounted at
/opt/tandem-mounted. For tests on one machine; users build the whole image.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.images import base, digest, mounted
from scripts.images.builder import REPOSITORY, ROLES, Builder, ImageError, Recipe, find_tool

WORK = REPOSITORY / ".cluster"
PREFIX = "ghcr.io/tandem-serving"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m scripts.images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("roles", nargs="*", metavar="ROLE", help=f"of {', '.join(ROLES)}; none: all")
    top.add_argument("--tool", choices=("docker", "podman", "buildah"), help="else the first there")
    top.add_argument("--prefix", default=PREFIX, help="before /tandem-ROLE (%(default)s)")
    top.add_argument("--tag", help="else the project's version")
    kind = top.add_mutually_exclusive_group()
    kind.add_argument("--base", help="image to build on, instead of the Dockerfiles' own")
    kind.add_argument("--make-base", action="store_true", help="make a base with debootstrap")
    kind.add_argument(
        "--floating-base", action="store_true", help="build on whatever the base's tag means now"
    )
    kind.add_argument("--pin", action="store_true", help="only pin the bases by their digests")
    top.add_argument("--thin", action="store_true", help="a worker whose big packages are mounted")
    top.add_argument("--ca", type=Path, help="certificates to trust while building, a PEM bundle")
    top.add_argument("--save", type=Path, help="also write an archive of each image there")
    top.add_argument("--work", type=Path, default=WORK, help="for what is made on the way")
    return top


def version() -> str:
    """The project's version."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def recipes(given: argparse.Namespace) -> list[Recipe]:
    """Return the images to build."""
    chosen = given.roles or list(ROLES)
    if wrong := [role for role in chosen if role not in ROLES]:
        raise ImageError(f"no role {', '.join(wrong)}; roles are {', '.join(ROLES)}")
    tag = given.tag or version()
    names = {role: f"{given.prefix}/tandem-{role}:{tag}" for role in chosen}
    thin = mounted.ARGUMENTS if given.thin else {}
    return [
        Recipe(role, reference, {"VERSION": tag, **(thin if role == "worker" else {})})
        for role, reference in names.items()
    ]


def perform(given: argparse.Namespace) -> None:
    """Build all that was asked for."""
    wanted = recipes(given)
    work = given.work.resolve()
    builder = Builder(given.tool or find_tool(), work, given.ca)
    is_thin = given.thin and any(recipe.role == "worker" for recipe in wanted)
    with ThreadPoolExecutor() as pool:  # most of it waits for downloads and disks
        begun = [pool.submit(mounted.fill, work / "mounted")] if is_thin else []
        builder.base = _base(given, builder, wanted)
        builder.build(wanted[0], given.save)  # the others begin with layers of it
        begun += [pool.submit(builder.build, recipe, given.save) for recipe in wanted[1:]]
        for each in begun:
            each.result()


def _base(given: argparse.Namespace, builder: Builder, wanted: list[Recipe]) -> str | None:
    """Return the base of all images; None leaves it to the Dockerfiles. Raises ImageError."""
    if given.make_base:
        return base.make(builder, builder.work)
    if given.floating_base:
        return None
    if given.base is not None:
        return str(digest.pinned(digest.Reference.of(given.base)))
    bases = {digest.base_of(recipe.dockerfile) for recipe in wanted}
    if len(bases) != 1:
        raise ImageError(f"the Dockerfiles name different bases: {', '.join(map(str, bases))}")
    return str(digest.pinned(bases.pop()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with the reason on standard error."""
    given = parser().parse_args(arguments)
    try:
        if given.pin:
            for found in digest.pin([Recipe(role, "").dockerfile for role in ROLES]):
                print(found)
        else:
            perform(given)
    except ImageError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        words = " ".join(map(str, error.cmd))
        print(f"images: exit {error.returncode} of {words}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

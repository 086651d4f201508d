"""What every image of Tandem promises, read from the Dockerfiles; the cluster's tests run them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from scripts.images.digest import Reference, base_of

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("operator", "router", "worker")


def lines(role: str) -> list[str]:
    """Instructions of the last stage of a Dockerfile."""
    text = (ROOT / "images" / role / "Dockerfile").read_text().replace("\\\n", " ")
    return text.rpartition("\nFROM ")[2].splitlines()


@pytest.mark.parametrize("role", ROLES)
def test_an_image_runs_tandem_as_nobody_in_particular(role: str) -> None:
    """No root, no shell between the signal and the process, and no health check of its own."""
    assert "USER 65532:65532" in lines(role)
    assert 'ENTRYPOINT ["tandem"]' in lines(role)
    assert "HEALTHCHECK NONE" in lines(role)


@pytest.mark.parametrize("role", ROLES)
def test_an_image_says_what_it_is(role: str) -> None:
    """Title, licence, version and commit are labels with the names of the OCI specification."""
    labels = next(line for line in lines(role) if line.startswith("LABEL "))
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


def test_images_have_one_base_by_digest() -> None:
    """A tag alone may mean another image tomorrow."""
    bases = {str(base_of(ROOT / "images" / role / "Dockerfile")) for role in ROLES}
    (base,) = bases
    assert Reference.of(base).digest is not None


@pytest.mark.parametrize("role", ROLES)
def test_an_image_is_built_with_the_pinned_uv(role: str) -> None:
    """The Makefile's uv, so that the lock is read by the version that wrote it."""
    makefile = (ROOT / "Makefile").read_text()
    pinned = makefile.partition("UV_VERSION := ")[2].split()[0]
    assert f"ARG UV_VERSION={pinned}\n" in (ROOT / "images" / role / "Dockerfile").read_text()


@pytest.mark.parametrize("role", ROLES)
def test_an_image_with_triton_has_a_compiler(role: str) -> None:
    """Triton comes with torch; it compiles for the driver when a kernel is first launched, and no
    GPU worker starts without gcc, the C library's headers and Python's."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    torch = {
        group
        for group, needs in groups.items()
        if any(need.startswith("torch") for need in needs if isinstance(need, str))
    }
    assert torch == {"worker"}
    text = (ROOT / "images" / role / "Dockerfile").read_text()
    chosen = set(re.findall(r"--only-group (\w+)", text))
    stage = lines(role)
    has = 'ARG COMPILER="gcc libc6-dev"' in stage
    assert has is bool(chosen & torch)
    if has:
        (installs,) = (line for line in stage if "apt-get install" in line)
        assert "${COMPILER}" in installs.partition("apt-get install")[2]
        assert "Python.h" in installs
        assert stage.index(installs) < stage.index("USER 65532:65532")


def test_every_portion_is_sent_to_the_builder() -> None:
    """A portion that .dockerignore forgets would be missing in the images, without an error."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{package.partition('/')[0]}" for package in packages} <= set(sent)

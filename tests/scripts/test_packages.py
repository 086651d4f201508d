"""The lists of packages in pyproject.toml agree with each other."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tandem.cli.__main__ import EXTRAS
from tandem.protocol.link import DISTRIBUTION, tandem_version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRA_LISTS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
CLI = {"httpx>=0.28", "pyyaml>=6.0.3", "rich>=15"}
"""Packages that only commands of a person need."""


def group(name: str) -> set[str]:
    """Return the packages of a group and of the groups that it includes."""
    found: set[str] = set()
    for need in PROJECT["dependency-groups"][name]:
        found |= {need} if isinstance(need, str) else group(need["include-group"])
    return found


def test_the_default_install_has_what_serving_needs() -> None:
    """`pip install` without extras brings every role that `serve` and `up` run."""
    wanted = group("hub") | group("router") | group("worker") | CLI
    assert set(PROJECT["project"]["dependencies"]) == wanted


@pytest.mark.parametrize("extra", sorted({*EXTRA_LISTS} - {"bench", "operator"}))
def test_an_extra_is_the_group_of_the_images(extra: str) -> None:
    """Images and users install the same packages for one capability."""
    assert set(EXTRA_LISTS[extra]) == group(extra)


def test_the_operator_extra_completes_the_default_install() -> None:
    have = {*PROJECT["project"]["dependencies"], *EXTRA_LISTS["operator"]}
    assert group("operator") <= have


def test_every_missing_package_names_an_extra_that_exists() -> None:
    """The remedy in an error can be typed as it stands."""
    assert set(EXTRAS.values()) == set(EXTRA_LISTS)


def test_only_the_worker_brings_torch() -> None:
    """The images of router and operator stay small."""
    with_torch = [
        name for name in ("hub", "router", "operator", "worker") if "torch>=2.11" in group(name)
    ]
    assert with_torch == ["worker"]


def test_the_distribution_has_the_name_of_its_metadata() -> None:
    """Versions are read from the distribution that pyproject.toml names."""
    assert PROJECT["project"]["name"] == DISTRIBUTION
    assert tandem_version() == PROJECT["project"]["version"]

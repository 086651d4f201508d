"""The version of the installed distribution, `tandem-serving`."""

from __future__ import annotations

from importlib.metadata import version

DISTRIBUTION = "tandem-serving"
"""Its name at a package index; another project owns the name `tandem` there."""


def tandem_version() -> str:
    """Return the version of this Tandem, as "0.1.0"."""
    return version(DISTRIBUTION)

"""Names of the images under test: the chart's own defaults, unless variables say otherwise."""

from __future__ import annotations

import os

from tandem.protocol.link import tandem_version

ENV_PREFIX = "TANDEM_E2E_IMAGE_PREFIX"
ENV_TAG = "TANDEM_E2E_IMAGE_TAG"
PREFIX = "ghcr.io/tandem-serving"


def prefix() -> str:
    return os.environ.get(ENV_PREFIX, PREFIX)


def tag() -> str:
    return os.environ.get(ENV_TAG, tandem_version())


def reference(role: str) -> str:
    return f"{prefix()}/tandem-{role}:{tag()}"

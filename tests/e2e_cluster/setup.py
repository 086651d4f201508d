"""What the suite is told about its cluster, by environment variables.

``make e2e`` sets them; against another cluster only KUBECONFIG has to be set, and the images that
the chart names must be pullable there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

ENV_RUN = "TANDEM_E2E_CLUSTER"
"""``own``: the cluster of tests/cluster, whose nodes may be killed; ``given``: another one."""
ENV_MOUNTED = "TANDEM_E2E_MOUNTED"
ENV_MODELS = "TANDEM_E2E_MODELS"
ENV_MODEL_IMAGE = "TANDEM_E2E_MODEL_IMAGE"
ENV_ADDRESS = "TANDEM_E2E_ADDRESS"


@dataclass(frozen=True)
class Setup:
    """The cluster, as the suite may use it."""

    kubeconfig: str
    is_own: bool
    mounted: str | None
    """Folder on every node with the packages that a thin worker image lacks."""
    models: str | None
    """Folder on every node whose folder smollm2 is the prepared model; else it is a package."""
    model_image: str | None
    """Reference of an image with the prepared model, where nodes have one."""
    address: str | None
    """Where node ports are reached, if not at the nodes' own addresses."""


def read() -> Setup | None:
    """The setup, or None where nobody asked for the suite to run."""
    which = os.environ.get(ENV_RUN)
    if which is None:
        return None
    return Setup(
        kubeconfig=os.environ["KUBECONFIG"],
        is_own=which == "own",
        mounted=os.environ.get(ENV_MOUNTED) or None,
        models=os.environ.get(ENV_MODELS) or None,
        model_image=os.environ.get(ENV_MODEL_IMAGE) or None,
        address=os.environ.get(ENV_ADDRESS) or None,
    )

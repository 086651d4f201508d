"""What a spec names beside its children has to be there, as far as pods use it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.test_children import facts

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.gather import missing_reference
from tandem.operator.desired.naming import Manifest

VOLUME = {"persistentVolumeClaim": {"claimName": "tandem-node"}}


class Claims(Cluster):
    """An API server that has these claims and nothing else."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        found = kind == "PersistentVolumeClaim" and name in self._names
        return {"metadata": {"name": name}, "spec": {}} if found else None


@pytest.mark.parametrize("mode", [None, "Auto", "Required", "Disabled"])
def test_a_nodes_claim_is_asked_for_where_it_is_mounted(mode: str | None):
    """With mode Disabled nobody mounts it: the claim may be gone, and pods start all the same."""
    local: dict[str, Any] = {"volume": VOLUME} if mode is None else {"volume": VOLUME, "mode": mode}
    spec = facts(kvTransfer__nodeLocal=local).spec
    missing = missing_reference(Claims("models"), "ns", spec)
    if mode == "Disabled":
        assert missing is None
    else:
        assert missing is not None
        assert missing.startswith("ClaimNotFound: spec.kvTransfer.nodeLocal.volume names ")
    assert missing_reference(Claims("models", "tandem-node"), "ns", spec) is None

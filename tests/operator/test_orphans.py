"""`kubectl delete --cascade=orphan` on a real API server, with its garbage collector."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.operator.harness import Harness


def owners(harness: Harness, kind: str) -> list[Any]:
    """Owners of the service's children of a kind."""
    text = harness.kubectl("get", kind, "-l", "tandem.dev/service=demo", "-o", "json")
    found = json.loads(text)["items"]
    assert found, kind
    return [each["metadata"].get("ownerReferences", []) for each in found]


@pytest.mark.nightly
def test_an_orphaned_service_goes_and_its_children_stay(harness: Harness):
    """The collector may take the owner from every child, a template with odd text as well."""
    odd = {"metadata": {"annotations": {"example.com/odd": "<a> & 'é'"}}}
    harness.create(decode={"replicas": 1, "podTemplate": odd})
    harness.ready()
    harness.kubectl("delete", "llm", "demo", "--cascade=orphan", "--timeout=60s")
    for kind in ("controllerrevisions", "deployments", "secrets", "services", "configmaps"):
        assert not any(owners(harness, kind)), kind

"""Who the operator runs as: a user of its own, or one that the cluster chooses."""

from __future__ import annotations

from typing import Any

import pytest
from tests.manifests import load_manifests
from tests.operator.test_install import CHART, NEEDS_HELM, ROOT, helm

from tandem.operator.desired.pod import USER

CONTEXT = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@NEEDS_HELM
@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([], CONTEXT),
        (["podSecurityContext=null"], None),
        (
            ["podSecurityContext.runAsUser=null", "podSecurityContext.runAsGroup=null"],
            {name: CONTEXT[name] for name in ("runAsNonRoot", "seccompProfile")},
        ),
    ],
)
def test_who_the_operator_runs_as_may_be_the_clusters_choice(
    sets: list[str], expected: dict[str, Any] | None
):
    """OpenShift gives each namespace users of its own; the chart's test is a pod like others."""
    words = [word for each in sets for word in ("--set", each)]
    found = load_manifests(helm("template", "tandem", CHART, *words))
    (operator,) = (each for each in found if each["kind"] == "Deployment")
    (asking,) = (each for each in found if each["kind"] == "Pod")
    for pod in (operator["spec"]["template"]["spec"], asking["spec"]):
        assert pod.get("securityContext") == expected
        assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    plain = load_manifests((ROOT / "manifests/operator/deployment.yaml").read_text())
    (manifest,) = (each for each in plain if each["kind"] == "Deployment")
    assert manifest["spec"]["template"]["spec"]["securityContext"] == CONTEXT

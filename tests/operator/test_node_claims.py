"""Claims of a node's folder (`nodeAgent.claims` of the chart): each has a volume of its own."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from tests.manifests import load_manifests
from tests.operator.control_plane import ControlPlane
from tests.operator.test_install import AGENT, CHART, NEEDS_HELM, helm

pytestmark = pytest.mark.full

Claim = tuple[str, str]
LONG = "x" * 55


def chosen(*claims: Claim) -> tuple[str, str]:
    """Flags of helm for an agent and these claims, a namespace and a name each."""
    pairs = [
        (f"nodeAgent.claims[{place}].namespace={space}", f"nodeAgent.claims[{place}].name={name}")
        for place, (space, name) in enumerate(claims)
    ]
    return "--set", ",".join([AGENT, *chain.from_iterable(pairs)])


@NEEDS_HELM
@pytest.mark.parametrize(
    ("claims", "names"),
    [
        ([("llm", "tandem-node")], ["tandem-llm-tandem-node"]),
        (
            [("llm", "prod-node"), ("llm-prod", "node"), ("a", "b")],
            ["tandem-llm-prod-node", "tandem-llm-prod-node-4005c186", "tandem-a-b"],
        ),
        (
            [(LONG, "nodes-a"), (LONG, "nodes-b")],
            [f"tandem-{LONG}", f"tandem-{'x' * 47}-61d2a953"],
        ),
    ],
)
def test_no_two_claims_share_a_volume(claims: list[Claim], names: list[str]):
    """The first of two whose volumes would have one name keeps it, as it may have had it for long;
    each claim is bound to its own."""
    volumes, bound = {}, {}
    for each in load_manifests(helm("template", "tandem", CHART, *chosen(*claims))):
        metadata = each["metadata"]
        if each["kind"] == "PersistentVolume":
            claim = each["spec"]["claimRef"]
            volumes[claim["namespace"], claim["name"]] = metadata["name"]
        elif each["kind"] == "PersistentVolumeClaim":
            bound[metadata["namespace"], metadata["name"]] = each["spec"]["volumeName"]
    assert volumes == bound == dict(zip(claims, names, strict=True))
    assert all(len(each) <= 63 for each in names)


@pytest.mark.nightly
@NEEDS_HELM
@pytest.mark.slow
def test_a_claim_keeps_its_volume_whatever_others_come_and_go(plane: ControlPlane, namespace: str):
    """A claim's volume cannot be changed: an upgrade that would is refused whole."""
    where = ("-n", namespace, "--kubeconfig", str(plane.kubeconfig()))
    other = f"{namespace}-x"
    plane.kubectl("create", "namespace", other)
    first, second = (namespace, "x-node"), (other, "node")

    def volume(claim: Claim) -> str:
        path = "jsonpath={.spec.volumeName}"
        return plane.kubectl("-n", claim[0], "get", "pvc", claim[1], "-o", path)

    name = f"nodes-tandem-{namespace}-x-node"
    for step, claims in enumerate(([first], [second, first], [second])):
        verb = "upgrade" if step else "install"
        said = helm(verb, "nodes", CHART, *where, "--set", "crds.install=false", *chosen(*claims))
        assert "STATUS: deployed" in said, said
        assert first not in claims or volume(first) == name
        assert second not in claims or volume(second).startswith(f"{name}-")
        for claim in claims:
            path = "jsonpath={.spec.claimRef.namespace}/{.spec.claimRef.name}"
            assert plane.kubectl("get", "pv", volume(claim), "-o", path) == "/".join(claim)
    assert "uninstalled" in helm("uninstall", "nodes", *where)
    plane.kubectl("delete", "namespace", other, "--wait=false")


@NEEDS_HELM
@pytest.mark.slow
def test_claims_that_share_a_volume_do_not_stop_an_upgrade(plane: ControlPlane, namespace: str):
    """Charts before gave two of the same letters one volume. They keep it, it stays that of whom
    it is for, and the other, made anew, gets its own."""
    where = ("-n", namespace, "--kubeconfig", str(plane.kubeconfig()))
    other = f"{namespace}-x"
    plane.kubectl("create", "namespace", other)
    first, second = (namespace, "x-node"), (other, "node")
    name = f"both-tandem-{namespace}-x-node"

    def upgrade(verb: str, *claims: Claim) -> dict[str, str]:
        said = helm(verb, "both", CHART, *where, "--set", "crds.install=false", *chosen(*claims))
        assert "STATUS: deployed" in said, said
        path = "jsonpath={.spec.volumeName}"
        return {
            claim[1]: plane.kubectl("-n", *claim[:1], "get", "pvc", claim[1], "-o", path)
            for claim in claims
        }

    assert upgrade("install", first) == {"x-node": name}
    found = json.loads(plane.kubectl("-n", namespace, "get", "pvc", "x-node", "-o", "json"))
    kept = {key: found["metadata"][key] for key in ("labels", "annotations")}
    metadata = {"namespace": other, "name": "node", **kept}
    spec = {**found["spec"], "volumeName": name}
    shared = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": spec,
    }
    plane.kubectl("create", "-f", "-", stdin=json.dumps(shared))
    assert upgrade("upgrade", second, first) == {"x-node": name, "node": name}
    path = "jsonpath={.spec.claimRef.namespace}/{.spec.claimRef.name}"
    assert plane.kubectl("get", "pv", name, "-o", path) == "/".join(first)
    plane.kubectl("-n", other, "patch", "pvc", "node", "-p", '{"metadata":{"finalizers":null}}')
    plane.kubectl("-n", other, "delete", "pvc", "node")
    assert upgrade("upgrade", second, first)["node"].startswith(f"{name}-")
    assert "uninstalled" in helm("uninstall", "both", *where)
    plane.kubectl("delete", "namespace", other, "--wait=false")

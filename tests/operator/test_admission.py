"""What the API server itself holds the operator's account to, whatever the operator would write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.operator.control_plane import OPERATOR_TOKEN, ControlPlane
from tests.operator.harness import poll
from tests.operator.test_children import facts
from tests.operator.test_templates import BEYOND

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.desired.compose import router_role
from tandem.operator.desired.job import model_job
from tandem.operator.desired.merge import merged
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.workload import deployment, rendered

pytestmark = pytest.mark.full


@pytest.fixture
def deputy(plane: ControlPlane, namespace: str) -> Cluster:
    """A client with the operator's account, in a namespace that enforces no profile; the policies
    bite, which takes the API server a moment after its start."""
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce-")
    found = Cluster(kubeconfig=plane.kubeconfig(token=OPERATOR_TOKEN))
    assert poll(lambda: refused(found, workload(namespace, {"spec": {"hostPID": True}})))
    return found


def refused(deputy: Cluster, manifest: Manifest) -> str | None:
    """What the API server says against an object, as a dry run; None when it would take it."""
    try:
        deputy.create(manifest, dry_run=True)
    except ClusterError as error:
        return error.message
    return None


def at(namespace: str, manifest: Manifest) -> Manifest:
    """The object, in a namespace and without an owner that is not there."""
    metadata = {**manifest["metadata"], "namespace": namespace}
    metadata.pop("ownerReferences")
    found = {**copy.deepcopy(manifest), "metadata": metadata}
    for subject in found.get("subjects", ()):
        subject["namespace"] = namespace
    return found


def workload(namespace: str, template: Manifest) -> Manifest:
    """A Deployment of ours whose pods have a template merged in without any check of ours."""
    given = facts()
    pods = merged(rendered(given, Role.DECODE), template)
    return at(namespace, deployment(given, Role.DECODE, given.revision(Role.DECODE), 0, pods))


def test_what_the_operator_makes_is_taken(deputy: Cluster, cluster: Cluster, namespace: str):
    """Deployments of all roles, the Job, Role and RoleBinding pass."""
    auth = {"apiKeysSecretRef": {"name": "a.b"}, "adminKeysSecretRef": {"name": "c"}}
    given = facts(
        router__auth=auth,
        imagePullSecrets=[{"name": "registry"}],
        labels={"team": "a"},
        annotations={"team": "a"},
    )
    made = [
        deployment(given, role, given.revision(role), 0, rendered(given, role)) for role in Role
    ]
    job = model_job(given)
    assert job is not None
    role, binding = (at(namespace, each) for each in router_role(given))
    assert refused(deputy, role) is None
    cluster.create(role)
    for each in [*made, job]:
        assert refused(deputy, at(namespace, each)) is None, each
    assert refused(deputy, binding) is None


@pytest.mark.parametrize("what", BEYOND)
def test_nothing_beyond_the_baseline_profile_is_taken(deputy: Cluster, namespace: str, what: str):
    """Each thing that the operator refuses by itself is refused to it, too."""
    if what == "Windows":
        pytest.skip("the API server wants more of a Windows pod before it asks policies")
    said = refused(deputy, workload(namespace, BEYOND[what][0]))
    assert said is not None
    assert "ValidatingAdmissionPolicy 'tandem-operator-pods'" in said


SECRET = {"name": "theirs"}
BAD: dict[str, Manifest] = {
    "another account": {"serviceAccountName": "default"},
    "another service's account": {"serviceAccountName": "other-router"},
    "a volume": {"volumes": [{"name": "x", "secret": {"secretName": "theirs"}}]},
    "a name like ours": {
        "volumes": [{"name": "x", "secret": {"secretName": "demo-canary-of-theirs"}}]
    },
    "a projection": {"volumes": [{"name": "x", "projected": {"sources": [{"secret": SECRET}]}}]},
    "a driver": {
        "volumes": [{"name": "x", "csi": {"driver": "d", "nodePublishSecretRef": SECRET}}]
    },
    "a share": {
        "volumes": [{"name": "x", "azureFile": {"secretName": "theirs", "shareName": "s"}}]
    },
    "a cephfs": {"volumes": [{"name": "x", "cephfs": {"monitors": ["m"], "secretRef": SECRET}}]},
    "a block device": {
        "volumes": [{"name": "x", "rbd": {"monitors": ["m"], "image": "i", "secretRef": SECRET}}]
    },
    "a target": {
        "volumes": [
            {
                "name": "x",
                "iscsi": {
                    "targetPortal": "1.2.3.4",
                    "iqn": "iqn.2026-11.example:a",
                    "lun": 0,
                    "secretRef": SECRET,
                },
            }
        ]
    },
    "an own driver": {
        "volumes": [{"name": "x", "flexVolume": {"driver": "a/b", "secretRef": SECRET}}]
    },
    "a disk": {"volumes": [{"name": "x", "cinder": {"volumeID": "v", "secretRef": SECRET}}]},
    "a pool": {
        "volumes": [
            {
                "name": "x",
                "scaleIO": {"gateway": "g", "system": "s", "volumeName": "v", "secretRef": SECRET},
            }
        ]
    },
    "a store": {"volumes": [{"name": "x", "storageos": {"volumeName": "v", "secretRef": SECRET}}]},
    "a variable": {
        "containers": [
            {
                "name": "main",
                "env": [{"name": "X", "valueFrom": {"secretKeyRef": {**SECRET, "key": "a"}}}],
            }
        ]
    },
    "all variables": {"containers": [{"name": "main", "envFrom": [{"secretRef": SECRET}]}]},
}


@pytest.mark.parametrize("what", BAD)
def test_foreign_accounts_and_secrets_are_not_taken(deputy: Cluster, namespace: str, what: str):
    """Unless the operator has noted that the Secret's owner allowed it."""
    manifest = workload(namespace, {"spec": BAD[what]})
    noted = manifest["metadata"].pop("annotations", None)
    said = refused(deputy, manifest)
    assert said is not None
    assert "an LLMService" in said
    if "account" not in what:
        manifest["metadata"]["annotations"] = noted
        assert refused(deputy, manifest) is None


def test_no_pod_is_made_and_none_changed(deputy: Cluster, cluster: Cluster, namespace: str):
    """Pods are tried as a dry run and marked; neither made nor given another image."""
    template = rendered(facts(), Role.DECODE)
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "pod", "namespace": namespace},
        "spec": template["spec"],
    }
    assert refused(deputy, pod) is None
    with pytest.raises(ClusterError, match="the operator creates no pods"):
        deputy.create(pod)
    cluster.create(pod)
    deputy.patch("Pod", namespace, "pod", {"metadata": {"annotations": {"a": "b"}}})
    there = cluster.get("Pod", namespace, "pod")
    assert there is not None
    other = there["spec"]["containers"]
    other[0]["image"] = "other"
    with pytest.raises(ClusterError, match="the operator may only change pod metadata"):
        deputy.patch("Pod", namespace, "pod", {"spec": {"containers": other}})


def status(uid: str, **changes: Any) -> Manifest:
    return {"metadata": {"uid": uid}, "status": changes}


def condition(kind: str, value: str) -> Manifest:
    return {"conditions": [{"type": kind, "status": value, "reason": "X"}]}


@pytest.mark.parametrize("role", [Role.ROUTER, Role.DECODE])
def test_readiness_is_taken_from_routers_and_nothing_else_said(
    deputy: Cluster, cluster: Cluster, namespace: str, role: Role
):
    template = rendered(facts(), role)
    metadata = {**template["metadata"], "name": "pod", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    cluster.create(pod)
    there = cluster.get("Pod", namespace, "pod")
    assert there is not None
    uid = there["metadata"]["uid"]
    up = {**condition("Ready", "True"), "phase": "Running", "podIP": "10.0.0.1"}
    cluster.patch_pod_status(namespace, "pod", status(uid, **up))
    beyond: list[Manifest] = [{"phase": "Failed"}, {"podIP": "10.0.0.2"}]
    beyond += [{"podIPs": [{"ip": "10.0.0.2"}]}, condition("ContainersReady", "False")]
    for each in beyond:
        with pytest.raises(ClusterError, match=r"change nothing else|may set only Ready=False"):
            deputy.patch_pod_status(namespace, "pod", status(uid, **each))
    if role is not Role.ROUTER:
        with pytest.raises(ClusterError, match="may set only Ready=False"):
            deputy.patch_pod_status(namespace, "pod", status(uid, **condition("Ready", "False")))
        return
    deputy.patch_pod_status(namespace, "pod", status(uid, **condition("Ready", "False")))
    with pytest.raises(ClusterError, match="may change nothing else in a pod"):
        deputy.patch_pod_status(namespace, "pod", status(uid, **condition("Ready", "True")))
    with pytest.raises(ClusterError, match=r"metadata\.uid.*immutable"):
        deputy.patch_pod_status(namespace, "pod", status("other", **condition("Ready", "False")))


def test_roles_read_pods_and_nothing_else(deputy: Cluster, cluster: Cluster, namespace: str):
    """The operator may read Secrets; it may not let anybody else."""
    role, binding = (at(namespace, each) for each in router_role(facts()))
    more = {**role, "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}
    said = refused(deputy, more)
    assert said is not None
    assert "may only let routers read pods" in said
    cluster.create(role)
    stranger = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    said = refused(deputy, {**binding, "subjects": [stranger]})
    assert said is not None
    assert "to the Role of the same name" in said

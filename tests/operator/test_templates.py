"""No way around: what a podTemplate may not change holds in the merged pod, whatever it says."""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec
import pytest
from tests.operator.test_children import facts

from tandem.operator.decide import plan
from tandem.operator.desired.baseline import beyond_baseline
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.protect import TemplateConflict
from tandem.operator.desired.references import secrets_of
from tandem.operator.desired.workload import rendered
from tandem.operator.settings import OperatorSettings


def main(**fields: Any) -> Manifest:
    """A podTemplate that says something of the container main."""
    return {"spec": {"containers": [{"name": "main", **fields}]}}


def sidecar(**context: Any) -> Manifest:
    return {"spec": {"containers": [{"name": "x", "image": "y", "securityContext": context}]}}


REPLACE: Manifest = {"$patch": "replace"}
CHANGED: dict[str, tuple[Manifest, str]] = {
    "a label": ({"metadata": {"labels": {"tandem.dev/role": "x"}}}, "metadata.labels"),
    "no labels": ({"metadata": {"labels": None}}, "metadata.labels"),
    "no metadata": ({"metadata": None}, "metadata.labels"),
    "the account": ({"spec": {"serviceAccountName": "x"}}, "serviceAccountName"),
    "no account": ({"spec": {"serviceAccountName": None}}, "serviceAccountName"),
    "the account's old name": ({"spec": {"serviceAccount": "x"}}, "spec.serviceAccount"),
    "a token": ({"spec": {"automountServiceAccountToken": True}}, "automountServiceAccountToken"),
    "no word of a token": (
        {"spec": {"automountServiceAccountToken": None}},
        "automountServiceAccountToken",
    ),
    "restarts": ({"spec": {"restartPolicy": "Never"}}, "restartPolicy"),
    "another template": ({**REPLACE, "spec": {}}, "metadata.labels"),
    "another spec": (
        {"spec": {**REPLACE, "containers": [{"name": "main", "image": "x"}]}},
        "serviceAccountName",
    ),
    "other containers": (
        {"spec": {"containers": [REPLACE, {"name": "main", "image": "x"}]}},
        "containers.main..args",
    ),
    "main replaced": (main(**REPLACE, image="x"), "containers.main..args"),
    "main deleted": ({"spec": {"containers": [{"name": "main", "$patch": "delete"}]}}, "main"),
    "arguments": (main(args=["x"]), "args"),
    "no arguments": (main(args=None), "args"),
    "a variable": (main(env=[{"name": "TANDEM_POD_IP", "value": "1"}]), "TANDEM_POD_IP"),
    "a variable deleted": (main(env=[{"name": "TANDEM_CURVE_KEYS", "$patch": "delete"}]), "CURVE"),
    "other variables": (main(env=[REPLACE, {"name": "A", "value": "b"}]), "env"),
    "no variables": (main(env=None), "env"),
    "a volume": ({"spec": {"volumes": [{"name": "tandem-keys", "emptyDir": {}}]}}, "tandem-keys"),
    "other volumes": ({"spec": {"volumes": [REPLACE]}}, "volumes"),
    "a mount": (main(volumeMounts=[{"mountPath": "/etc/tandem/keys", "name": "x"}]), "keys"),
    "no mounts": (main(volumeMounts=[REPLACE]), "volumeMounts"),
    "a mount of administrators' keys": (
        main(volumeMounts=[{"mountPath": "/etc/tandem/admin-api-keys", "name": "x"}]),
        "keys",
    ),
    "a mount above": (main(volumeMounts=[{"mountPath": "/etc/tandem", "name": "x"}]), "keys are"),
    "a mount below": (main(volumeMounts=[{"mountPath": "/etc/tandem/keys/a", "name": "x"}]), "are"),
    "a mount at /": (main(volumeMounts=[{"mountPath": "//./", "name": "x"}]), "are there"),
    "the same mount": (
        main(volumeMounts=[{"mountPath": "/etc/tandem/keys/", "name": "x"}]),
        "are there",
    ),
    "a port": (main(ports=[{"containerPort": 5570, "protocol": "TCP", "name": "x"}]), "ports"),
    "what a probe asks": (main(livenessProbe={"httpGet": {"path": "/x"}}), "livenessProbe"),
    "another probe": (main(readinessProbe={**REPLACE, "exec": {"command": []}}), "readinessProbe"),
    "no probe": (main(startupProbe=None), "startupProbe"),
    "a probe with more": (main(livenessProbe={"exec": {"command": ["true"]}}), "livenessProbe"),
    "root": ({"spec": {"securityContext": {"runAsUser": 0}}}, "runAsUser"),
    "perhaps root": ({"spec": {"securityContext": {"runAsNonRoot": False}}}, "runAsNonRoot"),
    "no context": ({"spec": {"securityContext": None}}, "securityContext"),
    "no context of main": (main(securityContext=None), "securityContext"),
    "escalation": (main(securityContext={"allowPrivilegeEscalation": True}), "Escalation"),
    "capabilities": (main(securityContext={"capabilities": None}), "capabilities"),
    "a writable root": (main(securityContext={"readOnlyRootFilesystem": False}), "readOnly"),
}
BEYOND: dict[str, tuple[Manifest, str]] = {
    "privileged": (sidecar(privileged=True), "privileged"),
    "a privileged init container": (
        {
            "spec": {
                "initContainers": [
                    {"name": "x", "image": "y", "securityContext": {"privileged": True}}
                ]
            }
        },
        r"initContainers\[x\].securityContext.privileged",
    ),
    "the host's network": ({"spec": {"hostNetwork": True}}, "hostNetwork"),
    "the host's processes": ({"spec": {"hostPID": True}}, "hostPID"),
    "the host's memory": ({"spec": {"hostIPC": True}}, "hostIPC"),
    "the host's files": (
        {"spec": {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}},
        r"volumes\[x\].hostPath",
    ),
    "the host's port": (main(ports=[{"containerPort": 9, "hostPort": 9}]), "hostPort"),
    "capabilities": (sidecar(capabilities={"add": ["SYS_ADMIN"]}), "SYS_ADMIN"),
    "proc": (
        {"spec": {**sidecar(procMount="Unmasked")["spec"], "hostUsers": False}},
        "procMount",
    ),
    "seccomp": (sidecar(seccompProfile={"type": "Unconfined"}), "seccompProfile"),
    "AppArmor": (sidecar(appArmorProfile={"type": "Unconfined"}), "appArmorProfile"),
    "SELinux": (sidecar(seLinuxOptions={"type": "spc_t"}), "seLinuxOptions"),
    "Windows": (sidecar(windowsOptions={"hostProcess": True}), "hostProcess"),
    "sysctls": (
        {"spec": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}},
        "kernel.msgmax",
    ),
}


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("what", CHANGED)
def test_what_tandem_needs_is_protected(what: str, role: Role):
    """Identity, keys, arguments, probes and context hold in every role; messages have the path."""
    template, said = CHANGED[what]
    if role is Role.ROUTER and what in ("a token", "a port"):
        template = copy.deepcopy(template)
        template["spec"]["automountServiceAccountToken"] = False
        said = "automountServiceAccountToken"
    with pytest.raises(TemplateConflict, match=said) as raised:
        rendered(facts(**{f"{role}__podTemplate": template}), role)
    assert str(raised.value).startswith(f"spec.{role}.podTemplate.")
    assert "not allowed; fields" not in str(raised.value)


@pytest.mark.parametrize("unmanaged", [False, True])
@pytest.mark.parametrize("what", BEYOND)
def test_no_pod_goes_beyond_the_baseline_profile(what: str, unmanaged: bool):
    """Also where security contexts are the user's; the operator's flag opens it by name."""
    template, said = BEYOND[what]
    changes: dict[str, Any] = {"decode__podTemplate": template}
    if unmanaged:
        changes["security__podSecurity"] = "Unmanaged"
    with pytest.raises(TemplateConflict, match=said):
        rendered(facts(**changes), Role.DECODE)
    settings = OperatorSettings(allow_privileged_pods=True)
    opened = msgspec.structs.replace(facts(**changes), settings=settings)
    assert beyond_baseline(rendered(opened, Role.DECODE)["spec"]) is not None


def test_own_pods_are_within_the_baseline_profile():
    for changes in ({}, {"security__podSecurity": "Unmanaged"}):
        for role in Role:
            assert beyond_baseline(rendered(facts(**changes), role)["spec"]) is None


def test_the_container_that_fetches_is_protected():
    """It holds the hub's token: its arguments, variables and mounts stay what they are."""
    hub = {"type": "Hub", "hub": {"repository": "a/b"}}
    free = {"name": "fetch", "image": "mirror/worker", "resources": {"limits": {"cpu": "1"}}}
    given: dict[str, Any] = {"model__source": hub}
    rendered(facts(**given, decode__podTemplate={"spec": {"initContainers": [free]}}), Role.DECODE)
    for change in ({"args": ["x"]}, {"env": [{"name": "X", "value": "1"}]}, {"command": ["sh"]}):
        template = {"spec": {"initContainers": [{"name": "fetch", **change}]}}
        with pytest.raises(TemplateConflict, match=next(iter(change))):
            rendered(facts(**given, decode__podTemplate=template), Role.DECODE)


def test_a_user_that_is_not_root_may_be_chosen():
    """Volumes that belong to somebody are no reason to give the profile up."""
    context = {"runAsUser": 1000, "fsGroup": 1000}
    template = {"spec": {"securityContext": context}}
    made = rendered(facts(decode__podTemplate=template), Role.DECODE)
    assert made["spec"]["securityContext"]["runAsUser"] == 1000


GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
READY, REACHED = (f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable"))
OWN = [
    {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for key in (READY, REACHED)
]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([GPU], [GPU, *OWN]),
        (
            [{"key": REACHED, "operator": "Exists", "tolerationSeconds": 5}],
            [{"key": REACHED, "operator": "Exists", "tolerationSeconds": 5}, OWN[0]],
        ),
        ([{"operator": "Exists"}], [{"operator": "Exists"}]),
        (
            [{"operator": "Exists", "effect": "NoSchedule"}],
            [{"operator": "Exists", "effect": "NoSchedule"}, *OWN],
        ),
        ([], OWN),
        (None, OWN),
    ],
)
@pytest.mark.parametrize("role", Role)
def test_pods_leave_a_dead_node_whatever_else_they_tolerate(
    given: list[Manifest] | None, expected: list[Manifest], role: Role
):
    """Tolerations of a podTemplate are added to; what it says of nodes that are gone is meant."""
    changed = facts(**{f"{role}__podTemplate": {"spec": {"tolerations": given}}})
    assert rendered(changed, role)["spec"]["tolerations"] == expected


def test_secrets_are_found_wherever_they_are_named():
    """By the ending of the reference's name, so that volumes of drivers to come are seen, too."""
    pod = {
        "volumes": [{"name": "a", "cephfs": {"secretRef": {"name": "1"}}}],
        "containers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": "2", "key": "x"}}}]}],
        "ephemeral": [{"new": {"nodeStageSecretRef": {"name": "3"}}, "azure": {"secretName": "4"}}],
        "imagePullSecrets": [{"name": "pull"}],
    }
    assert secrets_of(pod) == {"1", "2", "3", "4"}


STRANGE: tuple[Any, ...] = (
    None,
    "x",
    7,
    True,
    [],
    ["x"],
    [None],
    [[]],
    {},
    {"a": None},
    REPLACE,
    [REPLACE],
)
PLACES = (
    ("metadata",),
    ("metadata", "labels"),
    ("metadata", "annotations"),
    ("spec",),
    ("spec", "containers"),
    ("spec", "containers", 0),
    ("spec", "containers", 0, "env"),
    ("spec", "containers", 0, "env", 0),
    ("spec", "containers", 0, "name"),
    ("spec", "containers", 0, "args"),
    ("spec", "containers", 0, "ports"),
    ("spec", "containers", 0, "livenessProbe"),
    ("spec", "containers", 0, "securityContext"),
    ("spec", "containers", 0, "securityContext", "capabilities"),
    ("spec", "containers", 0, "volumeMounts"),
    ("spec", "containers", 0, "volumeMounts", 0),
    ("spec", "volumes"),
    ("spec", "volumes", 0),
    ("spec", "securityContext"),
    ("spec", "securityContext", "sysctls"),
    ("spec", "tolerations"),
    ("spec", "initContainers"),
)
WHOLE: Manifest = {
    "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}},
    "spec": {
        "containers": [
            {
                "name": "main",
                "env": [{"name": "A", "value": "b"}],
                "args": [],
                "ports": [],
                "livenessProbe": {},
                "securityContext": {"capabilities": {}},
                "volumeMounts": [{"name": "a", "mountPath": "/a"}],
            }
        ],
        "volumes": [{"name": "a", "emptyDir": {}}],
        "securityContext": {"sysctls": []},
        "tolerations": [],
        "initContainers": [],
    },
}


def broken(place: tuple[str | int, ...], value: Any) -> Manifest:
    """A whole podTemplate with something strange in one place."""
    result = copy.deepcopy(WHOLE)
    target: Any = result
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = copy.deepcopy(value)
    return result


def test_every_shape_gets_a_word_and_no_traceback():
    """Whatever stands anywhere in a podTemplate, the condition says something of it."""
    cases = [broken(place, value) for place in PLACES for value in STRANGE]
    draw = random.Random(7)
    for _ in range(400):
        twice = broken(draw.choice(PLACES[4:]), draw.choice(STRANGE))
        twice["metadata"] = broken(draw.choice(PLACES[1:3]), draw.choice(STRANGE))["metadata"]
        cases.append(twice)
    words = {plan.accepted(with_template(case))[1] for case in cases}
    assert {"Accepted", "InvalidSpec", "PodTemplateConflict"} == {str(each) for each in words}


def with_template(template: Manifest) -> Facts:
    """Facts of a service whose decode workers have the template."""
    return facts(decode__podTemplate=template)

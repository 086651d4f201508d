"""What of a node's folder a worker sees, and who may not be the node's agent."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.test_children import facts
from tests.operator.test_templates import main, sidecar

from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.node_folder import AGENT_USER, folder_of
from tandem.operator.desired.protect import TemplateConflict
from tandem.operator.desired.workload import rendered

CLAIM = {"persistentVolumeClaim": {"claimName": "node"}}
CSI = {"csi": {"driver": "node.example.org"}}


def local(volume: Manifest = CLAIM, **more: Any) -> dict[str, Any]:
    """Changes of a service that has such a folder."""
    return {"kvTransfer__nodeLocal": {"volume": volume, **more}}


def shown(template: Manifest) -> dict[str, Manifest]:
    """Mounts of the node's volume in the main container, by their place."""
    (container,) = template["spec"]["containers"]
    mounts = container["volumeMounts"]
    return {each["mountPath"]: each for each in mounts if each["name"] == "tandem-node"}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("volume", [CLAIM, CSI])
def test_a_worker_sees_its_services_folder_and_may_read_the_agents(volume: Manifest, role: Role):
    """And no other of the volume; both roles of a service meet in one."""
    given = facts(**local(volume))
    found = shown(rendered(given, role))
    owner = given.owner
    own, agents = found["/run/tandem/node"], found["/run/tandem/node-agent"]
    assert own["subPath"] == f"{owner.namespace}_{owner.name}_{owner.uid}"
    assert not own.get("readOnly")
    assert (agents["subPath"], agents["readOnly"]) == ("agent", True)
    assert len(found) == 2
    assert not shown(rendered(facts(), role))
    direct = shown(rendered(facts(**local(volume, copy="Direct")), role))
    assert list(direct) == ["/run/tandem/node"], "the agent is not asked"


def test_services_have_folders_of_their_own():
    """By namespace, name and uid; none is another's, nor the agent's."""
    owner = facts().owner
    parts = [("a", "b-c", "1"), ("a-b", "c", "1"), ("a", "b-c", "2"), ("b", "b-c", "1")]
    kind = type(owner)
    names = {folder_of(kind(*each)) for each in parts} | {"agent"}
    assert len(names) == len(parts) + 1
    assert not any("/" in each or ".." in each for each in names)


MORE: dict[str, Manifest] = {
    "a mount": main(volumeMounts=[{"name": "tandem-node", "mountPath": "/all"}]),
    "the whole": main(
        volumeMounts=[{"name": "tandem-node", "mountPath": "/run/tandem/node", "subPath": None}]
    ),
    "another folder": main(
        volumeMounts=[{"name": "tandem-node", "mountPath": "/run/tandem/node", "subPath": "x"}]
    ),
    "the agent's to be written": main(
        volumeMounts=[
            {"name": "tandem-node", "mountPath": "/run/tandem/node-agent", "readOnly": False}
        ]
    ),
    "a mount of a sidecar": {
        "spec": {
            "containers": [
                {
                    "name": "x",
                    "image": "y",
                    "volumeMounts": [{"name": "tandem-node", "mountPath": "/run/tandem/node"}],
                }
            ]
        }
    },
    "a mount of an init container": {
        "spec": {
            "initContainers": [
                {
                    "name": "x",
                    "image": "y",
                    "volumeMounts": [{"name": "tandem-node", "mountPath": "/all"}],
                }
            ]
        }
    },
    "the claim once more": {"spec": {"volumes": [{"name": "x", **CLAIM}]}},
    "the claim to be read": {
        "spec": {
            "volumes": [
                {
                    "name": "x",
                    "persistentVolumeClaim": {"claimName": "node", "readOnly": True},
                }
            ]
        }
    },
}


@pytest.mark.parametrize("what", MORE)
def test_a_template_shows_no_more_of_the_nodes_folder(what: str):
    """Other services' folders, and the agent's to be written, stay out of sight."""
    with pytest.raises(TemplateConflict, match=r"^spec\.decode\.podTemplate\.spec\."):
        rendered(facts(**local(), decode__podTemplate=MORE[what]), Role.DECODE)


def test_another_volume_of_the_driver_is_the_same_folder():
    """An inline volume shows each pod of the node the same."""
    template = {"spec": {"volumes": [{"name": "x", **CSI}]}}
    with pytest.raises(TemplateConflict, match=r"volumes\[x\]"):
        rendered(facts(**local(CSI), decode__podTemplate=template), Role.DECODE)
    rendered(facts(**local(CLAIM), decode__podTemplate=template), Role.DECODE)


def of_kind(kind: str, **context: Any) -> Manifest:
    """A template with a container of this kind."""
    container = {"name": "x", "image": "y", "securityContext": context}
    return {"spec": {kind: [container]}}


AGENTS: dict[str, tuple[Manifest, str]] = {
    **{
        f"{name} of the pod": ({"spec": {"securityContext": {name: AGENT_USER}}}, name)
        for name in ("runAsUser", "runAsGroup", "fsGroup")
    },
    "a group of the pod": (
        {"spec": {"securityContext": {"supplementalGroups": [1, AGENT_USER]}}},
        "supplementalGroups",
    ),
    "a float": ({"spec": {"securityContext": {"runAsUser": float(AGENT_USER)}}}, "runAsUser"),
    "main": (main(securityContext={"runAsUser": AGENT_USER}), r"containers\[main\]"),
    "the group of main": (main(securityContext={"runAsGroup": AGENT_USER}), "runAsGroup"),
    "a sidecar": (sidecar(runAsUser=AGENT_USER), "runAsUser"),
    "an init container": (of_kind("initContainers", runAsUser=AGENT_USER), "initContainers"),
    "an ephemeral one": (of_kind("ephemeralContainers", runAsUser=AGENT_USER), "ephemeral"),
    "the second of a name": (
        {
            "spec": {
                "ephemeralContainers": [
                    {"name": "x", "securityContext": {"runAsUser": AGENT_USER}},
                    {"name": "x", "securityContext": {"runAsUser": 1}},
                ]
            }
        },
        "ephemeral",
    ),
}


@pytest.mark.parametrize("unmanaged", [False, True])
@pytest.mark.parametrize("what", AGENTS)
def test_no_pod_runs_as_the_nodes_agent(what: str, unmanaged: bool):
    """However the user is set; the message names the field and the value."""
    template, said = AGENTS[what]
    changes: dict[str, Any] = {"decode__podTemplate": template}
    if unmanaged:
        changes["security__podSecurity"] = "Unmanaged"
    with pytest.raises(TemplateConflict, match=said) as raised:
        rendered(facts(**changes), Role.DECODE)
    assert str(AGENT_USER) in str(raised.value)

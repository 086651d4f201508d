"""The folder of a node that pods of one service share, isolated from other services.

A worker sees its service's folder and, read-only, the agent's. A podTemplate may not show more, nor
run as the agent's user.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.operator.api.transfer import NodeLocalCopy
from tandem.operator.desired.baseline import CONTAINERS
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Identity, Manifest, map_of, maps_of
from tandem.operator.desired.policy import node_local_volume
from tandem.operator.desired.protect import TemplateConflict
from tandem.protocol import names

AGENT_USER = 65533
"""User and group of the node's agent in the chart."""
_VOLUME = "tandem-node"
_IDS = ("runAsUser", "runAsGroup", "fsGroup")


def folder_of(owner: Identity) -> str:
    """Return the folder of a service, unique to its UID."""
    return f"{owner.namespace}_{owner.name}_{owner.uid}"


def node_folders(facts: Facts) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volume and its mounts in a worker, if there is one."""
    source = node_local_volume(facts.spec)
    if source is None:
        return [], []
    own: Manifest = {"mountPath": names.PATH_NODE, "subPath": folder_of(facts.owner)}
    agents = {"mountPath": names.PATH_NODE_AGENT, "subPath": names.AGENT_FOLDER, "readOnly": True}
    copies = facts.spec.kv_transfer.node_local.copy_mode
    shown = [own] if copies is NodeLocalCopy.DIRECT else [own, agents]
    return [{"name": _VOLUME, **source}], [{"name": _VOLUME, **each} for each in shown]


def check_node_folders(own: Manifest, pod: Manifest, *, field: str) -> None:
    """Raise TemplateConflict if ``pod`` runs as the agent's user or shows more than ``own``."""
    for at in _agents_ids(pod["spec"]):
        why = f"{AGENT_USER} is the user of the node agent; allowed: any other user"
        raise TemplateConflict(f"{field}.spec.{at}", why)
    for at in _more_shown(own["spec"], pod["spec"]):
        why = (
            "this volume is shared by the pods of all services; a service may mount only its "
            "own folder"
        )
        raise TemplateConflict(f"{field}.spec.{at}", why)


def _agents_ids(spec: Manifest) -> Iterator[str]:
    holders = [("", spec)]
    holders += [
        (f"{kind}[{each.get('name')}].", each)
        for kind in CONTAINERS
        for each in maps_of(spec.get(kind))
    ]
    for place, holder in holders:
        given = map_of(holder.get("securityContext"))
        for name in _IDS:
            if given.get(name) == AGENT_USER:
                yield f"{place}securityContext.{name}"
        groups = given.get("supplementalGroups")
        if isinstance(groups, list) and AGENT_USER in groups:
            yield f"{place}securityContext.supplementalGroups"


def _more_shown(own: Manifest, spec: Manifest) -> Iterator[str]:
    ours = [each for each in maps_of(own.get("volumes")) if each.get("name") == _VOLUME]
    shared = [_source(each) for each in ours]
    for volume in maps_of(spec.get("volumes")):
        if volume.get("name") != _VOLUME and _source(volume) in shared:
            yield f"volumes[{volume.get('name')}]"
    allowed = {
        (each.get("name"), mount["mountPath"])
        for each in own["containers"]
        for mount in each["volumeMounts"]
        if mount["name"] == _VOLUME
    }
    for kind in CONTAINERS:
        for container in maps_of(spec.get(kind)):
            for mount in maps_of(container.get("volumeMounts")):
                known = kind == "containers" and (container.get("name"), mount.get("mountPath"))
                if ours and mount.get("name") == _VOLUME and known not in allowed:
                    yield f"{kind}[{container.get('name')}].volumeMounts[{mount.get('mountPath')}]"


def _source(volume: Manifest) -> tuple[object, object]:
    """Return the identity of a volume: the claim, or the driver."""
    claim = map_of(volume.get("persistentVolumeClaim")).get("claimName")
    driver = map_of(volume.get("csi")).get("driver")
    return (claim, driver) if claim or driver else (id(volume), None)

"""Strategic merge of a user's podTemplate over the operator's, by Kubernetes' own merge keys.

Lists of named things merge by key, other lists are replaced; ``$patch: delete`` and
``$patch: replace`` work. What Tandem depends on is protected: touching it is an error that names
the path. Semantics: k8s.io/apimachinery, pkg/util/strategicpatch. Pure; called by ``pod``.
"""

from __future__ import annotations

import copy
from typing import Any

from tandem.operator.desired.naming import Manifest
from tandem.protocol.errors import InvalidParameter

MAIN = "main"
"""Name of Tandem's own container."""

_KEYS = {
    "containers": ("name",),
    "env": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "protocol"),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_DEFAULTS = {"protocol": "TCP"}
_DIRECTIVE = "$patch"
_TARGETS = {"exec", "grpc", "httpGet", "tcpSocket", _DIRECTIVE}
"""What a probe asks; how often and how long may be changed."""


class TemplateConflict(InvalidParameter):
    """A podTemplate touches what is Tandem's."""


def merged(base: Any, patch: Any, *, field: str = "") -> Any:
    """``patch`` over ``base``; neither is changed. A None in the patch removes the field."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return _merged_maps(base, patch)
    if isinstance(base, list) and isinstance(patch, list) and field in _KEYS:
        return _merged_lists(base, patch, _KEYS[field])
    return copy.deepcopy(patch)


def _merged_maps(base: Manifest, patch: Manifest) -> Manifest:
    if patch.get(_DIRECTIVE) == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != _DIRECTIVE}
    result = copy.deepcopy(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif key in result:
            result[key] = merged(result[key], value, field=key)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged_lists(base: list[Any], patch: list[Any], keys: tuple[str, ...]) -> list[Any]:
    if any(item.get(_DIRECTIVE) == "replace" and len(item) == 1 for item in patch):
        return [copy.deepcopy(item) for item in patch if _DIRECTIVE not in item]
    result = {_key(item, keys): copy.deepcopy(item) for item in base}
    for item in patch:
        key = _key(item, keys)
        if item.get(_DIRECTIVE) == "delete":
            result.pop(key, None)
        elif key in result:
            result[key] = _merged_maps(result[key], item)
        else:
            result[key] = copy.deepcopy(item)
    return list(result.values())


def _key(item: Manifest, keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key, _DEFAULTS.get(key)) for key in keys)


def check_untouched(before: Manifest, template: Manifest, *, field: str) -> None:
    """Raise TemplateConflict when ``template`` names something that ``before`` must keep.

    ``before`` is the operator's own template: all of its labels, volumes, mounts, variables, ports
    and probe targets are protected, and so are the arguments of the container main.
    """
    labels = template.get("metadata", {}).get("labels", {}) or {}
    own = before["metadata"]["labels"]
    _refuse(f"{field}.metadata.labels", set(labels) & set(own))
    spec, theirs = before["spec"], template.get("spec", {}) or {}
    _refuse(f"{field}.spec", set(theirs) & {"serviceAccountName", "serviceAccount"})
    _refuse(f"{field}.spec", set(theirs) & {"restartPolicy", "automountServiceAccountToken"})
    _refuse(f"{field}.spec.volumes", _names(theirs, "volumes") & _names(spec, "volumes"))
    mains = [each for each in theirs.get("containers") or () if each.get("name") == MAIN]
    for main in mains:
        _check_main(spec["containers"][0], main, f"{field}.spec.containers[{MAIN}]")


def _check_main(own: Manifest, theirs: Manifest, field: str) -> None:
    _refuse(field, set(theirs) & {"args", _DIRECTIVE})
    _refuse(f"{field}.env", _names(theirs, "env") & _names(own, "env"))
    mounts = _names(theirs, "volumeMounts", "mountPath") & _names(own, "volumeMounts", "mountPath")
    _refuse(f"{field}.volumeMounts", mounts)
    ports = _names(theirs, "ports", "containerPort") & _names(own, "ports", "containerPort")
    _refuse(f"{field}.ports", ports)
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        touched = set(theirs.get(probe) or ()) & {
            "httpGet",
            "exec",
            "grpc",
            "tcpSocket",
            _DIRECTIVE,
        }
        _refuse(f"{field}.{probe}", touched)


def _names(holder: Manifest, field: str, key: str = "name") -> set[Any]:
    return {item.get(key) for item in holder.get(field) or ()}


def _refuse(field: str, names: set[Any]) -> None:
    if names:
        listed = ", ".join(sorted(map(str, names)))
        raise TemplateConflict(field, listed, "fields that are not Tandem's own")

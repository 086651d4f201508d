"""Strategic merge of a user's podTemplate over the operator's, by Kubernetes' merge keys.

Semantics: k8s.io/apimachinery, pkg/util/strategicpatch. ``protect`` checks the result.
"""

from __future__ import annotations

import copy
from typing import Any

from tandem.operator.desired.naming import Manifest
from tandem.protocol.errors import TandemError

MAIN = "main"
"""Name of Tandem's container."""

KEYS = {
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
"""Lists of named items, and their keys."""
_DEFAULTS = {"protocol": "TCP"}
_DIRECTIVE = "$patch"


def main_of(template: Manifest) -> Manifest:
    """Return Tandem's container of a merged pod template."""
    containers: list[Manifest] = template["spec"]["containers"]
    return next((each for each in containers if each["name"] == MAIN), {})


class TemplateUnreadable(TandemError, ValueError):
    """A podTemplate has a value of the wrong kind."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        kind = {dict: "a map", list: "a list", str: "a text", bool: "true or false"}
        super().__init__(f"{field}: found {kind.get(type(found), 'a number')}, not {expected}")


def merged(base: Any, patch: Any, *, path: str = "") -> Any:
    """Return ``patch`` over ``base``; neither is changed. A None removes the field.

    Raises TemplateUnreadable if a map or a list of named items meets another kind.
    """
    if isinstance(base, dict):
        return _merged_maps(base, _map(patch, path), path)
    field = path.rpartition(".")[2]
    if isinstance(base, list) and field in KEYS:
        if not isinstance(patch, list):
            raise TemplateUnreadable(path, patch, "a list")
        return _merged_lists(base, [_map(each, f"{path}[]") for each in patch], path)
    return copy.deepcopy(patch)


def _map(value: Any, path: str) -> Manifest:
    if not isinstance(value, dict):
        raise TemplateUnreadable(path, value, "a map")
    return value


def _merged_maps(base: Manifest, patch: Manifest, path: str) -> Manifest:
    if patch.get(_DIRECTIVE) == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != _DIRECTIVE}
    result = copy.deepcopy(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif key in result:
            result[key] = merged(result[key], value, path=f"{path}.{key}" if path else key)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged_lists(base: list[Any], patch: list[Manifest], path: str) -> list[Any]:
    field = path.rpartition(".")[2]
    if any(item.get(_DIRECTIVE) == "replace" and len(item) == 1 for item in patch):
        return [copy.deepcopy(item) for item in patch if _DIRECTIVE not in item]
    result = {key_of(item, field): copy.deepcopy(item) for item in base}
    for item in patch:
        key = key_of(item, field)
        if item.get(_DIRECTIVE) == "delete":
            result.pop(key, None)
        elif key in result:
            result[key] = _merged_maps(result[key], item, f"{path}[{item.get(KEYS[field][0])}]")
        else:
            result[key] = copy.deepcopy(item)
    return list(result.values())


def key_of(item: Manifest, field: str) -> str:
    """Return the key of an item of a list."""
    return repr([item.get(key, _DEFAULTS.get(key)) for key in KEYS[field]])

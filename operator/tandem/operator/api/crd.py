"""The CustomResourceDefinitions, made from the types: ``python -m tandem.operator.api.crd``.

Writes manifests/crds and, with Helm's switches, charts/tandem/templates/crds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from tandem.operator.api.roles import LLMRoleScalerSpec, LLMRoleScalerStatus
from tandem.operator.api.rules import NAME_RULES, RULES
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.api.values import GROUP, VERSION

_DROPPED = ("title", "default", "$ref", "allOf")
_STRUCTS = {kind.__name__: kind for kind in RULES}


def structural(kind: type) -> dict[str, Any]:
    """Return the schema of ``kind``, inlined; ``kind``'s docstring is its description."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return _convert(schema, components)


def _convert(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    schema = _resolved(schema, components)
    result = {key: value for key, value in schema.items() if key not in _DROPPED}
    if result.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result.pop("maxLength", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        return result
    if result.get("x-kubernetes-preserve-unknown-fields"):
        result.pop("additionalProperties", None)
        return result
    if result.get("type") == "integer":
        result.setdefault("format", "int64" if result.get("maximum", 2**40) > 2**31 else "int32")
    if not result.get("required", True):
        del result["required"]  # the API server drops empty lists: each apply would conflict
    if "enum" in result:
        result.setdefault("type", "string")
    if "properties" in result:
        properties = result["properties"]
        result["properties"] = {
            name: _convert(each, components) for name, each in properties.items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            result[key] = _convert(result[key], components)
    return result


def _resolved(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its reference and its one alternative to null merged in."""
    own = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "allOf")}
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _merged({**_resolved(components[name], components), **_rules(name)}, own)
    members = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if len(members) == 1:
        return _merged(_resolved(members[0], components), own)
    return schema


def _merged(inner: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    return {**inner, **own}


def _rules(name: str) -> dict[str, Any]:
    kind = _STRUCTS.get(name)
    if kind is None:
        return {}
    return {"x-kubernetes-validations": [rule.manifest() for rule in RULES[kind]]}


MAX_BYTES = 150 << 10
"""Maximum bytes, below the limits of Helm releases and client-side apply."""

_KEEP = "helm.sh/resource-policy"


def _column(name: str, path: str, description: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": more.pop("type", "string"),
        "jsonPath": path,
        "description": description,
        **more,
    }


def _condition(name: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{name}")].{field}'


SERVICE_COLUMNS = [
    _column("Ready", _condition("Ready", "status"), "True if requests are answered."),
    _column("Reason", _condition("Ready", "reason"), "Reason of Ready."),
    _column("Mode", ".status.mode", "Disaggregated, Aggregated or Pooling."),
    _column("P", ".status.summary.prefill", "Ready and desired prefill replicas."),
    _column("D", ".status.summary.decode", "Ready and desired decode replicas."),
    _column("Links", ".status.summary.links", "Healthy and expected KV links."),
    _column("Model", ".spec.model.name", "Name of the model."),
    _column("Age", ".metadata.creationTimestamp", "Time since creation.", type="date"),
]

SCALER_COLUMNS = [
    _column("Service", ".spec.serviceName", "LLMService whose role is scaled."),
    _column("Role", ".spec.role", "Scaled role."),
    _column("Desired", ".spec.replicas", "Requested replicas.", type="integer"),
    _column("Current", ".status.replicas", "Current replicas.", type="integer"),
    _column("Age", ".metadata.creationTimestamp", "Time since creation.", type="date"),
]


def service_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of LLMService."""
    spec = {**structural(LLMServiceSpec), "description": "Desired state."}
    status = {
        **structural(LLMServiceStatus),
        "description": "Observed state, written by the operator.",
    }
    schema = _root("A language model, served with prefill and decode on separate pods.")
    schema["properties"] |= {"spec": spec, "status": status}
    schema["required"] = ["spec"]
    schema["x-kubernetes-validations"] = [rule.manifest() for rule in NAME_RULES]
    names = {
        "kind": "LLMService",
        "listKind": "LLMServiceList",
        "plural": "llmservices",
        "singular": "llmservice",
        "shortNames": ["llm"],
        "categories": ["all"],
    }
    return _crd(names, schema, SERVICE_COLUMNS, {"status": {}})


def scaler_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of LLMRoleScaler, with its /scale."""
    spec = {
        **structural(LLMRoleScalerSpec),
        "description": "Desired state, written by an autoscaler.",
    }
    status = {**structural(LLMRoleScalerStatus), "description": "Observed state."}
    schema = _root("The /scale of one role of an LLMService; created by the operator.")
    schema["properties"] |= {"spec": spec, "status": status}
    schema["required"] = ["spec"]
    names = {
        "kind": "LLMRoleScaler",
        "listKind": "LLMRoleScalerList",
        "plural": "llmrolescalers",
        "singular": "llmrolescaler",
        "shortNames": ["llmscale"],
    }
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return _crd(names, schema, SCALER_COLUMNS, {"status": {}, "scale": scale})


def _root(description: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},  # the API server allows no description here
        },
    }


def _crd(
    names: dict[str, Any],
    schema: dict[str, Any],
    columns: list[dict[str, Any]],
    subresources: dict[str, Any],
) -> dict[str, Any]:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": names,
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def manifests() -> dict[str, str]:
    """Return the text of every generated file, by its path in the repository."""
    files = {}
    for crd in (service_crd(), scaler_crd()):
        name = f"{crd['spec']['names']['plural']}.yaml"
        files[f"manifests/crds/{name}"] = _text(crd)
        kept = {**crd, "metadata": {**crd["metadata"], "annotations": {_KEEP: "keep"}}}
        files[f"charts/tandem/templates/crds/{name}"] = _chart_text(kept)
    return files


def _chart_text(crd: dict[str, Any]) -> str:
    """Return a CRD that a release installs unless another owner has installed it."""
    name = crd["metadata"]["name"]
    asked = f'include "tandem.installsCrd" (dict "name" "{name}" "root" .)'
    return f"{{{{- if {asked} }}}}\n{_text(crd)}{{{{- end }}}}\n"


def _text(crd: dict[str, Any]) -> str:
    import yaml

    header = "# Made by `python -m tandem.operator.api.crd` from operator/tandem/operator/api.\n"
    return header + yaml.safe_dump(crd, sort_keys=False, width=100, allow_unicode=True)


def main() -> None:
    """Write the files below the current folder, and print the CRDs' sizes."""
    for path, text in manifests().items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
        print(path)
    for crd in (service_crd(), scaler_crd()):
        size = len(json.dumps(crd).encode())
        print(f"{crd['metadata']['name']}: {size} bytes of JSON")
        if size > MAX_BYTES:
            sys.exit(f"{crd['metadata']['name']}: above {MAX_BYTES} bytes")


if __name__ == "__main__":
    main()

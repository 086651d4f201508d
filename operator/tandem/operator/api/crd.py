"""The CustomResourceDefinitions, made from the types: ``python -m tandem.operator.api.crd``.

Writes manifests/crds (plain) and charts/tandem/templates/crds (the same, kept by Helm when a
release is uninstalled, behind a switch). A test fails when the files differ from the types.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tandem.operator.api.rules import NAME_RULES
from tandem.operator.api.scaler import LLMRoleScalerSpec, LLMRoleScalerStatus
from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import LLMServiceStatus
from tandem.operator.api.structural import structural
from tandem.operator.api.values import GROUP, VERSION

MAX_BYTES = 150 << 10
"""Helm releases and the annotation of client-side apply have limits; stay well below."""

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
    _column("Ready", _condition("Ready", "status"), "Whether requests are answered."),
    _column("Reason", _condition("Ready", "reason"), "Why it is ready or not."),
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
    _column("Desired", ".spec.replicas", "Replicas asked for.", type="integer"),
    _column("Current", ".status.replicas", "Replicas that are there.", type="integer"),
    _column("Age", ".metadata.creationTimestamp", "Time since creation.", type="date"),
]


def service_crd() -> dict[str, Any]:
    """CustomResourceDefinition of LLMService."""
    spec = {**structural(LLMServiceSpec), "description": "What is asked for."}
    status = {**structural(LLMServiceStatus), "description": "What is; written by the operator."}
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
    """CustomResourceDefinition of LLMRoleScaler, with its /scale."""
    spec = {**structural(LLMRoleScalerSpec), "description": "What an autoscaler asks for."}
    status = {**structural(LLMRoleScalerStatus), "description": "What is."}
    schema = _root("The /scale of one role of an LLMService; made by the operator.")
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
    """Text of every generated file, by its path from the repository's root."""
    files = {}
    for crd in (service_crd(), scaler_crd()):
        name = f"{crd['spec']['names']['plural']}.yaml"
        files[f"manifests/crds/{name}"] = _text(crd)
        kept = {**crd, "metadata": {**crd["metadata"], "annotations": {_KEEP: "keep"}}}
        files[f"charts/tandem/templates/crds/{name}"] = _chart_text(kept)
    return files


def _chart_text(crd: dict[str, Any]) -> str:
    """A CRD that a release installs unless somebody else's is there: another release's, or one of
    kubectl's, which Helm would refuse to take over."""
    name = crd["metadata"]["name"]
    asked = f'include "tandem.installsCrd" (dict "name" "{name}" "root" .)'
    return f"{{{{- if {asked} }}}}\n{_text(crd)}{{{{- end }}}}\n"


def _text(crd: dict[str, Any]) -> str:
    import yaml

    header = "# Made by `python -m tandem.operator.api.crd` from operator/tandem/operator/api.\n"
    return header + yaml.safe_dump(crd, sort_keys=False, width=100, allow_unicode=True)


def main() -> None:
    """Write the files below the current folder, and say how big the CRDs are."""
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

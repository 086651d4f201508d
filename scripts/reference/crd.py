"""docs/reference/llmservice.md: every field of the resource, from its CRD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from scripts.reference.table import MADE, code, table

_HEAD = f"""# Fields of an LLMService

{MADE}
[LLMService](../resource.md) explains what fields do together, and which ones this version
refuses. `podTemplate` is a pod template of Kubernetes.
"""
_OPAQUE = "podTemplate"
_NAMES = {"object": "map", "array": "list", "integer": "integer", "boolean": "switch"}
_BOUNDS = {"minimum": "at least", "maximum": "at most", "maxItems": "items, at most"}
_BOUNDS |= {"maxLength": "characters, at most", "pattern": "pattern"}


def page(path: Path) -> str:
    """The whole page, from the CRD's manifest."""
    schema = yaml.safe_load(path.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = [_HEAD]
    for top in ("spec", "status"):
        part = schema["properties"][top]
        parts.append(f"## {top}\n")
        parts.append(table(("field", "type", "allowed", "effect"), _rows(part, "")))
    return "\n".join(parts)


def _rows(node: dict[str, Any], path: str) -> Iterator[tuple[str, str, str, str]]:
    needed = set(node.get("required", ()))
    for name, each in node.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        inner = each.get("items", each)
        text = each.get("description", "")
        yield (
            code(where),
            _kind(each),
            _allowed(each),
            ("Required. " if name in needed else "") + text,
        )
        if name != _OPAQUE:
            yield from _rows(inner, where + ("[]" if "items" in each else ""))


def _kind(node: dict[str, Any]) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "integer or text"
    kind = node.get("type", "")
    inner = node.get("items", {}).get("type", "object")
    named: str = _NAMES.get(kind, "text" if kind == "string" else kind)
    return f"list of {_NAMES.get(inner, 'text')}s" if kind == "array" else named


def _allowed(node: dict[str, Any]) -> str:
    if "enum" in node:
        return ", ".join(map(code, node["enum"]))
    found = [f"{text} {code(node[key])}" for key, text in _BOUNDS.items() if key in node]
    return ", ".join(found)

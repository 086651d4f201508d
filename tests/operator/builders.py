"""Specs of LLMServices for tests: one that is right, and changes to it."""

from __future__ import annotations

import copy
from typing import Any

DEMO: dict[str, Any] = {
    "model": {
        "name": "smollm2",
        "source": {
            "type": "PersistentVolumeClaim",
            "persistentVolumeClaim": {"claimName": "models", "path": "smollm2"},
        },
    },
    "prefill": {"replicas": 1},
    "decode": {"replicas": 1},
}


def spec(**changes: Any) -> dict[str, Any]:
    """The demo's spec; ``a__b=value`` sets ``a.b``, and None removes it."""
    result = copy.deepcopy(DEMO)
    for path, value in changes.items():
        *outer, last = path.split("__")
        target = result
        for key in outer:
            target = target.setdefault(key, {})
        if value is None:
            target.pop(last, None)
        else:
            target[last] = value
    return result


def service(name: str = "demo", **changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name},
        "spec": spec(**changes),
    }

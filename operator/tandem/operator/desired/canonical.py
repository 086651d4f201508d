"""JSON as Go writes a map: sorted keys, no blanks, HTML escaped.

The data of a ControllerRevision is immutable to the byte. The garbage collector patches the object
to take its owner away (``--cascade=orphan``), which writes the data anew as Go does. Data in any
other form is refused as a change, and the deletion never ends.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tandem.operator.desired.naming import Manifest

KIND = "ControllerRevision"
_ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def as_go_writes(manifest: Manifest) -> Manifest:
    """Return a manifest whose data, if it is a ControllerRevision, has that form."""
    if manifest.get("kind") != KIND or "data" not in manifest:
        return manifest
    return {**manifest, "data": msgspec.Raw(_encoded(manifest["data"]))}


def _encoded(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return text.encode()


def in_order(value: Any) -> Any:
    """Return a value whose maps have their keys in order."""
    return msgspec.json.decode(msgspec.json.encode(value, order="sorted"))


def is_sorted(value: Any) -> bool:
    """Return whether all maps of a value have their keys in order."""
    return msgspec.json.encode(value) == msgspec.json.encode(value, order="sorted")

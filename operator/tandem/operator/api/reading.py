"""Objects of the API server as types.

The decoders are built at import: msgspec crashes if two threads build one at once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import LLMServiceStatus
from tandem.protocol.errors import TandemError

_BUILT = (msgspec.json.Decoder(LLMServiceSpec), msgspec.json.Decoder(LLMServiceStatus))


class Unreadable(TandemError, ValueError):
    """The spec does not fit this version's types; the message names the field."""


def spec_of(resource: dict[str, Any]) -> LLMServiceSpec:
    """Return the spec of an LLMService. Raises Unreadable."""
    if "spec" not in resource:
        raise Unreadable("spec: it is missing")
    try:
        return msgspec.convert(resource["spec"], LLMServiceSpec)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at ")
        field = "spec" + place.strip("`").removeprefix("$")
        raise Unreadable(f"{field}: {said}") from error


def status_of(resource: dict[str, Any]) -> LLMServiceStatus:
    """Return the status; an empty one if it cannot be read."""
    try:
        return msgspec.convert(resource.get("status") or {}, LLMServiceStatus)
    except msgspec.ValidationError:
        return LLMServiceStatus()

"""Objects of the API server as types.

msgspec builds what it knows of a type at its first use, and two threads that do so at once bring
the interpreter down (seen with 0.22). So that is done here, while this module is imported.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import LLMServiceStatus
from tandem.protocol.errors import TandemError

_BUILT = (msgspec.json.Decoder(LLMServiceSpec), msgspec.json.Decoder(LLMServiceStatus))


class Unreadable(TandemError, ValueError):
    """A spec that is not what this version's types say; the message names the field."""


def spec_of(resource: dict[str, Any]) -> LLMServiceSpec:
    """The spec of an LLMService. Raises Unreadable."""
    if "spec" not in resource:
        raise Unreadable("spec: it is missing")
    try:
        return msgspec.convert(resource["spec"], LLMServiceSpec)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at ")
        field = "spec" + place.strip("`").removeprefix("$")
        raise Unreadable(f"{field}: {said}") from error


def status_of(resource: dict[str, Any]) -> LLMServiceStatus:
    """The status as it is; one of another version that cannot be read is made anew."""
    try:
        return msgspec.convert(resource.get("status") or {}, LLMServiceStatus)
    except msgspec.ValidationError:
        return LLMServiceStatus()

"""What the API server holds, as types.

msgspec builds what it knows of a type at its first use, and two threads that do so at once bring
the interpreter down (seen with 0.22). So that is done here, while this module is imported.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import LLMServiceStatus

_BUILT = (msgspec.json.Decoder(LLMServiceSpec), msgspec.json.Decoder(LLMServiceStatus))


def spec_of(resource: dict[str, Any]) -> LLMServiceSpec:
    """The spec of an LLMService. Raises msgspec.ValidationError with the path in it."""
    return msgspec.convert(resource["spec"], LLMServiceSpec)


def status_of(resource: dict[str, Any]) -> LLMServiceStatus:
    """The status as it is; one of another version that cannot be read is made anew."""
    try:
        return msgspec.convert(resource.get("status") or {}, LLMServiceStatus)
    except msgspec.ValidationError:
        return LLMServiceStatus()

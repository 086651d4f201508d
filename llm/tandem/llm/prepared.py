"""A request that may be sent, and those that are under way, by their callers' ids."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import InvalidParameter
from tandem.text.input_processor import ProcessedInput


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that passed every check and was not sent yet."""

    request_id: str
    """The caller's id."""
    processed: ProcessedInput


class Running:
    """Requests that were sent and have not ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, PreparedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def take(self, prepared: PreparedRequest) -> None:
        """It is sent. Raises InvalidParameter if its id is that of another one."""
        if prepared.request_id in self._by_id:
            raise InvalidParameter(
                "request_id", prepared.request_id, "an id that no running request has"
            )
        self._by_id[prepared.request_id] = prepared

    def free(self, prepared: PreparedRequest) -> None:
        """Its id may be used again, unless it may already, or is another request's by now."""
        if self._by_id.get(prepared.request_id) is prepared:
            del self._by_id[prepared.request_id]

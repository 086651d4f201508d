"""Prepared requests, and running ones by their callers' ids."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import InvalidParameter
from tandem.text.input_processor import ProcessedInput


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Request that passed every check and was not sent yet."""

    request_id: str
    processed: ProcessedInput


class Running:
    """Requests that were sent and have not ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, PreparedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def take(self, prepared: PreparedRequest) -> None:
        """Add a request. Raises InvalidParameter if another one has its id."""
        if prepared.request_id in self._by_id:
            raise InvalidParameter(
                "request_id", prepared.request_id, "an id that no running request has"
            )
        self._by_id[prepared.request_id] = prepared

    def free(self, prepared: PreparedRequest) -> None:
        """Remove a request, unless another one has its id."""
        if self._by_id.get(prepared.request_id) is prepared:
            del self._by_id[prepared.request_id]

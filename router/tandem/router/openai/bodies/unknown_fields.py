"""Unknown fields of a body: refused, or ignored and logged.

An ignored misspelt parameter gives an answer that was not requested, so an unknown field is an
error. ``--ignore-unknown-fields`` accepts it for clients that send extras of other servers. The log
names the fields. Clients chose these names, so few are logged, short and escaped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from difflib import get_close_matches

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.written import shortened

logger = logging.getLogger(__name__)

MAX_NAMES = 64
"""Names that the log gets to see in the life of a process."""
MAX_LENGTH = 64
"""Characters of a name that are shown."""


class UnknownFields:
    """Policy for unknown fields: refuse or ignore. One per process."""

    def __init__(self, *, ignored: bool = False) -> None:
        self._ignored = ignored
        self._seen: set[str] = set()

    def meet(self, prefix: str, name: str, value: object, known: Iterable[str]) -> None:
        """Raise InvalidParameter for the field ``prefix + name``, or let it pass."""
        field = prefix + shortened(name, MAX_LENGTH)
        if not self._ignored:
            near = get_close_matches(name[:MAX_LENGTH], list(known), n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise InvalidParameter(field, value, f"no parameter has this name{hint}")
        if field not in self._seen and len(self._seen) < MAX_NAMES:
            self._seen.add(field)
            logger.warning("unknown field %s in a request is ignored", ascii(field))

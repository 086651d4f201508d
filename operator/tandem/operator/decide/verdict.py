"""What a canary came to; asked by ``probes``, weighed by ``plan`` and ``status``."""

from __future__ import annotations

import msgspec

from tandem.operator.api.conditions import Reason


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a canary showed."""

    ok: bool
    reason: Reason
    message: str
    targets: str
    at: float

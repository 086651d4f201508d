"""Result of a canary; made by ``probes``, read by ``plan`` and ``status``."""

from __future__ import annotations

import msgspec

from tandem.operator.api.conditions import Reason


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a canary."""

    ok: bool
    reason: Reason
    message: str
    targets: str
    at: float

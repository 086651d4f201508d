"""Bounds of mixed steps for the GPU workers of a pair. Pure; called by ``up``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.engine.config.engine import resolve_device
from tandem.protocol.step_bound import step_bound
from tandem.router.config import RouterConfig


def bound_steps(
    router: RouterConfig,
    given: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Sequence[str]],
) -> dict[str, Sequence[str]]:
    """Return ``flags`` by role, with ``--max-itl-ms`` for GPU workers without a bound.

    ``given`` are the engine settings of each role's workers, from any source. Without both roles
    there is no pair, and nothing is added.
    """
    bounded = dict(flags)
    if router.strict_handoff or not {"prefill", "decode"} <= given.keys():
        return bounded
    for role, settings in given.items():
        more = step_bound(router.target_itl_ms, settings)
        if more and resolve_device(settings.get("device", "auto")) == "cuda":
            bounded[role] = [*flags.get(role, ()), *more]
    return bounded

"""Bounds of mixed steps for the GPU workers of a pair, as ``tandem up`` gives them.

Pure; called by ``worker``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tandem.operator.api.service import DisaggregationMode, LLMServiceSpec
from tandem.operator.desired.merge import MAIN
from tandem.operator.desired.naming import Manifest, Role, map_of, maps_of
from tandem.operator.desired.policy import draws_tokens, router_has, router_value, worker_role
from tandem.protocol.names import ENV_PREFIX
from tandem.protocol.step_bound import TARGET_ITL_MS, step_bound


def step_bound_flags(spec: LLMServiceSpec, role: Role) -> list[str]:
    """Return ``--max-itl-ms`` for a role that requests GPUs and has no bound of its own, by
    ``extraArgs`` or a variable of its podTemplate. None for strict hand-off, or if the router
    refuses its target."""
    fixed = (DisaggregationMode.NEVER, DisaggregationMode.ALWAYS)
    if spec.disaggregation.mode in fixed or not draws_tokens(spec):
        return []
    section = worker_role(spec, role)
    if router_has(spec, "strict-handoff") or not _has_gpu(section.resources):
        return []
    flags = _settings_of([*spec.engine.extra_args, *section.extra_args])
    try:
        target = float(router_value(spec, "target-itl-ms") or TARGET_ITL_MS)
    except ValueError:
        return []
    if not 0 < target < math.inf:
        return []
    return step_bound(target, {*flags, *_settings_in(section.pod_template or {})})


def _has_gpu(resources: Manifest | None) -> bool:
    """Return whether a container requests a GPU, as an extended resource or by a claim."""
    wanted = resources or {}
    names = (*map_of(wanted.get("limits")), *map_of(wanted.get("requests")))
    return bool(wanted.get("claims")) or any("gpu" in name for name in names)


def _settings_of(words: Sequence[str]) -> Iterator[str]:
    """Return the names of settings whose flags are among the words."""
    return (each[2:].split("=", 1)[0].replace("-", "_") for each in words if each[:2] == "--")


def _settings_in(template: Manifest) -> Iterator[str]:
    """Return the names of settings in a podTemplate's variables; none for another shape."""
    for container in maps_of(map_of(template.get("spec")).get("containers")):
        if container.get("name") != MAIN:
            continue
        names = (str(each.get("name")) for each in maps_of(container.get("env")))
        yield from (
            each.removeprefix(ENV_PREFIX).lower() for each in names if each.startswith(ENV_PREFIX)
        )

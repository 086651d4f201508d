"""The bound of steps that workers get where ``router.extraArgs`` asks for elastic placement.

As ``tandem up`` gives it to its workers; without it such steps are over the router's bound of gaps,
and few prompts leave the prefill workers (docs/pair.md). Pure; called by ``worker``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tandem.operator.api.service import DisaggregationMode, LLMServiceSpec
from tandem.operator.desired.merge import MAIN
from tandem.operator.desired.naming import Manifest, Role, map_of, maps_of
from tandem.operator.desired.policy import draws_tokens, router_value, worker_role
from tandem.protocol.names import ENV_PREFIX
from tandem.protocol.step_bound import step_bound


def elastic_step_flags(spec: LLMServiceSpec, role: Role) -> list[str]:
    """``--max-itl-ms`` for a role of an elastic pair that was given no bound of its own, by
    ``extraArgs`` or a variable of its podTemplate. None where the router refuses its target."""
    if router_value(spec, "placement") != "elastic" or not draws_tokens(spec):
        return []
    if spec.disaggregation.mode is DisaggregationMode.NEVER:
        return []
    section = worker_role(spec, role)
    flags = _settings_of([*spec.engine.extra_args, *section.extra_args])
    given = router_value(spec, "target-itl-ms")
    try:
        target = None if given is None else float(given)
    except ValueError:
        return []
    if target is not None and not 0 < target < math.inf:
        return []
    return step_bound(target, {*flags, *_settings_in(section.pod_template or {})})


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

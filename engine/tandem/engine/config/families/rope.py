"""Rotary embeddings of config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.config.facts import DEFAULT_THETA, RopeFacts
from tandem.engine.config.families.values import above_zero, number
from tandem.protocol.errors import InvalidParameter

_MAIN = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})


def rope_of(config: Mapping[str, Any]) -> RopeFacts:
    """Return the rotary embedding of all layers; rope_scaling, if set, replaces rope_parameters.
    Raises InvalidParameter."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping) or any(isinstance(each, Mapping) for each in given.values()):
        allowed = "an object of numbers: one rotary embedding for all layers"
        raise InvalidParameter(f"config.json: {key}", given, allowed)
    name = f"{key}.rope_theta" if "rope_theta" in given else "rope_theta"
    theta = given.get("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return _facts(given, theta=above_zero(name, theta), partial=partial)


def ropes_by_type(
    config: Mapping[str, Any], thetas: Mapping[str, tuple[str, float]]
) -> dict[str, RopeFacts]:
    """Return the rotary embedding of each layer type. Raises InvalidParameter.

    ``thetas`` has, by layer type, the older key of its base and the default; rope_scaling is of the
    first type.
    """
    given = config.get("rope_parameters") or {}
    _check_by_type("rope_parameters", given, thetas)
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        raise InvalidParameter("config.json: rope_scaling", scaling, "an object of numbers")
    found = {}
    for kind, (older, default) in thetas.items():
        own = {**(given.get(kind) or {}), **scaling}
        name = f"rope_parameters.{kind}.rope_theta" if "rope_theta" in own else older
        theta = own.get("rope_theta", config.get(older) or default)
        partial = own.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        found[kind] = _facts(own, theta=above_zero(name, theta), partial=partial)
        scaling = {}
    return found


def _check_by_type(key: str, given: Any, kinds: Mapping[str, Any]) -> None:
    if (
        isinstance(given, Mapping)
        and given.keys() <= kinds.keys()
        and all(isinstance(each, Mapping | None) for each in given.values())
    ):
        return
    allowed = f"an object of rotary embeddings by layer type: {', '.join(kinds)}"
    raise InvalidParameter(f"config.json: {key}", given, allowed)


def _facts(given: Mapping[str, Any], *, theta: float, partial: Any) -> RopeFacts:
    return RopeFacts(
        theta=theta,
        kind=str(given.get("rope_type", given.get("type", "default"))),
        scaling={key: value for key, value in given.items() if key not in _MAIN},
        partial=number("partial_rotary_factor", partial),
    )

"""Sampling parameters from what callers write: nothing, a mapping, or the struct itself.

What the caller leaves open comes from the model's generation_config.json, as in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tandem.llm import params
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams, from_mapping

logger = logging.getLogger(__name__)

_FROM_GENERATION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json to ours."""


Params = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters as callers write them (see ``params_from``)."""


def defaults_of(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's own defaults. One that is not allowed is left out with a warning."""
    found: dict[str, Any] = {}
    for theirs, ours in _FROM_GENERATION.items():
        value = generation.get(theirs)
        if value is None:
            continue
        try:
            from_mapping({ours: value})
        except InvalidParameter as error:
            logger.warning("generation_config.json: %s is left out: %s", theirs, error)
        else:
            found[ours] = value
    return found


def params_from(
    given: SamplingParams | Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Return verified parameters. A struct is complete; a mapping is filled with defaults.

    ``stop`` and ``bad_words`` may be single strings. Raises InvalidParameter.
    """
    if isinstance(given, params.SamplingParams):
        return params.wire(given)
    if isinstance(given, SamplingParams):
        return given.verify()
    fields = {**(defaults or {}), **(given or {})}
    for name in ("stop", "bad_words"):
        value = fields.get(name)
        if isinstance(value, str):
            fields[name] = (value,)
        elif value is None:
            fields.pop(name, None)
    return from_mapping(fields)

"""Setting of drafts: `speculative_config`, in vLLM's spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tandem.base.settings import check_integer
from tandem.protocol.errors import InvalidParameter

NAME = "speculative_config"
METHODS = ("ngram",)
MOST_SPECULATIVE_TOKENS = 15
MOST_DRAFTED_SEQS = 64
"""Sequences of a step up to which drafts are proposed: reading the weights takes most of its time,
so more tokens are nearly free."""
MOST_DRAFTS = 448
"""Maximum proposed drafts in one step: each has a row of logits."""
_USUAL_LOOKUP = 5
_MOST_LOOKUP = 64


@dataclass(frozen=True, slots=True)
class NgramLookup:
    """Proposals by prompt lookup: the tokens that followed the same n-gram before."""

    num_speculative_tokens: int
    prompt_lookup_max: int
    """Most tokens of an n-gram, which is tried first."""
    prompt_lookup_min: int

    @property
    def text(self) -> str:
        """Return the setting as JSON, complete."""
        return json.dumps({"method": "ngram", **asdict(self)})


DraftSource = NgramLookup
"""Any parsed setting."""


def lookup_of(value: object) -> DraftSource:
    """Return the parsed setting, a JSON object or a mapping. Raise InvalidParameter."""
    given = _mapping(value)
    known = ("method", *(each.name for each in fields(NgramLookup)))
    for key in given:
        if key not in known:
            raise InvalidParameter(NAME, key, f"these keys: {', '.join(known)}")
    if given.get("method") not in METHODS:
        allowed = f"a method, one of {', '.join(METHODS)}"
        raise InvalidParameter(NAME, given.get("method"), allowed)
    tokens: Any = given.get("num_speculative_tokens")
    most, least = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
    most = (_USUAL_LOOKUP if least is None else least) if most is None else most
    least = most if least is None else least
    check_integer(f"{NAME}.num_speculative_tokens", tokens, 1, MOST_SPECULATIVE_TOKENS)
    check_integer(f"{NAME}.prompt_lookup_max", most, 1, _MOST_LOOKUP)
    check_integer(f"{NAME}.prompt_lookup_min", least, 1, most)
    return NgramLookup(tokens, most, least)


def _mapping(value: object) -> Mapping[str, Any]:
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError as error:
            raise InvalidParameter(NAME, value, f"a JSON object ({error})") from error
    if not isinstance(found, Mapping):
        raise InvalidParameter(NAME, value, "a JSON object")
    return found

"""Texts that a schema describes, as outlines-core takes them: by length, or by an expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.structured.grammar import GrammarError
from tandem.engine.structured.outlines.expressions import read_search
from tandem.engine.structured.outlines.words import count, refusal, unmatched
from tandem.engine.structured.rewrite import LEAP_YEAR, YEAR

_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{YEAR}-{_DAYS}|{LEAP_YEAR}-02-29)"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-z0-9]{1,20}(?:-[a-z0-9]{1,20}){0,2}"
_NAME = rf"(?:{_LABEL}\.){{1,4}}[a-z]{{2,12}}"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": rf"{_DATE}T{_TIME}(?:\.[0-9]{{1,9}})?{_OFFSET}",
    "email": rf"[a-z0-9]{{1,20}}(?:[._+-][a-z0-9]{{1,20}}){{0,3}}@{_NAME}",
    "hostname": _NAME,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "time": rf"{_TIME}(?:\.[0-9]{{1,9}})?{_OFFSET}",
    "uri": rf"https?://{_NAME}(?:/[A-Za-z0-9._~-]*)*",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
"""Formats, and an expression all of whose texts are of each; outlines-core's own let others
through."""


def string_of(said: Mapping[str, Any], at: str) -> Any:
    """A schema of texts in outlines-core's words. Raises GrammarError."""
    given = [key for key in ("pattern", "format") if key in said]
    given += ["minLength" if "minLength" in said else "maxLength"] * (
        "minLength" in said or "maxLength" in said
    )
    if len(given) > 1:
        raise refusal(f"{given[1]} beside {given[0]}", at)
    if not given:
        return {"type": "string"}
    if given[0] == "pattern":
        return _matching(said["pattern"], at)
    if given[0] == "format":
        pattern = FORMATS.get(str(said["format"]))
        if pattern is None:
            raise refusal(f"format {said['format']!r}", at)
        return _matching(f"^(?:{pattern})$", at)
    least, most = count(said, "minLength", at) or 0, count(said, "maxLength", at)
    if most is not None and most < least:
        raise unmatched(at)
    return {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})


def _matching(pattern: Any, at: str) -> Any:
    if not isinstance(pattern, str):
        raise GrammarError(f"a schema that has a text for pattern at {at or '/'}")
    try:
        return {"type": "string", "pattern": read_search(pattern).text}
    except GrammarError as error:
        raise GrammarError(
            f"a schema that is followed: its pattern at {at or '/'} is to be {error}"
        ) from None

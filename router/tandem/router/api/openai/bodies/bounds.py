"""Bounds of the counts in one request, and the parsing of a body within them.

Counts are checked before types: each wrong value makes a message. Large bodies are checked in a
thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
)

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails, from_json

from tandem.llm.cpu_pool import IN_LOOP
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import MAX_N, MAX_STOP_TOKEN_IDS
from tandem.router.api.openai.bodies.hints import Hint, Reading
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.config import RouterConfig
from tandem.router.http.errors import (
    MAX_NAME,
    ErrorAnswer,
    HttpProblem,
    bad_request,
    shortened,
    written,
)

SLICE_BYTES = 1 << 18
CONTAINER_SHARE = 10
"""Ratio of allowed values to allowed objects and lists."""
_NOT_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")


def check_shape(body: bytes, *, max_values: int, max_depth: int) -> None:
    """Raise HttpProblem (413, or 400 for the depth) if the body holds too much."""
    counted = _Counted(max_values, max_depth)
    start = 0
    while start < len(body):
        part = body[start : start + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # never between a backslash and its letter
            part = body[start : start + len(part) + 1]
        start += len(part)
        counted.take(part)


class _Counted:
    """Counters over the bytes so far."""

    def __init__(self, max_values: int, max_depth: int) -> None:
        self._max_values = max_values
        self._max_depth = max_depth
        self._num_values = 1
        self._num_containers = 0
        self._depth = 0
        self._in_text = False

    def take(self, part: bytes) -> None:
        if b"\\" in part:
            part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        pieces = part.split(b'"')
        outside = b"".join(pieces[int(self._in_text) :: 2])
        if len(pieces) % 2 == 0:
            self._in_text = not self._in_text
        brackets = outside.translate(None, _NOT_BRACKETS)
        opened = brackets.count(b"[") + brackets.count(b"{")
        self._num_containers += opened
        self._num_values += opened + outside.count(b",") + outside.count(b":")
        self._check_counts()
        self._go_down(brackets)

    def _check_counts(self) -> None:
        most = self._max_values
        if self._num_values > most:
            raise too_many_values("values", most)
        if self._num_containers > most // CONTAINER_SHARE:
            raise too_many_values("objects and lists", most // CONTAINER_SHARE)

    def _go_down(self, brackets: bytes) -> None:
        depth = self._depth
        for each in brackets:
            depth += 1 if each in b"[{" else -1
            if depth > self._max_depth:
                raise _too_deep(self._max_depth)
        self._depth = depth


def too_many_values(what: str, limit: int) -> HttpProblem:
    """Return the 413 for a body with too much."""
    return HttpProblem(
        ErrorAnswer(
            status=413,
            message=f"The body holds more than {limit} {what}",
            type="invalid_request_error",
            code="request_too_large",
        )
    )


def _too_deep(limit: int) -> HttpProblem:
    return HttpProblem(
        ErrorAnswer(
            status=400,
            message=f"The body nests objects and lists more than {limit} deep",
            type="invalid_request_error",
            code="body_too_deep",
        )
    )


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _one_or_several(*kinds: dict[str, Any]) -> WithJsonSchema:
    several = {"type": "array", "items": {"anyOf": [*kinds]}, "minItems": 1}
    return WithJsonSchema({"anyOf": [*kinds, several]})


Prompts = Annotated[Any, _one_or_several(_TEXT, _TOKENS)]
"""A text or token ids, or a list of them."""
_EXAMPLE = (  # safetensors, [1, 2] float32
    "OAAAAAAAAAB7IngiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzEsMl0sImRhdGFfb2Zmc2V0"
    "cyI6WzAsOF19fQAAAD8AAIC+"
)
_SAVED = {
    "type": "string",
    "minLength": 1,
    "contentEncoding": "base64",
    "description": "A safetensors file with one tensor [positions, hidden_size].",
    "examples": [_EXAMPLE],
}
Embeds = Annotated[
    str | list[str],
    WithJsonSchema({"anyOf": [_SAVED, {"type": "array", "items": _SAVED}]}),
]
"""A safetensors file with one tensor [positions, hidden_size], in base64, or a list of them."""
Texts = Annotated[Any, _one_or_several(_TEXT)]
_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
Documents = Annotated[
    Any,
    WithJsonSchema({"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1}),
]
"""Texts, bare or in objects."""


class Body(BaseModel):
    """JSON object. Strict: a number in quotes is not a number, true is not 1."""

    model_config = ConfigDict(strict=True, extra="allow")

    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    """Known fields that are not supported."""
    HINTS: ClassVar[Mapping[str, Hint]] = {}
    """Fields without effect, which are reported."""
    EXAMPLE: ClassVar[Mapping[str, Any]] = {}
    """Body that is answered with 200, without ``model``."""

    def check(self, reading: Reading, prefix: str = "") -> None:
        """Raise InvalidParameter for unsupported fields, nested ones too; note hints."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Body):
                value.check(reading, f"{prefix}{name}.")
            if name in self.HINTS:
                self.HINTS[name].check(f"{prefix}{name}", value, reading)
        for name, value in (self.model_extra or {}).items():
            refused, hint = self.REFUSED.get(name), self.HINTS.get(name)
            if refused is not None:
                refused.check(f"{prefix}{name}", value)
            elif hint is not None:
                hint.check(f"{prefix}{name}", value, reading)
            else:
                known = (*type(self).model_fields, *self.REFUSED, *self.HINTS)
                reading.meet(prefix, name, value, known)


MAX_INTEGER = 2**63 - 1
"""Default bound of an integer."""
_SUSPECT = re.compile(rb"NaN|Infinity|[0-9][eE]\+?[0-9]{3}")


def check_finite(body: bytes) -> None:
    """Raise InvalidParameter for the first number in a JSON ``body`` that is not finite."""
    if _SUSPECT.search(body) is None:
        return
    for path, value in _walked(from_json(body)):
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidParameter(shortened(path, MAX_NAME), value, "a finite number")


def _walked(value: Any) -> Iterator[tuple[str, Any]]:
    left = [("", value)]
    while left:
        path, each = left.pop()
        yield path, each
        if isinstance(each, dict):
            inner = [(f"{path}.{key}" if path else key, at) for key, at in each.items()]
        elif isinstance(each, list):
            inner = [(f"{path}[{index}]", at) for index, at in enumerate(each)]
        else:
            continue
        left += reversed(inner)


_AnyBody = TypeVar("_AnyBody", bound=Body)


def parse(model: type[_AnyBody], body: bytes, reading: Reading) -> _AnyBody:
    """Return the checked body as ``model``. Raises HttpProblem 400 and InvalidParameter."""
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise _problem(error, body, model) from error
    parsed.check(reading)
    check_finite(body)
    return parsed


def _problem(error: ValidationError, body: bytes, model: type[BaseModel]) -> HttpProblem:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return HttpProblem(bad_request(f"The body is not JSON: {first['msg']}", None))
    param = shortened(_path(first, body, model), MAX_NAME)
    if first["type"] == "missing":
        return HttpProblem(bad_request(f"{param}: is required", param))
    message = f"{param or 'body'}: {written(first['input'])} is not allowed; {first['msg']}"
    return HttpProblem(bad_request(message, param or None))


def _path(error: ErrorDetails, body: bytes, model: type[BaseModel]) -> str:
    """Return the path of the error in the body: ``messages[2].role``."""
    value = from_json(body)
    path = ""
    for step in error["loc"]:
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(step, str) and isinstance(value, dict):
            path = f"{path}.{step}" if path else step
            value = value.get(step)
            if step not in model.model_fields and value is None:
                break
        else:
            break  # the rest names members of a union
    return path


SMALL_BYTES = IN_LOOP
"""Maximum bytes of a body that is parsed in the loop."""
MAX_DOCUMENTS = 1_024
MAX_INPUTS = 2_048
"""Maximum inputs of a call that is answered by vectors or scores."""
MAX_FIELDS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBounds:
    """Entries per field, and of the body as a whole."""

    json_values: int
    json_depth: int
    prompts: int
    sequences: int
    entries: Mapping[str, int]
    """Bounds of other lists or objects."""

    @classmethod
    def of(cls, config: RouterConfig) -> RequestBounds:
        return cls(
            json_values=config.max_json_values,
            json_depth=config.max_json_depth,
            prompts=config.max_prompts,
            sequences=config.max_sequences,
            entries={
                "messages": config.max_messages,
                "bad_words": config.max_bad_words,
                "logit_bias": config.max_logit_bias,
                "stop": 1_024,
                "stop_sequences": 1_024,
                "stop_token_ids": MAX_STOP_TOKEN_IDS,
                "tools": MAX_DOCUMENTS,
                "documents": max(MAX_INPUTS, config.max_prompts),
                "chat_template_kwargs": MAX_FIELDS,
                "modalities": MAX_FIELDS,
            },
        )

    def check(self, fields: Mapping[str, object]) -> None:
        """Raise InvalidParameter for the first field with too many entries."""
        if len(fields) > MAX_FIELDS:
            raise InvalidParameter("body", list(fields), f"at most {MAX_FIELDS} fields")
        for name, most in self.entries.items():
            value = fields.get(name)
            if isinstance(value, list | dict) and len(value) > most:
                raise too_many(name, value, most)
        self._check_prompts(fields.get("prompt"), fields.get("prompt_embeds"), fields.get("n"))

    def _check_prompts(self, prompt: object, embeds: object, n: object) -> None:
        batch = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        count = len(prompt) if batch and isinstance(prompt, list) else 1
        name, value = "prompt", prompt
        if isinstance(embeds, list) and embeds:
            count, name, value = len(embeds) + (count if prompt else 0), "prompt_embeds", embeds
        if count > self.prompts:
            raise too_many(name, value, self.prompts)
        if isinstance(n, int) and count * n > self.sequences:
            allowed = f"prompts times n of at most {self.sequences}; it has {count} prompts"
            most = min(self.sequences, MAX_N)
            raise InvalidParameter("n", n, allowed if count > 1 else f"an integer, 1 to {most}")


def too_many(name: str, value: object, most: int) -> InvalidParameter:
    """Return the error of a long list or object."""
    count = len(value) if isinstance(value, Sequence | Mapping) else 0
    return InvalidParameter(name, value, f"at most {most} entries; it has {count}")


def understand(
    model: type[_AnyBody], body: bytes, bounds: RequestBounds, reading: Reading
) -> _AnyBody:
    """Return the body as ``model``. Raises HttpProblem and InvalidParameter."""
    check_shape(body, max_values=bounds.json_values, max_depth=bounds.json_depth)
    if len(body) > SMALL_BYTES:
        _check_before(body, bounds)
    parsed = parse(model, body, reading)
    bounds.check({**parsed.__dict__, **(parsed.model_extra or {})})
    return parsed


def _check_before(body: bytes, bounds: RequestBounds) -> None:
    """Check the counts of a body's fields; ``parse`` raises if it is not JSON."""
    try:
        fields = pydantic_core.from_json(body)
    except ValueError:
        return
    if isinstance(fields, dict):
        bounds.check(fields)

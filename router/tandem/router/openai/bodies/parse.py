"""Parse bodies from bytes to objects; errors are 400 and name field, value and allowed values."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from tandem.router.openai.bodies.body import Body
from tandem.router.openai.bodies.numbers import check_finite
from tandem.router.openai.bodies.reading import Reading
from tandem.router.openai.errors import HttpProblem, bad_request
from tandem.router.openai.written import MAX_NAME, shortened, written

_AnyBody = TypeVar("_AnyBody", bound=Body)


def parse(model: type[_AnyBody], body: bytes, reading: Reading) -> _AnyBody:
    """Return the body as ``model``, checked. Raises HttpProblem 400 and InvalidParameter."""
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
            break  # the rest names members of a union, not keys of the body
    return path

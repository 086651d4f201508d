"""Numbers beyond what a field holds: 400 that names the field, on every route that takes one."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from tests.router.http_server import Served

from tandem.router.api.anthropic.body import CountBody, MessagesBody
from tandem.router.api.openai.bodies.bounds import Body, check_finite
from tandem.router.api.openai.bodies.pooling_schemas import (
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from tandem.router.api.openai.bodies.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from tandem.router.api.openai.responses.body import ResponsesBody

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/embeddings": EmbeddingBody,
    "/pooling": PoolingBody,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
BEYOND = [str(2**63), str(2**64), str(-(2**63) - 1), "1" + "0" * 400]
ODD = ["1e400", "-1e400", "NaN", "Infinity"]
INSIDE = {
    "/v1/chat/completions": [
        '"chat_template_kwargs": {"a": [1, @]}',
        (
            '"response_format": {"type": "json_schema", "json_schema": '
            '{"name": "a", "schema": {"type": "number", "maximum": @}}}'
        ),
        (
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": '
            '{"type": "object", "properties": {"a": {"maximum": @}}}}}]'
        ),
    ],
    "/v1/messages": ['"thinking": {"type": "enabled", "budget_tokens": @}'],
}


def _fields(body: type[Body]) -> Iterator[tuple[str, str]]:
    """Names of fields that are integers, or lists of them, and how a value is written."""
    for name, field in body.model_fields.items():
        if int in typing.get_args(field.annotation):
            yield name, "@"
        elif list[int] in (field.annotation, *typing.get_args(field.annotation)):
            yield name, "[1, @]"


def _body(path: str, written: str, field: str) -> bytes:
    """An example of the route's with one more field."""
    rest = {key: value for key, value in BODIES[path].EXAMPLE.items() if key != field}
    return f"{{{written}, {json.dumps({'model': 'fake', **rest})[1:]}".encode()


def _refused(served: Served, path: str, content: bytes) -> dict[str, Any]:
    answer = served.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.full
@pytest.mark.parametrize("path", BODIES)
def test_an_integer_beyond_64_bits_is_refused_by_its_field(well: Served, path: str) -> None:
    """Whatever the field, with a message of a bounded length."""
    for field, form in _fields(BODIES[path]):
        for value in BEYOND:
            written = f'"{field}": {form.replace("@", value)}'
            error = _refused(well, path, _body(path, written, field))
            assert field in error["message"], (field, value, error)
            assert len(error["message"]) < 600


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, 0, -1])
def test_dimensions_have_a_range(well: Served, path: str, value: int) -> None:
    """No value reaches a worker that its message cannot hold."""
    content = json.dumps({"input": "a", "dimensions": value}).encode()
    error = _refused(well, path, content)
    assert error["param"] == "dimensions"
    assert "an integer from 1 to 2147483647" in error["message"]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("path", INSIDE)
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(
    well: Served, path: str, value: str
) -> None:
    """In a schema, in arguments of a template: where no field checks numbers."""
    for written in INSIDE[path]:
        field = written.partition('"')[2].partition('"')[0]
        error = _refused(well, path, _body(path, written.replace("@", value), field))
        assert field in error["message"], error


def test_texts_may_have_words_of_numbers() -> None:
    check_finite(b'{"prompt": "NaN and Infinity and 1e400", "temperature": 1e-300, "a": 1e299}')

"""What clients write about the form of an answer, and what workers get of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served

from tandem.protocol.errors import Refusal, RefusalCode

BODY: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["é", None]}}}

TAG = {"format": {"type": "const_string", "value": "a"}}
OLDER = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": True}}, {"json": True}),
        ({"structured_outputs": {"json_object": True, "regex": None}}, {"json_object": True}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, {"structural_tag": TAG}),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}),
        ({"response_format": {"type": "structural_tag", **OLDER}}, {"structural_tag": OLDER}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
        (
            {
                "structured_outputs": {"json_object": True, "whitespace_pattern": " ?"},
                "response_format": {"type": "text"},
            },
            {"json_object": True, "whitespace_pattern": " ?"},
        ),
    ],
)
def test_workers_get_what_is_wanted(
    well: Served, asked: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert well.post("/v1/chat/completions", json={**BODY, **asked}).status_code == 200
    params = well.workers[-1].submitted[-1].params.structured_outputs
    assert params is not None
    found = {name: value for name in params.__struct_fields__ if (value := getattr(params, name))}
    for name in {"json", "structural_tag"} & found.keys():
        found[name] = json.loads(found[name])
    assert found == wanted


def test_any_text_is_no_wish(well: Served) -> None:
    body = {**BODY, "response_format": {"type": "text"}}
    assert well.post("/v1/chat/completions", json=body).status_code == 200
    assert well.workers[-1].submitted[-1].params.structured_outputs is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_schema_is_blamed_where_the_client_wrote_it(
    serve: Callable[..., Served], decode: Callable[..., FakeWorker], path: str, stream: bool
) -> None:
    """A worker speaks of ``structured_outputs``; who wrote ``response_format`` hears of that."""

    def look_closer(turn: Turn) -> Iterator[float]:
        turn.accept()
        yield 0.05
        param = "structured_outputs.json"
        message = f"{param}: {{}} is not allowed; a schema without not at /"
        turn.refuse(Refusal(code=RefusalCode.INVALID, message=message, param=param))

    served = serve(decode(behaviour=look_closer))
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    body = {"prompt": "Hi", "max_tokens": 3, **BODY, "stream": stream, "response_format": asked}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    error = served.post(path, json=body).json()["error"]

    assert error["param"] == "response_format.json_schema.schema"
    assert error["message"].startswith("response_format.json_schema.schema: {} is not allowed;")

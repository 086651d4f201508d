"""The OpenAPI document says what is taken and what is answered: every status, every member."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from openapi_schema_validator import OAS32Validator, validate
from openapi_spec_validator import validate as validate_document
from tests import clear_text
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.router.api.admin import ops
from tandem.router.api.admin.document import document
from tandem.router.config import RouterConfig
from tandem.router.endpoints import Routes
from tandem.router.http.access import Access, Authorizer
from tandem.router.observe.ui import page

PATHS = {route.path for route in page.routes}
Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
TEXT = {"prompt": "Hi", "max_tokens": 2}
RESPONSE = {"input": "Hi", "max_output_tokens": 2}
LOGPROBS = ["message.output_text.logprobs"]
ALL = {"return_token_ids": True, "echo": True, "n": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
NAMED_EVENTS = ("/v1/responses", "/v1/messages")
"""Paths whose streams end with an event of their own."""
RIGHT: list[tuple[str, str, Mapping[str, Any] | None]] = [
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/chat/completions", {**CHAT, **ALL, "logprobs": True, "top_logprobs": 2}),
    ("post", "/v1/chat/completions", {**CHAT, "prompt_logprobs": 1, "return_prompt_text": True}),
    ("post", "/v1/chat/completions", {**CHAT, **STREAM}),
    ("post", "/v1/chat/completions", {**CHAT, **STREAM, **ALL, "logprobs": True}),
    ("post", "/v1/responses", RESPONSE),
    ("post", "/v1/responses", {**RESPONSE, "include": LOGPROBS, "top_logprobs": 2}),
    ("post", "/v1/responses", {**RESPONSE, "stream": True, "include": LOGPROBS}),
    ("post", "/v1/responses", {**RESPONSE, "max_output_tokens": 500, "tools": []}),
    ("post", "/v1/messages", CHAT),
    ("post", "/v1/messages", {**CHAT, "stream": True, "stop_sequences": ["is"]}),
    ("post", "/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("post", "/v1/completions", TEXT),
    ("post", "/v1/completions", {**TEXT, **ALL, "logprobs": 2, "prompt_logprobs": 1}),
    ("post", "/v1/completions", {**TEXT, **STREAM}),
    ("post", "/v1/completions", {**TEXT, **STREAM, **ALL, "logprobs": 2}),
    ("post", "/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("post", "/tokenize", {"messages": MESSAGES}),
    ("post", "/detokenize", {"tokens": [1, 2]}),
    ("post", "/v1/embeddings", {"input": ["Hi", "there"]}),
    ("post", "/v1/embeddings", {"input": "Hi", "encoding_format": "base64", "dimensions": 2}),
    ("post", "/pooling", {"input": "Hi", "task": "token_embed"}),
    ("post", "/pooling", {"input": [1, 2], "encoding_format": "base64"}),
    ("post", "/v1/score", {"text_1": "Hi", "text_2": ["Hi", "there"]}),
    ("post", "/score", {"text_1": ["Hi"], "text_2": ["there"]}),
    ("post", "/v1/rerank", {"query": "Hi", "documents": ["Hi", {"text": "there"}]}),
    ("post", "/v2/rerank", {"query": "Hi", "documents": ["Hi"], "return_documents": False}),
    ("post", "/rerank", {"query": "Hi", "documents": ["a", "b"], "top_n": 1}),
    ("get", "/v1/models", None),
    ("get", "/v1/models/fake", None),
    ("get", "/", None),
    ("get", "/health", None),
    ("get", "/ready", None),
    ("get", "/version", None),
    ("get", "/metrics", None),
    ("get", "/debug/canary", None),
    ("get", "/debug/fleet", None),
    ("get", "/debug/placements", None),
    ("get", "/debug/requests", None),
    ("get", "/debug/requests?limit=5", None),
    ("post", "/reset_prefix_cache", None),
]


@pytest.fixture(scope="module")
def session(well: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=well.url, timeout=20) as client:
        yield client


class Document(dict[str, Any]):
    """The document, and what each answer is held to: a look at all of it finds out whether a schema
    is right, so that it is taken once."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(found)
        self._checks: dict[tuple[str, ...], OAS32Validator] = {}

    def check(self, value: object, schema: dict[str, Any], *name: str) -> None:
        """Raises ValidationError where the value is not as the schema of this name says."""
        if name not in self._checks:
            whole = {**schema, "components": self["components"]}
            validate(value, whole)  # and that the schema is one
            self._checks[name] = OAS32Validator(whole)
        self._checks[name].validate(value)


def document_of(served: Served) -> Document:
    answer = clear_text.get(served.url + "/openapi.json", headers={"Authorization": "Bearer k"})
    return Document(answer.json())


@pytest.fixture(scope="module")
def described(well: Served) -> Document:
    """That of the app that many requests are sent to."""
    return document_of(well)


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref":
                yield each
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def conforms(document: Document, answer: httpx.Response) -> int:
    """The status of an answer, which is as the document says of the request's path."""
    path = answer.request.url.path
    if path.startswith("/v1/models/"):
        path = "/v1/models/{model_id}"
    if path.startswith("/debug/requests/"):
        path = "/debug/requests/{request_id}"
    if path.startswith("/v1/responses/"):
        path = "/".join(["/v1/responses/{response_id}", *path.split("/")[4:]])
    method, status = answer.request.method.lower(), str(answer.status_code)
    described = document["paths"][path][method]["responses"].get(status)
    assert described, f"{answer.request.method} {path} answers {answer.status_code}: {answer.text}"
    kind = answer.headers["content-type"].partition(";")[0]
    schema = described["content"][kind]["schema"]
    for name in described["headers"]:
        assert answer.headers[name]
    if kind == "text/event-stream":
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        if path not in NAMED_EVENTS:
            assert events.pop() == "[DONE]"
        schema = schema["properties"]["data"]["contentSchema"]
        values = [json.loads(event) for event in events]
    else:
        values = [answer.text if kind == "text/plain" else answer.json()]
    for value in values:
        document.check(value, schema, path, method, status, kind)
    return answer.status_code


def test_the_document_is_valid_and_whole(well: Served) -> None:
    """As OpenAPI 3.1 wants it; whatever it refers to is there, and so is every path."""
    document = document_of(well)
    defined = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    routes = {getattr(route, "path", "") for route in well.app.routes}

    validate_document(document)
    assert set(references(document)) <= defined
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/metrics"}
    hidden = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
    plain = {route.replace(":path", "") for route in routes}
    assert plain - hidden - PATHS == set(document["paths"])


def test_the_document_describes_the_bodies(well: Served) -> None:
    """Fields that are done and those that are refused, and no others."""
    schema = document_of(well)["components"]["schemas"]["ChatBody"]

    assert {"messages", "temperature", "use_beam_search", "user"} <= set(schema["properties"])
    assert schema["properties"]["use_beam_search"]["enum"] == [False, None]
    assert schema["additionalProperties"] is False


def test_no_status_is_told_that_is_never_answered(well: Served) -> None:
    told = {
        status
        for operations in document_of(well)["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
    }

    assert told == {"200", "400", "404", "408", "413", "429", "500", "503", "504"}


@pytest.mark.parametrize(("method", "path", "body"), RIGHT)
def test_right_requests_are_answered_as_described(
    session: httpx.Client,
    described: Document,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
) -> None:
    """Every path, whole and streamed, with everything that may be asked for beside the text."""
    answer = session.request(method, path, json=body)

    assert conforms(described, answer) == 200


def test_stored_responses_are_answered_as_described(well: Served) -> None:
    document = document_of(well)
    history = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "?"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    body = {**RESPONSE, "input": history, "previous_response_id": "resp_x"}
    missing = well.post("/v1/responses", json=body)
    del body["previous_response_id"]
    name = well.post("/v1/responses", json=body).json()["id"]
    path = f"{well.url}/v1/responses/{name}"
    statuses = [
        conforms(document, missing),
        conforms(document, clear_text.get(path)),
        conforms(document, clear_text.get(path, params={"stream": "true"})),
        conforms(document, clear_text.get(path + "/input_items")),
        conforms(document, clear_text.get(path + "/input_items", params={"limit": "0"})),
        conforms(document, clear_text.get(path + "/input_items", params={"order": "up"})),
        conforms(document, clear_text.get(path + "/input_items", params={"after": "up"})),
        conforms(document, clear_text.post(path + "/cancel")),
        conforms(document, httpx.delete(path)),
        conforms(document, httpx.delete(path)),
    ]

    assert statuses == [404, 200, 400, 200, 400, 400, 400, 400, 200, 404]


def test_refusals_are_answered_as_described(serve: Serve, decode: Make) -> None:
    """No key, an unknown model, too large, too slow to serve, nobody there."""
    d = decode(step=0.5)
    served = serve(
        d, api_key=("k",), max_body_bytes=200, request_timeout=0.3, wait=False, worker_wait=0.1
    )
    served.wait_started()
    key = {"Authorization": "Bearer k"}
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    document = document_of(served)
    assert document["components"]["securitySchemes"]
    path = "/v1/chat/completions"
    statuses = [
        conforms(document, served.post(path, json=CHAT)),
        conforms(document, served.post(path, json={**CHAT, "model": "x"}, headers=key)),
        conforms(document, served.post(path, json={**CHAT, "stop": ["x" * 300]}, headers=key)),
        conforms(document, served.post(path, json={**CHAT, "n": 0}, headers=key)),
        conforms(document, served.post(path, json={**CHAT, "max_tokens": 9}, headers=key)),
        conforms(document, clear_text.get(served.url + "/v1/models/x", headers=key)),
    ]
    d.stop()
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 503)
    statuses += [
        conforms(document, served.post(path, json=CHAT, headers=key)),
        conforms(document, clear_text.get(served.url + "/ready")),
    ]

    assert statuses == [401, 404, 413, 400, 504, 404, 503, 503]


def test_a_full_queue_is_answered_as_described(serve: Serve, decode: Make) -> None:
    """429, with Retry-After, while another request is served."""
    release = threading.Event()

    def wait_for_release(turn: Turn) -> Iterator[float]:
        turn.accept()
        while not release.is_set():
            yield 0.01
        turn.token(0)

    d = decode(behaviour=wait_for_release)
    served = serve(d, max_inflight_requests=1, max_queued_requests=0)
    first: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: first.append(served.post("/v1/completions", json={**TEXT, "max_tokens": 1}))
    )
    thread.start()
    wait_for(lambda: d.submitted)
    second = served.post("/v1/completions", json=TEXT)
    release.set()
    thread.join()

    assert conforms(document_of(served), second) == 429
    assert conforms(document_of(served), first[0]) == 200


def test_a_fault_is_answered_as_described(serve: Serve, decode: Make) -> None:
    """500 has the shape of every error."""
    served = serve(decode(), wait=False)
    served.wait_started()
    document = document_of(served)
    served.app.state.service.names = None

    assert conforms(document, served.post("/v1/completions", json=TEXT)) == 500


RIGHT_BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/v1/messages": CHAT,
}
ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([-1, 0, 1, 2, "", "text", [], {}, [1], ["a"], {"type": "text"}, {"5": 1}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"],
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_odd_bodies_are_answered_as_described(
    session: httpx.Client, described: Document, path: str, data: st.DataObject
) -> None:
    """Parameters with values of any type, misspelt ones among them: never an undescribed answer."""
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = schema["schema"]["$ref"].rpartition("/")[2]
    names = [*described["components"]["schemas"][name]["properties"], "temperture"]
    odd = data.draw(st.dictionaries(st.sampled_from(names), ODD, max_size=4))
    right: Mapping[str, Any] = RIGHT_BODIES.get(path, {"prompt": "Hi"})
    body = {**right, **odd}
    content = json.dumps(body)

    assert conforms(described, session.post(path, content=content)) in (200, 400, 404)


def test_a_path_without_a_description_fails_the_document() -> None:
    new = Routes("operation")
    new.get("/new")(ops.live)

    with pytest.raises(KeyError, match="/new"):
        document(Authorizer(RouterConfig()), [(new[0], Access.OPEN)])


def test_every_body_has_an_example_that_is_answered(session: httpx.Client, well: Served) -> None:
    """One that is valid under its own schema."""
    document = document_of(well)
    for path, methods in document["paths"].items():
        taken = methods.get("post", {}).get("requestBody")
        if taken is None:
            continue
        content = taken["content"]["application/json"]
        schema = {**content["schema"], "components": document["components"]}
        validate(content["example"], schema)
        answer = session.post(path, json=content["example"])
        if path == "/classify":  # this model has no head
            assert answer.json()["error"]["param"] == "model"
        else:
            assert answer.status_code == 200, (path, answer.text)

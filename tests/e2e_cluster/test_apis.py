"""Every interface through the Service that the operator makes, over a prefill and a decode pod."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.e2e_cluster import access, pods
from tests.e2e_cluster.kube import wait_for
from tests.e2e_cluster.service import NAME, QUESTION, Service
from tests.router.rpc_client import RpcClient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def ports(service: Service) -> dict[str, str]:
    """``address:port`` of the operator's own Service, by the names of its ports."""
    address = service.setup.address or access.node_address(service.kube)
    found = service.kube.get("service", NAME)["spec"]["ports"]
    named = {each["name"]: f"{address}:{each['nodePort']}" for each in found}
    wait_for("the port to open", lambda: _answers(f"http://{named['http']}"), seconds=30)
    return named


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def client(ports: dict[str, str]) -> Iterator[openai.OpenAI]:
    url = f"http://{ports['http']}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as made:
        yield made


def test_an_answer_follows_its_schema(service: Service, client: openai.OpenAI) -> None:
    """A chat under a JSON Schema, whose KV was handed over."""
    before = service.handed_over()
    question = f"Answer in JSON. {QUESTION}"  # others have asked it as it is: D has that KV
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        response_format=form,
        max_tokens=64,
        temperature=1.0,
        seed=1,
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"city", "big"}
    wait_for("bytes of KV", lambda: service.handed_over() > before, seconds=10)


def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "look_up"}},
        max_tokens=64,
        stream=True,
    )
    with stream:
        calls = [call for part in stream for call in part.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in calls if call.function and call.function.name] == [
        "look_up"
    ]
    written = "".join(call.function.arguments or "" for call in calls if call.function)
    assert set(json.loads(written)) == {"city", "big"}


def test_responses_and_messages(client: openai.OpenAI, ports: dict[str, str]) -> None:
    """OpenAI's second interface, streamed, and Anthropic's."""
    import anthropic  # takes seconds: not while tests are collected

    with client.responses.stream(
        model=NAME, input=QUESTION, max_output_tokens=16, temperature=0
    ) as events:
        whole = events.get_final_response()
    assert "Paris" in whole.output_text
    with anthropic.Anthropic(base_url=f"http://{ports['http']}", api_key="none") as asked:
        answer = asked.messages.create(
            model=NAME,
            max_tokens=16,
            extra_body={"temperature": 0},  # no argument of the package any more
            messages=[{"role": "user", "content": QUESTION}],
        )
    assert answer.content[0].type == "text"
    assert "Paris" in answer.content[0].text


def test_vectors_are_a_prefill_workers(service: Service, client: openai.OpenAI) -> None:
    prompts = "vllm:prompt_tokens_total"
    (decode,) = service.pods("decode")
    before = pods.total(pods.metrics(service.kube, decode), prompts)
    vectors = client.embeddings.create(model=NAME, input=["Paris", "A cat"]).data
    assert [len(each.embedding) for each in vectors] == [576, 576]
    ranked = httpx.post(
        str(client.base_url).removesuffix("v1/") + "rerank",
        json={"model": NAME, "query": "Paris", "documents": ["A cat", "Paris"]},
        timeout=60,
    ).json()
    assert ranked["results"][0]["index"] == 1
    assert pods.total(pods.metrics(service.kube, decode), prompts) == before


def test_grpc_answers_beside_http(ports: dict[str, str]) -> None:
    """On its own port, by reflection, whole and piece by piece."""
    host, _, port = ports["grpc"].partition(":")
    asked = RpcClient(int(port), host=host)
    try:
        pieces = asked.call(
            "Generate",
            prompt="The capital of France is",
            stream=True,
            sampling={"max_tokens": 8, "temperature": 0},
            timeout=60.0,
        )
        assert len(pieces) > 2
        assert "Paris" in "".join(
            each["choices"][0].get("text", "") for each in pieces if "choices" in each
        )
        assert asked.call("GetModelInfo")["names"] == [NAME]
    finally:
        asked.close()

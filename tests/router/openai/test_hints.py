"""Hints are accepted, reported and counted; what asks for something is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.openai.parameters_page import listed
from tests.router.openai.test_tool_calls import write_model

from tandem.protocol.card import WorkerRole

pytestmark = pytest.mark.full

CASES = Path(__file__).parent / "cases"
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
RESPONSE: dict[str, Any] = {"input": "Hi", "max_output_tokens": 8}
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": FUNCTION},
    "/v1/responses": {"type": "function", **FUNCTION},
    "/v1/messages": {"name": "f", "input_schema": {"type": "object"}},
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSE, "/v1/messages": CHAT}
DEMANDS: dict[str, Any] = {
    "/v1/chat/completions": "required",
    "/v1/responses": "required",
    "/v1/messages": {"type": "any"},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that calls tools and whose template reads no effort; a token per byte."""
    folder = tmp_path_factory.mktemp("hinted-model")
    write_model(folder)
    worker = FakeWorker(WorkerRole.DECODE, max_model_len=200_000)
    app = Served(str(folder), [worker], served_model_name=("scripted", "fake"))
    worker.answer = app.tokenizer.encode("Done.", add_special_tokens=False)
    yield app
    app.stop()
    worker.stop()


def prompt_of(served: Served) -> str:
    ids = served.workers[0].submitted[-1].prompt_token_ids
    return served.tokenizer.decode(list(ids), skip_special_tokens=False)


def ignored(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each for each in answer.headers.get("x-tandem-ignored", "").split(", ") if each]


def counted(served: Served, name: str) -> float:
    pattern = rf'^tandem:router_hints_ignored_total\{{hint="{re.escape(name)}"\}} (\S+)$'
    found = re.search(pattern, served.metrics(), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


@pytest.mark.parametrize("stream", [True, False])
def test_the_first_request_of_codex_is_answered(served: Served, stream: bool) -> None:
    """Hosted tools, client_metadata and includes are hints; functions reach the model."""
    body = json.loads((CASES / "responses_from_a_coding_agent.json").read_text())
    before = counted(served, "tools.namespace")
    answer = served.post("/v1/responses", json={**body, "stream": stream})

    assert set(ignored(answer)) == {
        *("prompt_cache_key", "client_metadata", "reasoning.summary"),
        *("tools.namespace", "tools.web_search", "include"),
    }
    assert '"text":"Done."' in answer.text
    assert "TOOL exec_command" in prompt_of(served)
    assert "web_search" not in prompt_of(served)
    assert counted(served, "tools.namespace") == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_the_first_request_of_claude_code_is_answered(served: Served, stream: bool) -> None:
    """Edits that keep everything, an effort and what is to be cached are hints."""
    body = json.loads((CASES / "messages_from_a_coding_agent.json").read_text())
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27"}
    answer = served.post("/v1/messages", json={**body, "stream": stream}, headers=headers)

    assert set(ignored(answer)) == {
        *("metadata", "context_management", "messages.content.cache_control"),
    }
    said = re.findall(r'"text":"(.*?)"', answer.text)
    assert "".join(said) == "Done."
    assert "TOOL Bash" in prompt_of(served)


def test_tokens_of_the_first_request_of_claude_code_are_counted(served: Served) -> None:
    """count_tokens takes the same tools and messages."""
    body = json.loads((CASES / "messages_from_a_coding_agent.json").read_text())
    kept = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
    answer = served.post("/v1/messages/count_tokens", json=kept)

    assert answer.json()["input_tokens"] > 100


@pytest.mark.parametrize(
    ("path", "extra", "name"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "max"}}, "output_config.effort"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    ],
)
def test_an_effort_that_the_template_reads_is_not_reported(
    served: Served, path: str, extra: dict[str, Any], name: str
) -> None:
    """The template here reads enable_thinking; one that reads neither makes it a hint."""
    templates: Any = served.app.state.service.llm.tokenizer.chat_templates
    reads = templates._sources["default"]
    assert ignored(served.post(path, json={**BODIES[path], **extra})) == []
    try:
        templates._sources["default"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert ignored(served.post(path, json={**BODIES[path], **extra})) == [name]
    finally:
        templates._sources["default"] = reads


HOSTED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"type": "web_search"}, "web_search"),
    ("/v1/responses", {"type": "web_search_preview_2025_03_11"}, "web_search_preview"),
    (
        "/v1/responses",
        {"type": "code_interpreter", "container": {"type": "auto"}},
        "code_interpreter",
    ),
    ("/v1/responses", {"type": "image_generation"}, "image_generation"),
    ("/v1/responses", {"type": "mcp", "server_label": "s", "server_url": "u"}, "mcp"),
    ("/v1/responses", {"type": "custom", "name": "c", "format": {"type": "text"}}, "custom"),
    ("/v1/responses", {"type": "local_shell"}, "local_shell"),
    ("/v1/responses", {"type": "namespace", "name": "n", "tools": [FUNCTION]}, "namespace"),
    ("/v1/responses", {"type": "tomorrow's, tool"}, "other"),
    ("/v1/chat/completions", {"type": "custom", "custom": {"name": "c"}}, "custom"),
    ("/v1/chat/completions", {"type": "web_search"}, "web_search"),
    ("/v1/messages", {"type": "web_search_20250305", "name": "web_search"}, "web_search"),
    ("/v1/messages", {"type": "bash_20250124", "name": "bash"}, "bash"),
    (
        "/v1/messages",
        {"type": "text_editor_20250728", "name": "e", "max_characters": 9},
        "text_editor",
    ),
    ("/v1/messages", {"type": "computer_20250124", "name": "computer"}, "computer"),
]


@pytest.mark.parametrize(("path", "hosted", "name"), HOSTED)
def test_a_tool_that_is_not_a_function_is_a_hint_unless_a_choice_demands_it(
    served: Served, path: str, hosted: dict[str, Any], name: str
) -> None:
    """It stands next to functions or alone; functions keep their places in errors."""
    function, body = TOOLS[path], BODIES[path]
    assert ignored(served.post(path, json={**body, "tools": [hosted]})) == [f"tools.{name}"]
    both = {**body, "tools": [hosted, function]}
    assert ignored(served.post(path, json=both)) == [f"tools.{name}"]
    assert "TOOL f" in prompt_of(served)
    demanded = served.post(path, json={**both, "tool_choice": DEMANDS[path]})
    assert ignored(demanded) == [f"tools.{name}"]

    for choice in (DEMANDS[path], {"type": hosted["type"]}):
        for tools in ([hosted],) if choice == DEMANDS[path] else ([hosted], [hosted, function]):
            answer = served.post(path, json={**body, "tools": tools, "tool_choice": choice})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("tool_choice")
    wrong = {**function, "function": {"name": ""}, "name": "", "parameters": {}}
    answer = served.post(path, json={**body, "tools": [hosted, wrong]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("tools[1].")


CHAT_HINTS: list[tuple[str, dict[str, Any]]] = [
    ("user", {"user": "me"}),
    ("safety_identifier", {"safety_identifier": "me"}),
    ("metadata", {"metadata": {"a": "b"}}),
    ("client_metadata", {"client_metadata": {"a": {"b": 1}}}),
    ("prompt_cache_key", {"prompt_cache_key": "k"}),
    ("prompt_cache_retention", {"prompt_cache_retention": "24h"}),
    ("service_tier", {"service_tier": "flex"}),
    ("verbosity", {"verbosity": "low"}),
    ("store", {"store": True}),
    ("prediction", {"prediction": {"type": "content", "content": "x"}}),
    ("web_search_options", {"web_search_options": {}}),
    (
        "stream_options.include_obfuscation",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ),
]
RESPONSE_HINTS: list[tuple[str, dict[str, Any]]] = [
    ("client_metadata", {"client_metadata": {"a": "x" * 2_000}}),
    ("include", {"include": ["web_search_call.action.sources"]}),
    ("include", {"include": ["reasoning.encrypted_content", "file_search_call.results"]}),
    ("max_tool_calls", {"max_tool_calls": 3}),
    ("service_tier", {"service_tier": "priority"}),
    ("text.verbosity", {"text": {"verbosity": "high"}}),
    ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
    ("stream_options", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ("tools.defer_loading", {"tools": [{**TOOLS["/v1/responses"], "defer_loading": True}]}),
]
_EDIT = {"type": "clear_thinking_20251015", "keep": "all"}
MESSAGE_HINTS: list[tuple[str, dict[str, Any]]] = [
    ("metadata", {"metadata": {"user_id": "me"}}),
    ("cache_control", {"cache_control": {"type": "ephemeral"}}),
    ("context_management", {"context_management": {"edits": [_EDIT, _EDIT]}}),
    ("context_management", {"context_management": {"edits": [{**_EDIT, "keep": {"type": "all"}}]}}),
    ("service_tier", {"service_tier": "priority"}),
    ("speed", {"speed": "fast"}),
    ("thinking.display", {"thinking": {"type": "adaptive", "display": "summarized"}}),
    ("mcp_servers", {"mcp_servers": [{"type": "url", "url": "u", "name": "n"}]}),
    ("tools.input_examples", {"tools": [{**TOOLS["/v1/messages"], "input_examples": [{}]}]}),
    ("tools.cache_control", {"tools": [{**TOOLS["/v1/messages"], "cache_control": {}}]}),
]
HINTS = [
    *(("/v1/chat/completions", *each) for each in CHAT_HINTS),
    *(("/v1/responses", *each) for each in RESPONSE_HINTS),
    *(("/v1/messages", *each) for each in MESSAGE_HINTS),
]


@pytest.mark.parametrize(("path", "name", "extra"), HINTS)
def test_a_hint_is_accepted_reported_and_counted(
    served: Served, path: str, name: str, extra: dict[str, Any]
) -> None:
    before = counted(served, name)

    assert ignored(served.post(path, json={**BODIES[path], **extra})) == [name]
    assert counted(served, name) == before + 1


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/chat/completions", {"service_tier": "auto", "store": False, "verbosity": "medium"}),
        ("/v1/chat/completions", {"user": None, "metadata": None, "reasoning_effort": "none"}),
        ("/v1/responses", {"service_tier": "default", "store": False, "include": []}),
        ("/v1/messages", {"service_tier": "auto", "mcp_servers": [], "context_management": {}}),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}),
    ],
)
def test_values_that_ask_for_nothing_are_not_reported(
    served: Served, path: str, extra: dict[str, Any]
) -> None:
    assert ignored(served.post(path, json={**BODIES[path], **extra})) == []


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/chat/completions", {"store": "yes"}, "store"),
        ("/v1/chat/completions", {"client_metadata": "x"}, "client_metadata"),
        ("/v1/chat/completions", {"verbosity": 3}, "verbosity"),
        ("/v1/responses", {"include": ["reasoning.encrypted"]}, "include[0]"),
        ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management"),
        ("/v1/responses", {"stream_options": {"include_usage": False}}, "stream_options"),
        ("/v1/responses", {"background": True}, "background"),
        (
            "/v1/messages",
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management",
        ),
        (
            "/v1/messages",
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
        ),
        ("/v1/messages", {"context_management": {"edits": "all"}}, "context_management"),
        ("/v1/messages", {"container": "c"}, "container"),
    ],
)
def test_what_asks_for_something_is_refused(
    served: Served, path: str, extra: dict[str, Any], param: str
) -> None:
    """So is a hint of another kind."""
    answer = served.post(path, json={**BODIES[path], **extra})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(f"{param}: ")


CALL = {"call_id": "c1", "type": "function_call", "name": "f", "arguments": "{}"}
HISTORIES: list[tuple[str, list[dict[str, Any]], list[str], list[str]]] = [
    (
        "encrypted thoughts",
        [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}],
        ["input.encrypted_content"],
        [],
    ),
    (
        "a result in parts",
        [
            CALL,
            {
                **CALL,
                "type": "function_call_output",
                "output": [
                    {"type": "input_text", "text": "one"},
                    {"type": "input_text", "text": "two"},
                ],
            },
        ],
        [],
        ["one", "two"],
    ),
    (
        "a custom tool",
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** x"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
        ],
        [],
        ["patched"],
    ),
    (
        "a local shell",
        [
            {
                "type": "local_shell_call",
                "call_id": "c1",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            },
            {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        ],
        [],
        ["a.txt"],
    ),
    (
        "a shell",
        [
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "c1",
                "output": [{"stdout": "b.txt", "stderr": "", "outcome": {"type": "exit"}}],
            },
        ],
        [],
        ["b.txt"],
    ),
    (
        "a search",
        [{"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}],
        ["input.web_search_call"],
        [],
    ),
    (
        "phases and namespaces",
        [
            {"role": "assistant", "content": "Well", "phase": "commentary"},
            {**CALL, "namespace": "n"},
            {"type": "function_call_output", "call_id": "c1", "output": "four"},
        ],
        ["input.phase", "input.namespace"],
        ["Well", "four"],
    ),
]


@pytest.mark.parametrize(
    ("items", "names", "texts"),
    [each[1:] for each in HISTORIES],
    ids=[each[0] for each in HISTORIES],
)
def test_items_of_agents_are_read_when_they_come_back(
    served: Served, items: list[dict[str, Any]], names: list[str], texts: list[str]
) -> None:
    """What they say reaches the model; what nobody here can read is reported."""
    items = [{k: v for k, v in each.items() if k in _known(each)} for each in items]
    history = [{"role": "user", "content": "Hi"}, *items, {"role": "user", "content": "Go on"}]
    answer = served.post("/v1/responses", json={**RESPONSE, "input": history})

    assert ignored(answer) == names
    for text in texts:
        assert text in prompt_of(served)
    stored = served.get(f"/v1/responses/{answer.json()['id']}/input_items?order=asc")["data"]
    kept = [each.get("type", "message") for each in items]
    assert [each["type"] for each in stored[1:-1]] == [
        each for each in kept if each != "web_search_call"
    ]


def _known(item: Mapping[str, Any]) -> set[str]:
    """Keys of a result do not include those of its call."""
    unknown = {"name", "arguments"} if str(item.get("type")).endswith("_output") else set()
    return set(item) - unknown


def test_calls_of_other_kinds_are_calls_of_the_chat(served: Served) -> None:
    """The model sees what it called and with what."""
    templates: Any = served.app.state.service.llm.tokenizer.chat_templates
    reads = templates._sources["default"]
    shows = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }} {{ c.function.arguments | tojson }};{% endfor %}{% endfor %}"
    )
    items = [each for _, history, _, _ in HISTORIES[2:5] for each in history]
    for number, each in enumerate(items):
        each[("id" if "call_id" not in each else "call_id")] = f"c{number // 2}"
    try:
        templates._sources["default"] = shows
        served.post("/v1/responses", json={**RESPONSE, "input": items})
        calls = prompt_of(served)
    finally:
        templates._sources["default"] = reads

    assert 'apply_patch {"input": "*** x"};' in calls
    assert 'local_shell {"type": "exec", "command": ["ls"], "env": {}};' in calls
    assert 'shell {"commands": ["ls"]};' in calls


@pytest.mark.parametrize("kind", ["item_reference", "compaction", "computer_call_output"])
def test_items_that_stand_for_something_unknown_are_refused(served: Served, kind: str) -> None:
    items = [{"type": kind, "id": "x", "encrypted_content": "y"}, {"role": "user", "content": "z"}]
    answer = served.post("/v1/responses", json={**RESPONSE, "input": items})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].type"


def test_blocks_of_agents_are_read_when_they_come_back(served: Served) -> None:
    """Marks of caching stand anywhere, thoughts may be redacted, and calls have callers."""
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}}
    said = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "Hm", "signature": "s", **cached},
        {"type": "text", "text": "Well", "citations": None, **cached},
        {**call, **cached},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "text", "text": "four", **cached},
    ], **cached}  # fmt: skip
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result]},
        {"role": "system", "content": "Be brief."},
    ]
    answer = served.post("/v1/messages", json={**CHAT, "messages": history})

    assert set(ignored(answer)) == {
        "messages.content.redacted_thinking",
        "messages.content.cache_control",
    }
    assert "four" in prompt_of(served)


def test_every_name_that_is_reported_stands_on_the_page() -> None:
    """No name of a client's own is a label of the counter."""
    apis = ("chat", "completions", "responses", "messages", "count_tokens", "vectors and scores")
    names = {name.replace("[]", "") for api in apis for name in listed("Hints", api)}

    assert {name for _, name, _ in HINTS} <= names

"""Chats become the prompts that transformers makes of them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from judged import Judged

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions, ChatTemplates
from tandem.text.tokenizer import Tokenizer

BOS = "<|begin|>"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Capital of France? <b> & 'é' 😀"},
    {"role": "assistant", "content": "  Paris. "},
    {"role": "user", "content": "And of Japan?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "wetter", "description": "Wetter für <Ort>", "parameters": {"é": 1}},
    }
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "wetter", "arguments": '{"ort": "Köln"}'}}
        ],
    },
    {"role": "tool", "content": "rain"},
]
TEMPLATES = {
    "header": (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {%- if message.role == 'system' %}\n"
        "<<{{ message['content'] | trim }}>>\n"
        "    {%- else %}\n"
        "[{{ message.role }}]{{ message.content.strip() }}{{ eos_token }}\n"
        "    {%- endif %}\n"
        "{% endfor %}\n"
        "{%- if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "loops": (
        "{% set ns = namespace(count=0) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% set ns.count = ns.count + 1 %}{{ ns.count }}:{{ m.content }}|"
        "{% if ns.count == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
    "tools": (
        "{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}{% endif %}"
        "{% for m in messages %}{{ m.role }}:"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }};{% endfor %}{% if documents %}{{ documents[0].title }}{% endif %}"
    ),
    "extra": "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}{{ dict(a=1).a }}",
}


judged = Judged("chat_template")


@cache
def judge(source: str):
    """transformers' tokenizer with a template of ours."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token="<|e|>")
    tokenizer.chat_template = source
    return tokenizer


@cache
def theirs(folder: Path):
    """transformers' tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def ours(source: str) -> ChatTemplates:
    return ChatTemplates({"default": source}, {"bos_token": BOS, "eos_token": "<|e|>"})


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, opens: bool) -> None:
    """Whitespace rules, loop controls, namespaces, generation blocks, JSON and extra names."""
    tools = TOOLS if "tool" in TEMPLATES[name] else None  # others get them as text, here alone
    expected = judged(
        f"{name}, {opens}",
        lambda: judge(TEMPLATES[name]).apply_chat_template(
            CHAT,
            tokenize=False,
            add_generation_prompt=opens,
            tools=tools,
            documents=[{"title": "t", "text": "x"}],
            enable_thinking=True,
        ),
    )

    options = ChatOptions(
        add_generation_prompt=opens,
        tools=tools,
        documents=[{"title": "t", "text": "x"}],
        template_kwargs={"enable_thinking": True},
    )
    assert expected == ours(TEMPLATES[name]).render(CHAT, options)


def test_calls_reach_the_template_as_objects() -> None:
    """OpenAI's arguments are JSON in a string; templates want what it stands for."""
    parsed = json.loads(json.dumps(CALLS))
    parsed[1]["tool_calls"][0]["function"]["arguments"] = {"ort": "Köln"}
    expected = judged(
        "calls",
        lambda: judge(TEMPLATES["tools"]).apply_chat_template(parsed, tokenize=False),
    )

    shown = ours(TEMPLATES["tools"]).render(CALLS, ChatOptions(add_generation_prompt=False))

    assert expected == shown
    assert '{"ort": "Köln"}' in shown


def test_broken_arguments_stay_as_they_are() -> None:
    """A call whose arguments are no JSON is shown to the model as the client wrote it."""
    call = {"function": {"name": "f", "arguments": "{oops"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]

    assert '"{oops"' in ours(
        "{% for c in messages[0].tool_calls %}{{ c | tojson }}{% endfor %}"
    ).render(messages)


@pytest.mark.parametrize("start", [0, 1])
def test_the_embedded_model_is_prompted_as_by_transformers(
    smollm2: Path, tokenizer: Tokenizer, start: int
) -> None:
    """Text and ids of a chat are those of transformers on the same folder."""
    chat = CHAT[start:]

    def ask(**form: bool) -> Any:
        return theirs(smollm2).apply_chat_template(chat, add_generation_prompt=True, **form)

    shown = tokenizer.render_chat(chat)
    assert shown == judged(f"text from {start}", lambda: ask(tokenize=False))
    ids = judged(f"ids from {start}", lambda: ask(return_dict=False))
    assert ids == tokenizer.encode(shown, add_special_tokens=False)


OPEN = ChatOptions(add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        None,
        "{% for m in messages %}[{{ m.content | trim }}]\n{% endfor %}",
        "{% for m in messages %}[{{ m.content.strip() }} ]{% endfor %}",
        "{% for m in messages %}[{{ m['content'].rstrip() }}{% endfor %}",
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    ],
)
@pytest.mark.parametrize("content", ["The capital is ", "  The capital", "x\n\n"])
def test_the_last_message_is_left_open(
    smollm2: Path, tokenizer: Tokenizer, content: str, source: str | None
) -> None:
    """``continue_final_message`` ends the prompt where the message ends: before its last white
    space, where the template trims messages."""
    chat = [CHAT[1], {"role": "assistant", "content": content}]
    expected = judged(
        f"{content!r} left open by {source}",
        lambda: theirs(smollm2).apply_chat_template(
            chat, chat_template=source, tokenize=False, continue_final_message=True
        ),
    )

    assert expected == tokenizer.render_chat(chat, replace(OPEN, chat_template=source))


def test_white_space_is_kept_where_the_template_keeps_it() -> None:
    chat = [{"role": "assistant", "content": "x "}]

    assert ours("{{ messages[0].content | trim }}.").render(chat, OPEN) == "x"
    assert ours("{{ messages[0].content }}.").render(chat, OPEN) == "x "


def test_the_last_part_is_left_open_where_templates_take_parts() -> None:
    """The text of the last part is what goes on."""
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}.{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert ours(source).render([{"role": "user", "content": parts}], OPEN) == "a.b"


@pytest.mark.parametrize(
    ("source", "keeps"),
    [
        ("{% for p in messages[0]['content'] %}{{ p.text }};{% endfor %}", True),
        ("{% for p in messages[0].content %}{{ p.text }};{% endfor %}", True),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }};{% endfor %}", True),
        ("{% for p in messages[0].content | list %}{{ p.text }};{% endfor %}", True),
        ("{{ messages[0].content | map(attribute='text') | join(';') }};", True),
        ("{{ messages[0].content }}", False),
        ("{{ messages[0].content | tojson | replace('\"', '') | replace('\\\\n', '\n') }}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_parts_become_one_text_unless_the_template_takes_parts(source: str, keeps: bool) -> None:
    """A template that writes out all parts gets parts; another gets the texts, line by line."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]

    shown = ours(source).render([{"role": "user", "content": parts}])

    assert shown == ("a;b;c;" if keeps else "a\nb\nc")


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    """OpenAI's newer role works with older templates."""
    chat = [{"role": "developer", "content": "x"}]

    source = "{{ messages[0].role }}: {{ messages[0].content }}"
    assert ours(source).render(chat) == "system: x"
    assert ours(source + "{# developer #}").render(chat) == "developer: x"


def test_templates_are_chosen_by_purpose_and_name() -> None:
    """Tools choose ``tool_use``; a client may name a template or bring one."""
    templates = ChatTemplates({"default": "D", "tool_use": "T", "rag": "R"}, {})
    chat = [{"role": "user", "content": "x"}]

    assert templates.render(chat) == "D"
    assert templates.render(chat, ChatOptions(tools=TOOLS)) == "T"
    assert templates.render(chat, ChatOptions(chat_template="rag")) == "R"
    assert (
        templates.render(chat, ChatOptions(chat_template="mine {{ messages[0].content }}"))
        == "mine x"
    )
    assert templates
    assert not ChatTemplates({}, {})


def test_the_date_is_there_for_templates() -> None:
    shown = ours("{{ strftime_now('%Y') }}").render([{"role": "user", "content": "x"}])

    assert 2020 < int(shown) < 2100


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ("hello", {}, "messages:"),
        ({"role": "user"}, {}, "messages:"),
        (5, {}, "messages:"),
        ([], {}, "messages:"),
        (["hello"], {}, r"messages\[0\]:"),
        ([{"role": "wizard", "content": "x"}], {}, r"messages\[0\].role: 'wizard'"),
        ([{"content": "x"}], {}, r"messages\[0\].role: None"),
        ([{"role": "user"}], {}, r"messages\[0\].content: None"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\].content: 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [5]}], {}, r"messages\[0\].content\[0\]: 5"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"chat_template": "{% if %}"}, "chat_template.*Jinja"),
        (CHAT, {"chat_template": "{{ raise_exception('no system') }}"}, "messages.*no system"),
        (CHAT, {"chat_template": "{{ messages[0].content + 1 }}"}, "messages.*refuses"),
        (CHAT, {"chat_template": "{{ ''.__class__.__mro__ }}"}, "messages.*refuses"),
        (CHAT, {"chat_template": "{{ namespace(__init__=1) }}"}, "messages.*refuses"),
        (CHAT, {"chat_template": "{% set n = namespace() %}{% set n._x = 1 %}"}, "refuses"),
        (CHAT, {"chat_template": "{{ messages.append(1) }}"}, "messages.*refuses"),
        (CHAT, {"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "messages.*refuses"),
    ],
)
def test_bad_chats_are_refused_by_field(messages, options: dict[str, Any], field: str) -> None:
    """The error names the message and the key, or says what the template said."""
    with pytest.raises(InvalidParameter, match=field):
        ours(TEMPLATES["header"]).render(messages, ChatOptions(**options))


@pytest.mark.parametrize(
    ("last", "source"),
    [
        ({"role": "assistant", "content": "x"}, "fixed"),
        ({"role": "assistant", "content": []}, "{% for p in messages[0].content %}{% endfor %}"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(last: dict[str, Any], source: str) -> None:
    """There must be text, and the template must show it."""
    with pytest.raises(InvalidParameter, match=r"^continue_final_message"):
        ours(source).render([last], OPEN)


def test_a_model_without_template_says_so() -> None:
    with pytest.raises(InvalidParameter, match=r"^chat_template: None .*this model has none"):
        ChatTemplates({}, {}).render(CHAT)

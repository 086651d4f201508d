"""Templates of strangers: rendered as the model's own are, and ended when they take too much."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions, ChatTemplates
from tandem.text.isolated_templates import MAX_SOURCE_CHARS, IsolatedTemplates

CHAT = [{"role": "user", "content": "Hi \U0001f600"}, {"role": "assistant", "content": "Ho"}]
TOKENS = {"bos_token": "<s>"}


@pytest.fixture(scope="module")
def isolated() -> Iterator[IsolatedTemplates]:
    made = IsolatedTemplates(seconds=50.0, max_chars=10_000)
    yield made
    made.close()


def options_of(source: str, **more: object) -> ChatOptions:
    return ChatOptions(chat_template=source, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        options_of(
            "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        ),
        options_of("{{ messages | tojson }}{{ tools | tojson }}", tools=[{"a": 1}]),
        options_of("{{ x }}{% if add_generation_prompt %}>{% endif %}", template_kwargs={"x": 1}),
        options_of(
            "{{ messages[-1].content }}", add_generation_prompt=False, continue_final_message=True
        ),
    ],
    ids=["messages", "tools", "names", "continued"],
)
def test_the_text_is_the_same(isolated: IsolatedTemplates, options: ChatOptions) -> None:
    here = ChatTemplates({}, TOKENS)
    there = ChatTemplates({}, TOKENS)
    there.isolated = isolated
    assert there.render(CHAT, options) == here.render(CHAT, options)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "param"),
    [
        ("{{ 'a' * 500000000 }}", "messages"),
        ("{% set x = 'a' * 100000 %}{{ x * 100000 }}", "messages"),
        ("{% for i in range(1999) %}{{ 'a' * 1000 }}{% endfor %}", "chat_template"),
        ("{{ 'a' * 10001 }}", "chat_template"),
        ("{{ '%2000000000d' | format(1) }}", "messages"),
        ("{{ nonsense(", "chat_template"),
        ("{{ raise_exception('not so') }}", "messages"),
        ("{{ raise_exception('a' * 20000000) }}", "messages"),
        ("{% " + "a" * 200_000 + " %}", "chat_template"),
        ("(" * 5 + "{{" + "(" * 20_000 + "1" + ")" * 20_000 + "}}", "chat_template"),
        ("x" * (MAX_SOURCE_CHARS + 1), "chat_template"),
    ],
    ids=[
        "memory",
        "squared",
        "output",
        "long",
        "format",
        "syntax",
        "own",
        "loud",
        "word",
        "deep",
        "source",
    ],
)
def test_too_much_is_refused(isolated: IsolatedTemplates, source: str, param: str) -> None:
    """400 that names the field; the server's own memory never holds it."""
    with pytest.raises(InvalidParameter) as caught:
        isolated.render(CHAT, options_of(source), TOKENS)
    assert caught.value.param in (param, "chat_template")
    assert len(caught.value.allowed) < 1_000


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (9 ** 99999) ** 99 }}",
    ],
    ids=["loops", "power"],
)
def test_too_long_is_ended(source: str) -> None:
    """Really: the process is gone, and the next request gets another."""
    brief = IsolatedTemplates(seconds=0.5)
    with pytest.raises(InvalidParameter, match=r"within|digits"):
        brief.render(CHAT, options_of(source), TOKENS)
    waiting = brief._ready
    assert waiting is not None
    assert waiting.poll() is None
    brief.close()
    assert waiting.returncode is not None


def test_what_a_process_says_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever speaks in it; it is ended in the middle of that, and of its job."""
    endless = "while True: print('a' * 9999)"
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", endless], stdin=pipe, stdout=pipe)
        for _ in range(2)
    ]
    monkeypatch.setattr("tandem.text.isolated_templates._start", iter(started).__next__)
    talked_over = IsolatedTemplates(seconds=50.0, max_chars=10)
    with pytest.raises(InvalidParameter, match="at most 10 characters"):
        talked_over.render(CHAT * 10_000, options_of("a"), TOKENS)
    talked_over.close()
    assert all(each.returncode is not None for each in started)


def test_the_process_knows_nothing(
    isolated: IsolatedTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither keys nor anything else of the server's environment."""
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    isolated.render(CHAT, options_of("a"), TOKENS)
    assert isolated._ready is not None
    with open(f"/proc/{isolated._ready.pid}/environ", "rb") as environment:
        assert b"secret" not in environment.read()
